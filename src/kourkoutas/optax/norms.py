"""What a step measures: pooled gradient norms and the parameters' mean magnitude."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kourkoutas.buckets import Partition
from kourkoutas.optax.axes import Axes
from kourkoutas.optax.update import as_real
from kourkoutas.rule import NonFiniteGradient

_SMALL = 1 << 16
_FEW = 256


class Members:
    """The parameters that have a gradient, and their buckets: known for a whole trace.

    Attributes:
      rows: numbers of the parameters that have a gradient; None: all.
      columns: numbers of the buckets that have a gradient; None: all.
      index: for each parameter with a gradient, the place of its bucket among those that have one.
      size: how many buckets have one.
    """

    def __init__(self, parts: Partition, present: Sequence[int]) -> None:
        columns, index = np.unique(np.asarray(parts.index, np.int32)[list(present)], return_inverse=True)
        self.rows = None if len(present) == len(parts.index) else np.asarray(present, np.int32)
        self.columns = None if len(columns) == len(parts.names) else columns
        self.index = index.astype(np.int32)
        self.size = len(columns)
        self.one_each = bool(np.array_equal(self.index, np.arange(self.size)))

    def sum(self, x: jax.Array) -> jax.Array:
        return x if self.one_each else jax.ops.segment_sum(x, self.index, self.size)

    def largest(self, x: jax.Array) -> jax.Array:
        return x if self.one_each else jax.ops.segment_max(x, self.index, self.size)

    def spread(self, x: jax.Array) -> jax.Array:
        return x if self.one_each else x[self.index]


def measure(
    gs: Sequence[Any], thetas: Sequence[Any] | None, members: Members, axes: Sequence[Axes], dtype: Any
) -> tuple[jax.Array, jax.Array | None]:
    """(n of each bucket, ⟨|θ|⟩ of each of `thetas`), whole parameters wherever their parts are.

    NOTE: Σg² of finite gradients may overflow where its root n does not. n is then s·√Σ(g/s)², with s = 2^k the root of
    the dtype's largest number: this overflows only where n does, and squares that underflow are below n's last digit.

    NOTE: on a CPU the second sum costs as much as reading all gradients again. If these are large, it stands in a
    branch that is hardly ever taken; if they are small, the branch would cost more. On an accelerator a branch waits
    for the host, and two sums are one pass over the gradients.
    """
    s = 2.0 ** (jnp.finfo(dtype).maxexp // 2)
    branches = jax.default_backend() == "cpu" and sum(map(jnp.size, gs)) > _SMALL
    rows = _square_sums(gs, (1.0,) if branches else (1.0, 1 / s), dtype)
    if thetas is not None:
        # ⟨|θ|⟩ = Σ over the parts of the part's mean / number of parts, as all parts have one size
        rows.append([_mean_abs(p) / each.size() for p, each in zip(thetas, axes, strict=True)])
    squares, *rest = _over_axes(rows, axes, dtype)
    mean_abs = rest.pop() if thetas is not None else None
    total = members.sum(squares)
    finite = jnp.isfinite(total)

    def guarded() -> jax.Array:
        scaled = members.sum(*(rest or _over_axes(_square_sums(gs, (1 / s,), dtype), axes, dtype)))
        # A one where it is not used: the derivative of the root at zero would be NaN.
        return jnp.where(finite, jnp.sqrt(jnp.where(finite, total, 1)), jnp.sqrt(jnp.where(finite, 1, scaled)) * s)

    every = jnp.all(finite)
    if not branches:
        norm = guarded()
    elif isinstance(every, jax.core.Tracer):
        norm = lax.cond(every, lambda: jnp.sqrt(total), guarded)
    else:
        norm = jnp.sqrt(total) if every else guarded()
    return norm, mean_abs


# NOTE: outside of jit, JAX compiles `lax.reduce` again for every function that it has not seen.
def _added(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> list[jax.Array]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _square_sums(gs: Sequence[Any], factors: Sequence[float], dtype: Any) -> list[list[jax.Array]]:
    """For each factor, Σ(factor·g)² of each gradient."""

    def sums(g: Any) -> Sequence[jax.Array]:
        # NOTE: without the barrier XLA computes g² once for the norm and the update, and writes it to memory between.
        x = as_real(lax.optimization_barrier(g)).astype(dtype)
        squares = [(x * f) ** 2 for f in factors]
        # NOTE: XLA on a CPU makes one loop of the reduction of both, and four of two sums. That loop adds one by one,
        # which costs digits where there are many; and over several devices it gathers where a sum would all-reduce.
        if len(factors) == 1 or x.size > _FEW or jax.device_count() > 1 or jax.default_backend() != "cpu":
            return [jnp.sum(each) for each in squares]
        zero = jnp.zeros((), dtype)
        both: Sequence[jax.Array] = lax.reduce(squares, [zero] * len(squares), _added, range(x.ndim))
        return both

    each = [sums(g) for g in gs]
    return [[row[k] for row in each] for k in range(len(factors))]


def _mean_abs(p: Any) -> jax.Array:
    x = as_real(p)
    return jnp.mean(jnp.abs(x)) if x.size else jnp.zeros((), x.dtype)


def _over_axes(rows: Sequence[Sequence[jax.Array]], axes: Sequence[Axes], dtype: Any) -> list[jax.Array]:
    """Each row as a vector, with an entry per parameter, summed over that parameter's axes.

    NOTE: one sum over the devices per set of axes, all rows and parameters together. Parameters with different axes are
    not in one vector before it, as `shard_map` keeps track of what is the same on all devices by array.
    """

    def vectors(block: Sequence[int]) -> list[jax.Array]:
        return [jnp.stack([row[i].astype(dtype) for i in block]) if block else jnp.zeros(0, dtype) for row in rows]

    blocks: dict[tuple[str, ...], list[int]] = {}
    for i, each in enumerate(axes):
        blocks.setdefault(each.names, []).append(i)
    if not any(blocks):
        return vectors(range(len(axes)))
    stacked = {names: jnp.stack(vectors(block)) for names, block in blocks.items()}
    sums = [lax.psum(block, names) if names else block for names, block in stacked.items()]
    order = np.argsort([i for block in blocks.values() for i in block]).astype(np.int32)
    return list(jnp.unstack(jnp.concatenate(sums, axis=1)[:, order]))


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
