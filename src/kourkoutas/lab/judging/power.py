"""What a number of seeds can show: the paired t test's power, the difference it would find, and the seeds one needs.

With d of mean δ and standard deviation s over n seeds, t has the noncentral t distribution with n - 1 degrees of
freedom and noncentrality δ√n/s, and the test at level α finds the difference with probability

    P(|T| > t_{n-1, 1-α/2})

NOTE: s is the one seen in the study, so with few seeds these are rough figures. For a family of m contrasts α is
divided by m, which is what Holm's rule asks of the first of them.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from scipy import optimize, special

from kourkoutas.lab.judging.contrasts import Contrast, percent_of
from kourkoutas.lab.judging.intervals import unit_of
from kourkoutas.lab.judging.values import Array

POWER = 0.8
MOST_SEEDS = 100_000
MANY = 100  # degrees of freedom from which the closed form is right to four digits
POINTS = 4_096  # of the average over the distribution of the standard deviation


@dataclass(frozen=True)
class Detectable:
    """The difference that a contrast would have found with probability `power`.

    Attributes:
      seeds: pairs of finite runs.
      sd: of their differences d.
      alpha: level of the test, divided by the number of contrasts.
      difference: in the units of d (log10 of a ratio where the comparison is on logarithms).
      percent: the same in percent of the baseline; None where that has no meaning.
      seeds_for_observed: seeds that the observed difference would need; None when beyond `MOST_SEEDS`.
    """

    seeds: int
    sd: float
    alpha: float
    power: float
    difference: float
    percent: float | None
    seeds_for_observed: int | None


def found(ratio: float, n: int, alpha: float) -> float:
    """Power of the two-sided paired t test for δ/s = `ratio`.

    T = (Z + nc)/R with Z normal and R = √(χ²_df/df), so P(|T| > c) is the mean over R of Φ(nc - cR) + Φ(-nc - cR).
    For many seeds R is nearly normal, with mean 1 - 1/(4df) and variance 1/(2df), which gives a closed form.
    """
    df, nc = n - 1, abs(ratio) * math.sqrt(n)
    c = float(special.stdtrit(df, 1 - alpha / 2))
    if df >= MANY:
        middle, wide = c * (1 - 1 / (4 * df)), math.sqrt(1 + c * c / (2 * df))
        return float(special.ndtr((nc - middle) / wide) + special.ndtr((-nc - middle) / wide))
    r = _chi(df)
    return float(np.mean(special.ndtr(nc - c * r) + special.ndtr(-nc - c * r)))


@functools.lru_cache(maxsize=256)
def _chi(df: int) -> Array:
    """R of equally probable slices."""
    u = (np.arange(POINTS) + 0.5) / POINTS
    return np.asarray(np.sqrt(2 * special.gammaincinv(df / 2, u) / df))


@functools.lru_cache(maxsize=4096)
def detectable_ratio(n: int, alpha: float, power: float = POWER) -> float:
    """δ/s that n pairs find with probability `power`."""
    high = 1.0
    while found(high, n, alpha) < power:
        high *= 2
    return float(optimize.brentq(lambda ratio: found(ratio, n, alpha) - power, 0.0, high, xtol=1e-6))


def seeds_needed(ratio: float, alpha: float, power: float = POWER, most: int = MOST_SEEDS) -> int | None:
    """The smallest number of seeds that finds δ/s = `ratio` with probability `power`; None when beyond `most`.

    >>> seeds_needed(1.0, 0.05), seeds_needed(0.5, 0.05)
    (10, 34)
    """
    if ratio == 0 or found(ratio, most, alpha) < power:
        return None
    # With a known s it would be ((z_{1-α/2} + z_power)·s/δ)²; an estimated one asks for a few more.
    n = max(2, int(((special.ndtri(1 - alpha / 2) + special.ndtri(power)) / ratio) ** 2))
    while n > 2 and found(ratio, n - 1, alpha) >= power:
        n -= 1
    while found(ratio, n, alpha) < power:
        n += 1
    return n


def spread(c: Contrast) -> tuple[int, float] | None:
    """(pairs, sd of d) of the finite pairs; None where there is no variance to reckon with."""
    d = np.array([pair.difference for pair in c.pairs])
    d = d[np.isfinite(d)]
    if c.t.t is None:
        return None
    unit = unit_of(d)
    return len(d), float((d / unit).std(ddof=1)) * unit


def difference_of(c: Contrast, percent: float, log: bool, higher_is_better: bool) -> float | None:
    """The size of d that is so many percent of the baseline; None where the contrast has no percentages."""
    if log:
        part = 1 + percent / 100 if higher_is_better else 1 - percent / 100
        if part <= 0:
            raise ValueError(f"--difference {percent:g}%: nothing is lower by 100 % or more; name less, for example 5%")
        return abs(math.log10(part))
    return None if c.baseline_size is None else c.baseline_size * percent / 100


def has_percentages(c: Contrast, log: bool) -> bool:
    """Whether a difference can be said in percent of the baseline."""
    return log or c.baseline_size is not None


@dataclass(frozen=True)
class Needed:
    """Seeds that one contrast needs for a stated difference; `seeds` is None when beyond `MOST_SEEDS`."""

    treatment: str
    baseline: str
    difference: float
    percent: float | None
    seeds: int | None


def parse_difference(text: str) -> tuple[float, bool]:
    """(size, whether it is in percent of the baseline) from "5%" or a number in the endpoint's own units."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        size = float(number)
    except ValueError:
        size = math.nan
    if not (math.isfinite(size) and size > 0):
        raise ValueError(f"--difference must be a size > 0 like 5% or 0.01; got {text!r}")
    return size, percent


def needed(c: Contrast, text: str, *, log: bool, higher_is_better: bool, power: float = POWER) -> Needed | None:
    """How many seeds this contrast needs to find the difference `text`; None where its differences do not vary."""
    size, percent = parse_difference(text)
    if log and not percent:
        raise ValueError(f"--difference {text}: this endpoint is compared as ratios; give percent, for example 5%")
    difference = difference_of(c, size, log, higher_is_better) if percent else size
    if difference is None:
        why = (
            f"{c.baseline} has values on both sides of 0, or at it, of which nothing is a percentage"
            if c.t.n
            else f"{c.treatment} and {c.baseline} have no pair of finite runs"
        )
        raise ValueError(f"--difference {text}: {why}; give a size in the endpoint's units")
    seen = spread(c)
    if seen is None:
        return None
    seeds = seeds_needed(difference / seen[1], (1 - c.confidence) / c.family, power)
    shown = size if percent else percent_of(difference, c.baseline_size, log, higher_is_better)
    return Needed(c.treatment, c.baseline, difference, shown, seeds)


def detectable(c: Contrast, *, log: bool, higher_is_better: bool, power: float = POWER) -> Detectable | None:
    """What the seeds of a contrast could have shown; None where its differences have no variance."""
    seen = spread(c)
    if seen is None or c.difference is None:
        return None
    n, sd = seen
    alpha = (1 - c.confidence) / c.family
    difference = detectable_ratio(n, alpha, power) * sd
    return Detectable(
        seeds=n,
        sd=sd,
        alpha=alpha,
        power=power,
        difference=difference,
        percent=percent_of(difference, c.baseline_size, log, higher_is_better),
        seeds_for_observed=seeds_needed(c.difference.value / sd, alpha, power),
    )
