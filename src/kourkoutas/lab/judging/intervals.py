"""Quantiles and confidence intervals."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy import special

from kourkoutas.lab.judging.values import Array

CONFIDENCE = 0.95
RESAMPLES = 9_999
# Values beyond which no bootstrap is made: it takes n·RESAMPLES numbers, and t intervals agree with it by then.
BOOTSTRAP_UP_TO = 2_000


@dataclass(frozen=True)
class Interval:
    """A confidence interval and how it was made."""

    low: float
    high: float
    method: str

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


def antilog(exponent: float) -> float:
    """10^exponent, infinite where that is beyond a double."""
    try:
        return float(10.0**exponent)
    except OverflowError:
        return math.inf


def clopper_pearson(successes: int, n: int, confidence: float = CONFIDENCE) -> Interval:
    """Exact interval of a rate, by beta quantiles."""
    tail = (1 - confidence) / 2
    low = float(special.betaincinv(successes, n - successes + 1, tail)) if successes > 0 else 0.0
    high = float(special.betaincinv(successes + 1, n - successes, 1 - tail)) if successes < n else 1.0
    return Interval(low, high, "Clopper–Pearson")


def quantile(values: Array, q: float) -> float:
    """Linear-interpolation quantile that lets infinite entries stand at their end instead of giving NaN."""
    ordered = np.sort(values)
    at = q * (len(ordered) - 1)
    low, part = int(at), at - int(at)
    if part == 0 or ordered[low] == ordered[low + 1]:
        return float(ordered[low])
    ends = np.isinf(ordered[low : low + 2])
    if ends.any():
        return 0.0 if ends.all() else float(ordered[low + int(ends[1])])
    return float(ordered[low] + part * (ordered[low + 1] - ordered[low]))


def t_interval(d: Array, confidence: float = CONFIDENCE) -> Interval:
    """mean(d) ± t_{df}·sd(d)/√n."""
    half = float(special.stdtrit(len(d) - 1, (1 + confidence) / 2) * d.std(ddof=1) / math.sqrt(len(d)))
    return Interval(float(d.mean()) - half, float(d.mean()) + half, "t")


def fieller(part: Array, whole: Array, confidence: float = CONFIDENCE) -> Interval | None:
    """The interval of mean(part)/mean(whole): all ρ with |mean(part - ρ·whole)| ≤ t·sd(part - ρ·whole)/√n.

    Squared, that is a quadratic in ρ; it is bounded when mean(whole) differs from 0 by its own t interval, else None.
    """
    n = len(whole)
    a, w = float(part.mean()), float(whole.mean())
    (s_aa, s_aw), (_, s_ww) = (np.cov(part, whole) / n).tolist()
    t2 = float(special.stdtrit(n - 1, (1 + confidence) / 2)) ** 2
    # (w² - t²·s_ww)·ρ² - 2·(a·w - t²·s_aw)·ρ + (a² - t²·s_aa) ≤ 0
    square, half, rest = w * w - t2 * s_ww, a * w - t2 * s_aw, a * a - t2 * s_aa
    if not square > 0:
        return None
    root = math.sqrt(max(half * half - square * rest, 0.0))
    return Interval((half - root) / square, (half + root) / square, "Fieller")


def bootstrap_mean(values: Array, confidence: float = CONFIDENCE, resamples: int = RESAMPLES) -> Interval | None:
    """BCa bootstrap interval of the mean (seeded), a percentile one where BCa is undefined.

    None where resamples cannot differ, for more than `BOOTSTRAP_UP_TO` values, and with `resamples=0`.
    """
    if resamples == 0 or not 2 <= len(values) <= BOOTSTRAP_UP_TO or np.ptp(values) == 0:
        return None
    from scipy import stats  # takes as long to import as a whole report, which has no bootstrap

    for method in ("BCa", "percentile"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of values that BCa has no interval for
            found = stats.bootstrap(
                (values,),
                np.mean,
                confidence_level=confidence,
                n_resamples=resamples,
                method=method,
                rng=np.random.default_rng(0),
            ).confidence_interval
        if np.isfinite([found.low, found.high]).all():
            return Interval(float(found.low), float(found.high), f"{method} bootstrap")
    return None


def bisect(rising: Callable[[float], float], level: float, low: float, high: float) -> float:
    """Where a rising function crosses a level between two places, to 1e-15 of their distance."""
    for _ in range(50):
        middle = (low + high) / 2
        if rising(middle) < level:
            low = middle
        else:
            high = middle
    return (low + high) / 2
