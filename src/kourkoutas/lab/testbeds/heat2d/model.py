r"""The Transformer surrogate: one token per frame, an encoder, and a linear map back to the frame.

.. math::
    z_s = \hat W^\top u_s + b + R_s \hat p_s + e(α), \qquad
    x \leftarrow x + A(\mathrm{LN}\,x), \quad x \leftarrow x + \mathrm{MLP}(\mathrm{LN}\,x), \qquad
    \hat u_s = W_o^\top\, \mathrm{LN}\,x_s + b_o

u_s are the grid² values of frame s, R_s turns pairs of channels of the positional table by the angles s·100^(-2i/d)
(RoPE), e is linear in the diffusivity, and a hat marks what is quantized.

NOTE: a positional encoding of the grid's nodes would be added to all frames alike, before a linear map; so it is one
more constant vector, which b holds.

NOTE: block mode. The model gets the first `known` frames and gives all frames at once; tokens of later frames hold no
u_s, and every frame looks at the known frames only. Causal mode: the token of frame s gives frame s + 1.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kourkoutas.lab.engines import Array, Batch, Engine, Params
from kourkoutas.lab.testbeds.heat2d.data import FASTEST, SLOWEST
from kourkoutas.lab.testbeds.heat2d.quantize import fake_quantize
from kourkoutas.lab.testbeds.heat2d.settings import Settings

BASE = 100.0


def initial(settings: Settings, rng: np.random.Generator) -> dict[str, NDArray[np.float32]]:
    """Initial parameters: maps uniform in ±1/√inputs, layer norms the identity.

    All rows of the positional table start equal, so that R_s makes a smooth code of time of them.
    """
    d, nodes = settings.width, settings.nodes

    def uniform(inputs: int, *shape: int) -> NDArray[np.float32]:
        bound = 1 / math.sqrt(inputs)
        return rng.uniform(-bound, bound, shape).astype(np.float32)

    params = {
        "project.w": uniform(nodes, nodes, d),
        "project.b": uniform(nodes, d),
        "position.table": np.tile(rng.standard_normal(d).astype(np.float32), (settings.frames, 1)),
        "diffusivity.w": uniform(1, 1, d),
        "diffusivity.b": uniform(1, d),
    }
    for n in range(settings.layers):
        layer = {
            "norm1.gain": np.ones(d, np.float32),
            "norm1.bias": np.zeros(d, np.float32),
            **{f"attention.{name}": uniform(d, d, d) for name in "qkvo"},
            "norm2.gain": np.ones(d, np.float32),
            "norm2.bias": np.zeros(d, np.float32),
            "mlp.w1": uniform(d, d, settings.mlp),
            "mlp.b1": uniform(d, settings.mlp),
            "mlp.w2": uniform(settings.mlp, settings.mlp, d),
            "mlp.b2": uniform(settings.mlp, d),
        }
        params |= {f"layers.{n}.{name}": p for name, p in layer.items()}
    return params | {
        "norm.gain": np.ones(d, np.float32),
        "norm.bias": np.zeros(d, np.float32),
        "output.w": uniform(d, d, nodes),
        "output.b": uniform(d, nodes),
    }


def rotations(settings: Settings) -> dict[str, NDArray[np.float32]]:
    """cos and sin of the angles s·100^(-2i/d): (frames, d/2) each."""
    i = np.arange(settings.width // 2)
    angles = np.arange(settings.frames)[:, None] * BASE ** (-2 * i / settings.width)
    return {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}


def turned(E: Engine, x: Array, cos: Array, sin: Array) -> Array:
    """R_s·x_s, with channel i of the first half and of the second as a pair."""
    a, b = E.split(x, 2, axis=-1)
    return E.concat([a * cos - b * sin, a * sin + b * cos], axis=-1)


def tokens(E: Engine, settings: Settings, params: Params, batch: Batch, count: int) -> Array:
    """z of the first `count` frames: (cases, count, width). `batch` holds `given` frames, `alpha`, `cos` and `sin`."""
    w, table = params["project.w"], params["position.table"][:count]
    if settings.quantize:
        # The scale of a column is that of the whole table, whatever part of it is used.
        w, table = fake_quantize(E, w), fake_quantize(E, params["position.table"])[:count]
    position = turned(E, table, batch["cos"][:count], batch["sin"][:count])
    share = E.expand((batch["alpha"] - SLOWEST) / (FASTEST - SLOWEST), 1)
    shared = E.expand(position, 0) + E.expand(E.linear(share, params["diffusivity.w"], params["diffusivity.b"]), 1)
    given = batch["given"]
    seen = E.linear(given, w, params["project.b"]) + shared[:, : given.shape[1]]
    return E.concat([seen, shared[:, given.shape[1] :]], axis=1) if given.shape[1] < count else seen


def block_attention(E: Engine, x: Array, known: int, heads: int, q: Array, k: Array, v: Array, o: Array) -> Array:
    r"""Multi-head attention of all frames to the first `known`, with work per frame that counts known·heads, not width.

    softmax(x·Q_h·(y·K_h)ᵀ)·(y·V_h)·O_h, summed over heads, with y the known frames. (y·K_h)·Q_hᵀ and (y·V_h)·O_h are
    the same for all frames: they are multiplied first, and x meets matrices of known·heads columns and rows.
    """
    cases, frames, d = x.shape
    y = x[:, :known]
    keys = (y @ k).reshape(cases, known, heads, d // heads)
    values = (y @ v).reshape(cases, known, heads, d // heads)
    # Columns sorted by key, then head: the softmax runs along an axis that is not the innermost one.
    ask = E.einsum("dhe,bjhe->bdjh", q.reshape(d, heads, d // heads), keys).reshape(cases, d, known * heads)
    answer = E.einsum("bjhe,hed->bjhd", values, o.reshape(heads, d // heads, d)).reshape(cases, known * heads, d)
    scores = (x @ ask).reshape(cases, frames, known, heads) * (1 / math.sqrt(d // heads))
    return E.softmax(scores, axis=-2).reshape(cases, frames, known * heads) @ answer


def full_attention(
    E: Engine, x: Array, mask: Array | None, heads: int, q: Array, k: Array, v: Array, o: Array
) -> Array:
    """Multi-head attention of all frames to all frames that `mask` allows; causal without a mask."""
    cases, frames, d = x.shape

    def split(y: Array) -> Array:
        return E.transpose(y.reshape(cases, frames, heads, d // heads), (0, 2, 1, 3))

    seen = E.attention(split(x @ q), split(x @ k), split(x @ v), mask)
    return E.transpose(seen, (0, 2, 1, 3)).reshape(cases, frames, d) @ o


def predict(E: Engine, settings: Settings, params: Params, batch: Batch, count: int) -> Array:
    """Frames (cases, count, nodes): in block mode 0 … count-1, in causal mode 1 … count."""
    x = tokens(E, settings, params, batch, count)
    if settings.mask == "causal":
        attend = functools.partial(full_attention, E, mask=None)
    elif settings.shortcut:
        attend = functools.partial(block_attention, E, known=settings.known)
    else:
        looks = E.broadcast(E.expand(E.arange(count) < settings.known, 0), (count, count))
        attend = functools.partial(full_attention, E, mask=looks)
    for n in range(settings.layers):
        p = {name: params[f"layers.{n}.{name}"] for name in LAYER}
        y = E.layer_norm(x, p["norm1.gain"], p["norm1.bias"])
        x = x + attend(x=y, heads=settings.heads, **{name: p[f"attention.{name}"] for name in "qkvo"})
        y = E.layer_norm(x, p["norm2.gain"], p["norm2.bias"])
        x = x + E.linear(E.gelu(E.linear(y, p["mlp.w1"], p["mlp.b1"])), p["mlp.w2"], p["mlp.b2"])
    x = E.layer_norm(x, params["norm.gain"], params["norm.bias"])
    return E.linear(x, params["output.w"], params["output.b"])


LAYER = (
    *("norm1.gain", "norm1.bias", "norm2.gain", "norm2.bias"),
    *("attention.q", "attention.k", "attention.v", "attention.o"),
    *("mlp.w1", "mlp.b1", "mlp.w2", "mlp.b2"),
)


def constants(settings: Settings) -> dict[str, NDArray[np.float32]]:
    """Arrays that every batch shares: `cos` and `sin`, `weight` of each squared error, and two for the residual.

    weight   1/(frames·nodes) everywhere, more on the four sides and in the first `known` frames
    across   tridiagonal (1, -4, 1): neighbours along a row, and the -4u of the stencil
    inside   1 at the inner nodes of the rows between top and bottom, 0 at the ends of those rows
    """
    n, frames = settings.grid, settings.frames - (settings.mask == "causal")
    weight = np.full((frames, n, n), 1 / (frames * n * n))
    for side in (weight[:, :, 0], weight[:, :, -1], weight[:, 0], weight[:, -1]):
        side += settings.boundary / (frames * n)
    weight[: settings.known] += settings.start / (settings.known * n * n)
    inside = np.zeros((n - 2, n), np.float32)
    inside[:, 1:-1] = 1
    return {
        **rotations(settings),
        "weight": weight.reshape(frames, n * n).astype(np.float32),
        "across": (np.eye(n, k=1) + np.eye(n, k=-1) - 4 * np.eye(n)).astype(np.float32),
        "inside": inside.reshape(-1),
    }


def residual(E: Engine, u: Array, batch: Batch) -> Array:
    """Mean square of (u^{n+1} - u^n)/Δt - α∇²u^n over inner nodes, for frames u (cases, frames, nodes)."""
    cases, frames, nodes = u.shape
    n = math.isqrt(nodes)
    # Rows follow each other: a node's neighbours above and below are n places away.
    now, later = u[:, :-1], u[:, 1:, n:-n]
    here = now[:, :, n:-n]
    around = (here.reshape(-1, n) @ batch["across"]).reshape(*here.shape) + now[:, :, : -2 * n] + now[:, :, 2 * n :]
    rate, diffusion = (1 / batch["dt"]).reshape(-1, 1, 1), (batch["alpha"] * (n - 1) ** 2).reshape(-1, 1, 1)
    r = (later - here) * (rate * batch["inside"]) - around * (diffusion * batch["inside"])
    return E.sum(E.square(r)) / (cases * (frames - 1) * (n - 2) ** 2)


@dataclass(frozen=True)
class Objective:
    """MSE + boundary·(boundary MSE) + residual·(heat-equation residual MSE) + start·(MSE of the first frames).

    The boundary MSE is the sum of those of the four sides. Three of the terms weigh the same squared errors, and are
    taken together as one weighted sum: see `constants`.
    """

    settings: Settings

    def __call__(self, E: Engine, params: Params, batch: Batch) -> Array:
        s, frames = self.settings, batch["frames"]
        if s.mask == "block":
            given, truth, count = frames[:, : s.known], frames, s.frames
        else:
            given, truth, count = frames[:, :-1], frames[:, 1:], s.frames - 1
        predicted = predict(E, s, params, {**batch, "given": given}, count)
        value = E.sum(E.square(predicted - truth) * batch["weight"]) / frames.shape[0]
        return value + s.residual * residual(E, predicted, batch) if s.residual else value
