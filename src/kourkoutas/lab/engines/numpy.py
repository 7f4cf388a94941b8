"""The engine on NumPy: pictures of final models need no framework."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kourkoutas.lab.engines import Array, Engine


class NumPyEngine(Engine):
    """No gradients and no trainer."""

    name = "numpy"

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


ENGINE = NumPyEngine(np)
