"""The step through the C kernel: every tensor of a param group in one call.

It takes plain tensors with storage: real or complex of float32, float64, bfloat16 or float16 on the CPU, without gaps
in memory, gradient and state laid out as the parameter, none lazily negated or conjugated. A group with any other
tensor goes the other way.

NOTE: nothing about a tensor is remembered from step to step. Its address, dtype and layout are read each time, so that
gradients set to None, replaced `p.data` and state that moved or was swapped are seen.
"""

from __future__ import annotations

import math
import os
import struct
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kourkoutas import _native
from kourkoutas.rule import Hyper
from kourkoutas.torch.sharding import real_sizes

if TYPE_CHECKING:
    from kourkoutas.torch.lists import Work
    from kourkoutas.torch.optimizer import Derived

extension: Any = None
"""The C extension, ready for torch's tensors, or None."""
missing = "it was turned off"
"""Why `extension` is None."""


def connect(*, openmp: bool = True) -> None:
    """Set `extension`, or say in `missing` why there is none; `openmp` False: on threads of its own, not OpenMP's."""
    global extension, missing
    table = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    extension = None
    if _native.step is None:
        off = os.environ.get("KBETA_NATIVE", "1") == "0"
        missing = "KBETA_NATIVE=0 turned it off" if off else "it was not built, say for want of a C compiler"
    elif table is None:
        missing = "it needs torch 2.10 or later"
    elif not _native.step.connect(table, (Tensor, torch.nn.Parameter), openmp):
        missing = "this torch does not let it ask tensors whether they are negated or conjugated lazily"
    else:
        extension, missing = _native.step, "it was turned off"


connect()


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


def gather(own: Derived, state: Any, work: Work | None = None) -> bool:
    """Let the kernel take a group's tensors; False if one of them is not for it, or not in the state.

    `work` has the shards of parameters that lie on this rank, if there are any.
    """
    group, vectors = own.group, own.vectors
    if vectors is None or vectors.names != own.numbers:
        return False
    shards: list[Any] | None = None
    if work is not None and work.shards:
        if group["state_dtype"] is torch.bfloat16 and any(shard.strides is not None for shard in work.shards):
            return False  # the kernel numbers the elements of a shard one after the other, for the noise of rounding
        shards, no_max = [None] * len(group["params"]), [None] * (3 - len(work.moments()))
        rows = zip(work.params, work.grads, *work.moments(), strict=True)
        for i, shard, tensors in zip(work.chosen.places, work.shards, rows, strict=True):
            shards[i] = (*tensors, *no_max, shard.first)
    if own.plan is None:
        own.plan = extension.new_plan(len(own.bucket_index), len(own.bucket_names))
    lists = group["params"], group["bucket_index"], vectors.numbers, vectors.views
    return extension.gather(own.plan, own.packed, *lists, state, shards)  # type: ignore[no-any-return]


class KernelStep:
    """One group's gathered step, in the stages that `kourkoutas.torch` lists; the rule and the update are one call."""

    squares: list[float] | None = None
    means: list[float] | None = None

    def __init__(self, own: Derived) -> None:
        self.own, self.hyper = own, own.hyper
        self.lr, self.threads = float(own.group["lr"]), torch.get_num_threads()

    def measure(self) -> None:
        """Σ g² of each bucket, if somebody wants to see it; otherwise `apply` sums."""
        if self.own.shards is not None or self.hyper.nonfinite == "raise":
            self.local, self.abs_sums = extension.sums(self.own.plan, self.threads)
            self.squares = [0.0] * len(self.own.bucket_names)
            for b, square in zip(self.own.bucket_index, self.local, strict=True):
                self.squares[b] += square

    def sums(self) -> Tensor:
        """This rank's part of Σ g² and ⟨|θ|⟩ of each parameter of the group, for `sharding`."""
        rows = [self.local]
        if self.hyper.adaptive_tiny:
            sizes = real_sizes(self.own.group["params"], self.own.shards)
            rows.append([x / n for x, n in zip(self.abs_sums, sizes, strict=True)])
        return torch.tensor(rows, dtype=torch.float64)

    def take(self, squares: Tensor, means: Tensor | None, latest: Tensor | None) -> None:
        """Use the sums over all ranks instead."""
        self.squares = squares.tolist()
        self.means = None if means is None else means.tolist()

    def first_bad(self) -> str | None:
        """The name of the first bucket whose norm is not finite."""
        names = self.own.bucket_names
        return next((name for name, x in zip(names, self.squares or (), strict=False) if not math.isfinite(x)), None)

    def apply(self, ring: Tensor | None = None, rows: Tensor | None = None, first: int = 0) -> None:
        """Move everything; write (sun, β2, n) of the buckets, which are `first` and on in the trace, into its row."""
        written = extension.apply(self.own.plan, self.lr, self.threads, ring, rows, first, self.squares, self.means)
        torch.autograd.graph.increment_version(written)
