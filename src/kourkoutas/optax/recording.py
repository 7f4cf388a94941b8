"""The trace: rows of sun, β2 and n, written by a step and pulled by the host."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from kourkoutas import rule
from kourkoutas.optax.state import KourkoutasBetaState
from kourkoutas.trace import WINDOW, Trace


def record(state: KourkoutasBetaState, step: rule.Step, columns: Any) -> tuple[jax.Array | None, jax.Array | None]:
    """(ring, rows) of `state` with one row more; `columns` are the buckets of the step, None: all."""
    if state.ring is None or state.rows is None:
        return state.ring, state.rows
    # ring[(t-1) % WINDOW] = (sun, β2, n) of step t
    row = jnp.stack([step.sun, step.beta2, step.norm]).astype(state.ring.dtype)
    if columns is not None:
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
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, KourkoutasBetaState))
    found = [node for node in nodes if isinstance(node, KourkoutasBetaState)]
    if len(found) != 1:
        raise ValueError(
            f"`state` must hold one KourkoutasBetaState; found {len(found)}: pass the part of the state to trace"
        )
    if found[0].ring is None or found[0].rows is None:
        raise ValueError("`state` has no trace: build the optimizer with diagnostics=True")
    if jnp.ndim(found[0].rows):
        raise ValueError(
            f"`state` holds {jnp.shape(found[0].rows)} states side by side, as vmap makes them: pull each by itself"
        )
    trace.pull(found[0].ring, int(found[0].rows))
