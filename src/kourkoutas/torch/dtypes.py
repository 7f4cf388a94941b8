"""In which dtype arithmetic is done: reals, float32 at least."""

from __future__ import annotations

import torch
from torch import Tensor

LOW_PRECISION = (torch.float16, torch.bfloat16)
NO_FLOAT64 = ("mps",)  # devices


def arithmetic_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a tensor is computed with: float32 for float16 and bfloat16."""
    return torch.float32 if x.dtype in LOW_PRECISION else x.dtype


def wide(x: Tensor) -> Tensor:
    """`x` in the dtype of its arithmetic."""
    return x.float() if x.dtype in LOW_PRECISION else x


def real(x: Tensor) -> Tensor:
    """A complex tensor as pairs of reals."""
    return torch.view_as_real(x) if x.is_complex() else x


def is_wide(x: Tensor) -> bool:
    """Whether a tensor holds numbers of 64 bits."""
    return x.dtype in (torch.float64, torch.complex128)
