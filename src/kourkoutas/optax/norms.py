"""What a step measures: pooled gradient norms and the parameters' mean magnitude."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kourkoutas.buckets import Partition
from kourkoutas.optax.axes import Axes
from kourkoutas.optax.dtypes import as_real, stack
from kourkoutas.rule import NonFiniteGradient

_SMALL = 1 << 16


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


def measure(
    gs: Sequence[Any], thetas: Sequence[Any] | None, members: Members, axes: Sequence[Axes], dtype: Any
) -> tuple[jax.Array, jax.Array | None]:
    """(n of each bucket, ⟨|θ|⟩ of each of `thetas`), whole parameters wherever their parts are.

    A gradient that is None adds nothing.
    """
    rows = [_square_sums(gs, 1.0, dtype)]
    if thetas is not None:
        # ⟨|θ|⟩ = Σ over the parts of the part's mean / number of parts, as all parts have one size
        rows.append([_mean_abs(p) / each.size() for p, each in zip(thetas, axes, strict=True)])
    squares, *means = _over_axes(rows, axes, dtype)
    return _root(members.sum(squares), gs, members, axes), means[0] if means else None


def _root(total: jax.Array, gs: Sequence[Any], members: Members, axes: Sequence[Axes]) -> jax.Array:
    """n = √Σg², from `total` = Σg² where that is finite, and from Σ(g/s)² elsewhere.

    NOTE: with s = 2^k the square root of the largest number, Σ(g/s)² overflows only where n itself does. Where Σg²
    overflows, n > s, and squares that underflow are below its last digit.

    NOTE: on a CPU a second sum costs as much as reading all gradients again. If these are large, it stands in a branch
    that is hardly ever taken; if they are small, the branch would cost more. On an accelerator a branch waits for the
    host, and two sums are one pass over the gradients.
    """
    finite, s = jnp.isfinite(total), 2.0 ** (jnp.finfo(total.dtype).maxexp // 2)

    def scaled() -> jax.Array:
        (each,) = _over_axes([_square_sums(gs, 1 / s, total.dtype)], axes, total.dtype)
        squares = members.sum(each)
        # A one where it is not used: the derivative of the root at zero would be NaN.
        return jnp.where(finite, jnp.sqrt(jnp.where(finite, total, 1)), jnp.sqrt(jnp.where(finite, 1, squares)) * s)

    every = jnp.all(finite)
    if not isinstance(every, jax.core.Tracer):
        return jnp.sqrt(total) if every else scaled()
    branches = jax.default_backend() == "cpu" and sum(g.size for g in gs if g is not None) > _SMALL
    n: jax.Array = lax.cond(every, lambda: jnp.sqrt(total), scaled) if branches else scaled()
    return n


def _square_sums(gs: Sequence[Any], factor: float, dtype: Any) -> list[jax.Array]:
    """Σ(factor·g)² of each gradient."""

    def square_sum(g: Any) -> jax.Array:
        # NOTE: without the barrier XLA computes g² once for the norm and the update, and writes it to memory between.
        x = as_real(lax.optimization_barrier(g))
        x = x if factor == 1 else x * factor
        return jnp.sum(x * x)

    return [jnp.zeros((), dtype) if g is None else square_sum(g) for g in gs]


def _mean_abs(p: Any) -> jax.Array:
    x = as_real(p)
    return jnp.mean(jnp.abs(x)) if x.size else jnp.zeros((), x.dtype)


def _over_axes(rows: Sequence[Sequence[jax.Array]], axes: Sequence[Axes], dtype: Any) -> Sequence[jax.Array]:
    """Each row as a vector, with an entry per parameter, summed over that parameter's axes.

    NOTE: one sum over the devices per set of axes, all rows and parameters together. Parameters with different axes are
    not in one vector before it, as `shard_map` keeps track of what is the same on all devices by array.
    """
    sets = dict.fromkeys(each.names for each in axes)
    if not any(sets):
        return [stack(row, dtype) for row in rows]
    members = [[i for i, each in enumerate(axes) if each.names == names] for names in sets]
    blocks = [jnp.stack([stack([row[i] for i in block], dtype) for row in rows]) for block in members]
    sums = [lax.psum(block, names) if names else block for names, block in zip(sets, blocks, strict=True)]
    order = np.argsort([i for block in members for i in block]).astype(np.int32)
    return jnp.unstack(jnp.concatenate(sums, axis=1)[:, order])


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
