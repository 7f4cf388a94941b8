"""Stochastic rounding to bfloat16, the same on every route and machine: noise is a hash of step, place and element."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kourkoutas.torch.parts import Part

_WORD = 0xFFFFFFFF


def mixed(h: Tensor) -> Tensor:
    """A hash of 32 bits held in int64; _native/step.c has the same."""
    h = (h ^ h >> 16) * 0x45D9F3B5 & _WORD
    h = (h ^ h >> 13) * 0x3C6EF373 & _WORD
    return h ^ h >> 16


def bits(step: Tensor, place: int, like: Tensor, part: Part | None = None) -> Tensor:
    """32 bits for every element of `like`, as int64; `place` is the parameter's number in its group."""
    seed = mixed(mixed(step.to(torch.int64)) + place & _WORD)
    # Elements are counted in the order of memory, as the native kernel does; those of a part as in the whole tensor.
    if part is None or part.strides is None:
        count = torch.arange(like.numel(), device=like.device).as_strided(like.shape, like.stride())
    else:
        count = torch.zeros(like.shape, dtype=torch.int64, device=like.device)
        for d, (n, stride) in enumerate(zip(like.shape, part.strides, strict=True)):
            along = torch.arange(n, device=like.device) * stride
            count = count + along.view([n if e == d else 1 for e in range(like.ndim)])
    if part is not None:
        count = count + part.first
    return mixed(count * 0x1E3779B1 + seed.to(like.device) & _WORD)


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """float32 → bfloat16, up with the probability of what is cut off; `bits` are 16 random ones per element."""
    up = x.view(torch.int32) + bits.to(torch.int32) & -0x10000
    return torch.where(x.isfinite(), up.view(torch.float32), x).bfloat16()


def store(
    targets: list[list[Tensor]], values: list[list[Tensor]], seeds: Sequence[tuple[Tensor, int, Part | None]] | None
) -> None:
    """Put m, v and v_max into their places, rounded with noise from steps, places and parts unless `seeds` is None.

    m takes the low half of the hash, v and v_max the high half.
    """
    if seeds is None:
        torch._foreach_copy_([t for ts in targets for t in ts], [x for xs in values for x in xs])
    for i, (step, place, part) in enumerate(seeds or ()):
        noise = bits(step, place, targets[0][i], part)
        for j, (ts, xs) in enumerate(zip(targets, values, strict=True)):
            ts[i].copy_(rounded(xs[i], (noise if j == 0 else noise >> 16) & 0xFFFF))
