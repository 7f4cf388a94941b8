"""The step through the C kernel: every tensor of a param group in one call.

It takes plain tensors with storage: float32, float64, bfloat16 or float16 on the CPU, without gaps in memory, gradient
and state laid out as the parameter, none lazily negated. A group with any other tensor goes another way.

NOTE: nothing about a tensor is remembered from step to step. Its address, dtype and layout are read each time, so that
gradients set to None, replaced `p.data` and state that moved or was swapped are seen.
"""

from __future__ import annotations

import math
import struct
from typing import Any

import torch
from torch import Tensor

from kourkoutas import _native
from kourkoutas.rule import Hyper
from kourkoutas.torch.work import Options

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def connect(*, dlpack: bool = True, pool: bool = True) -> Any:
    """The kernel, ready for torch's tensors, or None; either of torch's two services can be left unused.

    Args:
      dlpack: read tensors through torch's DLPack table, which torch has from 2.10 on; else by their methods.
      pool: run on torch's OpenMP threads; else on threads made for the call.
    """
    if _native.step is not None:
        table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None) if dlpack else None
        _native.step.connect(table, (Tensor, torch.nn.Parameter), _DTYPES, pool)
    return _native.step


kernel: Any = connect()


def pack(hyper: Hyper, maximize: bool, state_dtype: torch.dtype | None) -> bytes | None:
    """The hyper-parameters as the kernel's struct, or None if one of them is a tensor."""
    names = ("beta1", "beta2_min", "beta2_max", "alpha", "eps", "tiny_spike", "tiny_denom", "leak", "max_ratio")
    values = [getattr(hyper, name) for name in (*names, "warmup_steps", "weight_decay", "adaptive_tiny")]
    exact, corrected = hyper.bias_correction == "exact", hyper.bias_correction != "none"
    values += [exact, corrected, hyper.nonfinite == "skip", maximize, state_dtype is torch.bfloat16]
    if any(isinstance(x, Tensor) for x in values):
        return None
    return struct.pack(f"{len(values)}d", *(-1.0 if x is None else x for x in values))


class KernelStep:
    """One group's gathered step, in the stages that `kourkoutas.torch` lists; the rule and the update are one call."""

    def __init__(self, options: Options, group: dict[str, Any], plan: Any) -> None:
        self.hyper, self.plan = options.hyper, plan
        self.lr, self.threads = float(group["lr"]), torch.get_num_threads()
        self.present = range(len(group["bucket_names"]))
        self.squares: list[float] | None = None

    def measure(self) -> None:
        """Σ g² of each bucket of the group, if somebody wants to see it; otherwise `apply` sums."""
        if self.hyper.nonfinite == "raise":
            self.squares = kernel.sums(self.plan, self.threads)

    def norms(self) -> list[float] | None:
        return None if self.squares is None else [math.sqrt(x) for x in self.squares]

    def apply(self, ring: Tensor | None, rows: Tensor | None, first: int, last: bool) -> None:
        """Move everything; write (sun, β2) of the buckets, which are `first` and on in the trace, into its row.

        The last group of a step counts the row.
        """
        written = kernel.apply(self.plan, self.lr, self.threads, ring, rows, first, self.squares, last)
        torch.autograd.graph.increment_version(written)
