"""Kourkoutas-β as a gradient transformation: what a step does, in the order in which it does it."""

# Annotations stay objects here (no `from __future__ import annotations`): Optax's own checks read them.
from typing import Any

import jax
import jax.numpy as jnp
import optax

from kourkoutas import rule
from kourkoutas.buckets import check_buckets
from kourkoutas.optax.axes import AxisName
from kourkoutas.optax.norms import Members, measure, refuse_nonfinite
from kourkoutas.optax.recording import record
from kourkoutas.optax.state import KourkoutasBetaState, check_layout, first_state, steps_taken
from kourkoutas.optax.trees import align, layout_of, name_of
from kourkoutas.optax.update import Leaf, each_parameter, update_leaf
from kourkoutas.rule import Buckets, Hyper


def transformation(
    hyper: Hyper, buckets: Buckets, diagnostics: bool, axis_name: AxisName
) -> optax.GradientTransformation:
    """The update u of `scale_by_kourkoutas_beta`: no learning rate, no weight decay."""
    check_buckets(buckets)

    def init_fn(params: optax.Params) -> KourkoutasBetaState:
        return first_state(params, hyper, layout_of(params, buckets, axis_name)[0], diagnostics)

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
            if jnp.iscomplexobj(g) and not jnp.iscomplexobj(m):
                name = name_of(jax.tree_util.tree_leaves_with_path(state.mu)[i][0])
                raise TypeError(f"the gradient of {name!r} is complex and the parameter is real: give its real part")
        thetas = None
        if hyper.adaptive_tiny:
            if params is None:
                raise ValueError("`adaptive_tiny` needs the parameters: call update(updates, state, params)")
            thetas, _ = align(params, state.mu, "params")

        parts, axes = layout_of(state.mu, buckets, axis_name)
        check_layout(state, parts, axes)
        present = [i for i, g in enumerate(gs) if g is not None]
        members = Members(parts, present)
        rows, columns = members.rows, members.columns

        real = state.ema.dtype
        axes = [axes[i] for i in present]
        norm, mean_abs = measure([gs[i] for i in present], thetas and [thetas[i] for i in present], members, axes, real)
        if hyper.nonfinite == "raise":
            refuse_nonfinite(norm, parts.names if columns is None else [parts.names[b] for b in columns])
        count, t = steps_taken(state)
        log_beta2 = state.log_beta2
        if log_beta2 is not None:  # a count and moments that were set, as from Adam's state, have no Σ log β2 with them
            log_beta2 = jnp.where((log_beta2 == 0) & (t > 0), t * jnp.log(hyper.beta2_max), log_beta2)
        step = rule.step(
            hyper,
            1.0,
            norm,
            rule.State(_of(state.ema, columns), _of(t, rows), _of(log_beta2, rows), _of(state.skipped, columns)),
            jnp,
            members=members,
            mean_abs=mean_abs,
        )
        ks = each_parameter(step.k, len(present), real)
        updated = [None] * len(present) if step.updated_each is None else jnp.unstack(step.updated_each)
        leaves = [Leaf(None, m, v, v_max) for m, v, v_max in zip(ms, vs, v_maxs, strict=True)]
        for i, k, is_updated in zip(present, ks, updated, strict=True):
            leaves[i] = update_leaf(hyper, k, is_updated, gs[i], ms[i], vs[i], v_maxs[i])

        ring, recorded = record(state, step, columns)
        updated_each = jnp.ones(len(present), bool) if step.updated_each is None else step.updated_each
        updated_each = _into(jnp.zeros(len(gs), bool), rows, updated_each)
        new = KourkoutasBetaState(
            count=count + 1,
            mu=treedef.unflatten([leaf.m for leaf in leaves]),
            nu=treedef.unflatten([leaf.v for leaf in leaves]),
            nu_max=None if state.nu_max is None else treedef.unflatten([leaf.v_max for leaf in leaves]),
            ema=_into(state.ema, columns, step.state.ema),
            log_beta2=_into(log_beta2, rows, step.state.log_beta2),
            skipped=_into(state.skipped, columns, step.state.skipped),
            ring=ring,
            rows=recorded,
            missed=jnp.where(updated_each, state.missed, state.missed + 1),
        )
        return rebuild([leaf.u for leaf in leaves]), new

    return optax.GradientTransformation(init_fn, update_fn)


def _of(x: Any, places: Any) -> Any:
    """The entries of a vector of the state at `places`; None: all."""
    return x if x is None or places is None else x[places]


def _into(x: Any, places: Any, new: Any) -> Any:
    """A vector of the state with `new` at `places`; None: all."""
    return x if x is None else new.astype(x.dtype) if places is None else x.at[places].set(new)
