"""The calls that NumPy and the frameworks name alike, and the engine on NumPy, so that pictures need no framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from kourkoutas.lab.engines import Array, Engine, Squares
from kourkoutas.lab.engines.taylor import Counts, taylor_silu

# Call of the vocabulary → function of the namespace.
ALIKE = {
    **{name: name for name in ("abs", "clip", "einsum", "logaddexp", "max", "maximum", "mean", "round", "sqrt")},
    **{name: name for name in ("square", "sum", "tanh", "transpose", "where")},
    "concat": "concatenate",
    "expand": "expand_dims",
    "broadcast": "broadcast_to",
}


class NumPyLike:
    """The vocabulary of `kourkoutas.lab.engines.Engine` in a namespace `xp` that follows NumPy; no trainer.

    An engine defines what its framework names or does otherwise.
    """

    sigmoid: Callable[[Array], Array]
    softmax: Callable[..., Array]
    logaddexp: Callable[..., Array]

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        for name, function in ALIKE.items():
            if not hasattr(self, name):
                setattr(self, name, getattr(xp, function))

    def arange(self, n: int) -> Array:
        return self.xp.arange(n, dtype=self.xp.int32)

    def split(self, x: Array, parts: int, axis: int = -1) -> Sequence[Array]:
        return cast(Sequence[Array], self.xp.split(x, parts, axis=axis))

    def take(self, table: Array, ids: Array) -> Array:
        return self.xp.take(table, ids, axis=0)

    def linear(self, x: Array, w: Array, b: Array | None = None) -> Array:
        return x @ w if b is None else x @ w + b

    def silu(self, x: Array) -> Array:
        return x * self.sigmoid(x)

    def gelu(self, x: Array) -> Array:
        return 0.5 * x * (1 + self.xp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))

    def attention(self, q: Array, k: Array, v: Array, *, mask: Array | None = None, causal: bool = False) -> Array:
        if causal:
            if mask is not None:
                raise ValueError("`causal=True` cannot be combined with `mask`: put the causal part into the mask")
            mask = self.xp.tri(q.shape[-2], k.shape[-2]) > 0
        scores = (q @ self.xp.swapaxes(k, -1, -2)) * (1 / math.sqrt(q.shape[-1]))
        if mask is not None:
            scores = self.xp.where(mask, scores, -math.inf)
        return self.softmax(scores) @ v

    def taylor_layer(self, x: Array, w: Array, b: Array, counts: Counts) -> Array:
        return taylor_silu(cast(Engine, self), x @ w, b, counts)

    def taylor_squares(
        self, layers: Sequence[Array], x: Array, targets: Array, squares: Callable[[int], Squares]
    ) -> Array | None:
        return None

    def bce_with_logits(self, logits: Array, y: Array) -> Array:
        return self.xp.mean(self.logaddexp(logits, 0.0) - y * logits)


class NumPyEngine(NumPyLike):
    """No gradients and no trainer."""

    name = "numpy"
    array = numpy = staticmethod(np.asarray)

    def stop_gradient(self, x: Array) -> Array:
        return x

    def compile(self, f: Callable[..., Array]) -> Callable[..., Array]:
        return f

    def sigmoid(self, x: Array) -> Array:
        return 0.5 * (1 + np.tanh(0.5 * x))

    def softmax(self, x: Array, axis: int = -1) -> Array:
        e = np.exp(x - x.max(axis=axis, keepdims=True))
        return e / e.sum(axis=axis, keepdims=True)

    def layer_norm(self, x: Array, gain: Array, bias: Array, eps: float = 1e-5) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        return gain * centred / np.sqrt(np.mean(np.square(centred), -1, keepdims=True) + eps) + bias


ENGINE = cast(Engine, NumPyEngine(np))
