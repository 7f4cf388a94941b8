"""The paired tests on the differences d of the seeds: t and its power, Wilcoxon, sign, McNemar; and Holm's rule.

`rounding` bounds the rounding error of each d: differences that it cannot tell apart count as equal.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from kourkoutas.lab.judging.intervals import bisect
from kourkoutas.lab.judging.values import Array

EXACT_UP_TO = 500  # pairs; the exact distribution of the signed ranks takes O(n³), a fraction of a second at 500
MANY = 1_000  # degrees of freedom beyond which t is taken as normal in its power


@dataclass(frozen=True)
class PairedT:
    """t = mean(d) / (sd(d)/√n), d_z = t/√n, r = √(t²/(t² + df)), over the pairs in which both runs are finite."""

    df: int
    t: float | None
    p: float | None
    d_z: float | None
    r: float | None


@dataclass(frozen=True)
class Wilcoxon:
    """Signed ranks over the pairs that differ. `rank_biserial` = (W⁺ - W⁻)/(W⁺ + W⁻), positive for the treatment."""

    n: int
    zeros: int
    statistic: float | None
    p: float | None
    rank_biserial: float | None
    method: str


@dataclass(frozen=True)
class McNemar:
    """Success (the threshold is met) and failure in pairs; exact test on the pairs that disagree."""

    only_treatment: int
    only_baseline: int
    rate_difference: float
    p: float


def paired_t(d: Array, rounding: Array) -> PairedT:
    """Paired t on differences; without variance (beyond `rounding`, the error bound of each d) it has no value."""
    n = len(d)
    df = max(n - 1, 0)
    if n < 2 or np.ptp(d) <= 2 * rounding.max():
        return PairedT(df, None, None, None, None)
    # t = mean(d)/(sd(d)/√n),  p = 2·P(T_df > |t|),  d_z = t/√n,  r = √(t²/(t² + df))
    t = float(d.mean() / (d.std(ddof=1) / math.sqrt(n)))
    p = 2 * float(special.stdtr(df, -abs(t)))
    return PairedT(df, t, p, t / math.sqrt(n), math.sqrt(t**2 / (t**2 + df)))


@functools.lru_cache(maxsize=4096)
def power_of_t(ratio: float, n: int, alpha: float) -> float:
    """The probability that the two-sided paired t test at level α finds δ/s = `ratio` on n pairs.

    With d of mean δ and standard deviation s, t is noncentral with n - 1 degrees of freedom and noncentrality δ√n/s:
    the power is P(|T| > t_{n-1, 1-α/2}).
    """
    df, nc = n - 1, abs(ratio) * math.sqrt(n)
    c = float(special.stdtrit(df, 1 - alpha / 2))
    if df > MANY:
        return float(special.ndtr(nc - c) + special.ndtr(-nc - c))
    # scipy gives NaN for a lower tail that is too small for its series
    return 1 - float(special.nctdtr(df, nc, c)) + float(np.nan_to_num(special.nctdtr(df, nc, -c)))


@functools.lru_cache(maxsize=4096)
def detectable_ratio(n: int, alpha: float) -> float:
    """δ/s that n pairs find with probability 0.8.

    NOTE: s is the one seen in the study, so with few seeds this is a rough figure. It is never asked of the difference
    that was observed: power at the observed effect is only another way to write its p.
    """
    high = 1.0
    while power_of_t(high, n, alpha) < 0.8:
        high *= 2
    return bisect(lambda ratio: power_of_t(ratio, n, alpha), 0.8, 0.0, high)


def _midranks(size: Array, rounding: Array) -> Array:
    """Ranks of |d|, shared where two sizes differ by no more than their rounding errors."""
    order = np.argsort(size, kind="stable")
    ordered, slack = size[order], rounding[order]
    with np.errstate(invalid="ignore"):  # inf - inf: two diverged runs, one rank
        opens = np.concatenate([[True], ordered[1:] - ordered[:-1] > slack[1:] + slack[:-1]])
    group = np.cumsum(opens) - 1
    position = np.arange(1, len(size) + 1, dtype=float)
    shared = np.bincount(group, weights=position) / np.bincount(group)
    ranks = np.empty(len(size))
    ranks[order] = shared[group]
    return ranks


def wilcoxon(d: Array, rounding: Array) -> Wilcoxon:
    """Wilcoxon signed-rank test, exact also with ties.

    Pairs with d = 0 are set aside. The distribution of W⁺ over all 2ⁿ signs is summed for the midranks at hand; without
    ties it is scipy's exact one, which knows no ties.
    """
    keep = d != 0
    zeros = int(np.sum(~keep))
    d, rounding = d[keep], rounding[keep]
    n = len(d)
    if n == 0:
        return Wilcoxon(0, zeros, None, None, None, "no pair differs")
    ranks = _midranks(np.abs(d), rounding)
    up, total = float(ranks[d > 0].sum()), float(ranks.sum())
    tied = len(np.unique(ranks)) < n
    if n > EXACT_UP_TO:
        from scipy import stats  # which takes a second to import

        p = float(stats.wilcoxon(np.sign(d) * ranks, method="asymptotic").pvalue)
        method = "normal approximation"
    else:
        chance = signed_rank_chances(ranks)
        at = round(2 * up)
        p = min(1.0, 2 * min(float(chance[: at + 1].sum()), float(chance[at:].sum())))
        method = "exact, tied ranks shared" if tied else "exact"
    return Wilcoxon(n, zeros, min(up, total - up), p, (2 * up - total) / total, method)


def signed_rank_chances(ranks: Array) -> Array:
    """P(2·W⁺ = w) for w = 0, 1, …: each rank joins W⁺ with probability ½; doubled midranks are whole numbers."""
    steps = np.rint(2 * ranks).astype(int)
    chance, highest = np.zeros(int(steps.sum()) + 1), 0
    chance[0] = 1.0
    for step in steps:
        joined = chance[: highest + 1].copy()
        chance[: highest + 1] *= 0.5
        highest += step
        chance[step : highest + 1] += 0.5 * joined
    return chance


def sign_test(wins: int, losses: int) -> float | None:
    """p of the sign test, ties set aside: that of so many heads and tails of a fair coin; None without any.

    2·P(X ≤ min), X ~ Binomial(wins + losses, ½).
    """
    n = wins + losses
    return min(1.0, 2 * float(special.bdtr(min(wins, losses), n, 0.5))) if n else None


def succeeds(values: Array, threshold: float, higher_is_better: bool) -> NDArray[np.bool_]:
    met = values >= threshold if higher_is_better else values <= threshold
    return np.asarray(met & np.isfinite(values))


def mcnemar(treatment: Array, baseline: Array, threshold: float, higher_is_better: bool = False) -> McNemar:
    """McNemar's exact test on who meets the threshold; a diverged run does not."""
    a = succeeds(treatment, threshold, higher_is_better)
    b = succeeds(baseline, threshold, higher_is_better)
    only_a, only_b = int(np.sum(a & ~b)), int(np.sum(~a & b))
    p = sign_test(only_a, only_b)
    return McNemar(only_a, only_b, float(a.mean() - b.mean()), 1.0 if p is None else p)


def holm(p_values: Sequence[float | None], family: int = 0) -> list[float | None]:
    """Holm-adjusted p-values: the k-th smallest of m becomes max over j ≤ k of (m - j + 1)·p₍ⱼ₎, at most 1.

    A planned contrast without a p-value still counts in m, and so do those that `family` counts beyond the p-values at
    hand: m is never less than `family`. (statsmodels' `multipletests` gives the same numbers but
    forces a full garbage collection on each call, which takes longer than all other statistics of a study.)
    """
    m, highest = max(len(p_values), family), 0.0
    adjusted: list[float | None] = [None] * len(p_values)
    for k, (p, i) in enumerate(sorted((p, i) for i, p in enumerate(p_values) if p is not None)):
        highest = max(highest, min(1.0, (m - k) * p))
        adjusted[i] = highest
    return adjusted
