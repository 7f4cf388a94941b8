"""Two studies against each other: the same arm, the same seeds, another engine, setting, version or code."""

from __future__ import annotations

from kourkoutas.lab.judging import endpoints as judged_by
from kourkoutas.lab.judging.analysis import Judged, judge
from kourkoutas.lab.judging.endpoints import Measure, Numbers
from kourkoutas.lab.judging.values import listed
from kourkoutas.lab.results.store import Study


def compare_studies(first: Study, second: Study, endpoint: str | None = None) -> Judged:
    """Every arm that both studies have, of the first against the second, paired by seed.

    Two studies of one arm each are compared whatever the arms are called. What else differs between the studies is
    among the notes.
    """
    shared = sorted(set(first.record.seeds) & set(second.record.seeds))
    if not shared:
        raise ValueError(
            f"{first.path} has seeds {listed(first.record.seeds)} and {second.path} has {listed(second.record.seeds)}: "
            "nothing can be paired; run both with the same --seeds"
        )
    pairs = _pairs(first, second)
    one, two = (_measure(study, endpoint) for study in (first, second))
    if (one.endpoint.metric, one.endpoint.maximize) != (two.endpoint.metric, two.endpoint.maximize):
        raise ValueError(
            f"{first.path} is judged by {one.endpoint.title} and {second.path} by {two.endpoint.title}: name a metric "
            "of both with --endpoint"
        )
    names = _names(first, second)
    values: Numbers = {}
    for study, measure, name in ((first, one, names[0]), (second, two, names[1])):
        runs = study.runs()
        found = judged_by.values(runs, measure.endpoint, measure.reduction)
        judged_by.check_logged(measure, found, runs)
        values |= {f"{arm} in {name}": by_seed for arm, by_seed in found.items()}
    labelled = [(f"{a} in {names[0]}", f"{b} in {names[1]}") for a, b in pairs]
    return judge(one, values, labelled, notes=[*_differences(first, second), *first.damage, *second.damage])


def _measure(study: Study, endpoint: str | None) -> Measure:
    if endpoint is None:
        return judged_by.measures(study)[0]
    return judged_by.parse(endpoint, judged_by.declared(study))


def _pairs(first: Study, second: Study) -> list[tuple[str, str]]:
    ours, theirs = ([arm.label for arm in study.record.arms] for study in (first, second))
    common = [(label, label) for label in ours if label in set(theirs)]
    if common:
        return common
    if len(ours) == len(theirs) == 1:
        return [(ours[0], theirs[0])]
    raise ValueError(
        f"{first.path} has the arms {listed(ours)} and {second.path} {listed(theirs)}: none is in both, so nothing can "
        "be compared"
    )


def _names(first: Study, second: Study) -> tuple[str, str]:
    """The folders' names, or their paths where the names are the same."""
    if first.path.resolve().name != second.path.resolve().name:
        return first.path.resolve().name, second.path.resolve().name
    return str(first.path), str(second.path)


def _differences(first: Study, second: Study) -> list[str]:
    """What else than the folder is not the same."""
    one, two = first.record, second.record
    found = [
        f"{name} is {getattr(one, name)!r} in the first and {getattr(two, name)!r} in the second"
        for name in ("testbed", "preset", "engine")
        if getattr(one, name) != getattr(two, name)
    ]
    for key in sorted({*one.settings, *two.settings}):
        here, there = one.settings.get(key, "the preset's"), two.settings.get(key, "the preset's")
        if here != there:
            found.append(f"setting {key} is {here!r} in the first and {there!r} in the second")
    if one.code is not None and two.code is not None and one.code.sha256 != two.code.sha256:
        found.append(f"the code differs: {one.code.file} and {two.code.file}")
    return found
