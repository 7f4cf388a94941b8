"""The step through the C kernel: every tensor of a param group in one call.

A fourth way through the same update, taken where `fused` is, if the kernel was built (`kbeta._native`) and every tensor
of the step suits it: float32, float64, bfloat16 or float16 on the CPU, without gaps in memory, gradient and state laid
out as the parameter. If one tensor does not, the whole step goes the torch way.

NOTE: nothing about a tensor is remembered from step to step. Its address, dtype and layout are read each time, so that
gradients set to None, replaced `p.data` and state that moved or was swapped are seen.
"""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from kbeta import _native
from kbeta.rule import Hyper

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def _connected() -> Any:
    if _native.step is not None:
        table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)  # from torch 2.10 on
        _native.step.connect(table, (Tensor, torch.nn.Parameter), _DTYPES)
    return _native.step


kernel: Any = _connected()


def pack(hyper: Hyper, maximize: bool) -> bytes | None:
    """The hyper-parameters as the kernel's struct, or None if one is an array or the update is plain Adam.

    A fixed β2 without the extras goes to torch's own kernel, whose bits it shares.
    """
    if hyper.fixed and hyper.bias_correction == "beta2max" and not hyper.adaptive_tiny and hyper.max_ratio is None:
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
    )
    if any(isinstance(x, Tensor) for x in values):
        return None
    return struct.pack(f"{len(values)}d", *values)
