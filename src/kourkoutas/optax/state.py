"""What `scale_by_kourkoutas_beta` keeps between steps."""

# Annotations stay objects here (no `from __future__ import annotations`): Optax's own checks read them.
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kourkoutas.buckets import Partition
from kourkoutas.optax.axes import Axes, are_bound
from kourkoutas.optax.trees import PyTree, name_of
from kourkoutas.rule import Hyper
from kourkoutas.trace import KEYS, WINDOW


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
      missed: calls in which a parameter took no step, for want of a gradient or skipped, int32, (parameters,).

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


def first_state(params: optax.Params, hyper: Hyper, parts: Partition, diagnostics: bool) -> KourkoutasBetaState:
    """The state before the first step."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    for path, x in leaves:
        if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
            raise TypeError(
                f"`params` must be floating-point or complex arrays; got {jnp.result_type(x)} at {name_of(path)!r}: "
                "leave it out, for example with optax.masked or equinox.filter(model, equinox.is_inexact_array)"
            )
    size, n = len(leaves), len(parts.names)
    real = jnp.float64 if any(jnp.finfo(jnp.result_type(x)).bits == 64 for _, x in leaves) else jnp.float32
    return KourkoutasBetaState(
        count=jnp.zeros((), jnp.int32),
        mu=jax.tree.map(_zeros, params),
        nu=jax.tree.map(_zeros, params),
        nu_max=None if hyper.leak is None else jax.tree.map(_zeros, params),
        ema=jnp.zeros(n, real),
        log_beta2=jnp.zeros(size, real) if hyper.bias_correction == "exact" else None,
        skipped=jnp.zeros(n, jnp.int32) if hyper.nonfinite == "skip" else None,
        ring=jnp.zeros((WINDOW, len(KEYS), n), jnp.float32) if diagnostics else None,
        rows=jnp.zeros((), jnp.int32) if diagnostics else None,
        missed=jnp.zeros(size, jnp.int32),
    )


def check_layout(state: KourkoutasBetaState, parts: Partition, axes: list[Axes]) -> None:
    """Raise unless a step with these buckets and axes fits the state and what is traced."""
    if state.ema.shape != (len(parts.names),):
        raise ValueError(
            f"the state has {state.ema.size} buckets and the parameters have {len(parts.names)}: call init() with the "
            "same parameters and `buckets`; inside shard_map with `axis_name` as PartitionSpecs"
        )
    if not are_bound(axes):
        names = sorted({name for each in axes for name in each.names})
        raise ValueError(
            f"`axis_name` names {names}, which are not all axes of a map around update(): call it inside shard_map "
            "over a mesh with these axes, or leave `axis_name` out (under jit norms are those of whole arrays anyway)"
        )


def steps_taken(state: KourkoutasBetaState) -> tuple[jax.Array, jax.Array]:
    """(count, t): calls so far, as an int32 that can still be counted up, and steps of each parameter."""
    count = jnp.minimum(jnp.asarray(state.count, jnp.int32), np.iinfo(np.int32).max - 1)
    if count.ndim:
        raise ValueError(
            f"the state's `count` must be a number; got shape {count.shape}, as version 0.1 kept it: "
            "load it with kourkoutas.optax.load_state(saved, solver.init(params))"
        )
    return count, jnp.maximum(count - state.missed, 0)


def _zeros(p: Any) -> jax.Array:
    """Zeros like `p` with a dtype that is not weak: a weak one would change in the first step and compile it twice."""
    return jnp.zeros_like(p, dtype=jnp.result_type(p))
