"""What one param group has to do in one step."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kourkoutas.rule import Hyper
from kourkoutas.torch.parts import Part

LOW_PRECISION = (torch.float16, torch.bfloat16)
_TYPES = {Tensor, torch.nn.Parameter}
_DTYPES = {torch.float32, torch.float64, *LOW_PRECISION}


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


def plain(work: Work) -> bool:
    """Whether all are plain tensors on the CPU, stored without gaps and signs to apply, of their parameter's kind."""
    tensors = [*work.params, *work.grads, *work.exp_avgs, *work.exp_avg_sqs, *work.max_exp_avg_sqs]
    n, dtypes, shapes = len(work.params) or 1, [x.dtype for x in tensors], [x.shape for x in tensors]
    kinds = len(tensors) // n
    return (
        set(map(type, tensors)) <= _TYPES
        and dtypes == dtypes[:n] * kinds
        and set(dtypes[:n]) <= _DTYPES
        and shapes == shapes[:n] * kinds
        and False not in [x.is_cpu for x in (*tensors, *work.norm_emas)]
        and all(map(Tensor.is_contiguous, tensors))
        and not any(map(Tensor.is_neg, tensors))
        and (all(map(Tensor.data_ptr, tensors)) or all(x.data_ptr() or not x.numel() for x in tensors))
    )


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
