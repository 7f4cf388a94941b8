"""What a step measures: pooled gradient norms and the parameters' mean magnitude."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kourkoutas.buckets import Partition
from kourkoutas.optax.dtypes import as_real, stack
from kourkoutas.rule import NonFiniteGradient


class Members:
    """Which parameters are in which bucket, for `rule.step`: one operation each, none when every bucket has one."""

    def __init__(self, parts: Partition, present: Any = True) -> None:
        self.present = present
        self.size = len(parts.names)
        self.index = np.asarray(parts.index, np.int32)
        self.trivial = self.size == len(parts.index)

    def sum(self, x: jax.Array) -> jax.Array:
        return x if self.trivial else jax.ops.segment_sum(x, self.index, self.size)

    def largest(self, x: jax.Array) -> jax.Array:
        return x if self.trivial else jax.ops.segment_max(jnp.where(self.present, x, 0), self.index, self.size)

    def spread(self, x: jax.Array) -> jax.Array:
        return x if self.trivial else x[self.index]


def pooled_norms(gs: Sequence[Any], members: Members, dtype: Any) -> jax.Array:
    """n = ||g|| of each bucket; a gradient that is None adds nothing."""
    squares = [jnp.zeros((), dtype) if g is None else _square_sum(g) for g in gs]
    return jnp.sqrt(members.sum(stack(squares, dtype)))


def mean_magnitudes(thetas: Sequence[Any], dtype: Any) -> jax.Array:
    """⟨|θ|⟩ of each parameter."""
    return stack([_mean_abs(p) for p in thetas], dtype)


def _square_sum(g: Any) -> jax.Array:
    # NOTE: without the barrier XLA computes g² once for the norm and the update, and writes it to memory in between.
    x = as_real(lax.optimization_barrier(g))
    return jnp.sum(x * x)


def _mean_abs(p: Any) -> jax.Array:
    x = as_real(p)
    return jnp.mean(jnp.abs(x)) if x.size else jnp.zeros((), x.dtype)


def refuse_nonfinite(norm: jax.Array, names: Sequence[str]) -> None:
    """Raise if a norm is not finite, for nonfinite="raise"."""
    if isinstance(norm, jax.core.Tracer):
        raise ValueError(
            "`nonfinite` is 'raise', which cannot raise while JAX is tracing (jit, scan, vmap, grad): use "
            "nonfinite='skip', wrap the optimizer in optax.apply_if_finite, or call update() outside of jit"
        )
    for name, n in zip(names, np.asarray(norm), strict=True):
        if not np.isfinite(n):
            raise NonFiniteGradient(name)
