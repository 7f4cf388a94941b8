"""What may be said of the optimizers of a suite: on each problem, and over all of them.

With K optimizers beside the baseline and P problems the suite makes K·(P + 1) statements: every optimizer on every
problem and over all of them. They are one family. Holm's adjustment is for all of them together, so that the
probability of any false "ahead" or "behind" in the whole suite is at most 0.05, and the intervals, each at
1 - 0.05/(K·(P + 1)), hold together with probability 0.95. Verdicts follow the rules of
`kourkoutas.lab.judging.verdicts`.

NOTE: a study judges its own family, which is smaller. So its page may call a difference clear that the suite, with more
statements to answer for, does not.

NOTE: how many pairs a verdict on a problem needs goes by the K comparisons of that problem. Signs alone could not give
a verdict among all K·(P + 1) statements with the ten seeds that are usual, and t is trusted that much further here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kourkoutas.lab.judging import verdicts
from kourkoutas.lab.judging.comparing import Judged
from kourkoutas.lab.judging.hypothesis_tests import holm
from kourkoutas.lab.judging.intervals import Interval
from kourkoutas.lab.judging.statistics import Paired
from kourkoutas.lab.judging.verdicts import Ruling, Verdict
from kourkoutas.lab.planning.contrasts import LEVEL, Family
from kourkoutas.lab.suites import across
from kourkoutas.lab.suites.across import Across, Ratios

FAILED = "a run failed"


@dataclass(frozen=True)
class Standing:
    """One optimizer beside the baseline.

    Attributes:
      verdict, why: over all problems, and why there is none.
      ratio: geometric mean over the problems of optimizer/baseline, below 1 where the optimizer is better; None where
        it has none.
      interval: of the ratio, simultaneous with all others of the suite.
      p, p_holm: of "the ratio is 1", and adjusted for the suite.
      ratios: {problem: geometric mean over its seeds}.
      rulings: {problem: what may be said there}.
      without: {problem: why it has no ratio, and is left out of the mean}.
      diverged: {problem: how many runs diverged}, of those with any.
    """

    optimizer: str
    verdict: Verdict
    why: str
    ratio: float | None
    interval: Interval | None
    p: float | None
    p_holm: float | None
    ratios: Mapping[str, float]
    rulings: Mapping[str, Ruling]
    without: Mapping[str, str]
    diverged: Mapping[str, int]

    def count(self, verdict: Verdict) -> int:
        """On how many problems."""
        return sum(ruling.verdict == verdict for ruling in self.rulings.values())


@dataclass(frozen=True)
class _Over:
    """An optimizer over all problems, before the adjustment."""

    found: Mapping[str, Ratios]
    without: Mapping[str, str]
    across: Across | None
    why: str


def family_of(optimizers: int, problems: int) -> Family:
    """All statements of a suite."""
    return Family(optimizers * (problems + 1))


def judge(
    problems: Mapping[str, Judged], optimizers: Sequence[str], baseline: str, margin: float | None = None
) -> list[Standing]:
    """Every optimizer beside the baseline.

    Args:
      problems: {problem: its primary endpoint with the pairs (optimizer, baseline)}.
      optimizers: without the baseline.
      margin: percent of the baseline within which a difference does not matter.
    """
    family, enough = family_of(len(optimizers), len(problems)), Family(len(optimizers))
    over = {arm: _over(problems, (arm, baseline), family, enough) for arm in optimizers}
    p_across = [None if one.across is None or one.why else one.across.p for one in over.values()]
    pairs: dict[tuple[str, str], Paired] = {}
    for name, judged in problems.items():
        for arm in optimizers:
            paired = judged.paired.get((arm, baseline))
            if paired is not None:
                pairs[name, arm] = paired
    rulings = verdicts.judge(list(pairs.values()), family, margin, leave_one_out=False, beside=p_across, enough=enough)
    ruled = dict(zip(pairs, rulings, strict=True))
    p_problems = [pairs[key].decision.p for key, ruling in ruled.items() if ruling.p_holm is not None]
    adjusted = holm([*p_across, *p_problems], family.size)
    standings = []
    for k, arm in enumerate(optimizers):
        own = {name: ruled.get((name, arm), Ruling("untested", why="no seed in common")) for name in problems}
        diverged = {name: _lost_runs(problems[name], arm) for name in problems}
        lost = {name: count for name, count in diverged.items() if count}
        standings.append(_standing(arm, over[arm], adjusted[k], own, lost, family, margin))
    return standings


def _over(problems: Mapping[str, Judged], pair: tuple[str, str], family: Family, enough: Family) -> _Over:
    """One optimizer over all problems."""
    found: dict[str, Ratios] = {}
    without: dict[str, str] = {}
    for name in sorted(problems):  # the draws are the same in whatever order the problems are named
        one = across.ratios(problems[name], pair)
        if isinstance(one, str):
            without[name] = one
        else:
            found[name] = one
    if FAILED in without.values() or not found:
        return _Over(found, without, None, next(iter(without.values())))
    together = across.over_problems(list(found.values()), family.size)
    pairs = sum(len(one.d) for one in found.values())
    why = together.why
    if not why and not enough.can_judge(pairs):
        why = f"{pairs} pairs are too few for {enough.words()}, {enough.least_pairs} are needed"
    return _Over(found, without, together, why)


def _lost_runs(judged: Judged, arm: str) -> int:
    """How many runs of an optimizer that count have no value."""
    return sum(not np.isfinite(x) for x in judged.counted.get(arm, {}).values())


def _standing(
    arm: str,
    over: _Over,
    p_holm: float | None,
    rulings: Mapping[str, Ruling],
    diverged: Mapping[str, int],
    family: Family,
    margin: float | None,
) -> Standing:
    together, verdict = over.across, _verdict(over, p_holm)
    interval = None if together is None else together.interval(family.confidence)
    if verdict == "unclear" and not diverged and _is_inside(interval, margin):
        verdict = "equal"
    return Standing(
        optimizer=arm,
        verdict=verdict,
        why=over.why,
        ratio=None if together is None else together.ratio,
        interval=interval,
        p=None if together is None else together.p,
        p_holm=p_holm,
        ratios={name: one.ratio for name, one in over.found.items()},
        rulings=rulings,
        without=over.without,
        diverged=diverged,
    )


def _is_inside(interval: Interval | None, margin: float | None) -> bool:
    """Whether the ratio lies within ±margin percent of 1."""
    if interval is None or margin is None:
        return False
    return 1 - margin / 100 < interval.low and interval.high < 1 + margin / 100


def _verdict(over: _Over, p_holm: float | None) -> Verdict:
    """What may be said over all problems, but for "equal"."""
    if FAILED in over.without.values():
        return "unfinished"
    if over.found and not any(np.any(one.d) for one in over.found.values()):
        return "identical"
    if over.across is None or p_holm is None:
        return "untested"
    if p_holm >= LEVEL:
        return "unclear"
    return "better" if over.across.ratio < 1 else "worse"
