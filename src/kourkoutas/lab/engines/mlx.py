"""The MLX engine: the loss, its gradient and the update are one compiled function of parameters and optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from numpy.typing import NDArray

from kourkoutas.lab.engines import Array, Batches, Engine, Loss, Optimizer, Params
from kourkoutas.lab.engines.numpy import NumPyLike
from kourkoutas.trace import HISTORY, Trace


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


class MlxTrainer:
    """See `kourkoutas.lab.engines.Trainer`."""

    def __init__(
        self,
        loss: Loss,
        params: Mapping[str, NDArray[Any]],
        optimizer: Optimizer,
        *,
        constants: Mapping[str, NDArray[Any]] | None = None,
        trace_every: int = 0,
        compile: bool = False,
    ) -> None:
        traced = trace_every > 0 and optimizer.recorded
        self._params: Params = {name: _array(p) for name, p in params.items()}
        self._constants = {name: _array(x) for name, x in (constants or {}).items()}
        self._optimizer = optimizer.mlx(traced)
        self._optimizer.init(self._params)
        gradient = mx.value_and_grad(lambda p, batch: loss(ENGINE, p, batch))

        def step(params: Params, constants: Params, batch: Params) -> tuple[Params, Array]:
            value, grads = gradient(params, {**constants, **batch})
            return self._optimizer.apply_gradients(grads, params), value

        state = [self._optimizer.state]
        self._step = mx.compile(step, inputs=state, outputs=state)
        self._trace_every = trace_every if traced else 0
        self.trace = self._new_trace()

    def _new_trace(self) -> Trace | None:
        if not self._trace_every:
            return None
        return Trace(self._optimizer.bucket_names, every=self._trace_every, history=HISTORY)

    def run(self, batches: Batches, lrs: NDArray[np.float64]) -> NDArray[np.float64]:
        losses: list[Array] = []
        if isinstance(batches, Mapping):
            stacked = {k: _array(x) for k, x in batches.items()}
            each = ({k: x[i] for k, x in stacked.items()} for i in range(len(lrs)))
        else:
            each = ({k: _array(x) for k, x in batch.items()} for batch in batches)
        for batch, lr in zip(each, lrs, strict=True):
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

    def params(self) -> dict[str, NDArray[Any]]:
        return {name: np.array(p) for name, p in self._params.items()}

    def state(self) -> dict[str, NDArray[Any]]:
        tree = {"params": self._params, "optimizer": self._optimizer.state}
        leaves: list[tuple[str, Any]] = cast(Any, tree_flatten(tree))
        return {path: _host(x) for path, x in leaves}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        self._params = {name: _device(state[f"params.{name}"], p) for name, p in self._params.items()}
        # The compiled step holds this very dict as its input, so it is filled, not replaced.
        held = self._optimizer.state
        held.update(tree_map_with_path(lambda path, x: _device(state[f"optimizer.{path}"], x), dict(held)))
        self.trace = self._new_trace()


class MlxEngine(NumPyLike):
    """See `kourkoutas.lab.engines.Engine`."""

    name = "mlx"
    array = staticmethod(_array)
    sigmoid = staticmethod(mx.sigmoid)
    stop_gradient = staticmethod(mx.stop_gradient)
    value_and_grad = staticmethod(mx.value_and_grad)
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


ENGINE = cast(Engine, MlxEngine(mx))
