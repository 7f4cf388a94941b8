"""One optimizer against the baseline over several problems: the geometric mean of its ratios, its interval and its p.

On a problem p the seeds give paired differences d = log10(baseline) - log10(treatment), above 0 where the treatment is
better; where higher values are better, d changes sign. With P problems of n_p seeds each

    L_p = mean of d on p        G = mean of the L_p        ratio = 10^-G

so a ratio below 1 speaks for the treatment, and every problem counts alike, however many seeds it has. What is random
are the seeds. The problems are these and no others: the answer does not speak of problems that nobody tried.

The interval is the bootstrap-t (Efron, 1981) of seeds within problems, a seed keeping both of its runs:

    SE² = Σ s_p²/n_p / P²       T* = (G* - G)/SE*       [G - T*_(1-α/2)·SE, G - T*_(α/2)·SE]

and p belongs to it. As within a study, an optimizer may have lost r by the luck of its tuning
(`kourkoutas.lab.tuning.luck`), which is given back to the one behind; r is the mean of the r_p:

    p = 2·E[P(T* ≥ (|G| - r)/SE)]

NOTE: a run that diverged has no ratio. It counts as the worst end that any run of any optimizer reached on its problem:
as bad as the worst that was seen, and no worse. So G is finite, a divergence is never better than any other end, and
how many runs diverged is told beside it. Two that diverged on one seed are equal. A run that failed is no outcome: the
answer waits for it, unless failures were declared to count; then it counts as one that diverged.

References:
  Efron (1981), Nonparametric standard errors and confidence intervals. Canadian Journal of Statistics 9, 139-158.
  Dolan and Moré (2002), Benchmarking optimization software with performance profiles. Mathematical Programming 91,
  201-213.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kourkoutas.lab.judging.comparing import Judged
from kourkoutas.lab.judging.deciding import Chances
from kourkoutas.lab.judging.intervals import Interval, antilog
from kourkoutas.lab.judging.statistics import Paired
from kourkoutas.lab.judging.values import Array, Sides, all_values
from kourkoutas.lab.tuning.luck import Lost, draws_of_s

RESAMPLES = 19_999
PER_STATEMENT = 400  # resamples: the smallest p, adjusted for all statements of a suite, is 2/400


@dataclass(frozen=True)
class Ratios:
    """An optimizer's ratios to the baseline on one problem.

    Attributes:
      d: log10 of baseline/treatment for each seed, above 0 where the treatment is better.
      lost: draws of what each may have lost by its tuning, on the same scale; None where that is not known.
    """

    d: Array
    lost: Sides[Array | None]

    @property
    def ratio(self) -> float:
        """The geometric mean of treatment/baseline; below 1 where the treatment is better."""
        return antilog(-float(self.d.mean()))


def ratios(judged: Judged, pair: tuple[str, str]) -> Ratios | str:
    """The ratios of a contrast on one problem, or why it has none."""
    paired = judged.paired.get(pair)
    if paired is None:
        return "no seed in common"
    if paired.unfinished:
        return "a run failed"
    ended = [x for x in all_values(judged.counted) if math.isfinite(x)]
    if not ended:
        return "no run gave a value"
    if min(ended) <= 0:
        return "values at or below 0 have no ratio"
    worst = min(ended) if paired.higher_is_better else max(ended)
    x, y = (np.log10(np.where(np.isfinite(own), own, worst)) for own in (paired.x, paired.y))
    d = x - y if paired.higher_is_better else y - x
    lost = Sides(_lost(paired, paired.x, paired.lost.treatment), _lost(paired, paired.y, paired.lost.baseline))
    return Ratios(d, lost)


def _lost(paired: Paired, values: Array, lost: Lost | None) -> Array | None:
    """Draws of what the side with these values may have lost by its tuning, as a logarithm of a ratio."""
    if lost is None:
        return None
    r = lost(draws_of_s(paired.both))
    if paired.log:
        return r
    # The luck of the tuning is in the endpoint's unit: x could have been x - r, or x + r where higher is better.
    finite = values[np.isfinite(values)]
    level = abs(float(finite.mean())) if len(finite) else math.nan
    part = r / level if paired.higher_is_better else -r / level
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.abs(np.log10(np.maximum(1 + part, 0.0))))


@dataclass(frozen=True)
class Across:
    """The geometric mean over the problems.

    Attributes:
      ratio: treatment/baseline, below 1 where the treatment is better.
      p: two-sided; None where the data have none.
      why: why there is no p.
      interval: of the ratio at a level; None where there is none.
    """

    ratio: float
    p: float | None = None
    why: str = ""
    interval: Callable[[float], Interval | None] = lambda level: None


@dataclass(frozen=True)
class _Bootstrap(Chances):
    """The bootstrap-t of G.

    Attributes:
      g, error: G and SE.
      drawn: T* of every resample, in order.
      lost: draws of what each side may have lost on average over the problems; None where that is not known.
    """

    g: float
    error: float
    drawn: Array
    lost: Sides[Array | None]

    def below(self, x: float) -> float:
        if self.lost.baseline is None:
            return math.nan
        at = np.searchsorted(self.drawn, (self.g - x - self.lost.baseline) / self.error, "left")
        return float(np.mean((len(self.drawn) - at + 1) / (len(self.drawn) + 1)))

    def above(self, x: float) -> float:
        if self.lost.treatment is None:
            return math.nan
        at = np.searchsorted(self.drawn, (self.g - x + self.lost.treatment) / self.error, "right")
        return float(np.mean((at + 1) / (len(self.drawn) + 1)))

    def interval(self, level: float) -> Interval | None:
        """Of the ratio, 10^-G."""
        if self.lost.treatment is None or self.lost.baseline is None:
            return None
        furthest = float(np.abs(self.drawn[np.isfinite(self.drawn)]).max(initial=0.0))
        most_lost = max(float(self.lost.treatment.max()), float(self.lost.baseline.max()))
        reach = self.error * furthest + most_lost + self.error
        low, high = self.ends(level, self.g - reach, self.g + reach)
        return Interval(antilog(-high), antilog(-low), "bootstrap-t over seeds within problems")


def over_problems(found: Sequence[Ratios], statements: int = 1, seed: int = 0) -> Across:
    """What the ratios on all problems say together, as one of so many statements."""
    g = float(np.mean([one.d.mean() for one in found]))
    ratio = antilog(-g)
    if any(len(one.d) < 2 for one in found):
        return Across(ratio, why="one seed is too few")
    error = math.sqrt(sum(one.d.var(ddof=1) / len(one.d) for one in found)) / len(found)
    if not error > 0:
        return Across(ratio, why="the differences are all equal")
    rng = np.random.default_rng(seed)
    drawn = np.sort(_studentized(found, g, rng, max(RESAMPLES, PER_STATEMENT * statements)))
    lost = Sides(
        treatment=_mean_lost([one.lost.treatment for one in found], rng),
        baseline=_mean_lost([one.lost.baseline for one in found], rng),
    )
    chances = _Bootstrap(g, error, drawn, lost)
    return Across(ratio, chances.two_sided(g), interval=chances.interval)


def _studentized(found: Sequence[Ratios], g: float, rng: np.random.Generator, resamples: int) -> Array:
    """T* = (G* - G)/SE* of every resample; where a resample has no spread, infinite on the side of its mean."""
    means, squares = np.zeros(resamples), np.zeros(resamples)
    for one in found:
        n = len(one.d)
        drawn = one.d[rng.integers(0, n, (resamples, n))]
        means += drawn.mean(axis=1) / len(found)
        squares += drawn.var(axis=1, ddof=1) / n
    with np.errstate(divide="ignore", invalid="ignore"):
        studentized = (means - g) / (np.sqrt(squares) / len(found))
    return np.nan_to_num(studentized, nan=0.0, posinf=math.inf, neginf=-math.inf)


def _mean_lost(on_problems: Sequence[Array | None], rng: np.random.Generator) -> Array | None:
    """Draws of r of one side: the mean over the problems, whose tunings know nothing of each other."""
    known = [rng.permutation(r) for r in on_problems if r is not None]
    return np.asarray(np.mean(known, axis=0)) if len(known) == len(on_problems) else None


def profile(typical: Mapping[str, Mapping[str, float]], higher_is_better: Mapping[str, bool]) -> dict[str, list[float]]:
    """{optimizer: its factors of the best, in order}, over the problems: Dolan and Moré's performance profile.

    The share of problems on which an optimizer is within a factor of the best is the share of its factors at or below
    it. A typical end that is no number, as that of runs most of which diverged, is within no factor.

    >>> profile({"p": {"a": 2.0, "b": 1.0}, "q": {"a": 1.0, "b": 3.0}}, {"p": False, "q": False})
    {'a': [1.0, 2.0], 'b': [1.0, 3.0]}
    """
    factors: dict[str, list[float]] = {}
    for problem, ends in typical.items():
        sign = -1 if higher_is_better[problem] else 1
        known = [value for value in ends.values() if math.isfinite(value) and value > 0]
        if not known:
            continue
        best = min(known, key=lambda value: sign * value)
        for arm, value in ends.items():
            own = (value / best) ** sign if math.isfinite(value) and value > 0 else math.inf
            factors.setdefault(arm, []).append(own)
    return {arm: sorted(own) for arm, own in factors.items()}
