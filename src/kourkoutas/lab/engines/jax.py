"""The JAX engine: a chunk of steps is one compiled loop with donated buffers.

NOTE: the number of steps of a chunk is data, not shape: a shorter last chunk is padded to the length of the first and
runs in the same compiled loop.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from numpy.typing import NDArray

from kourkoutas.lab.engines import Array, Axis, Batches, Loss, Params, Squares, Trainer
from kourkoutas.lab.engines.taylor import taylor_silu
from kourkoutas.lab.specs.optimizers import Recipe, build_optax
from kourkoutas.trace import HISTORY, Trace


def _host(x: Any) -> NDArray[Any]:
    """A copy on the host; dtypes that NumPy cannot save, such as bfloat16, as their bits."""
    a = np.array(x)
    return a.view(np.uint16) if a.dtype.kind == "V" or a.dtype.name == "bfloat16" else a


def _device(saved: NDArray[Any], like: Any) -> Array:
    a = np.asarray(saved)
    if a.dtype != like.dtype:
        a = a.view(like.dtype)
    # A copy in JAX's own memory, as the buffers of a step are donated.
    return jnp.array(a, copy=True)


class JaxTrainer:
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
        self._chunk, self._step, init = _compiled(loss, recipe.family, recipe.items, traced)
        self._params: Params = {name: jnp.array(p, copy=True) for name, p in params.items()}
        self._state = init(self._params)
        self._constants = {name: jnp.asarray(x) for name, x in constants.items()}
        self._length = 0
        self._trace_every = trace_every if traced else 0
        self._buckets = recipe.options.get("buckets", "parameter")
        self.trace = self._new_trace()

    def _new_trace(self) -> Trace | None:
        if not self._trace_every:
            return None
        from kourkoutas.optax import bucket_names

        return Trace(bucket_names(self._params, self._buckets), every=self._trace_every, history=HISTORY)

    def run(self, batches: Batches, lrs: NDArray[np.float64]) -> NDArray[np.float64]:
        losses = self._run_stacked(batches, lrs) if isinstance(batches, Mapping) else self._run_each(batches, lrs)
        if self.trace is not None:
            from kourkoutas.optax import pull

            pull(self.trace, self._state)
        return losses

    def _run_stacked(self, batches: Mapping[str, NDArray[Any]], lrs: NDArray[np.float64]) -> NDArray[np.float64]:
        n = len(lrs)
        self._length = max(self._length, n)
        if n < self._length:
            batches = {k: np.resize(x, (self._length, *x.shape[1:])) for k, x in batches.items()}
            lrs = np.resize(lrs, self._length)
        stacked = {k: jnp.asarray(x) for k, x in batches.items()}
        self._params, self._state, losses = self._chunk(
            self._params, self._state, self._constants, stacked, jnp.asarray(lrs, jnp.result_type(float)), n
        )
        return np.asarray(losses, np.float64)[:n]

    def _run_each(self, batches: Sequence[Mapping[str, NDArray[Any]]], lrs: NDArray[np.float64]) -> NDArray[np.float64]:
        losses = []
        for batch, lr in zip(batches, lrs, strict=True):
            arrays = {k: jnp.asarray(x) for k, x in batch.items()}
            self._params, self._state, value = self._step(
                self._params, self._state, self._constants, arrays, jnp.asarray(lr, jnp.result_type(float))
            )
            losses.append(value)
        return np.asarray([float(x) for x in losses])

    def arrays(self) -> Params:
        return self._params

    def params(self) -> dict[str, NDArray[Any]]:
        return {name: np.array(p) for name, p in self._params.items()}

    def state(self) -> dict[str, NDArray[Any]]:
        leaves = jax.tree_util.tree_leaves_with_path({"params": self._params, "optimizer": self._state})
        return {jax.tree_util.keystr(path, simple=True, separator="/"): _host(x) for path, x in leaves}

    def restore(self, state: Mapping[str, NDArray[Any]]) -> None:
        leaves, treedef = jax.tree_util.tree_flatten_with_path({"params": self._params, "optimizer": self._state})
        new = [_device(state[jax.tree_util.keystr(path, simple=True, separator="/")], x) for path, x in leaves]
        tree = jax.tree_util.tree_unflatten(treedef, new)
        self._params, self._state = tree["params"], tree["optimizer"]
        self.trace = self._new_trace()


@functools.lru_cache(maxsize=64)
def _compiled(
    loss: Loss, family: str, items: tuple[tuple[str, Any], ...], traced: bool
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """(chunk of stacked steps, one step, initial optimizer state), compiled once per loss and recipe."""
    build = build_optax(Recipe(family, family, items), diagnostics=traced)

    def update(params: Params, state: Any, batch: Params, lr: Array) -> tuple[Params, Any, Array]:
        value, grads = jax.value_and_grad(lambda p: loss(ENGINE, p, batch))(params)
        updates, state = build(lr).update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Params, state: Any, constants: Params, batch: Params, lr: Array) -> tuple[Params, Any, Array]:
        return update(params, state, {**constants, **batch}, lr)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def chunk(
        params: Params, state: Any, constants: Params, batches: Params, lrs: Array, n: Array
    ) -> tuple[Params, Any, Array]:
        def body(i: Array, carry: tuple[Params, Any, Array]) -> tuple[Params, Any, Array]:
            params, state, losses = carry
            batch = {k: lax.dynamic_index_in_dim(x, i, keepdims=False) for k, x in batches.items()}
            params, state, value = update(params, state, {**constants, **batch}, lrs[i])
            return params, state, losses.at[i].set(value.astype(losses.dtype))

        out: tuple[Params, Any, Array] = lax.fori_loop(0, n, body, (params, state, jnp.zeros(lrs.shape, lrs.dtype)))
        return out

    return chunk, step, build(jnp.zeros((), jnp.result_type(float))).init


# Its backward pass works everything out again from z: cheaper than to write it to memory and read it.
@functools.partial(jax.checkpoint, static_argnums=(2,))
def _taylor_silu(z: Array, b: Array, counts: tuple[int, int, int]) -> Array:
    return taylor_silu(ENGINE, z, b, counts)


class JaxEngine:
    """See `kourkoutas.lab.engines.Engine`."""

    name = "jax"

    def array(self, x: Any) -> Array:
        return jnp.asarray(x)

    def numpy(self, x: Array) -> NDArray[Any]:
        return np.asarray(x)

    def cast(self, x: Array, dtype: str) -> Array:
        return x.astype(dtype)

    def zeros(self, *shape: int) -> Array:
        return jnp.zeros(shape, jnp.float32)

    def ones(self, *shape: int) -> Array:
        return jnp.ones(shape, jnp.float32)

    def full(self, shape: Sequence[int], value: float) -> Array:
        return jnp.full(tuple(shape), value, jnp.float32)

    def arange(self, n: int) -> Array:
        return jnp.arange(n, dtype=jnp.int32)

    def exp(self, x: Array) -> Array:
        return jnp.exp(x)

    def log(self, x: Array) -> Array:
        return jnp.log(x)

    def sqrt(self, x: Array) -> Array:
        return jnp.sqrt(x)

    def rsqrt(self, x: Array) -> Array:
        return lax.rsqrt(x)

    def sin(self, x: Array) -> Array:
        return jnp.sin(x)

    def cos(self, x: Array) -> Array:
        return jnp.cos(x)

    def tanh(self, x: Array) -> Array:
        return jnp.tanh(x)

    def abs(self, x: Array) -> Array:
        return jnp.abs(x)

    def square(self, x: Array) -> Array:
        return jnp.square(x)

    def sign(self, x: Array) -> Array:
        return jnp.sign(x)

    def round(self, x: Array) -> Array:
        return jnp.round(x)

    def floor(self, x: Array) -> Array:
        return jnp.floor(x)

    def logaddexp(self, x: Array, y: Array | float) -> Array:
        return jnp.logaddexp(x, y)

    def maximum(self, x: Array, y: Array | float) -> Array:
        return jnp.maximum(x, y)

    def minimum(self, x: Array, y: Array | float) -> Array:
        return jnp.minimum(x, y)

    def clip(self, x: Array, low: float, high: float) -> Array:
        return jnp.clip(x, low, high)

    def where(self, condition: Array, x: Array | float, y: Array | float) -> Array:
        return jnp.where(condition, x, y)

    def sum(self, x: Array, axis: Axis = None, keepdims: bool = False) -> Array:
        return jnp.sum(x, axis=axis, keepdims=keepdims)

    def mean(self, x: Array, axis: Axis = None, keepdims: bool = False) -> Array:
        return jnp.mean(x, axis=axis, keepdims=keepdims)

    def max(self, x: Array, axis: int | None = None, keepdims: bool = False) -> Array:
        return jnp.max(x, axis=axis, keepdims=keepdims)

    def min(self, x: Array, axis: int | None = None, keepdims: bool = False) -> Array:
        return jnp.min(x, axis=axis, keepdims=keepdims)

    def argmax(self, x: Array, axis: int) -> Array:
        return jnp.argmax(x, axis=axis)

    def reshape(self, x: Array, shape: Sequence[int]) -> Array:
        return jnp.reshape(x, tuple(shape))

    def transpose(self, x: Array, axes: Sequence[int]) -> Array:
        return jnp.transpose(x, tuple(axes))

    def concat(self, xs: Sequence[Array], axis: int = 0) -> Array:
        return jnp.concatenate(list(xs), axis=axis)

    def stack(self, xs: Sequence[Array], axis: int = 0) -> Array:
        return jnp.stack(list(xs), axis=axis)

    def split(self, x: Array, parts: int, axis: int = -1) -> Sequence[Array]:
        return jnp.split(x, parts, axis=axis)

    def expand(self, x: Array, axis: int) -> Array:
        return jnp.expand_dims(x, axis)

    def broadcast(self, x: Array, shape: Sequence[int]) -> Array:
        return jnp.broadcast_to(x, tuple(shape))

    def matmul(self, x: Array, y: Array) -> Array:
        return jnp.matmul(x, y)

    def einsum(self, subscripts: str, *xs: Array) -> Array:
        return jnp.einsum(subscripts, *xs)

    def linear(self, x: Array, w: Array, b: Array | None = None) -> Array:
        y = jnp.matmul(x, w)
        return y if b is None else y + b

    def sigmoid(self, x: Array) -> Array:
        return jax.nn.sigmoid(x)

    def silu(self, x: Array) -> Array:
        return jax.nn.silu(x)

    def gelu(self, x: Array) -> Array:
        return jax.nn.gelu(x, approximate=True)

    def softmax(self, x: Array, axis: int = -1) -> Array:
        return jax.nn.softmax(x, axis=axis)

    def log_softmax(self, x: Array, axis: int = -1) -> Array:
        return jax.nn.log_softmax(x, axis=axis)

    def layer_norm(self, x: Array, gain: Array, bias: Array, eps: float = 1e-5) -> Array:
        centred = x - jnp.mean(x, -1, keepdims=True)
        return gain * centred * lax.rsqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + eps) + bias

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
            mask = jnp.tril(jnp.ones((q.shape[-2], k.shape[-2]), bool))
        scores = jnp.einsum("...qd,...kd->...qk", q, k) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
        if mask is not None:
            scores = jnp.where(mask, scores, -jnp.inf)
        return jnp.einsum("...qk,...kd->...qd", jax.nn.softmax(scores, axis=-1), v)

    def taylor_layer(self, x: Array, w: Array, b: Array, counts: tuple[int, int, int], *, fused: bool = False) -> Array:
        return _taylor_silu(x @ w, b, counts)

    def taylor_squares(
        self, layers: Sequence[Array], x: Array, targets: Array, squares: Callable[[int], Squares]
    ) -> Array | None:
        return None

    def take(self, table: Array, ids: Array) -> Array:
        return jnp.take(table, ids, axis=0)

    def bce_with_logits(self, logits: Array, y: Array) -> Array:
        return jnp.mean(jnp.logaddexp(logits, 0.0) - y * logits)

    def cross_entropy(self, logits: Array, ids: Array) -> Array:
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, ids))

    def stop_gradient(self, x: Array) -> Array:
        return lax.stop_gradient(x)

    def value_and_grad(self, f: Callable[..., Array]) -> Callable[..., tuple[Array, Params]]:
        return jax.value_and_grad(f)

    def compile(self, f: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(f)

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
        return JaxTrainer(loss, params, recipe, constants or {}, trace_every)


ENGINE = JaxEngine()
