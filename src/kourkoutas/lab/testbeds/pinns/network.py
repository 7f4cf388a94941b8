r"""A tanh network whose values, slopes and one second-order term travel forward together.

A point carries u, its slopes ∂ᵢu, and L u = Σᵢ cᵢ ∂ᵢ∂ᵢ u with the equation's own coefficients cᵢ. With a = z + b and
t = tanh a the chain rule gives

.. math::
    t, \qquad ∂_i t = t'\,z_i, \qquad L t = t'\,L z + t'' \sum_i c_i z_i^2, \qquad t' = 1 - t^2, \quad t'' = -2\,t\,t'

so a layer is one matrix product for all of them, and one reverse pass gives the gradient of the loss.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kourkoutas.lab.engines import Array, Engine, Params

INIT = 11


def init(inputs: int, width: int, depth: int, seed: int) -> dict[str, NDArray[Any]]:
    """`depth` hidden layers of `width`: Glorot's normal weights, biases zero, as in DeepXDE and PINNacle."""
    rng = np.random.default_rng([INIT, seed])
    sizes = [inputs, *[width] * depth, 1]
    params = {}
    for k, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        spread = np.sqrt(2 / (fan_in + fan_out))
        params[f"layer{k}.w"] = (spread * rng.standard_normal((fan_in, fan_out))).astype(np.float32)
        params[f"layer{k}.b"] = np.zeros(fan_out, np.float32)
    return params


def values(E: Engine, params: Params, x: Array) -> Array:
    """u at the rows of `x`."""
    last = len(params) // 2 - 1
    h = x
    for k in range(last):
        h = E.tanh(E.linear(h, params[f"layer{k}.w"], params[f"layer{k}.b"]))
    return E.linear(h, params[f"layer{last}.w"], params[f"layer{last}.b"])[:, 0]


def _curved(E: Engine, z: Array, second: tuple[float, ...]) -> Array:
    """Σ cᵢ zᵢ², zᵢ = z[i]."""
    return sum(c * E.square(z[i]) for i, c in enumerate(second) if c)


def channels(E: Engine, params: Params, x: Array, second: tuple[float, ...]) -> tuple[Array, Array, Array]:
    """(u, slopes, L u) at the rows of `x`, of shapes (n,), (inputs, n) and (n,); `second` holds the cᵢ."""
    last = len(params) // 2 - 1
    # The slopes of the input are the unit vectors, so those of the first layer are the rows of w; L of the input is 0.
    w = params["layer0.w"]
    t = E.tanh(E.linear(x, w, params["layer0.b"]))
    t1 = 1 - E.square(t)
    slopes = E.expand(t1, 0) * E.expand(w, 1)
    h = E.concat([E.expand(t, 0), slopes, E.expand(-2 * t * t1 * _curved(E, w, second), 0)])
    for k in range(1, last):
        z = h @ params[f"layer{k}.w"]
        t = E.tanh(z[0] + params[f"layer{k}.b"])
        t1 = 1 - E.square(t)
        linear = E.expand(t1, 0) * z[1:]  # t' zᵢ and t' L z
        h = E.concat([E.expand(t, 0), linear[:-1], E.expand(linear[-1] - 2 * t * t1 * _curved(E, z[1:-1], second), 0)])
    y = (h @ params[f"layer{last}.w"])[..., 0]
    return y[0] + params[f"layer{last}.b"], y[1:-1], y[-1]
