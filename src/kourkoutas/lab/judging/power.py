"""What a number of seeds can show: the difference that the paired t test finds, and the seeds that one needs.

With d of mean δ and standard deviation s over n seeds, t has the noncentral t distribution with n - 1 degrees of
freedom and noncentrality δ√n/s, and the test at level α finds the difference with probability P(|T| > t_{n-1, 1-α/2}).

NOTE: s is the one seen in the study, so with few seeds these are rough figures. δ is stated or asked for, never the
difference that was observed: power at the observed effect is only another way to write its p.
"""

from __future__ import annotations

import functools
import math
from bisect import bisect_left

import numpy as np
from scipy import special

from kourkoutas.lab.judging.intervals import bisect

POWER = 0.8
MOST_SEEDS = 100_000
MANY = 1_000  # degrees of freedom beyond which t is taken as normal


@functools.lru_cache(maxsize=4096)
def found(ratio: float, n: int, alpha: float) -> float:
    """Power of the two-sided paired t test for δ/s = `ratio`."""
    df, nc = n - 1, abs(ratio) * math.sqrt(n)
    c = float(special.stdtrit(df, 1 - alpha / 2))
    if df > MANY:
        return float(special.ndtr(nc - c) + special.ndtr(-nc - c))
    # scipy gives NaN for a lower tail that is too small for its series
    return 1 - float(special.nctdtr(df, nc, c)) + float(np.nan_to_num(special.nctdtr(df, nc, -c)))


@functools.lru_cache(maxsize=4096)
def detectable_ratio(n: int, alpha: float, power: float = POWER) -> float:
    """δ/s that n pairs find with probability `power`."""
    high = 1.0
    while found(high, n, alpha) < power:
        high *= 2
    return bisect(lambda ratio: found(ratio, n, alpha), power, 0.0, high)


def seeds_needed(ratio: float, alpha: float, power: float = POWER, most: int = MOST_SEEDS) -> int | None:
    """The smallest number of seeds that finds δ/s = `ratio` with probability `power`; None when beyond `most`.

    >>> seeds_needed(1.0, 0.05), seeds_needed(0.5, 0.05)
    (10, 34)
    """
    n = bisect_left(range(most + 1), power, lo=2, key=lambda n: found(ratio, n, alpha))
    return n if n <= most else None


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
