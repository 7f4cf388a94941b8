"""The statistics of a comparison, one list for console, JSON and page.

To add one, write its function and give it an entry in `OF_CONTRASTS` or `OF_ARMS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from kourkoutas.lab.judging import hypothesis_tests
from kourkoutas.lab.judging.deciding import Decision, decide
from kourkoutas.lab.judging.intervals import Interval, antilog, bootstrap_mean, clopper_pearson, quantile, t_interval
from kourkoutas.lab.judging.values import Array, Seed, Sides
from kourkoutas.lab.tuning.luck import Lost

DIVERGED, NEVER = "diverged", "never got there"  # what a run without a value did; the second where values are times
UNDEFINED = "t, its p-value, d_z, r and intervals are undefined"


@dataclass(frozen=True)
class Paired:
    """What the statistics of a contrast are made of.

    Attributes:
      seeds: one for each pair.
      x, y: values of treatment and baseline, NaN for a lost run: one that diverged, or that failed.
      d: y - x on the scale of the comparison, positive where the treatment is better; infinite where one run was lost,
        0 where both were, NaN where one failed and failures do not count.
      rounding: bounds on the rounding errors of d.
      resamples: of each bootstrap; 0 for none.
      lost: what each may have lost by its tuning; None where that is not known.
    """

    seeds: tuple[Seed, ...]
    x: Array
    y: Array
    d: Array
    rounding: Array
    log: bool
    higher_is_better: bool
    threshold: float | None
    resamples: int
    lost: Sides[Lost | None]

    @cached_property
    def both(self) -> Array:
        """d of the pairs in which both runs have a value."""
        return np.asarray(self.d[self.whole])

    @cached_property
    def whole(self) -> NDArray[np.bool_]:
        return np.isfinite(self.x) & np.isfinite(self.y)

    @cached_property
    def t(self) -> hypothesis_tests.PairedT:
        return hypothesis_tests.paired_t(self.both, self.rounding[self.whole])

    @cached_property
    def wilcoxon(self) -> hypothesis_tests.Wilcoxon:
        return hypothesis_tests.wilcoxon(self.d, self.rounding)

    @cached_property
    def decision(self) -> Decision:
        return decide(self.d, self.whole, self.t, self.wilcoxon, self.lost)

    @cached_property
    def unfinished(self) -> bool:
        """Whether a run failed that does not count: nothing can be decided."""
        return bool(np.isnan(self.d).any())

    def without(self, seed: Seed) -> Paired:
        """The same without a seed."""
        left = np.array([own != seed for own in self.seeds])
        seeds = tuple(own for own in self.seeds if own != seed)
        arrays = {"x": self.x[left], "y": self.y[left], "d": self.d[left], "rounding": self.rounding[left]}
        return replace(self, seeds=seeds, **arrays)

    @property
    def wins(self) -> int:
        return int(np.sum(self.d > 0))

    @property
    def ties(self) -> int:
        return int(np.sum(self.d == 0))

    @property
    def losses(self) -> int:
        return int(np.sum(self.d < 0))


@dataclass(frozen=True)
class OneArm:
    """What the statistics of one optimizer are made of: its values, NaN for a run that was lost."""

    x: Array
    log: bool
    higher_is_better: bool
    threshold: float | None

    @cached_property
    def finite(self) -> Array:
        return self.x[np.isfinite(self.x)]

    def quantile(self, q: float) -> float:
        """With lost runs as the worst."""
        return quantile(np.where(np.isfinite(self.x), self.x, -math.inf if self.higher_is_better else math.inf), q)


@dataclass(frozen=True)
class Finding:
    """The value of a statistic.

    Attributes:
      interval: a confidence interval, or for a median its quartiles.
      p, p_holm: of a test, and adjusted for the planned contrasts.
      detail: what else is to be told, such as t(9) = 2.26.
    """

    value: float | None
    interval: Interval | None = None
    p: float | None = None
    p_holm: float | None = None
    detail: str = ""


Of = TypeVar("Of")


@dataclass(frozen=True)
class Statistic(Generic[Of]):
    """One statistic: its name in JSON, its title for people, how it is computed and how it is shown.

    `compute` gives None where the statistic has no meaning for the data at hand.
    """

    name: str
    title: str
    compute: Callable[[Of], Finding | None]
    show: Callable[[Finding], str]


def show(value: float | None, digits: int = 4) -> str:
    """A number for people: `digits` significant figures, "–" for None, "diverged" for what is not finite."""
    if value is None:
        return "–"
    return f"{value:.{digits}g}" if math.isfinite(value) else DIVERGED


def with_interval(result: Finding, digits: int = 4) -> str:
    """value [low, high]."""
    if result.interval is None:
        return show(result.value, digits)
    return f"{show(result.value, digits)} [{show(result.interval.low, digits)}, {show(result.interval.high, digits)}]"


def between(low: float, high: float, text: Callable[[float], str]) -> str:
    """The ends of a confidence interval; in words where it has none.

    >>> between(1, 2, str), between(1, math.inf, str), between(-math.inf, 2, str), between(-math.inf, math.inf, str)
    ('1, 2', 'at least 1', 'at most 2', 'no bounds')
    """
    if math.isfinite(low):
        return f"{text(low)}, {text(high)}" if math.isfinite(high) else f"at least {text(low)}"
    return f"at most {text(high)}" if math.isfinite(high) else "no bounds"


def _detail(result: Finding) -> str:
    return result.detail


def scaled(value: float, interval: Interval | None, log: bool) -> Finding:
    """A difference d with its interval; on logarithms as a ratio."""
    if not log:
        return Finding(value, interval)
    if interval is not None:
        interval = Interval(antilog(interval.low), antilog(interval.high), interval.method)
    return Finding(antilog(value), interval)


def _mean(pairs: Paired) -> Finding | None:
    if not len(pairs.both):
        return None
    interval = t_interval(pairs.both) if pairs.t.t is not None else None
    return scaled(float(pairs.both.mean()), interval, pairs.log)


def _bootstrap(pairs: Paired) -> Finding | None:
    interval = bootstrap_mean(pairs.both, resamples=pairs.resamples) if pairs.t.t is not None else None
    return None if interval is None else scaled(float(pairs.both.mean()), interval, pairs.log)


def _median(pairs: Paired) -> Finding:
    """Of ratios on logarithms, else of differences; a lost run stands at the end of its side."""
    with np.errstate(over="ignore"):
        spread = np.power(10.0, pairs.d) if pairs.log else pairs.d
    q1, median, q3 = (quantile(spread, q) for q in (0.25, 0.5, 0.75))
    return Finding(median, Interval(q1, q3, "quartiles"))


def _show_median(result: Finding) -> str:
    def one(value: float) -> str:
        if math.isfinite(value):
            return show(value)
        return f"baseline {DIVERGED}" if value > 0 else f"treatment {DIVERGED}"

    ends = result.interval
    middle = "–" if result.value is None else one(result.value)
    return middle if ends is None else f"{middle} [{one(ends.low)}, {one(ends.high)}]"


def _better(pairs: Paired) -> Finding | None:
    """The share of seeds on which the treatment is better, of those that differ."""
    n = pairs.wins + pairs.losses
    if not n:
        return None
    ties = len(pairs.d) - n
    told = f"{pairs.wins} of {n}" + (f", {ties} equal" if ties else "")
    return Finding(pairs.wins / n, clopper_pearson(pairs.wins, n), detail=told)


def _if_any(value: float | None) -> Finding | None:
    return None if value is None else Finding(value)


def _paired_t(pairs: Paired) -> Finding:
    t = pairs.t
    told = "undefined" if t.t is None else f"t({t.df}) = {t.t:.3f}"
    without = len(pairs.d) - len(pairs.both)
    left_out = f", without {without} pairs" if without and t.t is not None else ""
    return Finding(t.t, p=t.p, detail=told + left_out)


def _wilcoxon(pairs: Paired) -> Finding:
    w = pairs.wilcoxon
    told = "undefined" if w.statistic is None else f"W = {w.statistic:g}, n = {w.n}, {w.method}"
    return Finding(w.statistic, p=w.p, detail=told)


def _sign(pairs: Paired) -> Finding:
    return Finding(
        pairs.wins, p=hypothesis_tests.sign_test(pairs.wins, pairs.losses), detail=f"{pairs.wins} to {pairs.losses}"
    )


def _mcnemar(pairs: Paired) -> Finding | None:
    if pairs.threshold is None:
        return None
    m = hypothesis_tests.mcnemar(pairs.x, pairs.y, pairs.threshold, pairs.higher_is_better)
    told = f"only first {m.only_treatment}, only other {m.only_baseline}"
    return Finding(m.rate_difference, p=m.p, detail=told)


OF_CONTRASTS: Sequence[Statistic[Paired]] = (
    Statistic("mean", "mean [t]", _mean, with_interval),
    Statistic("bootstrap", "mean [BCa]", _bootstrap, with_interval),
    Statistic("median", "median [quartiles]", _median, _show_median),
    Statistic("better", "P(better) [Clopper–Pearson]", _better, lambda r: f"{with_interval(r, 2)}, {r.detail}"),
    Statistic("d_z", "d_z", lambda pairs: _if_any(pairs.t.d_z), with_interval),
    Statistic("r", "r", lambda pairs: _if_any(pairs.t.r), with_interval),
    Statistic("rank_biserial", "rank-biserial r", lambda pairs: _if_any(pairs.wilcoxon.rank_biserial), with_interval),
    Statistic("paired_t", "paired t", _paired_t, _detail),
    Statistic("wilcoxon", "Wilcoxon", _wilcoxon, _detail),
    Statistic("sign", "sign", _sign, _detail),
    Statistic("mcnemar", "McNemar, exact", _mcnemar, _detail),
)


def _runs(arm: OneArm) -> Finding:
    return Finding(float(len(arm.x)), detail=f"{len(arm.x)}, {len(arm.x) - len(arm.finite)} lost")


def _middle(arm: OneArm) -> Finding:
    return Finding(arm.quantile(0.5), Interval(arm.quantile(0.25), arm.quantile(0.75), "quartiles"))


def _arithmetic(arm: OneArm) -> Finding | None:
    if not len(arm.finite):
        return None
    sd = f" ± {show(float(arm.finite.std(ddof=1)), 2)}" if len(arm.finite) > 1 else ""
    mean = float(arm.finite.mean())
    return Finding(mean, detail=show(mean) + sd)


def _geometric(arm: OneArm) -> Finding | None:
    return Finding(antilog(float(np.log10(arm.finite).mean()))) if arm.log and len(arm.finite) else None


def _success(arm: OneArm) -> Finding | None:
    if arm.threshold is None:
        return None
    k, n = int(np.sum(hypothesis_tests.succeeds(arm.x, arm.threshold, arm.higher_is_better))), len(arm.x)
    return Finding(k / n, clopper_pearson(k, n), detail=f"{k} of {n}")


OF_ARMS: Sequence[Statistic[OneArm]] = (
    Statistic("runs", "runs", _runs, _detail),
    Statistic("median", "median [quartiles]", _middle, with_interval),
    Statistic("geometric_mean", "geometric mean", _geometric, with_interval),
    Statistic("mean", "mean ± sd", _arithmetic, _detail),
    Statistic("success", "success [Clopper–Pearson]", _success, lambda r: f"{r.detail}: {with_interval(r, 3)}"),
)
