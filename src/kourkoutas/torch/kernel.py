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
from kourkoutas.torch import options, private

if TYPE_CHECKING:
    from kourkoutas.torch.group import Group
    from kourkoutas.torch.recorder import Row

extension: Any = None
"""The C extension, ready for torch's tensors, or None."""
missing = "it was turned off"
"""Why `extension` is None."""
has_lapack = False
"""Whether the extension turns bases and moves factors: it found BLAS and LAPACK in torch."""

FIELDS = (
    "beta1", "beta2_min", "beta2_max", "alpha", "eps", "tiny_spike", "tiny_denom", "leak", "max_ratio", "warmup_steps",
    "weight_decay", "adaptive_tiny", "exact", "corrected", "lr_warmup", "skip", "maximize", "noisy_states",
    "noisy_params",
)  # fmt: skip
"""The fields of the kernel's struct `Hyper`, in its order: see _native/arithmetic.h, which says what they mean."""


def connect(*, openmp: bool = True) -> None:
    """Set `extension`, or say in `missing` why there is none; `openmp` False: on threads of its own, not OpenMP's."""
    global extension, missing, has_lapack
    table = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    extension, has_lapack = None, False
    if _native.step is None:
        off = os.environ.get("KBETA_NATIVE", "1") == "0"
        missing = "KBETA_NATIVE=0 turned it off" if off else "it was not built, say for want of a C compiler"
    elif table is None:
        missing = "it needs torch 2.10 or later"
    elif getattr(_native.step, "HYPER_FIELDS", None) != FIELDS or not hasattr(_native.step, "add_moments"):
        missing = "it was built from the sources of another version: build it again with `pip install`"
    elif not _native.step.connect(table, (Tensor, torch.nn.Parameter), openmp):
        missing = "this torch does not let it ask tensors whether they are negated or conjugated lazily"
    else:
        extension, missing = _native.step, "it was turned off"
        has_lapack = extension.connect_lapack(private.library)


connect()


def pack(hyper: Hyper, group: dict[str, Any]) -> bytes | None:
    """The hyper-parameters and options of a group as the kernel's struct, or None if one of them is a tensor."""
    derived = {
        "exact": hyper.bias_correction == "exact",
        "corrected": hyper.bias_correction != "none",
        "skip": hyper.nonfinite == "skip",
        "maximize": group["maximize"],
        "noisy_states": options.noisy_states(group),
        "noisy_params": group["stochastic_rounding"],
    }
    numbers: list[float] = []
    for name in FIELDS:
        value = derived[name] if name in derived else getattr(hyper, name)
        if isinstance(value, Tensor):
            return None
        numbers.append(-1.0 if value is None else float(value))
    return struct.pack(f"{len(FIELDS)}d", *numbers)


def gather(own: Group, state: Any) -> KernelStep | None:
    """A group's step with all tensors at hand; None if one of them is not for the kernel, or not in the state."""
    if not own.views:
        return None
    lists = own.group["params"], own.bucket_of, len(own.bucket_names), own.scalars, own.views
    plan = extension.gather(own.packed, *lists, state)
    return None if plan is None else KernelStep(own, plan)


class KernelStep:
    """One group's gathered step, in the stages that `kourkoutas.torch` lists; the rule and the update are one call."""

    squares: Any = ()

    def __init__(self, own: Group, plan: Any) -> None:
        self.own, self.hyper, self.plan = own, own.hyper, plan
        self.lr, self.threads = float(own.group["lr"]), torch.get_num_threads()

    def measure(self) -> None:
        """Σ g² of each bucket, if somebody wants to see it; otherwise `apply` sums."""
        if self.hyper.nonfinite == "raise":
            self.squares = extension.sums(self.plan, self.threads)

    def first_bad(self) -> str | None:
        """The name of the first bucket whose norm is not finite."""
        each = zip(self.own.bucket_names, self.squares, strict=True)
        return next((name for name, x in each if not math.isfinite(x)), None)

    def gradient_norms(self) -> list[float]:
        """||g|| of each parameter of the group, after `apply`; 0 where there is no gradient."""
        return [math.sqrt(square) for square in extension.squares(self.plan)]

    def apply(self, row: Row | None = None) -> None:
        """Move everything, and write (sun, β2, n) of the buckets into the row of the trace."""
        ring, rows, first = (None, None, 0) if row is None else (row.ring, row.rows, row.first)
        written = extension.apply(self.plan, self.lr, self.threads, ring, rows, first)
        torch.autograd.graph.increment_version(written)
