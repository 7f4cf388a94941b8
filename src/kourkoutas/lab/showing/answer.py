"""The one sentence that answers a study: which baselines the treatment beats, by the rule of `judging.verdicts`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kourkoutas.lab.judging.analysis import Finding
from kourkoutas.lab.showing.effects import digits

MOST_TREATMENTS = 2  # with more, as in a grid, the sentence counts
SLIGHTLY = 5.0  # percent


def sentence(findings: Sequence[Finding]) -> str:
    """The answer of the primary endpoint's contrasts.

    NOTE: what is not shown is never called equal; the side that the estimate is on is told as such.
    """
    if not findings:
        return "No two optimizers of this study have a finished seed in common: there is nothing to compare yet."
    by_treatment: dict[str, list[Finding]] = {}
    for finding in findings:
        by_treatment.setdefault(finding.treatment, []).append(finding)
    if len(by_treatment) > MOST_TREATMENTS:
        return _counted(findings)
    return " ".join(_about(treatment, found) for treatment, found in by_treatment.items())


def _about(treatment: str, findings: Sequence[Finding]) -> str:
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.verdict, []).append(finding)
    parts = []
    for verdict in ("better", "worse"):
        if verdict in groups:
            parts.append(f"is {verdict} than {_listed([_with_size(f) for f in groups[verdict]])}")
    if "unclear" in groups:
        found = groups["unclear"]
        if len(found) == 1:
            parts.append(f"is not shown to differ from {found[0].baseline}{_if_anything(found[0])}")
        else:
            parts.append(f"is not shown to differ from {_listed([f.baseline for f in found])}")
    if "identical" in groups:
        parts.append(f"ends exactly as {_listed([f.baseline for f in groups['identical']])} does")
    if "untested" in groups:
        parts.append(f"cannot be compared with {_listed([f.baseline for f in groups['untested']])} on these runs")
    return f"{treatment} {_listed(parts, '; it ')} here."


def _with_size(f: Finding) -> str:
    if f.percent is None or not math.isfinite(f.percent) or f.diverged_treatment or f.diverged_baseline:
        return f.baseline
    return f"{f.baseline} ({digits(f.percent)} %)"


def _if_anything(f: Finding) -> str:
    if f.diverged_treatment or f.diverged_baseline:
        return ""
    size = f.percent if f.percent is not None else f.effect if f.contrast.ratio is None else None
    if size is None or not math.isfinite(size) or size == 0:
        return ""
    slightly = "slightly " if f.percent is not None and abs(f.percent) < SLIGHTLY else ""
    return f"; if anything, {slightly}{'better' if size > 0 else 'worse'}"


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


def _listed(items: Sequence[str], last: str = " and ") -> str:
    if last != " and ":
        return last.join(items)
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}"
