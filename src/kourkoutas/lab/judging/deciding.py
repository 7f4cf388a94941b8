"""The one p and the one interval that decide a comparison, with the luck of the tuning counted.

d are the paired differences of the test seeds, positive for the treatment. Where every run gave a number, the paired t
test decides; where one diverged or failed, its d is infinite and Wilcoxon's signed ranks decide.

The winners of a tuning are compared on fresh seeds, so the choice does not flatter them. But a choice on a few tuning
seeds may miss an optimizer's best value, and then two equal optimizers differ because one was tuned with less luck. So
the one behind gets the benefit of the doubt. With n pairs, s the standard deviation of the finite ones, k tuning seeds
and m(v) the mean over them of y(v) - y(chosen), less being better:

    s* ~ s·√((n-1)/χ²)               what the standard deviation may be
    μ(v) ~ m(v) + s*/√(2k)·z         each value of an optimizer; a pair's variance is that of two runs
    r = μ(chosen) - min μ            what the optimizer may have lost by its choice, which is by means too
    p = 2·E[P(d - r has no advantage)]   r of the optimizer behind

P is Φ((r - |mean d|)/(s*/√n)) for means, and for ranks the exact tail of the signed ranks of d - r. The interval is
p's own: its low end counts what the baseline may have lost, its high end what the treatment may have lost, and it
holds 0 exactly where p ≥ 1 - level. Without a tuning r = 0, and both are those of the t or the Wilcoxon test.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from kourkoutas.lab.judging.hypothesis_tests import EXACT_UP_TO, PairedT, Wilcoxon, signed_rank_chances
from kourkoutas.lab.judging.intervals import Interval, bisect, t_interval
from kourkoutas.lab.judging.values import Array

DRAWS = 4_000
T, RANKS = "paired t", "Wilcoxon"

Lost = Callable[[Array], Array]  # draws of s → as many draws of r


def nothing_lost(s: Array) -> Array:
    """r of an optimizer that was not tuned."""
    return np.zeros(len(s))


def lost_by_tuning(scores: Sequence[Sequence[float]], chosen: int) -> Lost | None:
    """r of an optimizer that was tuned; None where no run of its chosen value gave a score.

    Args:
      scores: one row per value with the score of each tuning seed, less being better; NaN where a run diverged or
        failed. A value is compared with the chosen one on the seeds on which both have a score.
      chosen: the row that was chosen.
    """
    y = np.array(scores, float)
    if not np.isfinite(y[chosen]).any():
        return None
    behind = [row[np.isfinite(row)] for row in np.delete(y - y[chosen], chosen, axis=0)]
    others = [(float(row.mean()), len(row)) for row in behind if len(row)]
    k = int(np.isfinite(y[chosen]).sum())

    def draw(s: Array) -> Array:
        rng = np.random.default_rng(0)
        own = s / math.sqrt(2 * k) * rng.standard_normal(len(s))
        best = own
        for mean, seeds in others:
            best = np.minimum(best, mean + s / math.sqrt(2 * seeds) * rng.standard_normal(len(s)))
        return own - best

    return draw


@dataclass(frozen=True)
class Decision:
    """What decides a comparison.

    Attributes:
      test: "paired t", or "Wilcoxon" where a run diverged or failed.
      tuned: whether the luck of a tuning is counted.
      estimate: of d: its mean, or for ranks its pseudo-median (Hodges and Lehmann); infinite where most runs of one
        side diverged, None without a pair.
      p: two-sided; None where the data have none.
      interval: of the estimate at a level, the one that goes with p; None where there is none.
    """

    test: str
    tuned: bool
    estimate: float | None
    p: float | None
    interval: Callable[[float], Interval | None]


def decide(
    d: Array,
    whole: NDArray[np.bool_],
    t: PairedT,
    w: Wilcoxon,
    lost_treatment: Lost | None = nothing_lost,
    lost_baseline: Lost | None = nothing_lost,
) -> Decision:
    """The decision about differences d, of which the `whole` ones are of two runs that gave a value.

    `lost_treatment` and `lost_baseline` give what each side may have lost by its tuning, None if that is not known.
    """
    finite = d[whole]
    ranks = len(finite) < len(d)
    tuned = not lost_treatment is lost_baseline is nothing_lost
    estimate = _pseudo_median(d) if ranks else float(d.mean()) if len(d) else None
    plain_p = w.p if ranks else t.p
    if plain_p is None:
        return Decision(RANKS if ranks else T, tuned, estimate, None, lambda level: None)
    if not tuned and not ranks:
        return Decision(T, False, estimate, plain_p, lambda level: t_interval(d, level))

    n = len(finite)
    if n > 1:
        s = finite.std(ddof=1) / np.sqrt(np.random.default_rng(1).chisquare(n - 1, DRAWS) / (n - 1))
    else:
        s = np.zeros(DRAWS)
    r_treatment, r_baseline = (None if lost is None else lost(s) for lost in (lost_treatment, lost_baseline))
    tail = _rank_tail(d) if ranks else _mean_tail(d, s)

    def below(x: float) -> float:
        """P(no advantage over x of the treatment)."""
        return math.nan if r_baseline is None else float(np.mean(tail(x + r_baseline, 1)))

    def above(x: float) -> float:
        return math.nan if r_treatment is None else float(np.mean(tail(-x + r_treatment, -1)))

    ahead = (w.rank_biserial or 0.0) if ranks else float(d.mean())
    counted = 2 * (below(0.0) if ahead > 0 else above(0.0))
    # The luck of a tuning makes nothing surer.
    p = 1.0 if math.isnan(counted) else min(1.0, max(plain_p, counted if tuned else 0.0))

    @functools.cache
    def interval(level: float) -> Interval | None:
        if r_treatment is None or r_baseline is None:
            return None
        alpha = (1 - level) / 2
        ends = _span(d, max(float(r_treatment.max()), float(r_baseline.max())), 0.0 if ranks else 40 * float(s.max()))
        low, high = _crossing(below, alpha, *ends), _crossing(lambda x: -above(x), -alpha, *ends)
        if p >= 1 - level:  # ties and zeros may move an end of ranks past 0 by one place
            low, high = min(low, 0.0), max(high, 0.0)
        how = "Hodges–Lehmann" if ranks else "t"
        return Interval(low, high, f"{how} with the luck of the tuning" if tuned else how)

    return Decision(RANKS if ranks else T, tuned, estimate, p, interval)


def _mean_tail(d: Array, s: Array) -> Callable[[Array, int], Array]:
    """P(δ ≤ x | s) for δ ~ mean d + s/√n·z; side -1 takes -d."""
    error = s / math.sqrt(len(d))

    def tail(x: Array, side: int) -> Array:
        return np.asarray(special.ndtr((x - side * d.mean()) / error))

    return tail


def _walsh(d: Array) -> tuple[Array, int]:
    """(the sorted means of two, (d_i + d_j)/2 for i ≤ j, how many are of two opposite infinities and have none)."""
    if len(d) > EXACT_UP_TO:  # evenly spaced ones of so many stand for all
        d = np.sort(d)[np.linspace(0, len(d) - 1, EXACT_UP_TO).round().astype(int)]
    i, j = np.triu_indices(len(d))
    with np.errstate(invalid="ignore"):
        means = np.sort((d[i] + d[j]) / 2)
    known = means[~np.isnan(means)]
    return known, len(means) - len(known)


def _pseudo_median(d: Array) -> float | None:
    walsh, _ = _walsh(d)
    if not len(walsh):
        return None
    with np.errstate(invalid="ignore"):
        middle = float((walsh[(len(walsh) - 1) // 2] + walsh[len(walsh) // 2]) / 2)
    return None if math.isnan(middle) else middle


def _rank_tail(d: Array) -> Callable[[Array, int], Array]:
    """P(W⁺ ≥ w) of the signed ranks of d - x; side -1 takes -d.

    W⁺ of d - x is the number of means of two above x, plus half of those equal to it.
    """
    n = min(len(d), EXACT_UP_TO)
    infinite = round(n * float(np.isinf(d).mean()))
    ranks = np.arange(1.0, n + 1)
    if infinite:
        ranks[n - infinite :] = n - (infinite - 1) / 2  # those that diverged share the highest ranks
    chances = signed_rank_chances(ranks)
    reach = np.append(np.cumsum(chances[::-1])[::-1], 0.0)
    sides = {side: _walsh(side * d) for side in (1, -1)}

    def tail(x: Array, side: int) -> Array:
        walsh, opposite = sides[side]
        above, not_below = len(walsh) - np.searchsorted(walsh, x, "right"), len(walsh) - np.searchsorted(walsh, x)
        return np.asarray(reach[above + not_below + opposite])  # twice W⁺

    return tail


def _span(d: Array, lost: float, slack: float) -> tuple[float, float]:
    finite = d[np.isfinite(d)]
    if not len(finite):
        return 0.0, 0.0
    width = float(np.ptp(finite)) + lost + slack + 1e-300
    return float(finite.min()) - width, float(finite.max()) + width


def _crossing(rising: Callable[[float], float], level: float, low: float, high: float) -> float:
    """Where a rising function crosses a level; infinite where it never does."""
    if rising(low) > level:
        return -math.inf
    if rising(high) < level:
        return math.inf
    return bisect(rising, level, low, high)
