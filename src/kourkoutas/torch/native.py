"""The step through the C kernel: every tensor of a param group in one call.

A fourth way through the same update, taken where `fused` is, if the kernel was built (`kourkoutas._native`) and every
tensor of the step suits it: float32, float64, bfloat16 or float16 on the CPU, without gaps in memory, gradient and
state laid out as the parameter. If one tensor does not, the whole step goes the torch way.

NOTE: nothing about a tensor is remembered from step to step. Its address, dtype and layout are read each time, so that
gradients set to None, replaced `p.data` and state that moved or was swapped are seen.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from kourkoutas import _native
from kourkoutas.rule import Hyper

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
    """The hyper-parameters as the kernel's struct, or None if one is an array or the update is plain Adam.

    A fixed β2 without the extras goes to torch's own kernel, whose bits it shares.
    """
    extras = hyper.adaptive_tiny or hyper.max_ratio is not None or state_dtype is not None
    if hyper.fixed and hyper.bias_correction == "beta2max" and not extras:
        return None
    values = (
        hyper.beta1,
        hyper.beta2_min,
        hyper.beta2_max,
        hyper.alpha,
        hyper.eps,
        hyper.tiny_spike,
        hyper.tiny_denom,
        -1.0 if hyper.leak is None else hyper.leak,
        -1.0 if hyper.max_ratio is None else hyper.max_ratio,
        hyper.warmup_steps,
        hyper.weight_decay,
        hyper.adaptive_tiny,
        hyper.bias_correction == "exact",
        hyper.bias_correction != "none",
        hyper.nonfinite == "skip",
        maximize,
        state_dtype is torch.bfloat16,
    )
    if any(isinstance(x, Tensor) for x in values):
        return None
    return struct.pack(f"{len(values)}d", *values)
