"""Stochastic rounding of bfloat16 parameters and state: up with the probability of what is cut off.

The noise is a hash of step, parameter and element, so that every route and any number of ranks round alike. It is
defined in _native/formats.h.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kourkoutas.torch.sharding import Shard

if TYPE_CHECKING:
    from kourkoutas.torch.group import Group

_WORD = 0xFFFFFFFF


def _mixed(h: Tensor) -> Tensor:
    """A hash of 32 bits held in int64."""
    h = (h ^ h >> 16) * 0x45D9F3B5 & _WORD
    h = (h ^ h >> 13) * 0x3C6EF373 & _WORD
    return h ^ h >> 16


def check_shards(own: Group) -> None:
    """Raise if it is not known where in its whole tensor a shard begins, which the noise counts from."""
    for name, shard in zip(own.names, own.shards or (), strict=False):
        if shard.first is None:
            raise RuntimeError(
                "`state_dtype=torch.bfloat16` and `stochastic_rounding=True` round by the place of an element in the "
                f"whole tensor, but this torch does not say where the shard of parameter {name!r} begins: leave them "
                "out, or use another version of torch"
            )


def noise_bits(step: Tensor, place: int, like: Tensor, shard: Shard | None = None) -> Tensor:
    """32 bits for every element of `like`, as int64: a hash of step, place and element, alike on all routes.

    `place` is the parameter's number in its group. Elements are counted in the order of memory, as the kernel does;
    those of a shard as in the whole tensor.
    """
    seed = _mixed(_mixed(step.to(torch.int64)) + place & _WORD)
    first, strides = (0, like.stride()) if shard is None else (shard.first, shard.strides)
    if first is None:
        raise RuntimeError("where this shard begins is not known")
    count = torch.full(like.shape, first, dtype=torch.int64, device=like.device)
    for d, (n, stride) in enumerate(zip(like.shape, strides, strict=True)):
        along = torch.arange(n, device=like.device) * stride
        count += along.view([n if e == d else 1 for e in range(like.ndim)])
    return _mixed(count * 0x1E3779B1 + seed.to(like.device) & _WORD)


def noise_of(name: str, bits: Tensor) -> Tensor:
    """16 of an element's `noise_bits`, for "param" (θ), "exp_avg" (m), or v and v_max."""
    if name == "param":
        return _mixed(bits ^ 0x9E3779B9) & 0xFFFF
    if name == "exp_avg":
        return bits & 0xFFFF
    return bits >> 16


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """float32 → bfloat16, up with the probability of what is cut off; `bits` are 16 random ones per element."""
    up = x.view(torch.int32) + bits.to(torch.int32) & -0x10000
    return torch.where(x.isfinite(), up.view(torch.float32), x).bfloat16()
