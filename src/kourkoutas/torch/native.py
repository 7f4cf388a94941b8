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
from kourkoutas.torch.pooling import Pooled
from kourkoutas.torch.work import Options, Work, sizes


def connect(*, pool: bool = True) -> Any:
    """The kernel, ready for torch's tensors, or None; `pool` False: on threads of its own, not torch's OpenMP ones."""
    table = getattr(Tensor, "__dlpack_c_exchange_api__", None)  # torch has it from 2.10 on
    if _native.step is None or table is None:
        return None
    _native.step.connect(table, (Tensor, torch.nn.Parameter), pool)
    return _native.step


kernel: Any = connect()


def pack(hyper: Hyper, maximize: bool, state_dtype: torch.dtype | None) -> bytes | None:
    """The hyper-parameters as the kernel's struct, or None if one of them is a tensor."""
    names = ("beta1", "beta2_min", "beta2_max", "alpha", "eps", "tiny_spike", "tiny_denom", "leak", "max_ratio")
    values = [getattr(hyper, name) for name in (*names, "warmup_steps", "weight_decay", "adaptive_tiny")]
    exact, corrected = hyper.bias_correction == "exact", hyper.bias_correction != "none"
    values += [exact, corrected, hyper.nonfinite == "skip", maximize, state_dtype is torch.bfloat16]
    values.append(hyper.lr_warmup)
    if any(isinstance(x, Tensor) for x in values):
        return None
    return struct.pack(f"{len(values)}d", *(-1.0 if x is None else x for x in values))


def plan_parts(
    plan: Any, options: Options, bucket_index: list[int], buckets: int, states: dict[Tensor, Any], work: Work
) -> bool:
    """Let the kernel gather the parts of parameters that lie on this rank; False if it does not take one of them."""
    if options.noisy and any(part.strides is not None for part in work.parts):
        return False  # the kernel numbers the elements of a part one after the other, for the noise of their rounding
    index = [bucket_index[i] for i in work.places]
    state = {p: dict(states[p]) for p in work.params}
    for name, tensors in zip(("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), work[2:5], strict=True):
        for p, x in zip(work.params, tensors, strict=False):
            state[p][name] = x
    told = [(g, i, part.first) for g, i, part in zip(work.grads, work.places, work.parts, strict=True)]
    return bool(kernel.gather(plan, options.packed, work.params, index, buckets, state, 0, told) >= 0)


class KernelStep:
    """One group's gathered step, in the stages that `kourkoutas.torch` lists; the rule and the update are one call."""

    device = torch.device("cpu")
    squares: list[float] | None = None
    means: list[float] | None = None

    def __init__(self, options: Options, group: dict[str, Any], plan: Any, work: Work | None) -> None:
        self.hyper, self.group, self.plan, self.work = options.hyper, group, plan, work  # work: of parts of tensors
        self.lr, self.threads = float(group["lr"]), torch.get_num_threads()

    @property
    def present(self) -> range:
        return range(len(self.group["bucket_names"]))

    def measure(self) -> None:
        """Σ g² of each bucket of the group, if somebody wants to see it; otherwise `apply` sums."""
        if self.work is not None or self.hyper.nonfinite == "raise":
            self.squares, self.local, self.abs_sums = kernel.sums(self.plan, self.threads)

    def sums(self) -> Tensor:
        """This rank's part of Σ g² and ⟨|θ|⟩ of each parameter with a gradient, for `pooling`."""
        rows = [self.local]
        if self.hyper.adaptive_tiny and self.work is not None:
            rows.append([x / n for x, n in zip(self.abs_sums, sizes(self.work), strict=True)])
        return torch.tensor(rows, dtype=torch.float64)

    def take(self, pooled: Pooled) -> None:
        """Use complete sums instead."""
        self.squares = pooled.squares.tolist()
        if pooled.means is not None and self.work is not None:
            self.means = pooled.means[self.work.places].tolist()

    def norms(self) -> list[float] | None:
        return None if self.squares is None else [math.sqrt(x) for x in self.squares]

    def apply(self, ring: Tensor | None = None, rows: Tensor | None = None, first: int = 0) -> None:
        """Move everything; write (sun, β2, n) of the buckets, which are `first` and on in the trace, into its row."""
        written = kernel.apply(self.plan, self.lr, self.threads, ring, rows, first, self.squares, self.means)
        torch.autograd.graph.increment_version(written)
