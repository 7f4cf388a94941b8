"""Which parameters and buckets a step concerns."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from kourkoutas.rule import Hyper

PER_PARAMETER = ("t", "log_beta2")


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

    @property
    def one_each(self) -> bool:
        return self.owner == tuple(range(len(self.owner)))

    @property
    def width(self) -> int:
        """How many buckets have a gradient."""
        return self.buckets if self.columns is None else len(self.columns)

    def take(self, name: str, x: mx.array) -> mx.array:
        """The entries of the state's vector `name` that this step concerns."""
        numbers = self._numbers(name)
        return x if numbers is None else x[mx.array(numbers, mx.int32)]

    def put(self, name: str, x: mx.array, new: mx.array) -> mx.array:
        """The state's vector `name` with `new` in these entries."""
        numbers = self._numbers(name)
        if numbers is None:
            return new
        places = mx.array(numbers, mx.int32).reshape(-1, *[1] * (x.ndim - 1))
        return mx.put_along_axis(x, mx.broadcast_to(places, new.shape), new, axis=0)

    def _numbers(self, name: str) -> tuple[int, ...] | None:
        return self.rows if name in PER_PARAMETER else self.columns

    # From buckets to parameters and back, as `rule.Members` has it.

    def spread(self, x: mx.array) -> mx.array:
        return x[mx.array(self.owner, mx.int32)]

    def largest(self, x: mx.array) -> mx.array:
        return mx.zeros(self.width, x.dtype).at[mx.array(self.owner, mx.int32)].maximum(x) if x.ndim else x


def precision(x: mx.array) -> mx.Dtype:
    return mx.float64 if x.dtype == mx.float64 else mx.float32
