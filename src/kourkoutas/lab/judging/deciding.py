"""The one p and the one interval of a contrast, with the luck of the tuning counted.

d are the paired differences of the test seeds, positive for the treatment. Where every run gave a number, the paired t
test decides; where one diverged, its d is infinite and Wilcoxon's signed ranks decide.

An optimizer that was tuned may have lost r by the luck of its choice (`kourkoutas.lab.tuning.luck`). To the one behind
that r is given back before the difference is tested. With n pairs and s* a draw of what the standard deviation of d may
be:

    p = 2·E[P(d - r has no advantage)]   r of the optimizer behind

P is Φ((r - |mean d|)/(s*/√n)) for means, and for ranks the exact tail of the signed ranks of d - r. The interval is
p's own: its low end counts what the baseline may have lost, its high end what the treatment may have lost, and it
holds 0 exactly where p ≥ 1 - level. Without a tuning r = 0, and both are those of the t or the Wilcoxon test.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from kourkoutas.lab.judging.hypothesis_tests import EXACT_UP_TO, PairedT, Wilcoxon, signed_rank_chances
from kourkoutas.lab.judging.intervals import Interval, bisect, t_interval
from kourkoutas.lab.judging.values import Array, Sides
from kourkoutas.lab.tuning.luck import Lost, draws_of_s, nothing_lost

T, RANKS = "paired t", "Wilcoxon"


def _no_interval(level: float) -> Interval | None:
    return None


@dataclass(frozen=True)
class Decision:
    """What decides a contrast.

    Attributes:
      test: "paired t", or "Wilcoxon" where a run diverged.
      tuned: whether the luck of a tuning is counted.
      estimate: of d: its mean, or for ranks its pseudo-median (Hodges and Lehmann); infinite where most runs of one
        side diverged, None without a pair.
      pairs: how many decide: all for t, for ranks those that differ.
      side: positive where the treatment is ahead.
      p: two-sided; None where the data have none.
      why: why there is no p.
      interval: of the estimate at a level, the one that goes with p; None where there is none.
    """

    test: str
    tuned: bool
    estimate: float | None
    pairs: int
    side: float
    p: float | None
    why: str = ""
    interval: Callable[[float], Interval | None] = _no_interval


def decide(
    d: Array,
    whole: NDArray[np.bool_],
    t: PairedT,
    w: Wilcoxon,
    lost: Sides[Lost | None],
) -> Decision:
    """The decision about differences d, of which the `whole` ones are of two runs that gave a value.

    `lost` gives what each side may have lost by its tuning, None if that is not known.
    """
    ranks = not whole.all()
    tuned = lost.treatment is not nothing_lost or lost.baseline is not nothing_lost
    if ranks:
        decision = Decision(RANKS, tuned, _pseudo_median(d), w.n, w.rank_biserial or 0.0, w.p)
    else:
        mean = float(d.mean()) if len(d) else None
        decision = Decision(T, tuned, mean, len(d), mean or 0.0, t.p)
    if why := _why_no_p(decision, len(d), w.zeros):
        return dataclasses.replace(decision, p=None, why=why)
    if not tuned and not ranks:
        return dataclasses.replace(decision, interval=lambda level: t_interval(d, level))
    s = draws_of_s(d[whole])
    luck = _Luck(
        decision=decision,
        d=d,
        s=s,
        tail=_rank_tail(d) if ranks else _mean_tail(d, s),
        lost=Sides(
            treatment=None if lost.treatment is None else lost.treatment(s),
            baseline=None if lost.baseline is None else lost.baseline(s),
        ),
    )
    return dataclasses.replace(decision, p=luck.p, interval=functools.cache(luck.interval))


class Chances(abc.ABC):
    """What the data leave possible of an effect, with what each side may have lost by its tuning; from it p and the
    interval that goes with p."""

    @abc.abstractmethod
    def below(self, x: float) -> float:
        """P(the treatment has no advantage over x), which rises with x; NaN where the baseline's loss is not known."""

    @abc.abstractmethod
    def above(self, x: float) -> float:
        """P(the treatment has an advantage of x or more), which falls with x; NaN where its own loss is not known."""

    def two_sided(self, side: float) -> float:
        """p of no difference, `side` being positive where the treatment is ahead. What is not known may be anything."""
        chance = 2 * (self.below(0.0) if side > 0 else self.above(0.0))
        return 1.0 if math.isnan(chance) else min(1.0, chance)

    def ends(self, level: float, low: float, high: float) -> tuple[float, float]:
        """The ends of the interval at a level, looked for between `low` and `high`."""
        alpha = (1 - level) / 2
        return crossing(self.below, alpha, low, high), crossing(lambda x: -self.above(x), -alpha, low, high)


@dataclass(frozen=True)
class _Luck(Chances):
    """A decision with the luck of the tuning, if there was one.

    Attributes:
      decision: without it.
      s: draws of s*.
      tail: P of the module's docstring, of d and of -d.
      lost: as many draws of what each side may have lost; None where that is not known.
    """

    decision: Decision
    d: Array
    s: Array
    tail: Callable[[Array, int], Array]
    lost: Sides[Array | None]

    def below(self, x: float) -> float:
        return math.nan if self.lost.baseline is None else float(np.mean(self.tail(x + self.lost.baseline, 1)))

    def above(self, x: float) -> float:
        return math.nan if self.lost.treatment is None else float(np.mean(self.tail(-x + self.lost.treatment, -1)))

    @functools.cached_property
    def p(self) -> float:
        """The luck of a tuning makes nothing surer."""
        p = self.decision.p or 0.0
        return max(p, self.two_sided(self.decision.side)) if self.decision.tuned else p

    def interval(self, level: float) -> Interval | None:
        if self.lost.treatment is None or self.lost.baseline is None:
            return None
        ranks = self.decision.test == RANKS
        most_lost = max(float(self.lost.treatment.max()), float(self.lost.baseline.max()))
        low, high = self.ends(level, *_span(self.d, most_lost, 0.0 if ranks else 40 * float(self.s.max())))
        if self.p >= 1 - level:  # ties and zeros may move an end of ranks past 0 by one place
            low, high = min(low, 0.0), max(high, 0.0)
        how = "Hodges–Lehmann" if ranks else "t"
        return Interval(low, high, f"{how} with the luck of the tuning" if self.decision.tuned else how)


def _why_no_p(decision: Decision, pairs: int, ties: int) -> str:
    """Why so few, or such, pairs have no p; empty where they have one."""
    if pairs == 0:
        return "no seed in common"
    if pairs == 1:
        return "one seed is too few"
    if decision.test == T:
        return "the differences are all equal" if decision.p is None else ""
    if decision.p is None:
        return "no run gave a value"
    # Signed ranks leave ties out: where most pairs tie, they would speak of the few others only, while the
    # pseudo-median of all pairs is 0.
    return f"{ties} of {pairs} pairs tie, more than half" if 2 * ties > pairs else ""


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
    """Two values between which any interval ends."""
    finite = d[np.isfinite(d)]
    if not len(finite):
        return 0.0, 0.0
    width = float(np.ptp(finite)) + lost + slack + 1e-300
    return float(finite.min()) - width, float(finite.max()) + width


def crossing(rising: Callable[[float], float], level: float, low: float, high: float) -> float:
    """Where a rising function crosses a level; infinite where it never does."""
    if rising(low) > level:
        return -math.inf
    if rising(high) < level:
        return math.inf
    return bisect(rising, level, low, high)
