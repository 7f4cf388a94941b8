r"""A Fourier neural operator in real arithmetic.

.. math::
    v_{l+1} = \text{gelu}\big(D^{-1} R_l\, D v_l + v_l W_l + b_l\big)

D keeps the modes |k_x| ≤ m/2, 0 ≤ k_y ≤ m/2 of the discrete Fourier transform, R is a complex matrix of channels for
each of them. D and its inverse are matrices of cosines and sines over all cells, so a transform is one product.

NOTE: arrays have the axes (cells, samples, channels), in which a transform and a map of channels are plain products.
A complex weight is two real parameters, `.re` and `.im`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kourkoutas.lab.engines import Array, Engine, Params

INIT = 21
INPUTS = 3  # a and the coordinates x and y


@functools.lru_cache(maxsize=8)
def transforms(grid: int, modes: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """D of shape (2K, cells), real parts of the K modes above imaginary ones, and its inverse (cells, 2K).

    D divides by the number of cells. The field is real, so a mode with k_y > 0 stands for its mirror image too; one
    with k_y = grid/2, if it is kept, is its own.
    """
    j = np.arange(grid)
    kx = np.arange(-(modes // 2), modes - modes // 2)
    ky = np.arange(modes // 2 + 1)
    phase = kx[:, None, None, None] * j[:, None] + ky[:, None, None] * j  # (kx, ky, x, y)
    phase = (2 * np.pi / grid * phase).reshape(len(kx) * len(ky), grid * grid)
    twice = np.where((ky == 0) | (2 * ky == grid), 1.0, 2.0)
    twice = np.tile(twice, len(kx))
    forward = np.concatenate([np.cos(phase), -np.sin(phase)]) / grid**2
    inverse = np.concatenate([twice[:, None] * np.cos(phase), -twice[:, None] * np.sin(phase)]).T
    return forward.astype(np.float32), inverse.astype(np.float32)


def kept(modes: int) -> int:
    """K, the number of modes."""
    return modes * (modes // 2 + 1)


def init(width: int, modes: int, layers: int, seed: int) -> dict[str, NDArray[Any]]:
    """Linear maps uniform in ±1/√inputs; complex weights normal with E|r|² = 1/width."""
    rng = np.random.default_rng([INIT, seed])
    params: dict[str, NDArray[Any]] = {}

    def linear(name: str, fan_in: int, fan_out: int) -> None:
        limit = 1 / np.sqrt(fan_in)
        params[f"{name}.w"] = rng.uniform(-limit, limit, (fan_in, fan_out)).astype(np.float32)
        params[f"{name}.b"] = rng.uniform(-limit, limit, fan_out).astype(np.float32)

    linear("lift0", INPUTS, 2 * width)
    linear("lift1", 2 * width, width)
    for k in range(layers):
        linear(f"layer{k}", width, width)
        for part in ("re", "im"):
            r = rng.standard_normal((kept(modes), width, width)) / np.sqrt(2 * width)
            params[f"layer{k}.{part}"] = r.astype(np.float32)
    linear("project0", width, 2 * width)
    linear("project1", 2 * width, 1)
    return params


def spectral(E: Engine, v: Array, re: Array, im: Array, forward: Array, inverse: Array) -> Array:
    """D⁻¹ R D v."""
    cells, samples, width = v.shape
    modes = re.shape[0]
    V = (forward @ v.reshape(cells, samples * width)).reshape(2 * modes, samples, width)
    a, b = V[:modes], V[modes:]
    # (a + ib)(re + i im)
    W = E.concat([a @ re - b @ im, a @ im + b @ re])
    return (inverse @ W.reshape(2 * modes, samples * width)).reshape(cells, samples, width)


def operator(E: Engine, params: Params, x: Array, forward: Array, inverse: Array) -> Array:
    """u (cells, samples) of inputs x (cells, samples, 3)."""
    v = E.gelu(E.linear(x, params["lift0.w"], params["lift0.b"]))
    v = E.linear(v, params["lift1.w"], params["lift1.b"])
    layers = sum(name.endswith(".re") for name in params)
    for k in range(layers):
        here = f"layer{k}"
        z = spectral(E, v, params[f"{here}.re"], params[f"{here}.im"], forward, inverse)
        z = z + E.linear(v, params[f"{here}.w"], params[f"{here}.b"])
        v = E.gelu(z) if k < layers - 1 else z
    v = E.gelu(E.linear(v, params["project0.w"], params["project0.b"]))
    return E.linear(v, params["project1.w"], params["project1.b"])[..., 0]
