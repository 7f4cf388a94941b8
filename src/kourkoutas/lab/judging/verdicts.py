"""From the p and the interval of every contrast to what may be said about it: all rules that a verdict follows.

A study declares its endpoints and plans its contrasts before the first run. Together they are the family of m
statements that its headline may make (`kourkoutas.lab.planning.contrasts.Family`). In this order:

    unfinished   a run of the contrast failed. An error is no outcome of an optimizer, so there is nothing to judge yet.
                 Where the study declared `--count-failed`, a failed run ranks as the worst, as a diverged one does.
    identical    both end with the same value on every seed.
    untested     the data have no p, or m·2^(1-n) > 0.05 for the n pairs that decide.
    better,      p is below 0.05 after Holm's adjustment for m. The difference is also called small where its
    worse        interval lies inside ±margin.
    equal        the interval lies inside ±margin.
    unclear      otherwise. What is not clear is never called equal.

Holm (1979) keeps the probability of any false "better" or "worse" of all m at 0.05 or below, whatever their
dependence. Intervals are simultaneous: each at 1 - 0.05/m, so all hold together with probability 0.95 or more.
Holm's p may be clear where the wider interval still holds 0; the converse cannot happen.

"Equal" is two one-sided tests (Schuirmann, 1987) by an interval: with the simultaneous one, which is two-sided, the
probability of any false "equal" is below 0.05 too. It is said only where every run gave a number.

A verdict that one seed carries is said to be so: all of this is done again without each seed, and those seeds are named
without which the verdict would be another.

References:
  Holm (1979), A simple sequentially rejective multiple test procedure. Scandinavian Journal of Statistics 6, 65-70.
  Schuirmann (1987), A comparison of the two one-sided tests procedure and the power approach for assessing the
  equivalence of average bioavailability. Journal of Pharmacokinetics and Biopharmaceutics 15, 657-680.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kourkoutas.lab.judging import sizes
from kourkoutas.lab.judging.deciding import T
from kourkoutas.lab.judging.hypothesis_tests import holm
from kourkoutas.lab.judging.statistics import Paired
from kourkoutas.lab.judging.values import Seed, in_order
from kourkoutas.lab.planning.contrasts import LEVEL, Family

Verdict = Literal["better", "worse", "equal", "unclear", "identical", "untested", "unfinished"]
JUDGED = ("better", "worse", "equal", "unclear")  # verdicts by p and interval, which one seed may carry

MOST_LEFT_OUT = 2_000  # contrasts to judge again: beyond, and with so many seeds, no single seed is looked for


@dataclass(frozen=True)
class Ruling:
    """What may be said of one contrast.

    Attributes:
      p_holm: adjusted for the family; None where there is no verdict by p.
      small: a clear difference is smaller than the margin.
      why: why there is no verdict.
      carried_by: (seed, the verdict without it) of every seed without which the verdict would be another.
    """

    verdict: Verdict
    p_holm: float | None = None
    small: bool = False
    why: str = ""
    carried_by: tuple[tuple[Seed, Verdict], ...] = ()


def judge(
    contrasts: Sequence[Paired],
    family: Family,
    margin: float | None = None,
    *,
    leave_one_out: bool = True,
    beside: Sequence[float | None] = (),
    enough: Family | None = None,
) -> list[Ruling]:
    """The rulings on the contrasts of one family, each with the seeds that carry it.

    Args:
      contrasts: those that could be made, of all endpoints; the family may have planned more.
      margin: percent of the baseline below which a difference does not matter.
      leave_one_out: whether to look for those seeds.
      beside: p of the other statements of the family, which are adjusted together with these.
      enough: the family that says how many pairs a verdict needs, if not this one.
    """
    rulings = _rule(contrasts, family, margin, enough=enough or family, beside=beside)
    if not leave_one_out:
        return rulings
    carried = _carried(contrasts, rulings, family, margin)
    return [replace(ruling, carried_by=tuple(seeds)) for ruling, seeds in zip(rulings, carried, strict=True)]


def _rule(
    contrasts: Sequence[Paired],
    family: Family,
    margin: float | None,
    *,
    enough: Family | None,
    beside: Sequence[float | None] = (),
) -> list[Ruling]:
    """The rulings; `enough` says how many pairs a verdict needs, None that any number decides.

    A contrast without a verdict counts in the family with the largest p: it makes no other one surer.
    """
    reasons = [_why_none(one, enough) for one in contrasts]
    p_values = [None if why else one.decision.p for one, why in zip(contrasts, reasons, strict=True)]
    rulings = []
    adjusted = holm([*p_values, *beside], family.size)[: len(p_values)]
    for one, why, p_holm in zip(contrasts, reasons, adjusted, strict=True):
        if one.unfinished:
            rulings.append(Ruling("unfinished", why=why))
        elif one.wins == one.losses == 0 and one.whole.any():
            rulings.append(Ruling("identical"))
        elif p_holm is None:
            rulings.append(Ruling("untested", why=why))
        else:
            inside = margin is not None and is_inside(one, margin, family)
            rulings.append(Ruling(_by_numbers(one, p_holm, inside), p_holm, small=inside and p_holm < LEVEL))
    return rulings


def _why_none(one: Paired, enough: Family | None) -> str:
    """Why nothing can be said about a contrast; empty where something can."""
    if one.unfinished:
        return "a run failed"
    decision = one.decision
    if decision.why or enough is None or enough.can_judge(decision.pairs):
        return decision.why
    differ = " that differ" if decision.test != T and decision.pairs < len(one.d) else ""
    return f"{decision.pairs} pairs{differ} are too few for {enough.words()}, {enough.least_pairs} are needed"


def _by_numbers(one: Paired, p_holm: float, inside: bool) -> Verdict:
    if p_holm < LEVEL:
        return "better" if one.decision.side > 0 else "worse"
    return "equal" if inside else "unclear"


def is_inside(one: Paired, margin: float, family: Family) -> bool:
    """Whether the simultaneous interval lies inside ±margin percent of the baseline; never where a run diverged."""
    if one.decision.test != T:
        return False
    percent = sizes.percent(one, family.confidence)
    interval = None if percent is None else percent.interval
    return interval is not None and -margin < interval.low and interval.high < margin


def _carried(
    contrasts: Sequence[Paired], rulings: Sequence[Ruling], family: Family, margin: float | None
) -> list[list[tuple[Seed, Verdict]]]:
    """For every contrast: the seeds without which its verdict would be another, and which.

    That fewer pairs are left than the family needs is no change of the verdict.
    """
    carried: list[list[tuple[Seed, Verdict]]] = [[] for _ in contrasts]
    seeds: set[Seed] = set()
    for one in contrasts:
        seeds.update(one.seeds)
    if len(seeds) < 3 or len(seeds) * len(contrasts) > MOST_LEFT_OUT:
        return carried
    for seed in in_order(seeds):
        without = [one.without(seed) for one in contrasts]
        for k, again in enumerate(_rule(without, family, margin, enough=None)):
            before = rulings[k].verdict
            if {before, again.verdict} <= set(JUDGED) and again.verdict != before:
                carried[k].append((seed, again.verdict))
    return carried
