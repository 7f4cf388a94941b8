"""The JAX engine: a chunk of steps is one compiled loop with donated buffers.

NOTE: the number of steps of a chunk is data, not shape: a shorter last chunk is padded to the length of the first and
runs in the same compiled loop.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from numpy.typing import NDArray

from kourkoutas.lab.engines import Array, Arrays, Batches, Engine, Loss, Optimizer, Params, Trainer, each_batch


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


class JaxTrainer(Trainer):
    def _begin(self, loss: Loss, params: Arrays, optimizer: Optimizer, constants: Arrays, compile: bool) -> None:
        self._chunk, self._step, init = _compiled(loss, optimizer.step, self._trace_every > 0)
        self._params: Params = {name: jnp.array(p, copy=True) for name, p in params.items()}
        self._state = init(self._params)
        self._constants = {name: jnp.asarray(x) for name, x in constants.items()}
        self._length = 0
        self._buckets = optimizer.buckets

    def _bucket_names(self) -> Sequence[str]:
        from kourkoutas.optax import bucket_names

        return bucket_names(self._params, self._buckets)

    def run(self, batches: Batches, lrs: NDArray[np.float64]) -> NDArray[np.float64]:
        losses = self._run_stacked(batches, lrs) if isinstance(batches, Mapping) else self._run_each(batches, lrs)
        if self.trace is not None:
            from kourkoutas.optax import pull

            pull(self.trace, self._state)
        return losses

    def _run_stacked(self, batches: Arrays, lrs: NDArray[np.float64]) -> NDArray[np.float64]:
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

    def _run_each(self, batches: Sequence[Arrays], lrs: NDArray[np.float64]) -> NDArray[np.float64]:
        losses = []
        for batch, lr in zip(each_batch(batches, len(lrs), jnp.asarray), lrs, strict=True):
            self._params, self._state, value = self._step(
                self._params, self._state, self._constants, batch, jnp.asarray(lr, jnp.result_type(float))
            )
            losses.append(value)
        return np.asarray([float(x) for x in losses])

    def arrays(self) -> Params:
        return self._params

    def state(self) -> dict[str, NDArray[Any]]:
        leaves = jax.tree_util.tree_leaves_with_path({"params": self._params, "optimizer": self._state})
        return {jax.tree_util.keystr(path, simple=True, separator="/"): _host(x) for path, x in leaves}

    def restore(self, state: Arrays) -> None:
        leaves, treedef = jax.tree_util.tree_flatten_with_path({"params": self._params, "optimizer": self._state})
        new = [_device(state[jax.tree_util.keystr(path, simple=True, separator="/")], x) for path, x in leaves]
        tree = jax.tree_util.tree_unflatten(treedef, new)
        self._params, self._state = tree["params"], tree["optimizer"]
        self.trace = self._new_trace()


@functools.lru_cache(maxsize=64)
def _compiled(
    loss: Loss, optimizer: Optimizer, traced: bool
) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """(chunk of stacked steps, one step, initial optimizer state), compiled once per loss and optimizer."""
    build = optimizer.optax(traced)

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


class JaxEngine(Engine):
    name = "jax"
    sigmoid = staticmethod(jax.nn.sigmoid)
    silu = staticmethod(jax.nn.silu)
    softmax = staticmethod(jax.nn.softmax)
    stop_gradient = staticmethod(lax.stop_gradient)
    compile = staticmethod(jax.jit)
    trainer = JaxTrainer

    def gelu(self, x: Array) -> Array:
        return jax.nn.gelu(x, approximate=True)

    def layer_norm(self, x: Array, gain: Array, bias: Array, eps: float = 1e-5) -> Array:
        centred = x - jnp.mean(x, -1, keepdims=True)
        return gain * centred * lax.rsqrt(jnp.mean(jnp.square(centred), -1, keepdims=True) + eps) + bias

    def recompute(self, f: Callable[..., Array], *arrays: Array) -> Array:
        # Cheaper than to write what f holds to memory and read it.
        return jax.checkpoint(f)(*arrays)

    def cross_entropy(self, logits: Array, ids: Array) -> Array:
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, ids))


ENGINE = JaxEngine(jnp)
