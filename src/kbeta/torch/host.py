"""The scalars of a step on the CPU, where reading them back is free: NumPy, or floats for a lone parameter."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kbeta import rule
from kbeta.rule import Hyper
from kbeta.torch.update import Coefficients

_ONE = torch.tensor(1.0)  # a number would be made a tensor once per entry of the list


class _Floats:
    """The calls that `kbeta.rule` makes of an array namespace, on floats: faster than arrays of one entry."""

    expm1 = staticmethod(math.expm1)
    log1p = staticmethod(math.log1p)

    @staticmethod
    def where(chosen: bool, a: float, b: float) -> float:
        return a if chosen else b

    @staticmethod
    def zeros_like(x: float) -> float:
        return 0.0


class Scalars:
    """What one group's step needs: read from its state, moved by the rule, written back.

    Args:
      bucket_of: per parameter, the place of its bucket.
      buckets: their number.
    """

    def __init__(self, bucket_of: Sequence[int], buckets: int) -> None:
        self.index = None if buckets == len(bucket_of) else np.asarray(bucket_of)
        self.buckets = buckets
        self.lone = len(bucket_of) == 1
        self.xp: Any = _Floats if self.lone else np

    def gather(self, xs: Sequence[Tensor]) -> Any:
        values = [x.item() for x in xs]
        return values[0] if self.lone else np.array(values, np.float64)

    def spread(self, x: Any) -> Any:
        return x if self.index is None else x[self.index]

    def pool(self, squares: list[float]) -> Any:
        """n = √Σ of the squares in each bucket."""
        if self.lone:
            return math.sqrt(squares[0])
        if self.index is None:
            return np.sqrt(squares)
        return np.sqrt(np.bincount(self.index, squares, self.buckets))

    def largest(self, x: Any) -> Any:
        """Per bucket, the largest of its members' entries."""
        if self.index is None:
            return x
        out = np.zeros(self.buckets)
        np.maximum.at(out, self.index, x)
        return out

    def listed(self, x: Any, n: int) -> list[float]:
        """One float per parameter of a number or an array."""
        return x.tolist() if isinstance(x, np.ndarray) else [float(x)] * n


def store(targets: list[Tensor], values: list[float]) -> None:
    if len(targets) == 1:
        targets[0].fill_(values[0])
        return
    dtype = targets[0].dtype
    if any(t.dtype != dtype for t in targets):
        for t, x in zip(targets, values, strict=True):
            t.fill_(x)
    else:
        torch._foreach_copy_(targets, torch.tensor(values, dtype=dtype).unbind())


def move(
    s: Scalars,
    hyper: Hyper,
    lr: float,
    norm: Any,
    emas: list[Tensor],
    steps: list[Tensor],
    log_beta2s: list[Tensor],
    skipped: list[Tensor],
    mean_abs: list[Tensor],
    traced: bool,
) -> tuple[Coefficients, np.ndarray | None, list[bool] | None]:
    """Move the bucket statistics and step counts by one step.

    Returns:
      The coefficients of each parameter, (sun, β2) of each bucket if `traced`, and which parameters go on (None: all).
    """
    n = len(steps)
    # A NaN norm is the caller's to see, not a warning; floats give none.
    with contextlib.nullcontext() if s.lone else np.errstate(all="ignore"):
        step = s.gather(steps) + 1
        bucket_step = s.largest(step) if hyper.warmup_steps else step
        ema = s.gather(emas)
        r = rule.moving_average(hyper, ema, norm)
        sun = rule.sunspike(hyper, r, norm, bucket_step, s.xp)
        c2 = rule.forgetting(hyper, sun, bucket_step, s.xp)
        stats = np.array([sun, 1 - c2]).reshape(2, s.buckets) if traced else None
        c2 = s.spread(c2)
        log_beta2 = None
        if log_beta2s:
            log_beta2 = s.gather(log_beta2s) + s.xp.log1p(-c2)
        a1, b2 = rule.bias_corrections(hyper, step, log_beta2, s.xp)
        gain, root = lr / a1, b2**0.5
    eps: Any = hyper.eps
    if hyper.adaptive_tiny:
        eps = hyper.eps + hyper.tiny_denom * np.maximum(s.gather(mean_abs), 1.0)
    columns = (
        1 - hyper.beta1,
        c2,
        root,
        eps,
        gain,
        lr * (hyper.max_ratio or 0.0),
        1 - lr * hyper.weight_decay,
        1.0 if hyper.leak is None else hyper.leak,
    )
    k = Coefficients(*(s.listed(x, n) for x in columns))

    good: list[bool] | None = None
    if hyper.nonfinite == "skip":
        fine = np.isfinite(norm)
        for t, ok in zip(skipped, np.atleast_1d(fine), strict=True):
            if not ok:
                t.add_(1)
        if not np.all(fine):
            # A skipped bucket has zero rates, which leaves every bit of m, v and θ as it was.
            good = np.atleast_1d(s.spread(fine)).tolist()
            stats = np.where(np.atleast_1d(fine), stats, np.nan) if stats is not None else None
            ones, zeros = [1.0] * n, [0.0] * n
            still = Coefficients(zeros, zeros, ones, k.eps, zeros, k.limit, ones, ones)
            k = Coefficients(
                *([a if ok else b for ok, a, b in zip(good, x, y, strict=True)] for x, y in zip(k, still, strict=True))
            )
            _store_where(np.atleast_1d(fine).tolist(), emas, np.atleast_1d(r).tolist())
            _store_where(good, steps, np.atleast_1d(step).tolist())
            if log_beta2 is not None:
                _store_where(good, log_beta2s, np.atleast_1d(log_beta2).tolist())
            return k, stats, good
    store(emas, s.listed(r, s.buckets))
    torch._foreach_add_(steps, _ONE)
    if log_beta2 is not None:
        store(log_beta2s, s.listed(log_beta2, n))
    return k, stats, good


def _store_where(chosen: list[bool], targets: list[Tensor], values: list[float]) -> None:
    for ok, t, x in zip(chosen, targets, values, strict=True):
        if ok:
            t.fill_(x)
