"""What one param group has to do in one step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kourkoutas.rule import Hyper
from kourkoutas.torch.parts import Part

LOW_PRECISION = (torch.float16, torch.bfloat16)


class Options(NamedTuple):
    """A group's options, checked: made anew when one of them has changed."""

    key: tuple[Any, ...]
    hyper: Hyper
    packed: bytes | None  # for the kernel; None if a hyper-parameter is a tensor
    adam: bool  # a fixed β2 without the extras
    needed: tuple[str, ...]  # the names of the state
    noisy: bool  # whether state is rounded with noise


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
    memories: list[Tensor]  # per bucket, what its signal keeps; empty for signal="sunspike"
    bucket_of: list[int]  # per parameter: the place of its bucket in `norm_emas`
    present: list[int]  # per bucket: its number in the group
    places: list[int]  # per parameter: its number in the group
    parts: list[Part]  # per parameter: what lies on this rank; empty if all of it


# NOTE: plain functions, as torch.compile of torch 2.7 and 2.8 does not read the properties of a named tuple.
def one_each(work: Work) -> bool:
    """Whether each parameter that has a gradient is a bucket of its own."""
    return len(work.present) == len(work.params) and work.bucket_of == list(range(len(work.params)))


def sizes(work: Work) -> list[int]:
    """Real numbers in each parameter, wherever they lie."""
    counts = [part.size for part in work.parts] if work.parts else [p.numel() for p in work.params]
    return [max(n * (2 if p.is_complex() else 1), 1) for n, p in zip(counts, work.params, strict=True)]


class Members:
    """Parameters and buckets of a step for `rule.step`; `largest` is its function of that name."""

    def __init__(self, index: Any, largest: Any) -> None:
        self.index = index
        self.largest = largest

    def spread(self, x: Any) -> Any:
        return x[self.index]


def wide(x: Tensor) -> Tensor:
    """`x` in the dtype of its arithmetic: float32 for float16 and bfloat16."""
    return x.float() if x.dtype in LOW_PRECISION else x
