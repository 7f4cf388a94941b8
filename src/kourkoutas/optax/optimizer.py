"""The optimizer: its two public functions, its state, and what a step does in the order in which it does it."""

# Annotations stay objects here (no `from __future__ import annotations`): Optax's own checks read them.
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from kourkoutas import rule
from kourkoutas.adam_names import explain_adams_names
from kourkoutas.optax.arithmetic import (
    Leaf,
    Members,
    as_real,
    at,
    each_parameter,
    mean_abs_of,
    measure,
    precision,
    put,
    update_dtype,
    update_leaf,
)
from kourkoutas.optax.eigenbasis import Eigenbasis, Gradients, Moment, advanced, column, first_basis, stacked
from kourkoutas.optax.trees import AxisName, Layout, PyTree, align, layouts, name_of
from kourkoutas.rule import Buckets, Hyper, NonFiniteGradient, check_learning_rate, warmup
from kourkoutas.trace import KEYS, WINDOW, Trace

Scalar = float | jax.Array

_DEFAULT = Hyper()


@explain_adams_names
def kourkoutas_beta(
    learning_rate: optax.ScalarOrSchedule,
    *,
    beta1: Scalar | None = None,
    beta2_min: Scalar = _DEFAULT.beta2_min,
    beta2_max: Scalar = _DEFAULT.beta2_max,
    alpha: Scalar = _DEFAULT.alpha,
    eps: Scalar = _DEFAULT.eps,
    tiny_spike: Scalar = _DEFAULT.tiny_spike,
    tiny_denom: Scalar = _DEFAULT.tiny_denom,
    decay: Scalar | None = _DEFAULT.decay,
    max_ratio: Scalar | None = _DEFAULT.max_ratio,
    adaptive_tiny: bool = _DEFAULT.adaptive_tiny,
    bias_correction: str | None = None,
    warmup_steps: int | jax.Array = _DEFAULT.warmup_steps,
    weight_decay: optax.ScalarOrSchedule = _DEFAULT.weight_decay,
    mask: PyTree | Callable[[optax.Params], PyTree] | None = None,
    buckets: Buckets = "parameter",
    nonfinite: str = _DEFAULT.nonfinite,
    lr_warmup: bool = _DEFAULT.lr_warmup,
    diagnostics: bool = False,
    axis_name: AxisName = None,
    basis: str | None = _DEFAULT.basis,
    basis_every: int | jax.Array = _DEFAULT.basis_every,
    basis_memory: Scalar = _DEFAULT.basis_memory,
    basis_limit: int | jax.Array = _DEFAULT.basis_limit,
) -> optax.GradientTransformationExtraArgs:
    r"""Kourkoutas-β: Adam with a second-moment memory that shortens when gradients spike.

    .. math::
        θ_t = (1 - γ_t λ_t)\, θ_{t-1} - γ_t\, u_t

    with :math:`u_t` from `scale_by_kourkoutas_beta`, learning rate :math:`γ_t` and weight decay :math:`λ_t`. With
    `beta2_min == beta2_max` and no extras this is `optax.adam`, but for complex leaves: these are pairs of real ones,
    as in torch.optim.Adam, where `optax.adam` averages |g|².

    Args:
      learning_rate: γ, a number or a schedule.
      weight_decay: decoupled weight decay λ, a number or a schedule, multiplied with the learning rate as in
        `optax.adamw`.
      mask: a tree of booleans with the structure of the parameters, or a callable that makes one from them: where
        weight decay applies.
      nonfinite: as below; a bucket that is skipped is not decayed either.
      lr_warmup: multiply the learning rate of a parameter by √(1 - β2_max^t), t its steps, which
        `bias_correction="beta2max"` does unasked.

    All other arguments are those of `scale_by_kourkoutas_beta`.

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
    hyper = Hyper.pick({**locals(), "weight_decay": 0.0 if callable(weight_decay) else weight_decay})
    if not callable(learning_rate):
        check_learning_rate(learning_rate, "learning_rate")
    # NOTE: `identity` does not read the parameters, and keeps the state's structure the same as with an injected zero.
    no_decay = isinstance(weight_decay, (int, float)) and weight_decay == 0
    if no_decay:
        decayed = optax.identity()
    elif callable(weight_decay):
        decayed = _scheduled_decay(weight_decay)
    else:
        decayed = optax.add_decayed_weights(weight_decay)
    if mask is not None:
        decayed = optax.masked(decayed, mask)
    scale = _transformation(replace(hyper, lr_warmup=False), buckets, diagnostics, axis_name)
    chain = optax.chain(scale, decayed, optax.scale_by_learning_rate(learning_rate))

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        if not no_decay:
            _need_parameters(params, f"`weight_decay` is {'a schedule' if callable(weight_decay) else weight_decay}")
        updates, new_state = chain.update(updates, state, params, **extra_args)
        before, after = state[0], new_state[0]
        us, rebuild = align(updates, before.mu, "gradients")
        if hyper.lr_warmup:
            # γ_t = γ·√(1 - β2_max^t)
            factors = warmup(beta2_max, _steps_taken(after)[1].astype(after.ema.dtype), jnp)
            us = [None if u is None else u * f.astype(jnp.real(u).dtype) for u, f in zip(us, factors, strict=True)]
        if hyper.nonfinite == "skip" or hyper.basis is not None:
            # What was skipped, or only made its basis, is not decayed either.
            stays = after.missed > before.missed
            us = [None if u is None else jnp.where(s, jnp.zeros_like(u), u) for u, s in zip(us, stays, strict=True)]
        # NOTE: zeros for a missing gradient, as `optax.apply_updates` cannot add None to an array.
        for i, m in enumerate(jax.tree.leaves(before.mu)):
            if us[i] is None:
                us[i] = jnp.zeros_like(m)
        return rebuild(us), new_state

    return optax.GradientTransformationExtraArgs(chain.init, update_fn)


def _scheduled_decay(schedule: optax.Schedule) -> optax.GradientTransformation:
    """`optax.add_decayed_weights` with a schedule, which Optax has had only since 0.2.6."""

    def init_fn(params: optax.Params) -> optax.ScaleByScheduleState:
        return optax.ScaleByScheduleState(count=jnp.zeros((), jnp.int32))

    def update_fn(
        updates: optax.Updates, state: optax.ScaleByScheduleState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.ScaleByScheduleState]:
        # u ← u + λ_t·θ
        decay = optax.add_decayed_weights(schedule(state.count))
        updates, _ = decay.update(updates, optax.EmptyState(), params)
        return updates, optax.ScaleByScheduleState(count=optax.safe_increment(state.count))

    return optax.GradientTransformation(init_fn, update_fn)


@explain_adams_names
def scale_by_kourkoutas_beta(
    *,
    beta1: Scalar | None = None,
    beta2_min: Scalar = _DEFAULT.beta2_min,
    beta2_max: Scalar = _DEFAULT.beta2_max,
    alpha: Scalar = _DEFAULT.alpha,
    eps: Scalar = _DEFAULT.eps,
    tiny_spike: Scalar = _DEFAULT.tiny_spike,
    tiny_denom: Scalar = _DEFAULT.tiny_denom,
    decay: Scalar | None = _DEFAULT.decay,
    max_ratio: Scalar | None = _DEFAULT.max_ratio,
    adaptive_tiny: bool = _DEFAULT.adaptive_tiny,
    bias_correction: str | None = None,
    warmup_steps: int | jax.Array = _DEFAULT.warmup_steps,
    buckets: Buckets = "parameter",
    nonfinite: str = _DEFAULT.nonfinite,
    diagnostics: bool = False,
    axis_name: AxisName = None,
    basis: str | None = _DEFAULT.basis,
    basis_every: int | jax.Array = _DEFAULT.basis_every,
    basis_memory: Scalar = _DEFAULT.basis_memory,
    basis_limit: int | jax.Array = _DEFAULT.basis_limit,
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
      max_ratio: None, or the bound on an update's entries before the learning rate, of complex ones on each part. With
        `decay=None` it turns on AMSGrad; use `decay=0` to clip only.
      adaptive_tiny: add tiny_denom·max(⟨|θ|⟩, 1) to the denominator; `update` then needs `params`.
      buckets: "parameter", "module", "shape", "global", or a callable of a parameter's dotted name and of an object
        with its shape and dtype.
      nonfinite: what happens to a bucket whose norm is not finite: "propagate" (NaN in all its parameters, where Adam
        loses single entries; `optax.zero_nans` before this keeps the others), "skip" (zero update, state unchanged,
        counted in `skipped`) or "raise" (only outside of jit).
      diagnostics: record sun, β2 and n of every bucket and step; read them with `pull`.
      axis_name: inside `shard_map`, the mesh axes over which parameters are sharded: names or a PartitionSpec for all
        of them, a tree of these like the parameters, or a callable of name and array; see `kourkoutas.optax.trees`.
        Norms are then those of whole parameters. Leave it None under `jit`, where XLA sums over all devices by itself.
      basis: None, or "eigen": m and v live in the eigenbasis of each matrix's gradient factors, as in SOAP; see
        `kourkoutas.eigenbasis`. A parameter's first gradient then makes its basis and moves nothing. Needs whole
        parameters, so no `axis_name`.
      basis_every: with "eigen", after how many steps the basis turns, ≥ 1.
      basis_memory: with "eigen", the decay of the factors, in [0, 1).
      basis_limit: with "eigen", the longest axis that gets a factor, ≥ 1.

    The other arguments are those of `kourkoutas.rule.Hyper`.

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
    return _transformation(Hyper.pick(locals()), buckets, diagnostics, axis_name)


class KourkoutasBetaState(NamedTuple):
    """State of `scale_by_kourkoutas_beta`: a pytree of arrays; what the options do not need is None.

    Attributes:
      count: how often `update` was called, int32, ().
      mu: first moments m, like the parameters.
      nu: second moments v, like the parameters.
      nu_max: v_max, like the parameters, with AMSGrad (`Hyper.leak`).
      ema: moving average r of the pooled norm, (buckets,).
      log_beta2: Σ log β2 of each parameter's steps, (parameters,), with `bias_correction="exact"`.
      skipped: steps skipped by each bucket, int32, (buckets,), with `nonfinite="skip"`.
      ring: the newest rows of the trace, float32, (WINDOW, 3, buckets), with `diagnostics=True`.
      rows: the number of rows ever written, int32, with `diagnostics=True`.
      missed: calls in which a parameter took no step, for want of a gradient, skipped, or to make its basis, int32,
        (parameters,).

    NOTE: the bias corrections of a parameter use t = count - missed, or 0 where that is negative. `missed` is there
    whatever the options, since whether gradients go missing is not known at `init`. `count` may be set, as in
    `optax.tree.set(state, count=...)`.
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
    missed: jax.Array

    @property
    def basis(self) -> None:
        """There is none; see `KourkoutasBetaEigenState`."""


class KourkoutasBetaEigenState(NamedTuple):
    """The state with `basis="eigen"`: that of `KourkoutasBetaState`, with mu, nu and nu_max in the basis.

    Attributes:
      basis: factors and bases.

    NOTE: a class of its own, so that states which were saved without a basis still fit.
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
    missed: jax.Array
    basis: Eigenbasis


AnyState = KourkoutasBetaState | KourkoutasBetaEigenState


def _transformation(
    hyper: Hyper, buckets: Buckets, diagnostics: bool, axis_name: AxisName
) -> optax.GradientTransformation:
    """The update u of `scale_by_kourkoutas_beta`: no learning rate, no weight decay."""
    layout_of = layouts(buckets, axis_name)
    if hyper.basis is not None and axis_name is not None:
        raise ValueError(
            f"`axis_name` is {axis_name!r}, and basis={hyper.basis!r} needs whole parameters on every device: leave "
            "`axis_name` out and use jit, which sees whole arrays, or use basis=None inside shard_map"
        )

    def init_fn(params: optax.Params) -> AnyState:
        return _first_state(params, hyper, len(layout_of(params).parts.bucket_names), diagnostics)

    def update_fn(
        updates: optax.Updates, state: AnyState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, AnyState]:
        treedef: Any
        ms, treedef = jax.tree.flatten(state.mu)
        vs = jax.tree.leaves(state.nu)
        v_maxs = jax.tree.leaves(state.nu_max) or [None] * len(ms)
        gs, rebuild = align(updates, state.mu, "gradients")
        _check_gradients(gs, state.mu)
        layout = layout_of(state.mu)
        _check_layout(state, layout)

        # Whether a parameter has a gradient is known while tracing: the step has the entries of those that have one.
        here = [i for i, g in enumerate(gs) if g is not None]
        members = Members(layout.parts, here)
        rows, columns = members.rows, members.columns
        thetas = None
        if hyper.adaptive_tiny:
            _need_parameters(params, "`adaptive_tiny` is True")
            every, _ = align(params, state.mu, "params")
            thetas = [every[i] for i in here]
        real = state.ema.dtype
        if state.basis is None:
            norm, mean_abs = measure([gs[i] for i in here], thetas, members, [layout.axes[i] for i in here], real)
        else:
            grads = stacked(state.basis, ms, _as_updates(gs, ms))
            norm = members.pooled(grads.norm)
            mean_abs = None if thetas is None else jnp.array([mean_abs_of(theta) for theta in thetas], real)
        if hyper.nonfinite == "raise":
            _refuse_nonfinite(norm, members.bucket_names)

        count, t = _steps_taken(state)
        log_beta2 = state.log_beta2
        if log_beta2 is not None:  # a count and moments that were set, as from Adam's state, have no Σ log β2 with them
            log_beta2 = jnp.where(log_beta2 == 0, rule.adam_log_beta2(hyper.beta2_max, t, jnp), log_beta2).astype(real)
        before = rule.State(
            ema=at(state.ema, columns),
            step=at(t, rows),
            log_beta2=at(log_beta2, rows),
            skipped=at(state.skipped, columns),
        )
        starts = None
        if state.basis is not None:  # moments that were set, as from Adam's state, are right in the basis that there is
            starts = (at(state.basis.seen, rows) == 0) & (before.step == 0)
        step = rule.step(hyper, 1.0, norm, before, jnp, members=members, mean_abs=mean_abs, starts=starts)

        leaves = [Leaf(None, m, v, v_max) for m, v, v_max in zip(ms, vs, v_maxs, strict=True)]
        basis = state.basis
        if basis is None:
            ks = each_parameter(step.k, len(here), real)
            updated = [None] * len(here) if step.updated_each is None else jnp.unstack(step.updated_each)
            for i, k, one in zip(here, ks, updated, strict=True):
                leaves[i] = update_leaf(hyper, k, one, gs[i], ms[i], vs[i], v_maxs[i])
        else:
            took = None if step.updated is None else members.spread(step.updated)
            leaves, basis = _update_in_basis(hyper, step, basis, grads, starts, took, gs, leaves)

        took_one = jnp.ones(len(here), bool) if step.updated_each is None else step.updated_each
        took_one = put(jnp.zeros(len(gs), bool), rows, took_one)
        ring, recorded = _record(state, step, columns)
        new = state._replace(
            count=count + 1,
            mu=treedef.unflatten([leaf.m for leaf in leaves]),
            nu=treedef.unflatten([leaf.v for leaf in leaves]),
            nu_max=None if state.nu_max is None else treedef.unflatten([leaf.v_max for leaf in leaves]),
            ema=put(state.ema, columns, step.state.ema),
            log_beta2=put(log_beta2, rows, step.state.log_beta2),
            skipped=put(state.skipped, columns, step.state.skipped),
            ring=ring,
            rows=recorded,
            missed=jnp.where(took_one, state.missed, state.missed + 1),
        )
        if isinstance(new, KourkoutasBetaEigenState) and basis is not None:
            new = new._replace(basis=basis)
        return rebuild([leaf.u for leaf in leaves]), new

    return optax.GradientTransformation(init_fn, update_fn)


def _as_updates(gs: Sequence[Any], ms: Sequence[Any]) -> list[Any]:
    """Gradients with the dtypes of their updates, as pairs of real numbers where these are complex."""
    return [None if g is None else as_real(jnp.asarray(g, update_dtype(g, m))) for g, m in zip(gs, ms, strict=True)]


def _update_in_basis(
    hyper: Hyper,
    step: rule.Step,
    basis: Eigenbasis,
    grads: Gradients,
    starts: Any,
    took: Any,
    gs: Sequence[Any],
    leaves: Sequence[Leaf],
) -> tuple[list[Leaf], Eigenbasis]:
    """All parameters and their bases after the step: rotate, update, rotate back, all of one shape at once.

    Args:
      step: has an entry for each parameter that has a gradient, as have `starts` and `took`.
      basis: before the step.
      grads: `gs` by shape.
      starts: which only make their basis.
      took: which are not skipped; None: all.
      gs: gradients; None where there is none.
      leaves: all parameters before the step.
    """
    kinds = ["m", "v"] if hyper.leak is None else ["m", "v", "v_max"]
    rows = [jnp.broadcast_to(x, grads.norm.shape) for x in (step.k.c1, step.k.c2, step.k.rate, step.k.floor)]
    us: dict[str, jax.Array] = {}
    after: dict[str, dict[str, jax.Array]] = {kind: {} for kind in kinds}
    for stack in grads.stacks:
        g = stack.enter(grads.of_shape[stack.shape])
        c1, c2, rate, floor = (column(at(x, stack.places), g) for x in rows)
        k = step.k._replace(c1=c1, c2=c2, rate=rate, floor=floor)
        updated = column(at(step.updated_each, stack.places), g)
        old = {kind: stack.join({i: as_real(getattr(leaves[i], kind)) for i in stack.numbers}) for kind in kinds}
        leaf = update_leaf(hyper, k, updated, g, old["m"], old["v"], old.get("v_max"))
        us[stack.shape] = stack.leave(leaf.u)
        for kind in kinds:
            after[kind][stack.shape] = getattr(leaf, kind)

    moments = [Moment(after[kind], turns=kind == "m") for kind in kinds]
    basis, moments = advanced(basis, grads, starts, took, moments, hyper.basis_every, hyper.basis_memory)
    new = list(leaves)
    for stack in grads.stacks:
        dtypes = {i: update_dtype(gs[i], leaves[i].m) for i in stack.numbers}
        parts: dict[str, Any] = {"u": stack.part(us[stack.shape], dtypes), "v_max": dict.fromkeys(stack.numbers)}
        for kind, moment in zip(kinds, moments, strict=True):
            like = {i: getattr(leaves[i], kind) for i in stack.numbers}
            parts[kind] = stack.part(moment.of_shape[stack.shape], like)
        for i in stack.numbers:
            new[i] = Leaf(**{kind: part[i] for kind, part in parts.items()})
    return new, basis


def _first_state(params: optax.Params, hyper: Hyper, buckets: int, diagnostics: bool) -> AnyState:
    """The state before the first step."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for path, x in leaves:
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            raise TypeError(
                f"`params` must be floating-point or complex arrays; got {jnp.result_type(x)} at {name_of(path)!r}: "
                "leave it out, for example with optax.masked or equinox.filter(model, equinox.is_inexact_array)"
            )
    real = precision(x for _, x in leaves)

    # NOTE: with a dtype that is not weak: a weak one would change in the first step and compile it twice.
    def zeros() -> Any:
        return jax.tree.map(lambda p: jnp.zeros_like(p, dtype=jnp.result_type(p)), params)

    state = KourkoutasBetaState(
        count=jnp.zeros((), jnp.int32),
        mu=zeros(),
        nu=zeros(),
        nu_max=None if hyper.leak is None else zeros(),
        ema=jnp.zeros(buckets, real),
        log_beta2=jnp.zeros(len(leaves), real) if hyper.bias_correction == "exact" else None,
        skipped=jnp.zeros(buckets, jnp.int32) if hyper.nonfinite == "skip" else None,
        ring=jnp.zeros((WINDOW, len(KEYS), buckets), jnp.float32) if diagnostics else None,
        rows=jnp.zeros((), jnp.int32) if diagnostics else None,
        missed=jnp.zeros(len(leaves), jnp.int32),
    )
    if hyper.basis is None:
        return state
    return KourkoutasBetaEigenState(*state, basis=first_basis(params, hyper.basis_limit))


def _check_gradients(gs: list[Any], mu: PyTree) -> None:
    for g, (path, m) in zip(gs, jax.tree_util.tree_leaves_with_path(mu), strict=True):
        if g is not None and jnp.shape(g) != m.shape:
            raise ValueError(f"the gradient of {name_of(path)!r} must have the shape {m.shape}; got {jnp.shape(g)}")
        if jnp.iscomplexobj(g) and not jnp.iscomplexobj(m):
            raise TypeError(
                f"the gradient of {name_of(path)!r} is complex and the parameter is real: give its real part"
            )


def _check_layout(state: AnyState, layout: Layout) -> None:
    """Raise unless a step with these buckets and axes fits the state and what is traced."""
    buckets = len(layout.parts.bucket_names)
    if state.ema.shape != (buckets,):
        raise ValueError(
            f"the state has {state.ema.size} buckets and the parameters have {buckets}: call init() "
            "with the same parameters and `buckets`; inside shard_map with `axis_name` as PartitionSpecs"
        )
    if layout.unbound:
        raise ValueError(
            f"`axis_name` names {layout.unbound}, which are not all axes of a map around update(): call it inside "
            "shard_map over a mesh with these axes, or leave `axis_name` out (under jit norms are those of whole "
            "arrays anyway)"
        )


def _need_parameters(params: Any, why: str) -> None:
    if params is None:
        raise ValueError(
            f"{why}, which needs the parameters, and update() was called without them: call update(grads, state, "
            "params); where a library makes the call, as DeepXDE does on JAX, leave `weight_decay` and "
            "`adaptive_tiny` out"
        )


def _refuse_nonfinite(norm: jax.Array, names: list[str]) -> None:
    """Raise if a norm is not finite, for nonfinite="raise"."""
    if isinstance(norm, jax.core.Tracer):
        raise ValueError(
            "`nonfinite` is 'raise', which cannot raise while JAX is tracing (jit, scan, vmap, grad): use "
            "nonfinite='skip', wrap the optimizer in optax.apply_if_finite, or call update() outside of jit"
        )
    for name, n in zip(names, np.asarray(norm), strict=True):
        if not np.isfinite(n):
            raise NonFiniteGradient(name)


def _steps_taken(state: AnyState) -> tuple[jax.Array, jax.Array]:
    """(count, t): calls so far, as an int32 that can still be counted up, and steps of each parameter."""
    count = jnp.minimum(jnp.asarray(state.count, jnp.int32), np.iinfo(np.int32).max - 1)
    if count.ndim:
        raise ValueError(f"the state's `count` must be a number; got shape {count.shape}: set one count for all")
    return count, jnp.maximum(count - state.missed, 0)


def _record(state: AnyState, step: rule.Step, columns: np.ndarray) -> tuple[Any, Any]:
    """(ring, rows) of `state` with one row more, in which the step has the buckets `columns`."""
    if state.ring is None or state.rows is None:
        return state.ring, state.rows
    # ring[(t-1) % WINDOW] = (sun, β2, n) of step t
    row = jnp.stack([step.sun, step.beta2, step.norm]).astype(state.ring.dtype)
    if len(columns) < state.ring.shape[-1]:
        row = jnp.full(state.ring.shape[1:], jnp.nan, row.dtype).at[:, columns].set(row)
    ring = lax.dynamic_update_index_in_dim(state.ring, row, state.rows % WINDOW, 0)
    return ring, optax.safe_increment(state.rows)


def pull(trace: Trace, state: optax.OptState) -> None:
    """Copy to a `kourkoutas.trace.Trace` the rows of sun, β2 and n that a state has gained since the last pull.

    Args:
      trace: made with `bucket_names(params, buckets)`.
      state: the state of a transformation with `diagnostics=True`, also inside `optax.chain`, `inject_hyperparams`,
        `MultiSteps` and the like.

    Example:
      >>> from kourkoutas.optax import bucket_names, kourkoutas_beta
      >>> params = {"w": jnp.ones(3)}
      >>> solver = kourkoutas_beta(1e-3, diagnostics=True)
      >>> _, state = solver.update(params, solver.init(params), params)
      >>> trace = Trace(bucket_names(params))
      >>> pull(trace, state)
      >>> {name: round(row["beta2"], 3) for name, row in trace.snapshot().items()}
      {'w': 0.888}
    """
    ours = only_state(state)
    if ours.ring is None or ours.rows is None:
        raise ValueError("`state` has no trace: build the optimizer with diagnostics=True")
    if jnp.ndim(ours.rows):
        raise ValueError(
            f"`state` holds {jnp.shape(ours.rows)} states side by side, as vmap makes them: pull each by itself"
        )
    trace.pull(ours.ring, int(ours.rows))


def is_state(x: Any) -> bool:
    return isinstance(x, KourkoutasBetaState | KourkoutasBetaEigenState)


def only_state(state: optax.OptState) -> AnyState:
    """The state of the one Kourkoutas-β in a solver's state."""
    found = [x for x in jax.tree.leaves(state, is_leaf=is_state) if is_state(x)]
    if len(found) != 1:
        raise ValueError(
            f"the state must hold one Kourkoutas-β; found {len(found)}: pass the state of kourkoutas_beta or a chain "
            "with one, and each branch of a partition by itself"
        )
    only: AnyState = found[0]
    return only
