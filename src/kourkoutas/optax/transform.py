"""Kourkoutas-β as a gradient transformation: what a step does, in the order in which it does it."""

# Annotations stay objects here (no `from __future__ import annotations`): Optax's own checks read them.
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kourkoutas import rule
from kourkoutas.buckets import check_buckets
from kourkoutas.optax.axes import AxisName
from kourkoutas.optax.dtypes import cast
from kourkoutas.optax.norms import Members, measure, refuse_nonfinite
from kourkoutas.optax.recording import record
from kourkoutas.optax.state import KourkoutasBetaState, check_layout, first_state, steps_taken
from kourkoutas.optax.trees import align, layout_of, name_of
from kourkoutas.optax.update import Leaf, scalars_of, update_leaf
from kourkoutas.rule import Buckets, Hyper

Scalar = float | jax.Array

_DEFAULT = Hyper()


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
    signal: str = _DEFAULT.signal,
    diagnostics: bool = False,
    axis_name: AxisName = None,
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
      signal: what moves β2, see `kourkoutas.signals`: "sunspike" (above), "centred" or "predictive".
      diagnostics: record sun, β2 and n of every bucket and step; read them with `pull`.
      axis_name: inside `shard_map`, the mesh axes over which parameters are sharded: names or a PartitionSpec for all
        of them, a tree of these like the parameters, or a callable of name and array; see `kourkoutas.optax.axes`.
        Norms are then those of whole parameters. Leave it None under `jit`, where XLA sums over all devices by itself.

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
        return first_state(params, hyper, layout_of(params, buckets, axis_name), diagnostics)

    def update_fn(
        updates: optax.Updates, state: KourkoutasBetaState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, KourkoutasBetaState]:
        treedef: Any
        ms, treedef = jax.tree.flatten(state.mu)
        vs = jax.tree.leaves(state.nu)
        v_maxs = jax.tree.leaves(state.nu_max) or [None] * len(ms)
        gs, rebuild = align(updates, state.mu, "gradients")
        for i, (g, m) in enumerate(zip(gs, ms, strict=True)):
            if g is not None and jnp.shape(g) != m.shape:
                name = name_of(jax.tree_util.tree_leaves_with_path(state.mu)[i][0])
                raise ValueError(f"the gradient of {name!r} must have the shape {m.shape}; got {jnp.shape(g)}")

        # A parameter's gradient is there or not for the whole trace; a bucket is live if one of its members has one.
        parts, axes = layout_of(state.mu, buckets, axis_name)
        check_layout(state, parts, axes)
        present = np.array([g is not None for g in gs], bool)
        members = Members(parts, present)
        live = np.zeros(members.size, bool)
        live[members.index[present]] = True
        everything = bool(present.all())

        thetas = None
        if hyper.adaptive_tiny:
            if params is None:
                raise ValueError("`adaptive_tiny` needs the parameters: call update(updates, state, params)")
            thetas, _ = align(params, state.mu, "params")
        real = state.ema.dtype
        norm, mean_abs = measure(gs, thetas, members, axes, real)
        if hyper.nonfinite == "raise":
            refuse_nonfinite(norm, parts.names)

        count, t = steps_taken(state)
        step = rule.step(
            hyper,
            1.0,
            norm,
            rule.State(state.ema, t, state.log_beta2, state.skipped, state.memory),
            jnp,
            members=members,
            mean_abs=mean_abs,
            live=None if everything else live,
            present=None if everything else present,
        )

        leaves = [
            Leaf(None, m, v, v_max) if g is None else update_leaf(hyper, k, g, m, v, v_max)
            for k, g, m, v, v_max in zip(scalars_of(step, hyper, len(gs), real), gs, ms, vs, v_maxs, strict=True)
        ]
        ring, rows = record(state, step)
        goes_on = True if step.fine_each is None else step.fine_each
        new = KourkoutasBetaState(
            count=count + 1,
            mu=treedef.unflatten([leaf.m for leaf in leaves]),
            nu=treedef.unflatten([leaf.v for leaf in leaves]),
            nu_max=None if state.nu_max is None else treedef.unflatten([leaf.v_max for leaf in leaves]),
            ema=cast(step.state.ema, real),
            log_beta2=None if state.log_beta2 is None else cast(step.state.log_beta2, real),
            skipped=step.state.skipped,
            ring=ring,
            rows=rows,
            missed=jnp.where(goes_on, state.missed, state.missed + 1),
            memory=None if state.memory is None else cast(step.state.memory, real),
        )
        return rebuild([leaf.u for leaf in leaves]), new

    return optax.GradientTransformation(init_fn, update_fn)
