"""What came after the first results of a study: said beside its answer, since it was planned knowing results."""

from __future__ import annotations

from kourkoutas.lab.judging.values import seed_ranges
from kourkoutas.lab.optimizers.looks import name_of
from kourkoutas.lab.results.export import names_in
from kourkoutas.lab.results.store import Call, StudyRecord


def told(record: StudyRecord, *, baseline: str | None = None, margin: float | None = None) -> tuple[str, ...]:
    """One sentence for each thing that was not planned before the first run ended.

    Args:
      baseline, margin: asked for now, instead of what the study declared.
    """
    lines = []
    if baseline is not None:
        lines.append(f"The baseline {name_of(baseline)} was chosen after the runs.")
    if margin is not None and margin != record.margin:
        lines.append(f"The margin of {margin:g} % was chosen after the runs.")
    arms: list[str] = []
    seeds: list[int] = []
    for call in record.calls:
        arms += call.late_arms
        seeds += call.late_seeds
    if arms:
        lines.append(f"Added when results were there: {', '.join(map(name_of, arms))}.")
    if seeds:
        lines.append(f"Seeds added when results were there: {seed_ranges(seeds)}.")
    return (*lines, *_versions([call for call in record.calls if call.runs]))


def _versions(calls: list[Call]) -> list[str]:
    """The packages that had another version for some of the runs."""
    mixed = []
    for package in names_in(call.versions for call in calls):
        found = list(dict.fromkeys(call.versions.get(package, "none") for call in calls))
        if len(found) > 1:
            mixed.append(f"{package} {', then '.join(found)}")
    return [f"The versions changed between the runs: {'; '.join(mixed)}."] if mixed else []
