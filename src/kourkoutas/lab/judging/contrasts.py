"""One optimizer against another, paired by seed: effect sizes, tests, and what the data support."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from kourkoutas.lab.judging.intervals import (
    RESAMPLES,
    Effect,
    Interval,
    antilog,
    antilog_interval,
    bootstrap_ci,
    clopper_pearson,
    effect_times,
    quantile,
    t_interval,
    unit_of,
)
from kourkoutas.lab.judging.tests import McNemar, PairedT, SignTest, Wilcoxon, mcnemar, paired_t, sign_test, wilcoxon
from kourkoutas.lab.judging.values import Array, Seed, Values, check_known, check_positive, in_order, listed

UNDEFINED = "t, its p-value, d_z, r and intervals are undefined"
Verdict = Literal["better", "worse", "unclear", "identical", "untested"]


@dataclass(frozen=True)
class Pair:
    """One seed's two values; `difference` is d, infinite when one of the runs diverged."""

    seed: Seed
    treatment: float
    baseline: float
    difference: float


@dataclass(frozen=True)
class Contrast:
    """Treatment against baseline, effect sizes first.

    Attributes:
      difference: mean of d, of log10 values where the comparison is on logarithms.
      ratio: on logarithms only: 10^difference.
      percent: how much better the treatment is, in percent of the baseline; None where the baseline has no one sign.
      baseline_size: what percentages are of: |mean| of the baseline; None on logarithms, or without one sign.
      test: the test that decides: "paired t", or "Wilcoxon" where a run diverged.
      p: of the deciding test.
      p_holm: the same, adjusted for the family of contrasts; p itself for a contrast on its own.
      family: contrasts that p_holm is adjusted for.
    """

    treatment: str
    baseline: str
    pairs: tuple[Pair, ...]
    wins: int
    ties: int
    losses: int
    diverged_treatment: int
    diverged_baseline: int
    improvement: float
    improvement_ci: Interval
    difference: Effect | None
    ratio: Effect | None
    percent: Effect | None
    baseline_size: float | None
    median: float
    q1: float
    q3: float
    t: PairedT
    wilcoxon: Wilcoxon
    sign: SignTest
    mcnemar: McNemar | None
    notes: tuple[str, ...]
    confidence: float
    test: str
    p: float | None
    p_holm: float | None
    family: int = 1

    @property
    def n(self) -> int:
        return len(self.pairs)

    @property
    def diverged(self) -> int:
        return self.diverged_treatment + self.diverged_baseline

    @property
    def verdict(self) -> Verdict:
        """What the data support about the treatment, by the one rule of the laboratory:

        the adjusted p of the deciding test is below 1 - confidence, and the effect's side says "better" or "worse".
        """
        if self.ties == self.n:
            return "identical" if self.t.n else "untested"
        if self.p_holm is None or self.n < 2:
            return "untested"
        if self.p_holm >= 1 - self.confidence:
            return "unclear"
        side = self.wilcoxon.rank_biserial if self.diverged else self.t.t
        return "better" if side is not None and side > 0 else "worse"


def contrast(
    values: Values,
    treatment: str,
    baseline: str,
    *,
    log: bool = False,
    higher_is_better: bool = False,
    threshold: float | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
) -> Contrast:
    """Treatment against baseline over the seeds that both have."""
    check_known(values, treatment, "treatment")
    check_known(values, baseline, "baseline")
    common = in_order(seed for seed in values[baseline] if seed in values[treatment])
    if not common:
        raise ValueError(
            f"{treatment!r} and {baseline!r} have no seed in common, so nothing can be paired: "
            "run both with the same seeds"
        )
    if log:
        check_positive(values, (treatment, baseline))
    x, y = (np.array([float(values[name][seed]) for seed in common]) for name in (treatment, baseline))
    notes = unpaired(values, treatment, baseline)
    fine_x, fine_y = np.isfinite(x), np.isfinite(y)
    fine = fine_x & fine_y

    # d = y[baseline] - y[treatment], +inf where only the baseline diverged, -inf where only the treatment did
    unit = 1.0 if log else unit_of(x, y)
    with np.errstate(all="ignore"):
        u, v = (np.log10(x), np.log10(y)) if log else (x / unit, y / unit)
        d = np.where(x == y, 0.0, u - v if higher_is_better else v - u)
    d = np.where(fine, d, np.where(fine_x, np.inf, np.where(fine_y, -np.inf, 0.0)))
    size = np.maximum(np.abs(u), np.abs(v))
    rounding = 4 * np.finfo(float).eps * np.where(fine, np.maximum(size, 1.0) if log else size, 0.0)
    wins, losses = int(np.sum(d > 0)), int(np.sum(d < 0))
    ties = len(d) - wins - losses

    finite, left_out = d[fine], int(np.sum(~fine))
    t = paired_t(finite, rounding[fine], left_out)
    w = wilcoxon(d, rounding)
    if left_out:
        notes.append(
            f"{left_out} of {len(d)} pairs hold a diverged run ({treatment}: {int(np.sum(~fine_x))}, {baseline}: "
            f"{int(np.sum(~fine_y))}): ranked as the worst, left out of mean, t and bootstrap"
        )
    notes += _limits(finite, t, w, confidence)

    difference = ratio = percent = None
    size_y = None if log else baseline_size(v[fine])
    if len(finite):
        ci = t_interval(finite, confidence) if t.t is not None else None
        boot = bootstrap_ci(finite, np.mean, confidence, resamples) if t.t is not None else None
        difference = Effect(float(finite.mean()), ci, boot)
        if log:
            ratio = Effect(antilog(difference.value), antilog_interval(ci), antilog_interval(boot))
        percent = _percents(difference, size_y, log, higher_is_better)
    with np.errstate(over="ignore"):
        spread = np.power(10.0, d) if log else d
        own = d * unit
    p = w.p if left_out else t.p
    return Contrast(
        treatment=treatment,
        baseline=baseline,
        pairs=tuple(Pair(s, float(a), float(b), float(c)) for s, a, b, c in zip(common, x, y, own, strict=True)),
        wins=wins,
        ties=ties,
        losses=losses,
        diverged_treatment=int(np.sum(~fine_x)),
        diverged_baseline=int(np.sum(~fine_y)),
        improvement=(wins + 0.5 * ties) / len(d),
        improvement_ci=clopper_pearson(wins + 0.5 * ties, len(d), confidence),
        difference=None if difference is None else effect_times(difference, unit),
        ratio=ratio,
        percent=percent,
        baseline_size=None if size_y is None else size_y * unit,
        median=quantile(spread, 0.5) * unit,
        q1=quantile(spread, 0.25) * unit,
        q3=quantile(spread, 0.75) * unit,
        t=t,
        wilcoxon=w,
        sign=sign_test(wins, losses),
        mcnemar=None if threshold is None else mcnemar(x, y, threshold, higher_is_better),
        notes=tuple(notes),
        confidence=confidence,
        test="Wilcoxon" if left_out else "paired t",
        p=p,
        p_holm=p,
    )


def unpaired(values: Values, treatment: str, baseline: str) -> list[str]:
    """Which seeds of one arm have no partner in the other."""
    return [
        f"{name} has no partner in {other} for seed{'s' if len(lone) > 1 else ''} {listed(lone)}: "
        "not part of this contrast"
        for name, other in ((treatment, baseline), (baseline, treatment))
        if (lone := in_order(seed for seed in values[name] if seed not in values[other]))
    ]


def _limits(finite: Array, t: PairedT, w: Wilcoxon, confidence: float) -> list[str]:
    """What so few, or such, pairs cannot say."""
    notes = []
    if t.t is None:
        why = (
            "no pair of finite runs"
            if not len(finite)
            else "one finite pair"
            if len(finite) == 1
            else "the differences are all equal"
        )
        notes.append(f"{why}: {UNDEFINED}")
    elif (floor := 2.0 ** (1 - len(finite))) > 1 - confidence:
        notes.append(f"{len(finite)} finite pairs: no exact two-sided p-value can be below {floor:.3g}")
    if w.zeros:
        notes.append(f"{w.zeros} pair{'s are' if w.zeros > 1 else ' is'} equal: set aside by Wilcoxon and sign test")
    if "tied" in w.method:
        notes.append("some differences have the same size: Wilcoxon shares their ranks, still exact")
    return notes


def baseline_size(baseline: Array) -> float | None:
    """|mean| of the baseline's values, for percentages; None where they have no one sign."""
    if not len(baseline) or not (np.all(baseline > 0) or np.all(baseline < 0)):
        return None
    return abs(float(baseline.mean()))


def percent_of(d: float, size: float | None, log: bool, higher_is_better: bool) -> float | None:
    """A difference d in percent of the baseline, of its geometric mean on logarithms, else of its mean `size`:

    100·(1 - treatment/baseline) where lower is better, 100·(treatment/baseline - 1) where higher is.
    """
    if log:
        return 100 * (antilog(d) - 1) if higher_is_better else 100 * (1 - antilog(-d))
    return None if size is None else 100 * (d / size)


def _percents(difference: Effect, size: float | None, log: bool, higher_is_better: bool) -> Effect | None:
    """The effect in percent. NOTE: the baseline's mean is taken as it is; the interval is that of the difference."""
    value = percent_of(difference.value, size, log, higher_is_better)
    if value is None:
        return None

    def of(ci: Interval | None) -> Interval | None:
        if ci is None:
            return None
        low, high = (percent_of(end, size, log, higher_is_better) for end in (ci.low, ci.high))
        return None if low is None or high is None else Interval(low, high, ci.method)

    return Effect(value, of(difference.ci), of(difference.bootstrap_ci))
