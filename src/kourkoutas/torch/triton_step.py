"""The step through the Triton kernels: GPU tensors, in a number of launches that does not grow with theirs.

Norms, ⟨|θ|⟩ and the update are launches over all tensors of one kind, that is, of the same dtypes of θ, g and the state;
the scalars in between are `rule.step`'s vectors, and are not read back. What the kernels know of tensors stands in a
`Table` on the device.

NOTE: a table is uploaded when an address in it has changed, from pinned memory and without waiting. While a CUDA graph
is captured nothing is uploaded: a step whose addresses are not in a table goes by torch's operations there.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kourkoutas.rule import Coefficients, Hyper
from kourkoutas.torch.lists import ListStep

if TYPE_CHECKING:
    from kourkoutas.torch.optimizer import Group

DEVICES = ("cuda",)  # ROCm's are called so, too
BLOCK = 1024  # elements of a program
LANES = 1024
_KINDS = {torch.float32: "fp32", torch.float64: "fp64", torch.bfloat16: "bf16", torch.float16: "fp16"}
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_TYPES = (Tensor, torch.nn.Parameter)


@functools.cache
def missing(device: torch.device | None = None) -> str | None:
    """Why the Triton kernels cannot run, on a real device if one is given; None if they can."""
    if os.environ.get("KBETA_NATIVE", "1") == "0":
        return "KBETA_NATIVE=0 turned it off"
    if importlib.util.find_spec("triton") is None:
        return "pip install 'kourkoutas-beta[gpu]'"
    if device is not None and torch.version.hip is None and torch.cuda.get_device_capability(device) < (7, 0):
        return "Triton needs a GPU of compute capability 7.0 or later"
    return None


def is_fake(x: Tensor) -> bool:
    """Whether a tensor has no memory, as those of FakeTensorMode."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and isinstance(x, module.FakeTensor)


def launch(name: str, programs: int, like: Tensor, *args: Any, **constants: Any) -> None:
    """Start one kernel of `triton_kernels` on the device of `like`; on fake tensors there is nothing to do."""
    if not programs or is_fake(like):
        return
    from kourkoutas.torch import triton_kernels

    kernel = getattr(triton_kernels, name)[(programs,)]
    # A wavefront of ROCm has 64 threads: 128 threads take 1024 elements, 8 each, and 8 of bfloat16 are 128 bits.
    warps = 2 if torch.version.hip else 4
    if like.is_cuda and like.device.index != torch.cuda.current_device():
        with torch.cuda.device(like.device):
            kernel(*args, **constants, num_warps=warps)
    else:
        kernel(*args, **constants, num_warps=warps)
