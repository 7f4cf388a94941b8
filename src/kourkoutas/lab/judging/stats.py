"""Paired statistics on {optimizer: {seed: value}}, on scipy.

All tests are two-sided and paired by seed. With y = log10(value) (`log=True`) or y = value, the difference of a seed is

    d = y[baseline] - y[treatment]        d > 0: the treatment is better (lower)

and its mean is reported as the geometric-mean ratio baseline/treatment (log) or as the mean difference. Where higher
values are better, d changes sign and the ratio is treatment/baseline, so d > 0 and a ratio above 1 always speak for
the treatment.

NOTE: three rules hold everywhere, and every use of them is printed among the notes of a result.

* A value that is NaN or infinite is a diverged run. It is counted, ranks as the worst (medians, quartiles, IQM, wins,
  sign test, Wilcoxon, McNemar; two diverged runs of one seed tie), and has no place in means, t and bootstrap, which
  say how many pairs they left out. A verdict is then taken from the ranks.
* A seed that only one of two optimizers has cannot be paired: the contrast uses the seeds of both and lists the rest.
* What the data cannot support (one pair, differences without variance) is None, not a number.

The parts: `values`, `intervals`, `tests`, `summaries` (one optimizer), `contrasts` (two), and here many at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from kourkoutas.lab.judging.contrasts import Contrast, Pair, Verdict, contrast
from kourkoutas.lab.judging.intervals import (
    RESAMPLES,
    Effect,
    Interval,
    antilog,
    bootstrap_ci,
    clopper_pearson,
    iqm,
    quantile,
    t_interval,
)
from kourkoutas.lab.judging.summaries import Rate, Summary, summarise
from kourkoutas.lab.judging.tests import (
    EXACT_UP_TO,
    McNemar,
    PairedT,
    SignTest,
    Wilcoxon,
    holm,
    mcnemar,
    paired_t,
    sign_test,
    wilcoxon,
)
from kourkoutas.lab.judging.values import Array, Seed, Values, check_known, check_positive, in_order, listed, plain

__all__ = [
    "EXACT_UP_TO",
    "RESAMPLES",
    "Array",
    "Comparison",
    "Contrast",
    "Effect",
    "Interval",
    "McNemar",
    "Pair",
    "PairedT",
    "Rate",
    "Seed",
    "SignTest",
    "Summary",
    "Values",
    "Verdict",
    "Wilcoxon",
    "all_notes",
    "antilog",
    "bootstrap_ci",
    "clopper_pearson",
    "compare",
    "compare_pairs",
    "contrast",
    "holm",
    "iqm",
    "mcnemar",
    "paired_t",
    "quantile",
    "sign_test",
    "summarise",
    "t_interval",
    "wilcoxon",
]

BOOTSTRAPPED = 200  # arms and contrasts of one comparison; with more, bootstrap intervals would take minutes


@dataclass(frozen=True)
class Comparison:
    """Every optimizer's summary and the contrasts, with Holm-adjusted p-values across the contrasts."""

    log: bool
    higher_is_better: bool
    confidence: float
    threshold: float | None
    seeds: tuple[Seed, ...]
    values: Values
    summaries: tuple[Summary, ...]
    contrasts: tuple[Contrast, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, all notes together; numbers that are not finite become "nan", "inf" and "-inf"."""
        out: dict[str, Any] = plain(self)
        out["notes"] = all_notes(self)
        for entry, c in zip(out["contrasts"], self.contrasts, strict=True):
            entry["n"], entry["verdict"] = c.n, c.verdict
        return out


def all_notes(comparison: Comparison) -> list[str]:
    """The notes of the comparison and of its contrasts, each once and naming whom it is about."""
    about: dict[str, list[str]] = {}
    for c in comparison.contrasts:
        for note in c.notes:
            about.setdefault(note, []).append(f"{c.treatment} vs {c.baseline}")
    every = len(comparison.contrasts)
    found = [f"{'every contrast' if 1 < every == len(who) else listed(who)}: {note}" for note, who in about.items()]
    return [*comparison.notes, *found]


def compare_pairs(
    values: Values,
    pairs: Sequence[tuple[str, str]],
    *,
    log: bool = False,
    higher_is_better: bool = False,
    threshold: float | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    family: int | None = None,
) -> Comparison:
    """The planned contrasts (treatment, baseline), Holm-adjusted across them.

    Args:
      values: optimizer → seed → final value; NaN or infinite for a diverged run.
      pairs: which treatment against which baseline.
      log: analyse log10 of the values and report geometric-mean ratios.
      higher_is_better: for accuracies and the like.
      threshold: a run that reaches it is a success; adds success rates and McNemar's test.
      confidence: level of all intervals.
      resamples: of each bootstrap; none are made for more than `BOOTSTRAPPED` arms and contrasts.
      family: contrasts to adjust for, where some that were planned cannot be made; None for `pairs` alone.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"`confidence` must be between 0 and 1, for example 0.95; got {confidence!r}")
    empty = [name for name, seeds in values.items() if not seeds]
    if empty or not values:
        raise ValueError(
            f"`values` holds no value for {listed([repr(name) for name in empty]) or 'any optimizer'}: leave it out"
        )
    if log:
        check_positive(values, values)
    notes = []
    if len(values) + len(pairs) > BOOTSTRAPPED:
        resamples = 0
        notes.append(f"{len(values)} arms and {len(pairs)} contrasts: no bootstrap intervals, which are for few")
    summaries = tuple(
        summarise(
            name,
            [values[name][seed] for seed in in_order(values[name])],
            log=log,
            higher_is_better=higher_is_better,
            threshold=threshold,
            confidence=confidence,
            resamples=resamples,
        )
        for name in values
    )
    found = [
        contrast(
            values,
            treatment,
            baseline,
            log=log,
            higher_is_better=higher_is_better,
            threshold=threshold,
            confidence=confidence,
            resamples=resamples,
        )
        for treatment, baseline in pairs
    ]
    family = max(len(found), family or 0)
    decided = holm([c.p for c in found], family)
    by_t = holm([c.t.p for c in found], family)
    by_rank = holm([c.wilcoxon.p for c in found], family)
    by_sign = holm([c.sign.p for c in found], family)
    by_success = holm([c.mcnemar.p if c.mcnemar else None for c in found], family)
    contrasts = tuple(
        replace(
            c,
            p_holm=decided[i],
            family=family,
            t=replace(c.t, p_holm=by_t[i]),
            wilcoxon=replace(c.wilcoxon, p_holm=by_rank[i]),
            sign=replace(c.sign, p_holm=by_sign[i]),
            mcnemar=replace(c.mcnemar, p_holm=by_success[i]) if c.mcnemar else None,
        )
        for i, c in enumerate(found)
    )
    return Comparison(
        log=log,
        higher_is_better=higher_is_better,
        confidence=confidence,
        threshold=threshold,
        seeds=tuple(in_order({seed for seeds in values.values() for seed in seeds})),
        values={name: dict(seeds) for name, seeds in values.items()},
        summaries=summaries,
        contrasts=contrasts,
        notes=(
            *notes,
            *(
                f"{s.optimizer}: {s.diverged} of {s.n} runs diverged; its mean and sd are of the others"
                for s in summaries
                if s.diverged
            ),
        ),
    )


def compare(
    values: Values,
    *,
    baseline: str,
    log: bool = False,
    higher_is_better: bool = False,
    threshold: float | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
) -> Comparison:
    """Every other optimizer against `baseline`; arguments as in `compare_pairs`.

    Example:
      >>> adam, kbeta = {0: 4.0, 1: 2.0, 2: 8.0}, {0: 2.0, 1: 1.5, 2: 4.0}
      >>> found = compare({"adam": adam, "kbeta": kbeta}, baseline="adam", log=True).contrasts[0]
      >>> round(found.ratio.value, 3), found.wins, found.verdict
      (1.747, 3, 'unclear')
    """
    check_known(values, baseline, "baseline")
    others = [name for name in values if name != baseline]
    if not others:
        raise ValueError(f"`values` holds only {baseline!r}: add the runs of another optimizer to compare with it")
    return compare_pairs(
        values,
        [(name, baseline) for name in others],
        log=log,
        higher_is_better=higher_is_better,
        threshold=threshold,
        confidence=confidence,
        resamples=resamples,
    )
