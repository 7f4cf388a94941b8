"""Optimizers against each other on {optimizer: {seed: value}}, paired by seed.

All tests are two-sided. With y = log10(value) (`log=True`) or y = value, the difference of a seed is

    d = y[baseline] - y[treatment]        d > 0: the treatment is better (lower)

Where higher values are better, d changes sign, so d > 0 and a ratio above 1 always speak for the treatment.

NOTE: four rules hold everywhere.

* A value that is no number, or beyond 1e100, is a run that diverged. It is counted, ranks as the worst (two of one seed
  tie), and has no place in means, t and bootstrap. Ranks decide then.
* A run that failed is no outcome of an optimizer: its contrasts are unfinished, unless failures were declared to count.
  Then it ranks as the worst, too.
* A seed that only one of two optimizers has cannot be paired: the contrast uses the seeds of both and lists the rest.
* What the data cannot support (one pair, differences without variance) is None, not a number.

`compare_endpoints` judges all endpoints of a study as one family, `compare_pairs` one endpoint, `compare` one table.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kourkoutas.lab.errors import unknown
from kourkoutas.lab.judging import sizes, verdicts
from kourkoutas.lab.judging.hypothesis_tests import holm
from kourkoutas.lab.judging.intervals import RESAMPLES
from kourkoutas.lab.judging.statistics import (
    DIVERGED,
    NEVER,
    OF_ARMS,
    OF_CONTRASTS,
    UNDEFINED,
    Finding,
    OneArm,
    Paired,
    between,
    show,
)
from kourkoutas.lab.judging.values import (
    Array,
    Outcomes,
    Seed,
    Sides,
    all_seeds,
    all_values,
    first_few,
    in_order,
    is_number,
    of_seeds,
    without_logarithm,
)
from kourkoutas.lab.judging.verdicts import Ruling, Verdict
from kourkoutas.lab.optimizers.looks import name_of, versus
from kourkoutas.lab.planning.contrasts import Family
from kourkoutas.lab.tuning.luck import Lost, nothing_lost

BOOTSTRAPPED = 200  # contrasts of one comparison; with more, bootstrap intervals would take minutes

Failed = Mapping[str, Collection[Seed]]


@dataclass(frozen=True)
class Pair:
    """One seed's two values, NaN for a lost run; `difference` is d: infinite when one of the runs diverged, NaN when
    one failed and failures do not count."""

    seed: Seed
    treatment: float
    baseline: float
    difference: float


@dataclass(frozen=True)
class Contrast:
    """Treatment against baseline.

    Attributes:
      verdict: as `kourkoutas.lab.judging.verdicts` rules.
      why: why there is no verdict; empty where there is one.
      small: the difference is clear, and smaller than the margin.
      carried_by: (seed, the verdict without it) of every seed without which the verdict would be another.
      diverged, failed: how many runs of each side were lost in which way.
      test: what decides: "paired t", or "Wilcoxon" where a run was lost.
      tuned: whether p and intervals count the luck of a tuning.
      p, p_holm: the p that decides, and the same adjusted for the `family` of that many statements.
      effect: mean difference, on logarithms ratio of geometric means; for ranks the pseudo-median. Its interval is one
        of `family` simultaneous ones.
      percent: how much better the treatment is in percent of the baseline, with the same interval; None where the
        baseline has no one sign.
      detectable, detectable_percent: the difference that these seeds would have found four times out of five; None
        where ranks decide.
      is_time: as of its `Comparison`.
      statistics: {name: its value}, as `statistics.OF_CONTRASTS` lists them; they leave the luck of a tuning out.
        Empty while the contrast is unfinished.
    """

    treatment: str
    baseline: str
    verdict: Verdict
    pairs: tuple[Pair, ...]
    n: int
    wins: int
    ties: int
    losses: int
    diverged: Sides[int]
    failed: Sides[int]
    family: int
    statistics: Mapping[str, Finding]
    notes: tuple[str, ...]
    log: bool
    higher_is_better: bool
    is_time: bool = False
    why: str = ""
    small: bool = False
    carried_by: tuple[tuple[Seed, Verdict], ...] = ()
    test: str = ""
    tuned: bool = False
    p: float | None = None
    p_holm: float | None = None
    effect: Finding | None = None
    percent: Finding | None = None
    detectable: float | None = None
    detectable_percent: float | None = None
    side: float = dataclasses.field(default=0.0, repr=False)

    @property
    def name(self) -> str:
        return versus(self.treatment, self.baseline)

    @property
    def absent(self) -> str:
        """What a run without a value did."""
        return NEVER if self.is_time else DIVERGED

    @property
    def lost(self) -> int:
        return sum(self.diverged) + sum(self.failed)

    @property
    def test_name(self) -> str:
        return f"{self.test} with the luck of the tuning" if self.tuned else self.test

    def rows(self, standing: str = "decides") -> list[tuple[str, str, str, str]]:
        """(statistic, value, p, adjusted p) for a table, first the one that decides, or that would decide."""
        if self.verdict == "unfinished":
            return [("unfinished", self.why, "–", "–")]
        effect = "–" if self.effect is None else show(self.effect.value)
        if self.effect is not None and (ends := self.effect.interval) is not None:
            effect += f" [{between(ends.low, ends.high, show)}]"
        test = f"{standing}: {self.test}{', with luck' if self.tuned else ''}"
        rows = [(test, effect, show(self.p, 3), show(self.p_holm, 3))]
        for one in OF_CONTRASTS:
            if (found := self.statistics.get(one.name)) is not None:
                p, p_holm = ("", "") if found.p is None else (show(found.p, 3), show(found.p_holm, 3))
                rows.append((one.title, one.show(found).replace(DIVERGED, self.absent), p, p_holm))
        return rows


@dataclass(frozen=True)
class Comparison:
    """One endpoint: every optimizer's statistics and the planned contrasts.

    Attributes:
      name: as it can be asked for again with --endpoint.
      primary: whether it decides the study. All others are secondary.
      declared: whether it was named before the runs were made.
      log: compared as ratios, on log10.
      confidence: of each interval; those of all statements hold together at 95 %.
      margin: percent of the baseline within which a difference does not matter; None where none was declared.
      is_time: values are steps or seconds until something was reached; a run without one never got there.
      values: optimizer → seed → value; NaN for a lost run.
      arms: optimizer → {name: value} of `statistics.OF_ARMS`. Failed runs are left out unless they count.
      missing: planned pairs that could not be compared.
      failed: optimizer → seeds whose runs failed; other lost runs diverged.
    """

    log: bool
    higher_is_better: bool
    threshold: float | None
    confidence: float
    margin: float | None
    seeds: tuple[Seed, ...]
    values: Outcomes
    arms: Mapping[str, Mapping[str, Finding]]
    contrasts: tuple[Contrast, ...]
    missing: tuple[tuple[str, str], ...]
    failed: Mapping[str, Sequence[Seed]]
    notes: tuple[str, ...]
    name: str = "value"
    title: str = "value"
    primary: bool = True
    declared: bool = True
    is_time: bool = False

    @property
    def absent(self) -> str:
        """What a run without a value did."""
        return NEVER if self.is_time else DIVERGED

    @property
    def treatments(self) -> list[str]:
        """Of the contrasts, each once."""
        return list(dict.fromkeys(c.treatment for c in self.contrasts))

    @property
    def standing(self) -> str:
        """Primary, secondary, or secondary and chosen with the results in view."""
        if self.primary:
            return "decides"
        return "secondary" if self.declared else "secondary, asked for after the runs"

    @property
    def every(self) -> list[float]:
        """The values of all runs, NaN for a lost one."""
        return all_values(self.values)


@dataclass(frozen=True)
class Question:
    """One endpoint to be judged.

    Attributes:
      values: optimizer → seed → value; NaN for a run that diverged or failed.
      log: analyse log10 of the values, and report ratios of geometric means.
      higher_is_better: for accuracies and the like.
      threshold: a run that reaches it is a success; adds success rates and McNemar's test.
      lost: {optimizer: what its tuning may have lost}, None where that is not known; untuned ones are left out.
      notes: that stand before those of the contrasts.
      name, title, primary, declared, is_time: of the comparison.
    """

    values: Outcomes
    log: bool = False
    higher_is_better: bool = False
    threshold: float | None = None
    lost: Mapping[str, Lost | None] = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()
    name: str = "value"
    title: str = "value"
    primary: bool = True
    declared: bool = True
    is_time: bool = False

    @property
    def scale(self) -> dict[str, Any]:
        return {"log": self.log, "higher_is_better": self.higher_is_better, "threshold": self.threshold}


@dataclass(frozen=True)
class Judged:
    """One endpoint, its values paired by seed, and the rulings on its contrasts.

    Attributes:
      values: NaN for every lost run.
      counted: the same without the failed runs that do not count.
      missing: contrasts without a seed in common.
    """

    question: Question
    family: Family
    values: Outcomes
    counted: Outcomes
    paired: Mapping[tuple[str, str], Paired]
    missing: tuple[tuple[str, str], ...]
    failed: Failed
    notes: tuple[str, ...]
    rulings: Mapping[tuple[str, str], Ruling] = dataclasses.field(default_factory=dict)

    def count_failed(self, arm: str, seeds: Sequence[Seed]) -> int:
        """How many of an arm's runs with these seeds failed."""
        return sum(seed in self.failed.get(arm, ()) for seed in seeds)


def compare_endpoints(
    questions: Sequence[Question], pairs: Sequence[tuple[str, str]], *, margin: float | None = None, **how: Any
) -> tuple[Comparison, ...]:
    """Every endpoint of a study by the same contrasts (treatment, baseline).

    Args:
      questions: one per endpoint.
      pairs: which treatment against which baseline.
      margin: percent of the baseline within which a difference does not matter.
      how: the other arguments of `judge`.
    """
    return tuple(comparison(one, margin) for one in judge(questions, pairs, margin=margin, **how))


def judge(
    questions: Sequence[Question],
    pairs: Sequence[tuple[str, str]],
    *,
    planned: int = 0,
    margin: float | None = None,
    failed: Failed | None = None,
    count_failed: bool = False,
    resamples: int = RESAMPLES,
    leave_one_out: bool = True,
) -> list[Judged]:
    """The rulings on every endpoint by the same contrasts, without their statistics.

    The declared endpoints are one family. Those asked for after the runs are adjusted for themselves and for it, and
    change nothing about it.

    Args:
      questions: one per endpoint.
      pairs: which treatment against which baseline.
      planned: contrasts to adjust for, where more were planned than `pairs`.
      margin: percent of the baseline within which a difference does not matter.
      failed: {optimizer: seeds whose runs failed}; other lost runs diverged.
      count_failed: whether a failed run ranks as the worst, as a diverged one does.
      resamples: of each bootstrap; none are made for more than `BOOTSTRAPPED` contrasts.
      leave_one_out: whether to look for seeds that carry a verdict, which takes as many judgements as there are seeds.
    """
    contrasts, declared = max(planned, len(pairs)), sum(one.declared for one in questions)
    families = {True: Family(contrasts, declared), False: Family(contrasts, len(questions))}
    judged: dict[str, Judged] = {}
    for is_declared, family in families.items():
        group = []
        for question in questions:
            if question.declared == is_declared:
                group.append(_side_by_side(question, family, pairs, failed or {}, count_failed, resamples))
        paired = list(itertools.chain.from_iterable(one.paired.values() for one in group))
        rulings = iter(verdicts.judge(paired, family, margin, leave_one_out=leave_one_out))
        for one in group:
            own = {pair: next(rulings) for pair in one.paired}
            judged[one.question.name] = dataclasses.replace(one, rulings=own)
    return [judged[one.name] for one in questions]


def compare_pairs(
    values: Outcomes, pairs: Sequence[tuple[str, str]], *, family: int = 0, margin: float | None = None, **how: Any
) -> Comparison:
    """The contrasts (treatment, baseline) of one endpoint, a family of their own.

    Args:
      values: optimizer → seed → value; NaN for a run that diverged or failed.
      pairs: which treatment against which baseline.
      family: contrasts to adjust for, where more were planned than `pairs`.
      margin: percent of the baseline within which a difference does not matter.
      how: the attributes of a `Question`, and the other arguments of `compare_endpoints`.
    """
    empty = [name for name, seeds in values.items() if not seeds]
    if empty:
        raise ValueError(f"`values` holds no value for {first_few([repr(name) for name in empty])}: leave it out")
    attributes = {field.name for field in dataclasses.fields(Question)}
    about = {name: value for name, value in how.items() if name in attributes and value is not None}
    rest = {name: value for name, value in how.items() if name not in attributes}
    (found,) = compare_endpoints([Question(values, **about)], pairs, planned=family, margin=margin, **rest)
    return found


def compare(values: Outcomes, *, baseline: str, **how: Any) -> Comparison:
    """Every other optimizer against `baseline`; arguments as in `compare_pairs`.

    Example:
      >>> adam, kbeta = {0: 4.0, 1: 2.0, 2: 8.0}, {0: 2.0, 1: 1.5, 2: 4.0}
      >>> found = compare({"adam": adam, "kbeta": kbeta}, baseline="adam", log=True).contrasts[0]
      >>> round(found.effect.value, 3), found.wins, found.verdict
      (1.747, 3, 'untested')
    """
    if baseline not in values:
        raise unknown("baseline", baseline, list(values))
    others = [name for name in values if name != baseline]
    if not others:
        raise ValueError(f"`values` holds only {baseline!r}: add the runs of another optimizer to compare with it")
    if how.get("log") and (run := without_logarithm(values)):
        name, seed = run
        raise ValueError(f"`log` needs values > 0; {name!r} has {values[name][seed]!r} for seed {seed!r}: leave it out")
    return compare_pairs(values, [(name, baseline) for name in others], **how)


def _side_by_side(
    question: Question,
    family: Family,
    pairs: Sequence[tuple[str, str]],
    failed: Failed,
    count_failed: bool,
    resamples: int,
) -> Judged:
    """One endpoint with its values paired and nothing ruled yet."""
    notes = list(question.notes)
    if question.log and without_logarithm(question.values):
        question = dataclasses.replace(question, log=False)
        notes.append("values at or below 0 have no logarithm: compared as differences instead of ratios")
    values: dict[str, dict[Seed, float]] = {}
    counted: dict[str, dict[Seed, float]] = {}
    for arm, own in question.values.items():
        values[arm] = {seed: x if is_number(x) else math.nan for seed, x in own.items()}
        left_out = () if count_failed else failed.get(arm, ())
        counted[arm] = {seed: x for seed, x in values[arm].items() if seed not in left_out}
    common = {(a, b): in_order(values.get(a, {}).keys() & values.get(b, {}).keys()) for a, b in pairs}
    missing = tuple(pair for pair, seeds in common.items() if not seeds)
    if missing:
        notes.append(f"no finished seed in common, so not compared: {first_few([versus(*pair) for pair in missing])}")
    if len(common) - len(missing) > BOOTSTRAPPED:
        resamples = 0
        notes.append(f"{len(common) - len(missing)} contrasts: no bootstrap intervals, which are for few")
    paired = {}
    for (a, b), seeds in common.items():
        if seeds:
            lost = Sides(question.lost.get(a, nothing_lost), question.lost.get(b, nothing_lost))
            unfinished = np.array([seed not in counted[a] or seed not in counted[b] for seed in seeds])
            x = np.array([values[a][seed] for seed in seeds])
            y = np.array([values[b][seed] for seed in seeds])
            paired[a, b] = _paired(
                x, y, unfinished, seeds=tuple(seeds), resamples=resamples, lost=lost, **question.scale
            )
    return Judged(question, family, values, counted, paired, missing, failed, tuple(notes))


def _paired(x: Array, y: Array, unfinished: Array, *, log: bool, higher_is_better: bool, **more: Any) -> Paired:
    fine_x, fine_y = np.isfinite(x), np.isfinite(y)
    fine = fine_x & fine_y
    with np.errstate(all="ignore"):
        u, v = (np.log10(x), np.log10(y)) if log else (x, y)
        d = np.where(x == y, 0.0, u - v if higher_is_better else v - u)
    d = np.where(fine, d, np.where(fine_x, np.inf, np.where(fine_y, -np.inf, 0.0)))
    d = np.where(unfinished, np.nan, d)
    size = np.maximum(np.abs(u), np.abs(v))
    rounding = 4 * np.finfo(float).eps * np.where(fine, np.maximum(size, 1.0) if log else size, 0.0)
    return Paired(x=x, y=y, d=d, rounding=rounding, log=log, higher_is_better=higher_is_better, **more)


def _statistics(of: Judged) -> dict[tuple[str, str], dict[str, Finding]]:
    """Every statistic of every contrast, each one's p adjusted for the family."""
    found: dict[tuple[str, str], dict[str, Finding]] = {pair: {} for pair in of.paired}
    for statistic in OF_CONTRASTS:
        results = [None if one.unfinished else statistic.compute(one) for one in of.paired.values()]
        adjusted = holm([None if result is None else result.p for result in results], of.family.size)
        for own, result, p_holm in zip(found.values(), results, adjusted, strict=True):
            if result is not None:
                own[statistic.name] = dataclasses.replace(result, p_holm=p_holm)
    return found


def comparison(of: Judged, margin: float | None = None) -> Comparison:
    """What was judged, with its statistics and in words."""
    question = of.question
    contrasts = tuple(_contrast(of, pair, statistics) for pair, statistics in _statistics(of).items())
    arms = {}
    for arm, own in of.counted.items():
        if own:
            one = OneArm(np.array([own[seed] for seed in in_order(own)]), **question.scale)
            arms[arm] = {each.name: found for each in OF_ARMS if (found := each.compute(one))}
    notes = [*of.notes, *_notes(contrasts)]
    if margin is not None and any(c.verdict in verdicts.JUDGED and c.percent is None for c in contrasts):
        notes.append(f"without percentages nothing can be called equal within {margin:g} %")
    return Comparison(
        **question.scale,
        confidence=of.family.confidence,
        margin=margin,
        seeds=tuple(all_seeds(of.values)),
        values=of.values,
        arms=arms,
        contrasts=contrasts,
        missing=of.missing,
        failed={arm: in_order(seeds) for arm, seeds in of.failed.items()},
        notes=tuple(notes),
        name=question.name,
        title=question.title,
        primary=question.primary,
        declared=question.declared,
        is_time=question.is_time,
    )


def _contrast(of: Judged, pair: tuple[str, str], statistics: Mapping[str, Finding]) -> Contrast:
    """One contrast; while it is unfinished, without what would decide."""
    paired, ruling, (treatment, baseline) = of.paired[pair], of.rulings[pair], pair
    rows = zip(paired.seeds, paired.x.tolist(), paired.y.tolist(), paired.d.tolist(), strict=True)
    lost = Sides(_lost_seeds(paired, paired.x), _lost_seeds(paired, paired.y))
    failed = Sides(of.count_failed(treatment, lost.treatment), of.count_failed(baseline, lost.baseline))
    contrast = Contrast(
        treatment=treatment,
        baseline=baseline,
        verdict=ruling.verdict,
        pairs=tuple(Pair(*row) for row in rows),
        n=len(paired.seeds),
        wins=paired.wins,
        ties=paired.ties,
        losses=paired.losses,
        diverged=Sides(len(lost.treatment) - failed.treatment, len(lost.baseline) - failed.baseline),
        failed=failed,
        family=of.family.size,
        statistics=statistics,
        notes=tuple(unpaired(of.values, treatment, baseline)),
        log=paired.log,
        higher_is_better=paired.higher_is_better,
        is_time=of.question.is_time,
    )
    if paired.unfinished:
        return dataclasses.replace(contrast, why=_why_unfinished(contrast))
    return _decided(contrast, paired, ruling, of.family.confidence)


def _lost_seeds(paired: Paired, values: Array) -> list[Seed]:
    """The seeds on which one side has no value."""
    return [seed for seed, value in zip(paired.seeds, values, strict=True) if not math.isfinite(value)]


def _why_unfinished(c: Contrast) -> str:
    failed = ((c.treatment, c.failed.treatment), (c.baseline, c.failed.baseline))
    parts = [f"{count} of {c.n} of {name_of(arm)}" for arm, count in failed if count]
    return f"{' and '.join(parts)} failed"


def _decided(contrast: Contrast, paired: Paired, ruling: Ruling, confidence: float) -> Contrast:
    """The contrast with what decides, each interval at this confidence."""
    decision, detectable = paired.decision, sizes.detectable(paired, confidence)
    return dataclasses.replace(
        contrast,
        why=ruling.why,
        small=ruling.small,
        carried_by=ruling.carried_by,
        test=decision.test,
        tuned=decision.tuned,
        p=decision.p,
        p_holm=ruling.p_holm,
        effect=sizes.effect(paired, confidence),
        percent=sizes.percent(paired, confidence),
        detectable=detectable,
        detectable_percent=None if detectable is None else sizes.percent_of(detectable, paired),
        notes=(*contrast.notes, *_limits(paired, ruling)),
        side=decision.side,
    )


def unpaired(values: Outcomes, treatment: str, baseline: str) -> list[str]:
    """Which seeds of one arm have no partner in the other."""
    notes = []
    for name, other in ((treatment, baseline), (baseline, treatment)):
        lone = in_order(values[name].keys() - values[other].keys())
        if lone:
            what = f"{name_of(name)} has no partner in {name_of(other)} for {of_seeds(lone)}"
            notes.append(f"{what}: not part of this contrast")
    return notes


def _limits(paired: Paired, ruling: Ruling) -> list[str]:
    """What so few, or such, pairs cannot say."""
    notes, n, w = [], len(paired.both), paired.wilcoxon
    if n < len(paired.d):
        of = f"{len(paired.d) - n} of {len(paired.d)} pairs hold a lost run"
        notes.append(f"{of}: ranked as the worst, left out of mean, t and bootstrap")
    if paired.t.t is None:
        why = "no pair of finite runs" if not n else "one finite pair" if n == 1 else "the differences are all equal"
        notes.append(f"{why}: {UNDEFINED}")
    if ruling.why and (paired.t.t is not None or w.n > 1):
        notes.append(ruling.why)
    if w.zeros:
        notes.append(f"{w.zeros} pair{'s are' if w.zeros > 1 else ' is'} equal: set aside by Wilcoxon and sign test")
    return notes


def _notes(contrasts: Sequence[Contrast]) -> list[str]:
    """The notes of the contrasts, each once and naming whom it is about."""
    about: dict[str, list[str]] = {}
    for c in contrasts:
        for note in c.notes:
            about.setdefault(note, []).append(c.name)
    every = len(contrasts)
    return [f"{'every contrast' if 1 < every == len(who) else first_few(who)}: {note}" for note, who in about.items()]
