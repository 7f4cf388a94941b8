"""What one param group has to do in one step."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kourkoutas.rule import Hyper

LOW_PRECISION = (torch.float16, torch.bfloat16)


class Options(NamedTuple):
    """A group's options, checked: made anew when one of them has changed."""

    key: tuple[Any, ...]
    hyper: Hyper
    packed: bytes | None  # for the kernel; None if a hyper-parameter is a tensor
    adam: bool  # a fixed β2 without the extras


class Work(NamedTuple):
    """The tensors of one step: lists per parameter that has a gradient, and per bucket that has one."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]  # empty when no v_max is kept
    steps: list[Tensor]
    log_beta2s: list[Tensor]  # empty unless bias_correction="exact"
    norm_emas: list[Tensor]  # per bucket
    skipped: list[Tensor]  # per bucket; empty unless nonfinite="skip"
    bucket_of: list[int]  # per parameter: the place of its bucket in `norm_emas`
    present: list[int]  # per bucket: its number in the group
    places: list[int]  # per parameter: its number in the group

    @classmethod
    def empty(cls) -> Work:
        return cls(*([] for _ in cls._fields))

    @property
    def one_each(self) -> bool:
        return len(self.present) == len(self.params) and self.bucket_of == list(range(len(self.params)))


class Members:
    """Parameters and buckets of a step for `rule.step`, on torch's or NumPy's arrays."""

    def __init__(self, index: Any, largest: Any) -> None:
        self.index = index
        self.largest = largest

    @classmethod
    def of(cls, work: Work, like: Tensor) -> Members | None:
        if work.one_each:
            return None
        index = torch.tensor(work.bucket_of, device=like.device)
        return cls(index, functools.partial(largest, index, len(work.present)))

    def spread(self, x: Any) -> Any:
        return x[self.index]


def largest(index: Tensor, buckets: int, x: Tensor) -> Tensor:
    """From an entry per parameter to one per bucket: the largest of its members, 0 without any."""
    return x.new_zeros(buckets).scatter_reduce_(0, index, x, "amax")
