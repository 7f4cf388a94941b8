"""The one rule that a headline follows, and the sentence that says what it found."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kourkoutas.lab.judging import confirming
from kourkoutas.lab.judging.contrasts import UNDEFINED, Contrast
from kourkoutas.lab.judging.power import Detectable
from kourkoutas.lab.judging.tests import Wilcoxon

COUNTED = " (with what the arm behind may have lost by the luck of its tuning)"
RULE = (
    "The primary endpoint decides. Yes or No: the two-sided p of the paired t test over the seeds{counted}, or of "
    "Wilcoxon's signed ranks where a run diverged, is below {level:.2g} after Holm's adjustment for all planned "
    "contrasts. Not shown: it is not. Other endpoints are secondary and decide nothing."
)
TUNED = "Both more --seeds and more --tune-seeds make a tuned comparison surer."
ANSWERS = {
    "better": "Yes",
    "worse": "No",
    "unclear": "Not shown",
    "identical": "No difference",
    "untested": "Cannot tell",
}


@dataclass(frozen=True)
class Answer:
    """To "does the treatment beat the baseline here?": one of `ANSWERS`, and a sentence with the numbers."""

    short: str
    sentence: str


def rule(confidence: float, *, tuned: bool = False) -> str:
    return RULE.format(level=1 - confidence, counted=COUNTED if tuned else "")


def floor_of(w: Wilcoxon, family: int, confidence: float) -> str:
    """What exact signed ranks of so few pairs cannot show, or nothing."""
    if w.floor is None or family * w.floor <= 1 - confidence:
        return ""
    adjusted = f", {min(1.0, family * w.floor):.3g} adjusted" if family > 1 else ""
    return f"{w.n} pairs cannot give an exact p below {w.floor:.3g}{adjusted}"


def answer(c: Contrast, can_show: Detectable | None) -> Answer:
    """The answer of one contrast."""
    short = ANSWERS[c.verdict]
    record = f"better on {c.wins} of {c.n} seeds" + (f", equal on {c.ties}" if c.ties else "")
    if c.verdict == "identical":
        return Answer(short, f"{c.treatment} and {c.baseline} end with the same value on all {c.n} seeds.")
    if c.verdict == "untested":
        why = next((note for note in c.notes if note.endswith(UNDEFINED)), "too few pairs")
        return Answer(short, f"{c.treatment} against {c.baseline}: {why} ({record}).")
    parts = [size_words(c), record]
    if c.diverged:
        parts.append(f"diverged: {c.treatment} {c.diverged_treatment}, {c.baseline} {c.diverged_baseline} of {c.n}")
    parts.append(p_words(c))
    facts = "; ".join(part for part in parts if part)
    if c.verdict in ("better", "worse"):
        return Answer(short, f"{c.treatment} ends {c.verdict} than {c.baseline} ({facts}).")
    text = f"no difference between {c.treatment} and {c.baseline} is shown ({facts})."
    if c.diverged:
        floor = floor_of(c.wilcoxon, c.family, c.confidence)
        return Answer(short, text + (f" {floor}." if floor else ""))
    if c.test == confirming.TEST:
        return Answer(short, f"{text} {TUNED}")
    return Answer(short, text + ("" if can_show is None else f" {can_show_words(can_show)}"))


def size_words(c: Contrast) -> str:
    """The effect with its own interval, unadjusted."""
    level = f"{100 * c.confidence:g} % interval"
    if c.percent is not None and math.isfinite(c.percent.value):
        ci = c.percent.ci
        side = "better" if c.percent.value > 0 else "worse"
        between = "" if ci is None else f", {level} {_between(ci.low, ci.high)}"
        return f"{abs(c.percent.value):.3g} % {side}{between}"
    if c.difference is not None:
        ci = c.difference.ci
        return f"by {c.difference.value:.4g}" + ("" if ci is None else f", {level} {ci.low:.4g} to {ci.high:.4g}")
    return ""


def _between(low: float, high: float) -> str:
    """An interval of percentages whose sides are said in words where it has both; else they are those of the estimate.

    >>> _between(-51.2, -13.3), _between(-5.81, 10.6)
    ('13.3 to 51.2 %', '5.81 % worse to 10.6 % better')
    """
    if low < 0 < high:
        return f"{-low:.3g} % worse to {high:.3g} % better"
    near, far = sorted((abs(low), abs(high)))
    return f"{near:.3g} to {far:.3g} %"


def p_words(c: Contrast) -> str:
    """The deciding test, with p before and after the adjustment."""
    if c.p is None or c.p_holm is None:
        return ""
    adjusted = f", {c.p_holm:.3g} after Holm for {c.family} contrasts" if c.family > 1 else ""
    return f"{c.test}, p = {c.p:.3g}{adjusted}"


def can_show_words(d: Detectable) -> str:
    """What the seeds could have shown, and how many the observed difference would need."""
    size = f"{d.percent:.3g} %" if d.percent is not None else f"{d.difference:.3g}"
    needs = (
        f"the one observed would need {d.seeds_for_observed} seeds"
        if d.seeds_for_observed is not None
        else "the one observed is too small for any number of seeds to show"
    )
    return f"These {d.seeds} seeds find a difference of {size} with {100 * d.power:g} % probability; {needs}."
