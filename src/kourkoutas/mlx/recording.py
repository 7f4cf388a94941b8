"""The trace: rows of sun, β2 and n, written by a step into the state."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx

from kourkoutas import rule
from kourkoutas.mlx.plan import Plan
from kourkoutas.trace import KEYS, WINDOW


def record(state: dict[str, Any], plan: Plan, step: rule.Step | None) -> None:
    """Write one row of the trace; `step` is None when no bucket had a gradient."""
    row = _row(plan, step) if step is not None else mx.full((len(KEYS), plan.buckets), math.nan, state["ring"].dtype)
    # ring[(t-1) % WINDOW] = (sun, β2, n) of step t
    state["ring"] = mx.slice_update(state["ring"], row[None], (state["count"] % WINDOW).reshape(1), (0,))
    state["count"] = state["count"] + 1


def _row(plan: Plan, step: rule.Step) -> mx.array:
    """(sun, β2, n) of all buckets, NaN for those without a gradient and those skipped."""
    row = mx.stack([step.sun, step.beta2, step.norm])
    if plan.columns is None:
        return row
    blank = mx.full((len(KEYS), plan.buckets), math.nan, row.dtype)
    return mx.put_along_axis(blank, mx.array([plan.columns] * len(KEYS), mx.int32), row, axis=1)
