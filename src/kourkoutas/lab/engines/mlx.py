"""The MLX engine: the loss, its gradient and the update are one compiled function of parameters and optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from numpy.typing import NDArray

from kourkoutas.lab.engines import Array, Arrays, Batches, Engine, Loss, Optimizer, Params, Trainer, each_batch


def _array(x: Any) -> Array:
    """NumPy → MLX with the dtype kept, as mx.array makes float32 of float64, and with any strides."""
    if not isinstance(x, np.ndarray):
        return mx.array(x)
    x = x if x.flags.c_contiguous else np.array(x, order="C")
    return mx.array(x, dtype=mx.float64) if x.dtype == np.float64 else mx.array(x)


def _host(x: Array) -> NDArray[Any]:
    """A copy on the host; bfloat16, which NumPy does not have, as its bits."""
    return np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x)


def _device(saved: NDArray[Any], like: Array) -> Array:
    x = _array(np.asarray(saved))
    return x.view(mx.bfloat16) if like.dtype == mx.bfloat16 else x.astype(like.dtype)


class MlxTrainer(Trainer):
    def _begin(self, loss: Loss, params: Arrays, optimizer: Optimizer, constants: Arrays, compile: bool) -> None:
        self._params: Params = {name: _array(p) for name, p in params.items()}
        self._constants = {name: _array(x) for name, x in constants.items()}
        self._optimizer = optimizer.mlx(self._trace_every > 0)
        self._optimizer.init(self._params)
        gradient = mx.value_and_grad(lambda p, batch: loss(ENGINE, p, batch))

        def step(params: Params, constants: Params, batch: Params) -> tuple[Params, Array]:
            value, grads = gradient(params, {**constants, **batch})
            return self._optimizer.apply_gradients(grads, params), value

        state = [self._optimizer.state]
        self._step = mx.compile(step, inputs=state, outputs=state)

    def _bucket_names(self) -> Sequence[str]:
        return cast(Sequence[str], self._optimizer.bucket_names)

    def run(self, batches: Batches, lrs: NDArray[np.float64]) -> NDArray[np.float64]:
        losses: list[Array] = []
        for batch, lr in zip(each_batch(batches, len(lrs), _array), lrs, strict=True):
            self._optimizer.learning_rate = mx.array(lr, mx.float32)
            self._params, value = self._step(self._params, self._constants, batch)
            # Without this the lazy graph of the whole chunk would be held in memory.
            mx.async_eval(self._params, self._optimizer.state, value)
            losses.append(value)
        if self.trace is not None:
            self._optimizer.pull(self.trace)
        return np.asarray([x.item() for x in losses], np.float64)

    def arrays(self) -> Params:
        return self._params

    def state(self) -> dict[str, NDArray[Any]]:
        tree = {"params": self._params, "optimizer": self._optimizer.state}
        leaves: list[tuple[str, Any]] = cast(Any, tree_flatten(tree))
        return {path: _host(x) for path, x in leaves}

    def restore(self, state: Arrays) -> None:
        self._params = {name: _device(state[f"params.{name}"], p) for name, p in self._params.items()}
        # The compiled step holds this very dict as its input, so it is filled, not replaced.
        held = self._optimizer.state
        held.update(tree_map_with_path(lambda path, x: _device(state[f"optimizer.{path}"], x), dict(held)))
        self.trace = self._new_trace()


class MlxEngine(Engine):
    name = "mlx"
    array = staticmethod(_array)
    sigmoid = staticmethod(mx.sigmoid)
    stop_gradient = staticmethod(mx.stop_gradient)
    compile = staticmethod(mx.compile)
    trainer = MlxTrainer

    def numpy(self, x: Array) -> NDArray[Any]:
        return np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)

    def cast(self, x: Array, dtype: str) -> Array:
        return x.astype(getattr(mx, "bool_" if dtype == "bool" else dtype))

    def linear(self, x: Array, w: Array, b: Array | None = None) -> Array:
        return x @ w if b is None else mx.addmm(b, x, w)

    def softmax(self, x: Array, axis: int = -1) -> Array:
        return mx.softmax(x, axis=axis)

    def layer_norm(self, x: Array, gain: Array, bias: Array, eps: float = 1e-5) -> Array:
        return mx.fast.layer_norm(x, gain, bias, eps)

    def cross_entropy(self, logits: Array, ids: Array) -> Array:
        return nn.losses.cross_entropy(logits, ids, reduction="mean")


ENGINE = MlxEngine(mx)
