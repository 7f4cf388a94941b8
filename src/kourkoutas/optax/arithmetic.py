"""The arithmetic of a step: pooled norms before `rule.step`, the elementwise update after it."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kourkoutas.buckets import Partition
from kourkoutas.optax.trees import Axes
from kourkoutas.rule import Coefficients, Hyper

_SMALL = 1 << 16
_FEW = 256


def precision(arrays: Iterable[Any]) -> Any:
    """The dtype of scalars and of elementwise arithmetic: float64 as soon as one of `arrays` is, else float32."""
    wide = any(jnp.result_type(x) in (jnp.float64, jnp.complex128) for x in arrays)
    return jnp.float64 if wide else jnp.float32


def as_real(x: Any) -> jax.Array:
    """x in `precision`; complex numbers as pairs along a new last axis."""
    a = jnp.asarray(x)
    if jnp.iscomplexobj(a):
        return jnp.stack([jnp.real(a), jnp.imag(a)], -1)
    return a.astype(precision([a]))


def from_real(x: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `as_real`."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        x = lax.complex(x[..., 0], x[..., 1])
    return x.astype(dtype)


class Members:
    """The parameters of a step, those that have a gradient, and their buckets: known for a whole trace.

    Attributes:
      bucket_of: for each parameter, the number of its bucket.
      bucket_names: one name per bucket.
      rows: the places of the parameters in the state's arrays.
      columns: the places of the buckets in the state's arrays.
      one_each: whether each parameter is a bucket of its own.
    """

    def __init__(self, parts: Partition, rows: Sequence[int]) -> None:
        self.rows = np.asarray(rows, np.int32)
        buckets = np.asarray(parts.bucket_of, np.int32)[self.rows]
        self.columns, bucket_of = np.unique(buckets, return_inverse=True)
        self.bucket_of: Any = bucket_of.astype(np.int32)
        self.bucket_names = [parts.bucket_names[column] for column in self.columns]
        self.one_each = np.array_equal(self.bucket_of, np.arange(len(self.columns)))

    # From buckets to parameters and back, as `rule.Members` has it.

    def spread(self, x: jax.Array) -> jax.Array:
        return x if self.one_each else x[self.bucket_of]

    def largest(self, x: jax.Array) -> jax.Array:
        return x if self.one_each else jax.ops.segment_max(x, self.bucket_of, len(self.columns))

    def total(self, x: jax.Array) -> jax.Array:
        return x if self.one_each else jax.ops.segment_sum(x, self.bucket_of, len(self.columns))

    def pooled(self, norm: jax.Array) -> jax.Array:
        """n of each bucket from ||g|| of each parameter, whose squares may overflow."""
        if self.one_each:
            return norm
        largest = self.largest(norm)
        unit = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
        return unit * jnp.sqrt(self.total((norm / self.spread(unit)) ** 2))


def at(x: Any, places: np.ndarray) -> Any:
    """The entries of an array at `places` of its first axis, ascending."""
    if x is None or len(places) == len(x):
        return x
    return x[places]


def put(x: Any, places: np.ndarray, new: Any) -> Any:
    """An array with `new` at `places` of its first axis, ascending."""
    if x is None:
        return None
    if len(places) == len(x):
        return new.astype(x.dtype)
    return x.at[places].set(new)


def measure(
    gs: Sequence[Any], thetas: Sequence[Any] | None, members: Members, axes: Sequence[Axes], dtype: Any
) -> tuple[jax.Array, jax.Array | None]:
    """(n of each bucket, ⟨|θ|⟩ of each of `thetas`), whole parameters wherever their parts are.

    NOTE: Σg² of finite gradients may overflow where its root n does not. n is then s·√Σ(g/s)², with s = 2^k the root of
    the dtype's largest number: this overflows only where n does, and squares that underflow are below n's last digit.

    NOTE: on a CPU the second sum costs as much as reading all gradients again. Large gradients therefore have it in a
    branch that is hardly ever taken; for small ones the branch costs more than the sum. On an accelerator a branch
    waits for the host, and two sums are one pass over the gradients.
    """
    s = 2.0 ** (jnp.finfo(dtype).maxexp // 2)
    branches = jax.default_backend() == "cpu" and sum(map(jnp.size, gs)) > _SMALL

    def sums(block: Sequence[int]) -> list[jax.Array]:
        rows = _square_sums([gs[i] for i in block], (1.0,) if branches else (1.0, 1 / s), dtype)
        if thetas is not None:
            # ⟨|θ|⟩ = Σ over the parts of the part's mean / number of parts, as all parts have one size
            rows.append(jnp.array([mean_abs_of(thetas[i]) / axes[i].size() for i in block], dtype))
        return rows

    squares, *rest = _over_axes(sums, axes)
    mean_abs = rest.pop() if thetas is not None else None
    scaled_squares = rest.pop() if rest else None
    total = members.total(squares)

    def only_scaled(block: Sequence[int]) -> list[jax.Array]:
        return _square_sums([gs[i] for i in block], (1 / s,), dtype)

    def guarded() -> jax.Array:
        finite = jnp.isfinite(total)
        scaled = _over_axes(only_scaled, axes)[0] if scaled_squares is None else scaled_squares
        # The root of 1 where the root is not used: its derivative at 0 would be NaN.
        root = jnp.sqrt(jnp.where(finite, 1, members.total(scaled))) * s
        return jnp.where(finite, jnp.sqrt(jnp.where(finite, total, 1)), root)

    every = jnp.all(jnp.isfinite(total))
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


def _square_sums(gs: Sequence[Any], factors: Sequence[float], dtype: Any) -> list[jax.Array]:
    """For each factor, the vector of Σ(factor·g)² of each gradient.

    NOTE: for each sum XLA runs three loops on the CPU, and one for a `lax.reduce` of several. Small gradients of one
    shape are therefore summed together, and for both factors at once. That adds one by one, which costs digits where
    there are many entries; and over several devices, where gradients lie in different ways, XLA would gather them.
    """
    # NOTE: without the barrier XLA shares g² between the norm and the update, and writes it to memory in between.
    xs = [as_real(lax.optimization_barrier(g)).astype(dtype) for g in gs]
    together = jax.default_backend() == "cpu" and jax.device_count() == 1
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(xs):
        alike = x.shape if together and x.size <= _FEW else i
        groups.setdefault(alike, []).append(i)

    def sums(group: Sequence[int]) -> Sequence[jax.Array]:
        x = jnp.stack([xs[i] for i in group])
        squares = [(x * f) ** 2 for f in factors]
        inner = range(1, x.ndim)
        small = together and xs[group[0]].size <= _FEW
        if len(factors) > 1 and small:
            zeros = [jnp.zeros((), dtype)] * len(factors)
            both: Sequence[jax.Array] = lax.reduce(squares, zeros, _added, inner)
            return both
        return [jnp.sum(each, inner) for each in squares]

    per_group = [sums(group) for group in groups.values()]
    vectors = []
    for k in range(len(factors)):
        of_factor = [each[k] for each in per_group]
        vectors.append(in_order(of_factor, groups.values(), dtype))
    return vectors


def in_order(parts: Sequence[jax.Array], groups: Iterable[Sequence[int]], dtype: Any) -> jax.Array:
    """One array with an entry per parameter along its last axis, from `parts` with those of a group of them each."""
    places = list(itertools.chain.from_iterable(groups))
    x = jnp.concatenate(parts, -1) if parts else jnp.zeros(0, dtype)
    return x if places == sorted(places) else x[..., np.argsort(places).astype(np.int32)]


def mean_abs_of(p: Any) -> jax.Array:
    x = as_real(p)
    return jnp.mean(jnp.abs(x)) if x.size else jnp.zeros((), x.dtype)


def _over_axes(sums: Callable[[Sequence[int]], list[jax.Array]], axes: Sequence[Axes]) -> list[jax.Array]:
    """The vectors that `sums` makes for some parameters, for all of them and summed over each parameter's axes.

    NOTE: one sum over the devices for each set of axes, all vectors and parameters together. Parameters with other axes
    must not be in the same array before it: `shard_map` tracks per array what is the same on all devices.
    """
    blocks: dict[tuple[str, ...], list[int]] = {}
    for i, each in enumerate(axes):
        blocks.setdefault(each.names, []).append(i)
    if not any(blocks):
        return sums(range(len(axes)))
    parts = []
    for names, block in blocks.items():
        stacked = jnp.stack(sums(block))
        parts.append(lax.psum(stacked, names) if names else stacked)
    return list(jnp.unstack(in_order(parts, blocks.values(), parts[0].dtype)))


def update_dtype(g: Any, m: Any) -> Any:
    """The dtype of an update, as `optax.adam` has it: float32 where one of `g` and `m` is float32 and one bfloat16."""
    if not jnp.issubdtype(jnp.result_type(g), jnp.inexact):
        return m.dtype
    # NOTE: JAX has no common dtype for an 8-bit number and a wider one: the wider one counts.
    wide = [x for x in (g, m) if jnp.result_type(x).itemsize > 1]
    return jnp.result_type(*(wide or (g, m)))


class Leaf(NamedTuple):
    """One parameter after the step."""

    u: Any
    m: Any
    v: Any
    v_max: Any


def each_parameter(k: Coefficients, size: int, dtype: Any) -> list[Coefficients]:
    """The coefficients of a step, parameter by parameter, 0-d.

    NOTE: the barrier hides from XLA that 1-β1 is a constant, so that the update of m waits for the norms as that of v
    does. Otherwise XLA on the CPU updates every m first, and reads all gradients from memory once more for v.
    """
    stacked = jnp.stack([jnp.broadcast_to(x, size).astype(dtype) for x in (k.c1, k.c2, k.rate, k.floor)])
    rows = [jnp.unstack(row) for row in lax.optimization_barrier(stacked)]
    return [k._replace(c1=c1, c2=c2, rate=rate, floor=floor) for c1, c2, rate, floor in zip(*rows, strict=True)]


def update_leaf(hyper: Hyper, k: Coefficients, updated: Any, g: Any, m: Any, v: Any, v_max: Any) -> Leaf:
    """The step of one parameter, without a learning rate, which later parts of the chain apply.

    `updated` is a 0-d boolean, or None where no parameter can be skipped.
    """
    dtype = update_dtype(g, m)
    x = as_real(jnp.asarray(g, dtype))
    c1, c2, rate, floor = (each.astype(x.dtype) for each in (k.c1, k.c2, k.rate, k.floor))

    # NOTE: use m and v after the `where`; keeping the unmasked ones alive makes XLA copy both.
    def unless_skipped(new: Any, old: Any) -> Any:
        return new if updated is None else jnp.where(updated, new, as_real(old))

    # m = β1·m + (1-β1)·g,  v = β2·v + (1-β2)·g²
    m_new = unless_skipped(hyper.beta1 * as_real(m) + c1 * x, m)
    v_new = v_hat = unless_skipped((1 - c2) * as_real(v) + c2 * (x * x), v)
    # v̂ = v, or v_max = max(δ·v_max, v)
    if hyper.leak is not None:
        v_hat = unless_skipped(jnp.maximum(hyper.leak * as_real(v_max), v_new), v_max)
    # u = rate·m / (√v̂ + floor), clipped to ±max_ratio
    u = unless_skipped(rate * m_new / (jnp.sqrt(v_hat) + floor), jnp.zeros_like(x))
    if hyper.max_ratio is not None:
        u = jnp.clip(u, -hyper.max_ratio, hyper.max_ratio)
    return Leaf(
        u=from_real(u, dtype),
        m=from_real(m_new, m.dtype),
        v=from_real(v_new, v.dtype),
        v_max=None if v_max is None else from_real(v_hat, v_max.dtype),
    )
