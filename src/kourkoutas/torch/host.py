"""The scalars of a step on the CPU, where reading them back is free: NumPy, or floats for a lone parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kourkoutas import rule
from kourkoutas.rule import Hyper
from kourkoutas.torch.update import Coefficients


class _Floats:
    """The calls that `kourkoutas.rule` makes of an array namespace, on floats: faster than arrays of one entry."""

    expm1 = staticmethod(math.expm1)
    log1p = staticmethod(math.log1p)

    @staticmethod
    def where(chosen: bool, a: float, b: float) -> float:
        return a if chosen else b

    @staticmethod
    def zeros_like(x: float) -> float:
        return 0.0


class Cells:
    """The numbers in a list of 0-dim tensors, through NumPy views of them: a tenth of the time of torch's calls.

    NOTE: views are kept from step to step, and made anew when an address has changed.
    """

    def __init__(self) -> None:
        self._at: list[int] = []
        self._views: list[NDArray[Any]] = []

    def look(self, tensors: list[Tensor]) -> bool:
        """Turn to these tensors; False if one is not on the CPU."""
        at = list(map(Tensor.data_ptr, tensors))
        if at != self._at:
            self._at = []
            if not all(t.is_cpu for t in tensors):
                return False
            self._views = [t.detach().numpy() for t in tensors]
            self._at = at
        return True

    def read(self) -> list[float]:
        return [view.item() for view in self._views]

    def write(self, values: Sequence[float]) -> None:
        for view, x in zip(self._views, values, strict=True):
            view[()] = x

    def write_where(self, chosen: Sequence[bool], values: Sequence[float]) -> None:
        for view, ok, x in zip(self._views, chosen, values, strict=True):
            if ok:
                view[()] = x


class Advance(NamedTuple):
    """What a step makes of the scalars: numbers where all share one, else arrays."""

    r: Any  # per bucket
    step: Any  # per parameter
    log_beta2: Any  # per parameter, or None
    sun: Any  # per bucket
    bucket_c2: Any
    c2: Any  # per parameter
    a1: Any
    b2: Any


class Scalars:
    """What one group's steps need: read from its state, moved by the rule, written back."""

    def __init__(self) -> None:
        self._emas, self._steps, self._logs = Cells(), Cells(), Cells()

    def look(
        self,
        bucket_of: Sequence[int],
        emas: list[Tensor],
        steps: list[Tensor],
        log_beta2s: list[Tensor],
    ) -> bool:
        """Turn to the state of one step; False if part of it is not on the CPU.

        Args:
          bucket_of: per parameter, the place of its bucket in `emas`.
          emas, steps, log_beta2s: 0-dim tensors per bucket, per parameter, and per parameter or none.
        """
        self.exact = bool(log_beta2s)
        self.buckets, self.parameters = len(emas), len(steps)
        self.lone = len(steps) == 1
        self.index = None if self.buckets == len(steps) else np.asarray(bucket_of)
        self.xp: Any = _Floats if self.lone else np
        return self._emas.look(emas) and self._steps.look(steps) and self._logs.look(log_beta2s)

    def pool(self, squares: list[float]) -> Any:
        """n = √Σ of the squares in each bucket."""
        if self.lone:
            return math.sqrt(squares[0])
        if self.index is None:
            return np.sqrt(squares)
        return np.sqrt(np.bincount(self.index, squares, self.buckets))

    def _largest(self, x: Any) -> Any:
        """Per bucket, the largest of its members' entries."""
        if self.index is None:
            return x
        out = np.zeros(self.buckets)
        np.maximum.at(out, self.index, x)
        return out

    def advance(self, hyper: Hyper, norm: Any) -> Advance:
        """One step of the rule; nothing is written yet."""
        if self.lone:
            return self._advance(hyper, norm)
        # A NaN norm is the caller's to see, not a warning; floats give none.
        with np.errstate(all="ignore"):
            return self._advance(hyper, norm)

    def _advance(self, hyper: Hyper, norm: Any) -> Advance:
        steps, emas = self._steps.read(), self._emas.read()
        # Mostly all have taken the same number of steps, and share their bias corrections.
        same = not self.exact and steps.count(steps[0]) == len(steps)
        step: Any = steps[0] + 1 if same else np.array(steps) + 1
        bucket_step = step if same or not hyper.warmup_steps else self._largest(step)
        c2, sun, r = rule._memory(hyper, norm, emas[0] if self.lone else np.array(emas), bucket_step, self.xp)
        spread = c2 if self.index is None else c2[self.index]
        log_beta2 = np.array(self._logs.read()) + np.log1p(-spread) if self.exact else None
        a1, b2 = rule.bias_corrections(hyper, step, log_beta2, _Floats if same else np)
        return Advance(r, step, log_beta2, sun, c2, spread, a1, b2)

    def write(self, new: Advance) -> None:
        n = self.parameters
        self._emas.write(listed(new.r, self.buckets))
        self._steps.write(listed(new.step, n))
        if new.log_beta2 is not None:
            self._logs.write(listed(new.log_beta2, n))

    def move(
        self, hyper: Hyper, lr: float, norm: Any, skipped: list[Tensor], mean_abs: list[float], traced: bool
    ) -> tuple[Coefficients, NDArray[Any] | None, list[bool] | None]:
        """Move the bucket statistics and step counts by one step.

        Returns:
          The coefficients of each parameter, (sun, β2) of each bucket if `traced`, and which parameters go on (None:
          all).
        """
        new, n = self.advance(hyper, norm), self.parameters
        stats = np.array([new.sun, 1 - new.bucket_c2]).reshape(2, self.buckets) if traced else None
        eps: Any = hyper.eps
        if hyper.adaptive_tiny:
            eps = hyper.eps + hyper.tiny_denom * np.maximum(mean_abs, 1.0)
        k = Coefficients(
            c1=[1 - hyper.beta1] * n,
            c2=listed(new.c2, n),
            root=listed(new.b2**0.5, n),
            eps=listed(eps, n),
            gain=listed(lr / new.a1, n),
            limit=[lr * (hyper.max_ratio or 0.0)] * n,
            keep=[1 - lr * hyper.weight_decay] * n,
            leak=[1.0 if hyper.leak is None else hyper.leak] * n,
        )
        if hyper.nonfinite == "skip" and not np.all(fine := np.isfinite(norm)):
            return self._skip(np.atleast_1d(fine), k, stats, new, skipped)
        self.write(new)
        return k, stats, None

    def _skip(
        self,
        fine: NDArray[np.bool_],
        k: Coefficients,
        stats: NDArray[Any] | None,
        new: Advance,
        skipped: list[Tensor],
    ) -> tuple[Coefficients, NDArray[Any] | None, list[bool]]:
        """The end of `move` when some buckets must stay as they are."""
        for t, ok in zip(skipped, fine, strict=True):
            if not ok:
                t.add_(1)
        # A skipped bucket has zero rates, which leaves every bit of m, v and θ as it was.
        good: list[bool] = (fine if self.index is None else fine[self.index]).tolist()
        n = len(good)
        ones, zeros = [1.0] * n, [0.0] * n
        still = Coefficients(zeros, zeros, ones, k.eps, zeros, k.limit, ones, ones)
        k = Coefficients(
            *([a if ok else b for ok, a, b in zip(good, x, y, strict=True)] for x, y in zip(k, still, strict=True))
        )
        self._emas.write_where(fine.tolist(), listed(new.r, self.buckets))
        self._steps.write_where(good, listed(new.step, n))
        if new.log_beta2 is not None:
            self._logs.write_where(good, listed(new.log_beta2, n))
        return k, np.where(fine, stats, np.nan) if stats is not None else None, good


def listed(x: Any, n: int) -> list[float]:
    """One float per entry of an array, or a number n times."""
    return x.tolist() if isinstance(x, np.ndarray) else [x] * n
