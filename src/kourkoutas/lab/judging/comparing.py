"""Optimizers against each other on {optimizer: {seed: value}}, paired by seed.

All tests are two-sided. With y = log10(value) (`log=True`) or y = value, the difference of a seed is

    d = y[baseline] - y[treatment]        d > 0: the treatment is better (lower)

Where higher values are better, d changes sign, so d > 0 and a ratio above 1 always speak for the treatment.

NOTE: three rules hold everywhere.

* A value that is no number, or beyond 1e100, is a run that was lost: it diverged or failed. It is counted, ranks as the
  worst (two of one seed tie), and has no place in means, t and bootstrap. Ranks decide then.
* A seed that only one of two optimizers has cannot be paired: the contrast uses the seeds of both and lists the rest.
* What the data cannot support (one pair, differences without variance) is None, not a number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from kourkoutas.lab.errors import unknown
from kourkoutas.lab.judging.attribution import Attribution, attribute
from kourkoutas.lab.judging.deciding import RANKS, Lost, T, nothing_lost
from kourkoutas.lab.judging.hypothesis_tests import detectable_ratio, holm
from kourkoutas.lab.judging.intervals import CONFIDENCE, RESAMPLES, Interval, antilog, fieller, t_interval
from kourkoutas.lab.judging.statistics import (
    OF_ARMS,
    OF_CONTRASTS,
    UNDEFINED,
    OneArm,
    Paired,
    Result,
    between,
    scaled,
    show,
)
from kourkoutas.lab.judging.values import Array, Seed, Values, in_order, is_number, listed, of_seeds, without_logarithm
from kourkoutas.lab.specs.looks import label, versus

BOOTSTRAPPED = 200  # contrasts of one comparison; with more, bootstrap intervals would take minutes

Verdict = Literal["better", "worse", "unclear", "identical", "untested"]


@dataclass(frozen=True)
class Pair:
    """One seed's two values, NaN for a lost run; `difference` is d, infinite when one of the runs was lost."""

    seed: Seed
    treatment: float
    baseline: float
    difference: float


@dataclass(frozen=True)
class Contrast:
    """Treatment against baseline.

    Attributes:
      verdict: by the one rule: where p_holm is below 0.05, the effect's side says "better" or "worse".
      diverged, failed: how many runs of (treatment, baseline) were lost in which way.
      test: what decides: "paired t", or "Wilcoxon" where a run was lost.
      tuned: whether p and intervals count the luck of a tuning.
      p, p_holm: the p that decides, and the same adjusted for the `family` of planned contrasts.
      effect: mean difference, on logarithms ratio of geometric means; for ranks the pseudo-median. Its interval goes
        with p_holm: it leaves out no difference exactly where p_holm is below 0.05.
      percent: how much better the treatment is in percent of the baseline, with the same interval; None where the
        baseline has no one sign.
      detectable, detectable_percent: the difference that these seeds would have found four times out of five; None
        where ranks decide.
      statistics: {name: its value}, as `statistics.OF_CONTRASTS` lists them; they leave the luck of a tuning out.
    """

    treatment: str
    baseline: str
    verdict: Verdict = field(init=False)
    pairs: tuple[Pair, ...]
    n: int
    wins: int
    ties: int
    losses: int
    diverged: tuple[int, int]
    failed: tuple[int, int]
    test: str
    tuned: bool
    p: float | None
    p_holm: float | None
    family: int
    effect: Result | None
    percent: Result | None
    detectable: float | None
    detectable_percent: float | None
    statistics: Mapping[str, Result]
    notes: tuple[str, ...]
    log: bool
    higher_is_better: bool
    side: float = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "verdict", self._verdict())

    def _verdict(self) -> Verdict:
        if self.ties == self.n:
            return "identical" if any(math.isfinite(pair.treatment) for pair in self.pairs) else "untested"
        if self.p_holm is None or self.n < 2:
            return "untested"
        if self.p_holm >= 1 - CONFIDENCE:
            return "unclear"
        return "better" if self.side > 0 else "worse"

    @property
    def name(self) -> str:
        return versus(self.treatment, self.baseline)

    @property
    def lost(self) -> int:
        return sum(self.diverged) + sum(self.failed)

    @property
    def test_name(self) -> str:
        return f"{self.test} with the luck of the tuning" if self.tuned else self.test

    def rows(self) -> list[tuple[str, str, str, str]]:
        """(statistic, value, p, adjusted p) for a table, the one that decides first."""
        effect = "–" if self.effect is None else show(self.effect.value)
        if self.effect is not None and (ends := self.effect.interval) is not None:
            effect += f" [{between(ends.low, ends.high, show)}]"
        test = f"decides: {self.test}{', with luck' if self.tuned else ''}"
        rows = [(test, effect, show(self.p, 3), show(self.p_holm, 3))]
        for one in OF_CONTRASTS:
            if (found := self.statistics.get(one.name)) is not None:
                p, p_holm = ("", "") if found.p is None else (show(found.p, 3), show(found.p_holm, 3))
                rows.append((one.title, one.show(found), p, p_holm))
        return rows


@dataclass(frozen=True)
class Comparison:
    """One endpoint: every optimizer's statistics and the planned contrasts.

    Attributes:
      name: as it can be asked for again with --endpoint.
      primary: whether it decides the study. All others are secondary.
      declared: whether it was named before the runs were made.
      log: compared as ratios, on log10.
      values: optimizer → seed → value; NaN for a lost run.
      arms: optimizer → {name: value} of `statistics.OF_ARMS`.
      missing: planned pairs that could not be compared.
      failed: optimizer → seeds whose runs failed; other lost runs diverged.
    """

    log: bool
    higher_is_better: bool
    threshold: float | None
    seeds: tuple[Seed, ...]
    values: Values
    arms: Mapping[str, Mapping[str, Result]]
    contrasts: tuple[Contrast, ...]
    attribution: tuple[Attribution, ...]
    missing: tuple[tuple[str, str], ...]
    failed: Mapping[str, Sequence[Seed]]
    notes: tuple[str, ...]
    name: str = "value"
    title: str = "value"
    primary: bool = True
    declared: bool = True

    @property
    def standing(self) -> str:
        """Primary, secondary, or secondary and chosen with the results in view."""
        if self.primary:
            return "decides"
        return "secondary" if self.declared else "secondary, asked for after the runs"


def compare_pairs(
    values: Values,
    pairs: Sequence[tuple[str, str]],
    *,
    log: bool = False,
    higher_is_better: bool = False,
    threshold: float | None = None,
    resamples: int = RESAMPLES,
    family: int = 0,
    lost: Mapping[str, Lost | None] | None = None,
    failed: Mapping[str, Collection[Seed]] | None = None,
    notes: Sequence[str] = (),
    **about: Any,
) -> Comparison:
    """The planned contrasts (treatment, baseline), adjusted by Holm's rule.

    Args:
      values: optimizer → seed → value; NaN for a run that diverged or failed.
      pairs: which treatment against which baseline.
      log: analyse log10 of the values, and report ratios of geometric means.
      higher_is_better: for accuracies and the like.
      threshold: a run that reaches it is a success; adds success rates and McNemar's test.
      resamples: of each bootstrap; none are made for more than `BOOTSTRAPPED` contrasts.
      family: contrasts to adjust for, where more were planned than `pairs`.
      lost: {optimizer: what its tuning may have lost}, None where that is not known; untuned ones are left out.
      failed: {optimizer: seeds whose runs failed}; other lost runs diverged.
      notes: that stand before those of the contrasts.
      about: name, title, primary and declared of the comparison.
    """
    empty = [name for name, seeds in values.items() if not seeds]
    if empty:
        raise ValueError(f"`values` holds no value for {listed([repr(name) for name in empty])}: leave it out")
    told = list(notes)
    if log and without_logarithm(values):
        log = False
        told.append("values at or below 0 have no logarithm: compared as differences instead of ratios")
    clean = {arm: {s: x if is_number(x) else math.nan for s, x in own.items()} for arm, own in values.items()}
    shared = {(a, b): in_order(clean.get(a, {}).keys() & clean.get(b, {}).keys()) for a, b in pairs}
    common = {pair: seeds for pair, seeds in shared.items() if seeds}
    if missing := [pair for pair in pairs if pair not in common]:
        told.append(f"no finished seed in common, so not compared: {listed([versus(*pair) for pair in missing])}")
    if len(common) > BOOTSTRAPPED:
        resamples = 0
        told.append(f"{len(common)} contrasts: no bootstrap intervals, which are for few")
    scale: dict[str, Any] = {"log": log, "higher_is_better": higher_is_better, "threshold": threshold}
    paired = [
        _paired(
            *(np.array([clean[arm][seed] for seed in seeds]) for arm in pair),
            **scale,
            resamples=resamples,
            lost=tuple((lost or {}).get(arm, nothing_lost) for arm in pair),
        )
        for pair, seeds in common.items()
    ]
    family = max(family, len(pairs))
    adjusted = holm([one.decision.p for one in paired], family)
    results = [{one.name: r for one in OF_CONTRASTS if (r := one.compute(of))} for of in paired]
    for one in OF_CONTRASTS:
        p_holm = holm([own[one.name].p if one.name in own else None for own in results], family)
        for own, p in zip(results, p_holm, strict=True):
            if one.name in own:
                own[one.name] = dataclasses.replace(own[one.name], p_holm=p)
    contrasts = tuple(
        _contrast(a, b, seeds, of, p, family, found, clean, failed or {})
        for ((a, b), seeds), of, p, found in zip(common.items(), paired, adjusted, results, strict=True)
    )
    verdicts = {(c.treatment, c.baseline): c.verdict for c in contrasts}
    shares = attribute(clean, log=log, higher_is_better=higher_is_better, verdicts=verdicts) if pairs else ()
    return Comparison(
        **scale,
        seeds=tuple(in_order({seed for seeds in clean.values() for seed in seeds})),
        values=clean,
        arms={arm: _of_arm(own, scale) for arm, own in clean.items()},
        contrasts=contrasts,
        attribution=shares,
        missing=tuple(missing),
        failed={arm: in_order(seeds) for arm, seeds in (failed or {}).items()},
        notes=(*told, *_notes(contrasts)),
        **about,
    )


def compare(values: Values, *, baseline: str, **how: Any) -> Comparison:
    """Every other optimizer against `baseline`; arguments as in `compare_pairs`.

    Example:
      >>> adam, kbeta = {0: 4.0, 1: 2.0, 2: 8.0}, {0: 2.0, 1: 1.5, 2: 4.0}
      >>> found = compare({"adam": adam, "kbeta": kbeta}, baseline="adam", log=True).contrasts[0]
      >>> round(found.effect.value, 3), found.wins, found.verdict
      (1.747, 3, 'unclear')
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


def _paired(x: Array, y: Array, *, log: bool, higher_is_better: bool, **more: Any) -> Paired:
    fine_x, fine_y = np.isfinite(x), np.isfinite(y)
    fine = fine_x & fine_y
    with np.errstate(all="ignore"):
        u, v = (np.log10(x), np.log10(y)) if log else (x, y)
        d = np.where(x == y, 0.0, u - v if higher_is_better else v - u)
    d = np.where(fine, d, np.where(fine_x, np.inf, np.where(fine_y, -np.inf, 0.0)))
    size = np.maximum(np.abs(u), np.abs(v))
    rounding = 4 * np.finfo(float).eps * np.where(fine, np.maximum(size, 1.0) if log else size, 0.0)
    return Paired(x, y, d, rounding, log=log, higher_is_better=higher_is_better, **more)


def _of_arm(own: Mapping[Seed, float], scale: Mapping[str, Any]) -> dict[str, Result]:
    arm = OneArm(np.array([own[seed] for seed in in_order(own)]), **scale)
    return {one.name: found for one in OF_ARMS if (found := one.compute(arm))}


def _contrast(
    treatment: str,
    baseline: str,
    seeds: Sequence[Seed],
    paired: Paired,
    p_holm: float | None,
    family: int,
    statistics: Mapping[str, Result],
    values: Values,
    failed: Mapping[str, Collection[Seed]],
) -> Contrast:
    decision = paired.decision
    lost = [[s for s, v in zip(seeds, x, strict=True) if not math.isfinite(v)] for x in (paired.x, paired.y)]
    crashed = [sum(s in failed.get(arm, ()) for s in own) for arm, own in zip((treatment, baseline), lost, strict=True)]
    # The interval that goes with the adjusted p: at 95 % for one contrast, wider by as much as p was raised.
    level = 1 - (1 - CONFIDENCE) * decision.p / p_holm if decision.p and p_holm else CONFIDENCE
    size = None if paired.log else _one_sign(paired.y[paired.whole])
    detectable = _detectable(paired, family)
    side = (paired.wilcoxon.rank_biserial if decision.test == RANKS else decision.estimate) or 0.0
    return Contrast(
        treatment=treatment,
        baseline=baseline,
        pairs=tuple(
            Pair(s, float(x), float(y), float(d))
            for s, x, y, d in zip(seeds, paired.x, paired.y, paired.d, strict=True)
        ),
        n=len(seeds),
        wins=paired.wins,
        ties=len(seeds) - paired.wins - paired.losses,
        losses=paired.losses,
        diverged=(len(lost[0]) - crashed[0], len(lost[1]) - crashed[1]),
        failed=(crashed[0], crashed[1]),
        test=decision.test,
        tuned=decision.tuned,
        p=decision.p,
        p_holm=p_holm,
        family=family,
        effect=None if decision.estimate is None else scaled(decision.estimate, decision.interval(level), paired.log),
        percent=_percent(paired, size, level),
        detectable=detectable,
        detectable_percent=None if detectable is None else _percent_of(detectable, size, paired),
        statistics=statistics,
        notes=(*unpaired(values, treatment, baseline), *_limits(paired)),
        log=paired.log,
        higher_is_better=paired.higher_is_better,
        side=side,
    )


def _percent_of(d: float, size: float | None, scale: Paired) -> float | None:
    """A difference d in percent of the baseline, of its geometric mean on logarithms, else of its mean `size`:

    100·(1 - treatment/baseline) where lower is better, 100·(treatment/baseline - 1) where higher is.
    """
    if scale.log:
        return 100 * (antilog(d) - 1) if scale.higher_is_better else 100 * (1 - antilog(-d))
    return None if size is None else 100 * (d / size)


def _percent(paired: Paired, size: float | None, level: float) -> Result | None:
    """The effect in percent. A ratio of two means has Fieller's interval; what the luck of a tuning adds to the
    interval of the difference is added to it."""
    d, interval = paired.decision.estimate, paired.decision.interval(level)
    value = None if d is None or not math.isfinite(d) else _percent_of(d, size, paired)
    if value is None or interval is None:
        return None if value is None else Result(value)
    low, high = (_percent_of(end, size, paired) for end in (interval.low, interval.high))
    if low is None or high is None:
        return Result(value)
    if size is not None and paired.decision.test == T:
        ratio, plain = fieller(paired.both, np.abs(paired.y), level), t_interval(paired.both, level)
        if ratio is None:
            return None
        low += 100 * (ratio.low - plain.low / size)
        high += 100 * (ratio.high - plain.high / size)
        if interval.holds(0.0):
            low, high = min(low, 0.0), max(high, 0.0)
    return Result(value, Interval(low, high, interval.method))


def _detectable(paired: Paired, family: int) -> float | None:
    """The difference that these seeds would have found with probability 0.8; None where ranks decide."""
    if paired.decision.test != T or paired.t.t is None:
        return None
    alpha = (1 - CONFIDENCE) / family
    found = detectable_ratio(len(paired.both), alpha) * float(paired.both.std(ddof=1))
    if paired.decision.tuned:
        with_luck, without = paired.decision.interval(1 - alpha), t_interval(paired.both, 1 - alpha)
        if with_luck is None:
            return None
        found += max(without.low - with_luck.low, with_luck.high - without.high)
    return found


def _one_sign(baseline: Array) -> float | None:
    """|mean| of the baseline's values, for percentages; None where they have no one sign."""
    if not len(baseline) or not (np.all(baseline > 0) or np.all(baseline < 0)):
        return None
    return abs(float(baseline.mean()))


def unpaired(values: Values, treatment: str, baseline: str) -> list[str]:
    """Which seeds of one arm have no partner in the other."""
    return [
        f"{label(name)} has no partner in {label(other)} for {of_seeds(lone)}: not part of this contrast"
        for name, other in ((treatment, baseline), (baseline, treatment))
        if (lone := in_order(seed for seed in values[name] if seed not in values[other]))
    ]


def _limits(paired: Paired) -> list[str]:
    """What so few, or such, pairs cannot say."""
    notes, n, w = [], len(paired.both), paired.wilcoxon
    if n < len(paired.d):
        of = f"{len(paired.d) - n} of {len(paired.d)} pairs hold a run that diverged or failed"
        notes.append(f"{of}: ranked as the worst, left out of mean, t and bootstrap")
    if paired.t.t is None:
        why = "no pair of finite runs" if not n else "one finite pair" if n == 1 else "the differences are all equal"
        notes.append(f"{why}: {UNDEFINED}")
    elif (floor := 2.0 ** (1 - n)) > 1 - CONFIDENCE:
        notes.append(f"{n} finite pairs: no exact two-sided p-value can be below {floor:.3g}")
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
    return [f"{'every contrast' if 1 < every == len(who) else listed(who)}: {note}" for note, who in about.items()]
