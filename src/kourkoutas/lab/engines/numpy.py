"""The part of the vocabulary that final models are evaluated with, on NumPy: pictures need no framework."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

import numpy as np

from kourkoutas.lab.engines import Array, Engine
from kourkoutas.lab.engines.taylor import Counts, taylor_silu


class NumPyEngine:
    """See `kourkoutas.lab.engines.Engine`; no gradients and no trainer."""

    name = "numpy"
    array = numpy = staticmethod(np.asarray)
    abs = staticmethod(np.abs)
    round = staticmethod(np.round)
    clip = staticmethod(np.clip)
    where = staticmethod(np.where)
    max = staticmethod(np.max)
    square = staticmethod(np.square)
    expand = staticmethod(np.expand_dims)
    broadcast = staticmethod(np.broadcast_to)
    einsum = staticmethod(np.einsum)
    concat = staticmethod(np.concatenate)
    split = staticmethod(np.split)
    arange = staticmethod(np.arange)
    transpose = staticmethod(np.transpose)

    def stop_gradient(self, x: Array) -> Array:
        return x

    def compile(self, f: Callable[..., Array]) -> Callable[..., Array]:
        return f

    def linear(self, x: Array, w: Array, b: Array) -> Array:
        return x @ w + b

    def sigmoid(self, x: Array) -> Array:
        return 0.5 * (1 + np.tanh(0.5 * x))

    def silu(self, x: Array) -> Array:
        return x * self.sigmoid(x)

    def gelu(self, x: Array) -> Array:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))

    def softmax(self, x: Array, axis: int = -1) -> Array:
        e = np.exp(x - x.max(axis=axis, keepdims=True))
        return e / e.sum(axis=axis, keepdims=True)

    def layer_norm(self, x: Array, gain: Array, bias: Array, eps: float = 1e-5) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        return gain * centred / np.sqrt(np.mean(np.square(centred), -1, keepdims=True) + eps) + bias

    def attention(self, q: Array, k: Array, v: Array, *, mask: Array | None = None, causal: bool = False) -> Array:
        scores = q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])
        allowed: Array = np.tri(q.shape[-2], k.shape[-2], dtype=bool) if causal else mask
        return self.softmax(np.where(allowed, scores, -np.inf)) @ v

    def taylor_layer(self, x: Array, w: Array, b: Array, counts: Counts, *, fused: bool = False) -> Array:
        return taylor_silu(cast(Engine, self), x @ w, b, counts)


ENGINE = cast(Engine, NumPyEngine())
