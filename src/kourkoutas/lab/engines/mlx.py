"""The MLX engine: the loss, its gradient and the update are one compiled function of parameters and optimizer state."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path
from numpy.typing import NDArray

from kourkoutas.lab.engines import Array, Axis, Batches, Loss, Params, Squares, Trainer
from kourkoutas.lab.engines.taylor import taylor_silu
from kourkoutas.lab.specs.optimizers import Recipe, build_mlx
from kourkoutas.trace import HISTORY, Trace

_DTYPES = {
    "float32": mx.float32,
    "float64": mx.float64,
    "bfloat16": mx.bfloat16,
    "float16": mx.float16,
    "int32": mx.int32,
    "int64": mx.int64,
    "uint8": mx.uint8,
    "bool": mx.bool_,
}


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
        recipe: Recipe,
        constants: Mapping[str, NDArray[Any]],
        trace_every: int,
    ) -> None:
        traced = trace_every > 0 and recipe.family == "kbeta"
        self._params: Params = {name: _array(p) for name, p in params.items()}
        self._constants = {name: _array(x) for name, x in constants.items()}
        self._optimizer = build_mlx(recipe, diagnostics=traced)
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


class MlxEngine:
    """See `kourkoutas.lab.engines.Engine`."""

    name = "mlx"

    def array(self, x: Any) -> Array:
        return _array(x)

    def numpy(self, x: Array) -> NDArray[Any]:
        return np.array(x.astype(mx.float32) if x.dtype == mx.bfloat16 else x)

    def cast(self, x: Array, dtype: str) -> Array:
        return x.astype(_DTYPES[dtype])

    def zeros(self, *shape: int) -> Array:
        return mx.zeros(shape)

    def ones(self, *shape: int) -> Array:
        return mx.ones(shape)

    def full(self, shape: Sequence[int], value: float) -> Array:
        return mx.full(tuple(shape), value, dtype=mx.float32)

    def arange(self, n: int) -> Array:
        return mx.arange(n, dtype=mx.int32)

    def exp(self, x: Array) -> Array:
        return mx.exp(x)

    def log(self, x: Array) -> Array:
        return mx.log(x)

    def sqrt(self, x: Array) -> Array:
        return mx.sqrt(x)

    def rsqrt(self, x: Array) -> Array:
        return mx.rsqrt(x)

    def sin(self, x: Array) -> Array:
        return mx.sin(x)

    def cos(self, x: Array) -> Array:
        return mx.cos(x)

    def tanh(self, x: Array) -> Array:
        return mx.tanh(x)

    def abs(self, x: Array) -> Array:
        return mx.abs(x)

    def square(self, x: Array) -> Array:
        return mx.square(x)

    def sign(self, x: Array) -> Array:
        return mx.sign(x)

    def round(self, x: Array) -> Array:
        return mx.round(x)

    def floor(self, x: Array) -> Array:
        return mx.floor(x)

    def logaddexp(self, x: Array, y: Array | float) -> Array:
        return mx.logaddexp(x, y)

    def maximum(self, x: Array, y: Array | float) -> Array:
        return mx.maximum(x, y)

    def minimum(self, x: Array, y: Array | float) -> Array:
        return mx.minimum(x, y)

    def clip(self, x: Array, low: float, high: float) -> Array:
        return mx.clip(x, low, high)

    def where(self, condition: Array, x: Array | float, y: Array | float) -> Array:
        return mx.where(condition, x, y)

    def sum(self, x: Array, axis: Axis = None, keepdims: bool = False) -> Array:
        return mx.sum(x, axis=axis, keepdims=keepdims)

    def mean(self, x: Array, axis: Axis = None, keepdims: bool = False) -> Array:
        return mx.mean(x, axis=axis, keepdims=keepdims)

    def max(self, x: Array, axis: int | None = None, keepdims: bool = False) -> Array:
        return mx.max(x, axis=axis, keepdims=keepdims)

    def min(self, x: Array, axis: int | None = None, keepdims: bool = False) -> Array:
        return mx.min(x, axis=axis, keepdims=keepdims)

    def argmax(self, x: Array, axis: int) -> Array:
        return mx.argmax(x, axis=axis)

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        return mx.reshape(x, tuple(shape))

    def transpose(self, x: Array, axes: Sequence[int]) -> Array:
        return mx.transpose(x, tuple(axes))

    def concat(self, xs: Sequence[Array], axis: int = 0) -> Array:
        return mx.concatenate(list(xs), axis=axis)

    def stack(self, xs: Sequence[Array], axis: int = 0) -> Array:
        return mx.stack(list(xs), axis=axis)

    def split(self, x: Array, parts: int, axis: int = -1) -> Sequence[Array]:
        return cast(Sequence[Array], mx.split(x, parts, axis=axis))

    def expand(self, x: Array, axis: int) -> Array:
        return mx.expand_dims(x, axis)

    def broadcast(self, x: Array, shape: Sequence[int]) -> Array:
        return mx.broadcast_to(x, tuple(shape))

    def matmul(self, x: Array, y: Array) -> Array:
        return mx.matmul(x, y)

    def einsum(self, subscripts: str, *xs: Array) -> Array:
        return mx.einsum(subscripts, *xs)

    def linear(self, x: Array, w: Array, b: Array | None = None) -> Array:
        return x @ w if b is None else mx.addmm(b, x, w)

    def sigmoid(self, x: Array) -> Array:
        return mx.sigmoid(x)

    def silu(self, x: Array) -> Array:
        return x * mx.sigmoid(x)

    def gelu(self, x: Array) -> Array:
        return 0.5 * x * (1 + mx.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))

    def softmax(self, x: Array, axis: int = -1) -> Array:
        return mx.softmax(x, axis=axis)

    def log_softmax(self, x: Array, axis: int = -1) -> Array:
        return x - mx.logsumexp(x, axis=axis, keepdims=True)

    def layer_norm(self, x: Array, gain: Array, bias: Array, eps: float = 1e-5) -> Array:
        return mx.fast.layer_norm(x, gain, bias, eps)

    def attention(
        self,
        q: Array,
        k: Array,
        v: Array,
        *,
        mask: Array | None = None,
        causal: bool = False,
        scale: float | None = None,
    ) -> Array:
        if causal:
            if mask is not None:
                raise ValueError("`causal=True` cannot be combined with `mask`: put the causal part into the mask")
            mask = mx.tril(mx.ones((q.shape[-2], k.shape[-2]), mx.bool_))
        scores = (q @ mx.swapaxes(k, -1, -2)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if mask is not None:
            scores = mx.where(mask, scores, -math.inf)
        return mx.softmax(scores, axis=-1) @ v

    def taylor_layer(self, x: Array, w: Array, b: Array, counts: tuple[int, int, int], *, fused: bool = False) -> Array:
        return taylor_silu(self, x @ w, b, counts)

    def taylor_squares(
        self, layers: Sequence[Array], x: Array, targets: Array, squares: Callable[[int], Squares]
    ) -> Array | None:
        return None

    def take(self, table: Array, ids: Array) -> Array:
        return mx.take(table, ids, axis=0)

    def bce_with_logits(self, logits: Array, y: Array) -> Array:
        return mx.mean(mx.logaddexp(logits, 0.0) - y * logits)

    def cross_entropy(self, logits: Array, ids: Array) -> Array:
        return nn.losses.cross_entropy(logits, ids, reduction="mean")

    def stop_gradient(self, x: Array) -> Array:
        return mx.stop_gradient(x)

    def value_and_grad(self, f: Callable[..., Array]) -> Callable[..., tuple[Array, Params]]:
        both: Callable[..., tuple[Array, Params]] = mx.value_and_grad(f)
        return both

    def compile(self, f: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = mx.compile(f)
        return compiled

    def trainer(
        self,
        loss: Loss,
        params: Mapping[str, NDArray[Any]],
        recipe: Recipe,
        *,
        constants: Mapping[str, NDArray[Any]] | None = None,
        trace_every: int = 0,
        compile: bool = False,
    ) -> Trainer:
        return MlxTrainer(loss, params, recipe, constants or {}, trace_every)


ENGINE = MlxEngine()
