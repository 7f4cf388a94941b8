"""Stochastic rounding to bfloat16, the same on every route and machine: noise is a hash of step, place and element."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def mixed(h: Tensor) -> Tensor:
    """A hash of 32 bits held in int64; _native/step.c has the same."""
    h = (h ^ h >> 16) * 0x45D9F3B5 & _WORD
    h = (h ^ h >> 13) * 0x3C6EF373 & _WORD
    return h ^ h >> 16


def bits(step: Tensor, place: int, like: Tensor) -> Tensor:
    """32 bits for every element of `like`, as int64; `place` is the parameter's number in its group."""
    seed = mixed(mixed(step.to(torch.int64)) + place & _WORD)
    # Elements are counted in the order of memory, as the native kernel does.
    count = torch.arange(like.numel(), device=like.device).as_strided(like.shape, like.stride())
    return mixed(count * 0x1E3779B1 + seed.to(like.device) & _WORD)


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """float32 → bfloat16, up with the probability of what is cut off; `bits` are 16 random ones per element."""
    up = x.view(torch.int32) + bits.to(torch.int32) & -0x10000
    return torch.where(x.isfinite(), up.view(torch.float32), x).bfloat16()


def store(targets: list[list[Tensor]], values: list[list[Tensor]], seeds: Sequence[tuple[Tensor, int]] | None) -> None:
    """Put m, v and v_max into their places, rounded with noise from steps and places unless `seeds` is None.

    m takes the low half of the hash, v and v_max the high half.
    """
    if seeds is None:
        torch._foreach_copy_([t for ts in targets for t in ts], [x for xs in values for x in xs])
    for i, (step, place) in enumerate(seeds or ()):
        noise = bits(step, place, targets[0][i])
        for j, (ts, xs) in enumerate(zip(targets, values, strict=True)):
            ts[i].copy_(rounded(xs[i], (noise if j == 0 else noise >> 16) & 0xFFFF))
