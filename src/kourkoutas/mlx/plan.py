"""Which parameters and buckets a step concerns, and `rule.step` for these."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from kourkoutas import rule
from kourkoutas.rule import Hyper

PER_PARAMETER = ("t", "log_beta2")
STATE = ("ema", "t", "log_beta2", "skipped", "memory")  # the names of `rule.State` here


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step does, apart from the numbers: the key under which its compiled form is kept.

    Attributes:
      rows: numbers of the parameters that have a gradient; None when all have one.
      columns: numbers of the buckets that have a gradient; None when all have one.
      owner: for each parameter with a gradient, the position of its bucket among `columns`.
      buckets: how many buckets there are.
    """

    hyper: Hyper
    rows: tuple[int, ...] | None
    columns: tuple[int, ...] | None
    owner: tuple[int, ...]
    buckets: int

    def axis(self, name: str) -> tuple[int, ...] | None:
        """The entries of the state's vector `name` that this step concerns."""
        return self.rows if name in PER_PARAMETER else self.columns

    @property
    def one_each(self) -> bool:
        return self.owner == tuple(range(len(self.owner)))

    @property
    def width(self) -> int:
        """How many buckets have a gradient."""
        return self.buckets if self.columns is None else len(self.columns)


def precision(x: mx.array) -> mx.Dtype:
    return mx.float64 if x.dtype == mx.float64 else mx.float32


def take(x: mx.array, numbers: tuple[int, ...] | None) -> mx.array:
    return x if numbers is None else x[mx.array(numbers, mx.int32)]


def put(x: mx.array, numbers: tuple[int, ...] | None, new: mx.array) -> mx.array:
    if numbers is None:
        return new
    places = mx.array(numbers, mx.int32).reshape(-1, *[1] * (x.ndim - 1))
    return mx.put_along_axis(x, mx.broadcast_to(places, new.shape), new, axis=0)


class _Members:
    """Parameters with a gradient and their buckets, for `rule.step`."""

    def __init__(self, plan: Plan) -> None:
        self.owner, self.shape = mx.array(plan.owner, mx.int32), (plan.width,)

    def spread(self, x: mx.array) -> mx.array:
        return x[self.owner]

    def largest(self, x: mx.array) -> mx.array:
        return mx.zeros(self.shape, x.dtype).at[self.owner].maximum(x) if x.ndim else x


def scalars(
    plan: Plan, alpha: mx.array, lr: mx.array, norm: mx.array, mean: mx.array | None, vectors: dict[str, mx.array]
) -> rule.Step:
    """`rule.step` of what has a gradient."""
    scheduled: Any = alpha.astype(norm.dtype)
    hyper = replace(plan.hyper, alpha=scheduled)
    state = rule.State(*(vectors.get(name) for name in STATE))
    members = None if plan.one_each else _Members(plan)
    return rule.step(hyper, lr, norm, state, mx, members=members, mean_abs=mean)
