"""The one sentence that answers a study: which baselines the treatment beats, by the rule of `judging.verdicts`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kourkoutas.lab.judging.analysis import Finding
from kourkoutas.lab.showing.effects import digits

MOST_TREATMENTS = 2  # with more, as in a grid, the sentence counts
SLIGHTLY = 5.0  # percent
NOTHING = "no two optimizers have a finished seed in common"


def sentence(findings: Sequence[Finding], missing: Sequence[tuple[str, str]] = ()) -> str:
    """The answer of the primary endpoint's contrasts; `missing` are the pairs without a finished seed in common.

    NOTE: what is not shown is never called equal; the side that the estimate is on is told as such.
    """
    if not findings:
        return f"There is nothing to compare: {NOTHING}."
    by_treatment: dict[str, list[Finding]] = {}
    for finding in findings:
        by_treatment.setdefault(finding.treatment, []).append(finding)
    if len(by_treatment) > MOST_TREATMENTS:
        return _counted(findings)
    lacking = {treatment: [b for a, b in missing if a == treatment] for treatment in by_treatment}
    return " ".join(_about(treatment, found, lacking[treatment]) for treatment, found in by_treatment.items())


def _about(treatment: str, findings: Sequence[Finding], lacking: Sequence[str]) -> str:
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.verdict, []).append(finding)
    parts = []
    for verdict in ("better", "worse"):
        if verdict in groups:
            parts.append(f"is {verdict} than {_listed([_with_size(f) for f in groups[verdict]])}")
    if "unclear" in groups:
        found = groups["unclear"]
        parts.append(f"is not shown to differ from {_listed([_with_losses(f) for f in found])}{_if_anything(found)}")
    if "identical" in groups:
        parts.append(f"ends exactly as {_listed([f.baseline for f in groups['identical']])} does")
    if "untested" in groups:
        found = groups["untested"]
        parts.append(f"cannot be compared with {_listed([f.baseline for f in found])}: {_why_untested(found)}")
    text = f"{treatment} {'; it '.join(parts)} here"
    if lacking:
        text += f"; {_listed(lacking)} {'has' if len(lacking) == 1 else 'have'} no finished seed to compare"
    return f"{text}."


def _why_untested(findings: Sequence[Finding]) -> str:
    most = max(f.n for f in findings)
    if most == 1:
        return "one seed is too few"
    if all(f.diverged_treatment == f.diverged_baseline == f.n for f in findings):
        return "every run diverged"
    return "too few pairs of finished runs"


def _with_size(f: Finding) -> str:
    if f.diverged_treatment or f.diverged_baseline or f.percent is None or not math.isfinite(f.percent):
        return _with_losses(f)
    return f"{f.baseline} ({digits(f.percent)} %)"


def _with_losses(f: Finding) -> str:
    """The baseline, and how many runs of which of the two diverged."""
    lost = [f"{f.diverged_baseline} of {f.n} diverged"] if f.diverged_baseline else []
    if f.diverged_treatment:
        lost.append(f"{f.diverged_treatment} of {f.n} of {f.treatment} diverged")
    return f"{f.baseline} ({', '.join(lost)})" if lost else f.baseline


def _if_anything(findings: Sequence[Finding]) -> str:
    """The side that all of the estimates are on, if there is one."""
    sizes = [_size(f) for f in findings]
    for side, sign in (("better", 1), ("worse", -1)):
        if all(size is not None and sign * size > 0 for size in sizes):
            small = all(f.percent is not None and abs(f.percent) < SLIGHTLY for f in findings)
            return f"; if anything, {'slightly ' if small else ''}{side}"
    return ""


def _size(f: Finding) -> float | None:
    """Positive for the treatment; None where runs diverged, whose ranks have no size, or where there is no estimate."""
    size = f.percent if f.percent is not None else f.effect if f.contrast.ratio is None else None
    known = size is not None and math.isfinite(size) and not (f.diverged_treatment or f.diverged_baseline)
    return size if known else None


def _counted(findings: Sequence[Finding]) -> str:
    words = {
        "better": "the first named is better",
        "worse": "it is worse",
        "unclear": "no difference is shown",
        "identical": "both end alike",
        "untested": "nothing can be said",
    }
    counts = [
        f"in {count} {text}"
        for verdict, text in words.items()
        if (count := sum(f.verdict == verdict for f in findings))
    ]
    return f"Of {len(findings)} comparisons, {_listed(counts)}."


def _listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
