"""Kourkoutas-β for JAX, as an Optax gradient transformation.

    import optax
    from kourkoutas.optax import kourkoutas_beta

    solver = kourkoutas_beta(1e-3)          # used like optax.adam(1e-3)

NOTE: buckets. They come from the key paths of the parameter tree (`{"enc": {"w": ...}}` → `enc.w`) and are worked out
while tracing; every bucket statistic is one array with an entry per bucket, whatever their number.

NOTE: missing gradients. A None leaf in the gradients where the parameters have an array means "no gradient": that
parameter, its moments and its count stay as they are. Its update is None from `scale_by_kourkoutas_beta`, so that
later parts of a chain leave it alone too, and zero from `kourkoutas_beta`.

NOTE: dtypes. Norms, moving averages and bias corrections are float32, or float64 when a parameter is. Moments have the
parameter's dtype and updates the gradient's; the arithmetic of 16-bit leaves is float32, rounded once. A complex leaf
is a pair of real ones: the real and imaginary parts have their own second moments.
"""

# Annotations stay objects here (no `from __future__ import annotations`): Optax's own checks read them.
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kourkoutas import rule
from kourkoutas.buckets import Partition, check_buckets, partition
from kourkoutas.rule import Buckets, Hyper, NonFiniteGradient, check_learning_rate
from kourkoutas.trace import WINDOW, Trace

try:
    import jax
    import jax.numpy as jnp
    import optax
    from jax import lax
except ModuleNotFoundError:
    raise ImportError("kourkoutas.optax needs JAX and Optax: pip install 'kourkoutas-beta[jax]'") from None

__all__ = ["KourkoutasBetaState", "bucket_names", "kourkoutas_beta", "pull", "scale_by_kourkoutas_beta"]

Scalar = float | jax.Array
PyTree = Any

_DEFAULT = Hyper()


class KourkoutasBetaState(NamedTuple):
    """State of `scale_by_kourkoutas_beta`: a pytree of arrays; what the options do not need is None.

    Attributes:
      count: steps taken by each parameter, int32, (parameters,).
      mu: first moments m, like the parameters.
      nu: second moments v, like the parameters.
      nu_max: v_max, like the parameters, with AMSGrad (`Hyper.leak`).
      ema: moving average r of the pooled norm, (buckets,).
      log_beta2: Σ log β2 of each parameter's steps, (parameters,), with `bias_correction="exact"`.
      skipped: steps skipped by each bucket, int32, (buckets,), with `nonfinite="skip"`.
      ring: the newest rows of the trace, float32, (WINDOW, 2, buckets), with `diagnostics=True`.
      rows: the number of rows ever written, int32, with `diagnostics=True`.
    """

    count: jax.Array  # type: ignore[assignment]
    mu: PyTree
    nu: PyTree
    nu_max: PyTree | None
    ema: jax.Array
    log_beta2: jax.Array | None
    skipped: jax.Array | None
    ring: jax.Array | None
    rows: jax.Array | None


def _is_none(x: object) -> bool:
    return x is None


def _name(path: Sequence[Any]) -> str:
    return jax.tree_util.keystr(tuple(path), simple=True, separator=".") or "params"


def _partition(params: PyTree, buckets: Buckets) -> Partition:
    """The buckets of a tree of parameters, or of any tree of their shape and dtype, such as `mu`."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    paths = [path for path, _ in leaves]
    # flax boxes parameters in nodes with one child, `value`, which is no part of the name.
    if all(path and path[-1] == jax.tree_util.GetAttrKey("value") for path in paths):
        paths = [path[:-1] for path in paths]
    names = [_name(path) for path in paths]
    if len(set(names)) < len(names):  # {"a.b": ...} beside {"a": {"b": ...}}
        names = [jax.tree_util.keystr(path) for path in paths]
    shapes = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for _, x in leaves]
    return partition(buckets, names, shapes)


def bucket_names(params: PyTree, buckets: Buckets = "parameter") -> tuple[str, ...]:
    """The names of the buckets of `params`, in the order of the entries of `KourkoutasBetaState.ema`.

    Args:
      params: the tree given to `init`.
      buckets: as given to `kourkoutas_beta`.

    Returns:
      One name per bucket.

    Example:
      >>> bucket_names({"enc": {"b": jnp.zeros(2), "w": jnp.zeros((2, 3))}, "gain": jnp.ones(())}, "module")
      ('enc', '')
    """
    return _partition(params, buckets).names


def pull(trace: Trace, state: optax.OptState) -> None:
    """Copy to a `kourkoutas.trace.Trace` the rows of sun and β2 that a state has gained since the last pull.

    Args:
      trace: made with `bucket_names(params, buckets)`.
      state: the state of a transformation with `diagnostics=True`, also inside `optax.chain`, `inject_hyperparams`,
        `MultiSteps` and the like.

    Example:
      >>> params = {"w": jnp.ones(3)}
      >>> solver = kourkoutas_beta(1e-3, diagnostics=True)
      >>> _, state = solver.update(params, solver.init(params), params)
      >>> trace = Trace(bucket_names(params))
      >>> pull(trace, state)
      >>> {name: round(row["beta2"], 3) for name, row in trace.snapshot().items()}
      {'w': 0.888}
    """
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, KourkoutasBetaState))
    found = [node for node in nodes if isinstance(node, KourkoutasBetaState)]
    if len(found) != 1:
        raise ValueError(
            f"`state` must hold one KourkoutasBetaState; found {len(found)}: pass the part of the state to trace"
        )
    if found[0].ring is None or found[0].rows is None:
        raise ValueError("`state` has no trace: build the optimizer with diagnostics=True")
    trace.pull(found[0].ring, int(found[0].rows))


def _align(tree: PyTree, like: PyTree, what: str) -> tuple[list[Any], Callable[[Sequence[Any]], PyTree]]:
    """The leaves of `tree` in the order of those of `like`, None where `tree` has None, and how to put them back."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    if treedef == jax.tree.structure(like):
        return leaves, treedef.unflatten
    got, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_none)
    want = jax.tree_util.tree_leaves_with_path(like, is_leaf=_is_none)
    for a, b in itertools.zip_longest(got, want):
        if a is None or b is None or a[0] != b[0] or (b[1] is None and a[1] is not None):
            here = "nothing" if a is None or a[1] is None else repr(_name(a[0]))
            there = "nothing" if b is None or b[1] is None else repr(_name(b[0]))
            raise ValueError(
                f"the tree of {what} does not match the parameters; the first path that differs: {here} in the {what}, "
                f"{there} in the parameters given to init(): pass the same tree, with None where a gradient is missing"
            )
    slots = [i for i, (_, x) in enumerate(want) if x is not None]

    def rebuild(leaves: Sequence[Any]) -> PyTree:
        full = [None] * len(got)
        for i, x in zip(slots, leaves, strict=True):
            full[i] = x
        return treedef.unflatten(full)

    return [got[i][1] for i in slots], rebuild


def _as_real(x: Any) -> jax.Array:
    """x in at least float32; complex numbers as pairs along a new last axis."""
    a = x if isinstance(x, jax.Array) else jnp.asarray(x)
    if jnp.iscomplexobj(a):
        return jnp.stack([jnp.real(a), jnp.imag(a)], -1)
    return _cast(a, jnp.promote_types(a.dtype, jnp.float32))


def _like(x: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `_as_real`."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return lax.complex(x[..., 0], x[..., 1]).astype(dtype)
    return _cast(x, dtype)


def _zeros(p: Any) -> jax.Array:
    """Zeros like `p` with a dtype that is not weak: a weak one would change in the first step and compile it twice."""
    return jnp.zeros_like(p, dtype=jnp.result_type(p))


def _square_sum(g: Any) -> jax.Array:
    # NOTE: without the barrier XLA computes g² once for the norm and the update, and writes it to memory in between.
    x = _as_real(lax.optimization_barrier(g))
    return jnp.sum(x * x)


def _mean_abs(p: Any) -> jax.Array:
    x = _as_real(p)
    return jnp.mean(jnp.abs(x)) if x.size else jnp.zeros((), x.dtype)


def _stack(scalars: Sequence[jax.Array], dtype: Any) -> jax.Array:
    return jnp.stack([_cast(x, dtype) for x in scalars]) if scalars else jnp.zeros(0, dtype)


def _cast(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else x.astype(dtype)


class _Pool:
    """Sums and maxima of parameters per bucket, and back: one operation each, none when every bucket has one."""

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


def _refuse_nonfinite(norm: jax.Array, names: Sequence[str]) -> None:
    if isinstance(norm, jax.core.Tracer):
        raise ValueError(
            "`nonfinite` is 'raise', which cannot raise while JAX is tracing (jit, scan, vmap, grad): use "
            "nonfinite='skip', wrap the optimizer in optax.apply_if_finite, or call update() outside of jit"
        )
    for name, n in zip(names, np.asarray(norm), strict=True):
        if not np.isfinite(n):
            raise NonFiniteGradient(name)


def scale_by_kourkoutas_beta(
    beta1: Scalar = _DEFAULT.beta1,
    beta2_min: Scalar = _DEFAULT.beta2_min,
    beta2_max: Scalar = _DEFAULT.beta2_max,
    alpha: Scalar = _DEFAULT.alpha,
    eps: Scalar = _DEFAULT.eps,
    tiny_spike: Scalar = _DEFAULT.tiny_spike,
    tiny_denom: Scalar = _DEFAULT.tiny_denom,
    *,
    decay: Scalar | None = _DEFAULT.decay,
    max_ratio: Scalar | None = _DEFAULT.max_ratio,
    adaptive_tiny: bool = _DEFAULT.adaptive_tiny,
    bias_correction: str = _DEFAULT.bias_correction,
    warmup_steps: int | jax.Array = _DEFAULT.warmup_steps,
    buckets: Buckets = "parameter",
    nonfinite: str = _DEFAULT.nonfinite,
    diagnostics: bool = False,
) -> optax.GradientTransformation:
    r"""Rescale updates according to the Kourkoutas-β algorithm.

    Per bucket, with pooled gradient norm :math:`n_t` and its moving average :math:`r_t`:

    .. math::
        r_t &= α r_{t-1} + (1-α)\, n_t \\
        \mathrm{sun}_t &= \frac{n_t}{n_t + r_t + \mathrm{tiny\_spike}} \\
        β_{2,t} &= β_{2,max} - (β_{2,max} - β_{2,min})\, \mathrm{sun}_t

    Per parameter of the bucket:

    .. math::
        m_t &= β_1 m_{t-1} + (1-β_1)\, g_t \\
        v_t &= β_{2,t} v_{t-1} + (1-β_{2,t})\, g_t^2 \\
        \hat v_t &= \max(δ \hat v_{t-1}, v_t) \text{ or } v_t \\
        u_t &= \mathrm{clip}\Big(\frac{m_t / a_1}{\sqrt{\hat v_t / b_2} + ε
               + \mathrm{tiny\_denom} \max(⟨|θ|⟩, 1)},\ \pm \mathrm{max\_ratio}\Big)

    NOTE: `optax.inject_hyperparams` takes every number as it is. A callable `buckets` must be named in its
    `static_args`, as it would be taken for a schedule; with 16-bit parameters pass `hyperparam_dtype=jnp.float32`,
    as β2_max = 0.999 would round to 1.

    Args:
      beta1: first-moment decay β1, in [0, 1).
      beta2_min: β2 under the strongest spike, in [0, beta2_max].
      beta2_max: β2 when norms vanish against their average, in [beta2_min, 1).
      alpha: decay of the moving average of the pooled norm, in (0, 1).
      eps: added to the denominator.
      tiny_spike: added to the moving average under the norm.
      tiny_denom: size of the adaptive-tiny term.
      decay: None (no v_max), 1 (AMSGrad), in (0, 1) (leaky AMSGrad), 0 (never a v_max, also with max_ratio).
      max_ratio: None, or the bound on an update's entries before the learning rate. With `decay=None` it turns on
        AMSGrad; use `decay=0` to clip only.
      adaptive_tiny: add tiny_denom·max(⟨|θ|⟩, 1) to the denominator; `update` then needs `params`.
      bias_correction: "none", "beta2max" or "exact".
      warmup_steps: steps of a bucket during which β2 stays at ½(β2_min + β2_max).
      buckets: "parameter", "module", "shape", "global", or a callable of a parameter's dotted name and of an object
        with its shape and dtype.
      nonfinite: what a non-finite pooled norm does: "propagate", "skip" the bucket (zero update, state unchanged,
        counted in `skipped`) or "raise" (only outside of jit).
      diagnostics: record sun and β2 of every bucket and step; read them with `pull`.

    Returns:
      The corresponding `optax.GradientTransformation`.

    Example:
      >>> params = {"w": jnp.array([1.0, 2.0])}
      >>> solver = optax.chain(scale_by_kourkoutas_beta(), optax.scale(-0.1))
      >>> updates, state = solver.update(params, solver.init(params), params)
      >>> updates["w"].shape
      (2,)

    References:
      Kassinos, Kourkoutas-β: A Sunspike-Driven Adam Optimizer with Desert Flair, 2025.
    """
    hyper = Hyper.pick(locals())
    check_buckets(buckets)

    def init_fn(params: optax.Params) -> KourkoutasBetaState:
        leaves = jax.tree_util.tree_leaves_with_path(params)
        for path, x in leaves:
            if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
                raise TypeError(
                    f"`params` must be floating-point or complex arrays; got {jnp.result_type(x)} at {_name(path)!r}: "
                    "leave it out, for example with optax.masked or equinox.filter(model, equinox.is_inexact_array)"
                )
        size, n = len(leaves), len(_partition(params, buckets).names)
        real = jnp.finfo(jnp.result_type(jnp.float32, *(x for _, x in leaves))).dtype
        return KourkoutasBetaState(
            count=jnp.zeros(size, jnp.int32),
            mu=jax.tree.map(_zeros, params),
            nu=jax.tree.map(_zeros, params),
            nu_max=None if hyper.leak is None else jax.tree.map(_zeros, params),
            ema=jnp.zeros(n, real),
            log_beta2=jnp.zeros(size, real) if hyper.bias_correction == "exact" else None,
            skipped=jnp.zeros(n, jnp.int32) if hyper.nonfinite == "skip" else None,
            ring=jnp.zeros((WINDOW, 2, n), jnp.float32) if diagnostics else None,
            rows=jnp.zeros((), jnp.int32) if diagnostics else None,
        )

    def update_fn(
        updates: optax.Updates, state: KourkoutasBetaState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, KourkoutasBetaState]:
        treedef: Any
        ms, treedef = jax.tree.flatten(state.mu)
        vs = jax.tree.leaves(state.nu)
        v_maxs = jax.tree.leaves(state.nu_max)
        gs, rebuild = _align(updates, state.mu, "gradients")
        parts = _partition(state.mu, buckets)
        real = state.ema.dtype
        for i, (g, m) in enumerate(zip(gs, ms, strict=True)):
            if g is not None and jnp.shape(g) != m.shape:
                name = _name(jax.tree_util.tree_leaves_with_path(state.mu)[i][0])
                raise ValueError(f"the gradient of {name!r} must have the shape {m.shape}; got {jnp.shape(g)}")

        # A parameter's gradient is there or not for the whole trace; a bucket is live if one of its members has one.
        present = np.array([g is not None for g in gs], bool)
        pool = _Pool(parts, present)
        live = np.zeros(pool.size, bool)
        live[pool.index[present]] = True

        # n = ||g||, pooled
        squares = [jnp.zeros((), real) if g is None else _square_sum(g) for g in gs]
        norm = jnp.sqrt(pool.sum(_stack(squares, real)))
        if hyper.nonfinite == "raise":
            _refuse_nonfinite(norm, parts.names)
        mean_abs = None
        if hyper.adaptive_tiny:
            if params is None:
                raise ValueError("`adaptive_tiny` needs the parameters: call update(updates, state, params)")
            thetas, _ = _align(params, state.mu, "params")
            mean_abs = _stack([_mean_abs(p) for p in thetas], real)

        # The step without a learning rate, which later parts of the chain apply; counts stop before they overflow.
        count = jnp.minimum(state.count, np.iinfo(np.int32).max - 1)
        new = rule.step(
            hyper,
            1.0,
            norm,
            rule.State(state.ema, count, state.log_beta2, state.skipped),
            jnp,
            members=pool,
            mean_abs=mean_abs,
            live=None if present.all() else live,
            present=None if present.all() else present,
        )
        k = new.k

        # NOTE: 1-β1 goes with the scalars that wait for the norms, and the barrier hides that it is a constant: XLA on
        # the CPU would update every m first, and read all gradients from memory once more for v.
        stacked = jnp.stack([_cast(jnp.broadcast_to(x, len(gs)), real) for x in (k.c1, k.c2, k.rate, k.floor)])
        scalars = [jnp.unstack(row) for row in lax.optimization_barrier(stacked)]
        steps_on = jnp.unstack(new.fine_each) if hyper.nonfinite == "skip" else ()

        def leaf(i: int, g: Any) -> tuple[Any, Any, Any, Any]:
            m, v = ms[i], vs[i]
            v_max = v_maxs[i] if v_maxs else None
            if g is None:
                return None, m, v, v_max
            x = _as_real(g)
            c1, c2, rate, floor = (_cast(each[i], x.dtype) for each in scalars)

            # NOTE: u is made of what m and v become, skipped or not: for anything else XLA would copy m and v.
            def unless_skipped(new: Any, old: Any) -> Any:
                return jnp.where(steps_on[i], new, _as_real(old)) if steps_on else new

            # m_t = β1 m_{t-1} + (1-β1) g_t,  v_t = β2 v_{t-1} + (1-β2) g_t²
            m_new = unless_skipped(hyper.beta1 * _as_real(m) + c1 * x, m)
            v_new = v_hat = unless_skipped((1 - c2) * _as_real(v) + c2 * (x * x), v)
            # v̂ = v_max ← max(δ v_max, v)
            if hyper.leak is not None:
                v_hat = unless_skipped(jnp.maximum(hyper.leak * _as_real(v_max), v_new), v_max)
            u = unless_skipped(rate * m_new / (jnp.sqrt(v_hat) + floor), jnp.zeros_like(x))
            if hyper.max_ratio is not None:
                u = jnp.clip(u, -hyper.max_ratio, hyper.max_ratio)
            return (
                _like(u, jnp.result_type(g)),
                _like(m_new, m.dtype),
                _like(v_new, v.dtype),
                None if v_max is None else _like(v_hat, v_max.dtype),
            )

        leaves = [leaf(i, g) for i, g in enumerate(gs)]
        us, ms, vs, v_maxs = ([x[j] for x in leaves] for j in range(4))

        ring, rows = state.ring, state.rows
        if ring is not None and rows is not None:
            row = jnp.stack([new.sun, new.beta2]).astype(ring.dtype)
            ring = lax.dynamic_update_index_in_dim(ring, row, rows % WINDOW, 0)
            rows = optax.safe_increment(rows)
        return rebuild(us), KourkoutasBetaState(
            count=new.state.step,
            mu=treedef.unflatten(ms),
            nu=treedef.unflatten(vs),
            nu_max=None if state.nu_max is None else treedef.unflatten(v_maxs),
            ema=_cast(new.state.ema, real),
            log_beta2=None if state.log_beta2 is None else _cast(new.state.log_beta2, real),
            skipped=new.state.skipped,
            ring=ring,
            rows=rows,
        )

    return optax.GradientTransformation(init_fn, update_fn)


def _hold_still(inner: optax.GradientTransformation, buckets: Buckets) -> optax.GradientTransformationExtraArgs:
    """The chain `inner` with zero updates, weight decay included, wherever its first part took no step.

    NOTE: zeros and not None for a missing gradient, as `optax.apply_updates` cannot add None to an array.
    """

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        updates, new_state = inner.update(updates, state, params, **extra_args)
        before, after = state[0], new_state[0]
        us, rebuild = _align(updates, before.mu, "gradients")
        if after.skipped is not None:
            skipped = jnp.unstack(_Pool(_partition(before.mu, buckets)).spread(after.skipped > before.skipped))
            us = [None if u is None else jnp.where(s, jnp.zeros_like(u), u) for u, s in zip(us, skipped, strict=True)]
        elif all(u is not None for u in us):
            return updates, new_state
        ms = jax.tree.leaves(before.mu)
        return rebuild([jnp.zeros_like(m) if u is None else u for u, m in zip(us, ms, strict=True)]), new_state

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def kourkoutas_beta(
    learning_rate: optax.ScalarOrSchedule,
    *,
    beta1: Scalar = _DEFAULT.beta1,
    beta2_min: Scalar = _DEFAULT.beta2_min,
    beta2_max: Scalar = _DEFAULT.beta2_max,
    alpha: Scalar = _DEFAULT.alpha,
    eps: Scalar = _DEFAULT.eps,
    tiny_spike: Scalar = _DEFAULT.tiny_spike,
    tiny_denom: Scalar = _DEFAULT.tiny_denom,
    decay: Scalar | None = _DEFAULT.decay,
    max_ratio: Scalar | None = _DEFAULT.max_ratio,
    adaptive_tiny: bool = _DEFAULT.adaptive_tiny,
    bias_correction: str = _DEFAULT.bias_correction,
    warmup_steps: int | jax.Array = _DEFAULT.warmup_steps,
    weight_decay: Scalar = _DEFAULT.weight_decay,
    mask: PyTree | Callable[[optax.Params], PyTree] | None = None,
    buckets: Buckets = "parameter",
    nonfinite: str = _DEFAULT.nonfinite,
    diagnostics: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Kourkoutas-β: Adam with a second-moment memory that shortens when gradients spike.

    .. math::
        θ_t = (1 - ρ_t λ)\, θ_{t-1} - ρ_t\, u_t

    with :math:`u_t` from `scale_by_kourkoutas_beta`, learning rate :math:`ρ_t` and weight decay :math:`λ`. With
    `beta2_min == beta2_max` and no extras this is Adam.

    Args:
      learning_rate: a number or a schedule.
      beta1: see `scale_by_kourkoutas_beta`, also for all arguments that are not below.
      beta2_min: idem.
      beta2_max: idem.
      alpha: idem.
      eps: idem.
      tiny_spike: idem.
      tiny_denom: idem.
      decay: idem.
      max_ratio: idem.
      adaptive_tiny: idem.
      bias_correction: idem.
      warmup_steps: idem.
      weight_decay: decoupled weight decay λ, multiplied with the learning rate as in `optax.adamw`.
      mask: a tree of booleans with the structure of the parameters, or a callable that makes one from them: where
        weight decay applies.
      buckets: idem.
      nonfinite: idem; a skipped bucket is not decayed either.
      diagnostics: idem.

    Returns:
      The corresponding `optax.GradientTransformationExtraArgs`.

    Example:
      >>> def f(x): return jnp.sum(x ** 2)
      >>> solver = kourkoutas_beta(learning_rate=0.1)
      >>> params = jnp.array([1.0, 2.0, 3.0])
      >>> state = solver.init(params)
      >>> for _ in range(200):
      ...     grads = jax.grad(f)(params)
      ...     updates, state = solver.update(grads, state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> print(f(params) < 0.01)
      True

    References:
      Kassinos, Kourkoutas-β: A Sunspike-Driven Adam Optimizer with Desert Flair, 2025.
    """
    Hyper(weight_decay=weight_decay)  # type: ignore[arg-type]
    if not callable(learning_rate):
        check_learning_rate(learning_rate, "learning_rate")
    scale = scale_by_kourkoutas_beta(
        beta1=beta1,
        beta2_min=beta2_min,
        beta2_max=beta2_max,
        alpha=alpha,
        eps=eps,
        tiny_spike=tiny_spike,
        tiny_denom=tiny_denom,
        decay=decay,
        max_ratio=max_ratio,
        adaptive_tiny=adaptive_tiny,
        bias_correction=bias_correction,
        warmup_steps=warmup_steps,
        buckets=buckets,
        nonfinite=nonfinite,
        diagnostics=diagnostics,
    )
    # NOTE: `identity` does not read the parameters, and keeps the state's structure the same as with an injected zero.
    still = isinstance(weight_decay, (int, float)) and weight_decay == 0
    decayed = optax.identity() if still else optax.add_decayed_weights(weight_decay)
    if mask is not None:
        decayed = optax.masked(decayed, mask)
    return _hold_still(optax.chain(scale, decayed, optax.scale_by_learning_rate(learning_rate)), buckets)
