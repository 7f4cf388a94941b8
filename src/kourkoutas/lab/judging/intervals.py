"""Where a number may lie: quantiles, means and confidence intervals, of anything up to the largest double."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import special, stats

from kourkoutas.lab.judging.values import Array

RESAMPLES = 9_999
# Values beyond which no bootstrap is made: it takes n·RESAMPLES numbers, and t intervals agree with it by then.
BOOTSTRAP_UP_TO = 2_000
PLAIN = (1e-100, 1e100)  # sizes whose squares, and sums of very many of them, are doubles


@dataclass(frozen=True)
class Interval:
    """A confidence interval and how it was made."""

    low: float
    high: float
    method: str

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Effect:
    """A size with its t interval and its BCa bootstrap interval."""

    value: float
    ci: Interval | None
    bootstrap_ci: Interval | None


def unit_of(*values: Array) -> float:
    """A power of two by which to divide the values, so that their squares and differences are doubles; often 1.

    >>> unit_of(np.array([0.1, 3.0])), unit_of(np.array([1e308, np.nan])) > 1e307
    (1.0, True)
    """
    sizes = [np.abs(x[np.isfinite(x)]) for x in values]
    largest = max((float(size.max()) for size in sizes if size.size), default=0.0)
    if largest == 0 or PLAIN[0] <= largest <= PLAIN[1]:
        return 1.0
    return math.ldexp(1.0, max(math.frexp(largest)[1] - 1, -1000))


def interval_times(ci: Interval | None, unit: float) -> Interval | None:
    return None if ci is None else Interval(ci.low * unit, ci.high * unit, ci.method)


def effect_times(effect: Effect, unit: float) -> Effect:
    return Effect(effect.value * unit, interval_times(effect.ci, unit), interval_times(effect.bootstrap_ci, unit))


def antilog(exponent: float) -> float:
    """10^exponent, infinite where that is beyond a double."""
    try:
        return float(10.0**exponent)
    except OverflowError:
        return math.inf


def antilog_interval(ci: Interval | None) -> Interval | None:
    return None if ci is None else Interval(antilog(ci.low), antilog(ci.high), ci.method)


def clopper_pearson(successes: float, n: int, confidence: float = 0.95) -> Interval:
    """Exact interval of a rate, by beta quantiles; half successes (ties) are let through to the same quantiles."""
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
    unit = unit_of(ordered[low : low + 2])
    a, b = ordered[low] / unit, ordered[low + 1] / unit
    return float(a + part * (b - a)) * unit


def iqm(values: Array) -> float:
    """Interquartile mean: the mean without the lowest and highest ⌊n/4⌋ values."""
    return float(trimmed(values))


def trimmed(values: Any, axis: int = -1) -> Any:
    """The same along an axis. (scipy's `trim_mean` gives the same numbers; its checks take a millisecond a call.)"""
    n = np.shape(values)[axis]
    kept = np.moveaxis(np.sort(values, axis=axis), axis, -1)[..., n // 4 : n - n // 4]
    return kept.mean(axis=-1)


def t_interval(d: Array, confidence: float = 0.95) -> Interval:
    """mean(d) ± t_{df}·sd(d)/√n."""
    half = float(special.stdtrit(len(d) - 1, (1 + confidence) / 2) * d.std(ddof=1) / math.sqrt(len(d)))
    return Interval(float(d.mean()) - half, float(d.mean()) + half, "t")


def bootstrap_ci(
    values: Array, statistic: Callable[..., Any], confidence: float = 0.95, resamples: int = RESAMPLES
) -> Interval | None:
    """BCa bootstrap interval (seeded), a percentile one where BCa is undefined, None where resamples cannot differ.

    None too for more than `BOOTSTRAP_UP_TO` values, and with `resamples=0`.
    """
    if resamples == 0 or not 2 <= len(values) <= BOOTSTRAP_UP_TO:
        return None
    if not np.isfinite(values).all() or np.ptp(values) == 0:
        return None
    for method, name in (("BCa", "BCa bootstrap"), ("percentile", "percentile bootstrap")):
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            # scipy warns where the jackknife or the resamples are degenerate; the NaN that follows is handled here
            warnings.simplefilter("ignore")
            found = stats.bootstrap(
                (values,),
                statistic,
                confidence_level=confidence,
                n_resamples=resamples,
                method=method,
                vectorized=True,
                axis=-1,
                rng=np.random.default_rng(0),
            ).confidence_interval
        if math.isfinite(found.low) and math.isfinite(found.high):
            return Interval(float(found.low), float(found.high), name)
    return None
