"""Two studies against each other: the same arm, the same seeds, another engine, setting, version or code."""

from __future__ import annotations

from collections.abc import Sequence

from kourkoutas.lab.judging import endpoints as judged_by
from kourkoutas.lab.judging import tuned
from kourkoutas.lab.judging.analysis import Judged, judge, with_luck
from kourkoutas.lab.judging.endpoints import PRIMARY, Measure, Numbers
from kourkoutas.lab.judging.values import listed
from kourkoutas.lab.planning.search import Tried
from kourkoutas.lab.planning.search import Values as Chosen
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
    if _judged_by(first, one) != _judged_by(second, two):
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
    notes = [*_differences(first, second), *_arms_differ(first, second, pairs)]
    if one.endpoint.log != two.endpoint.log:
        how = "ratios" if one.endpoint.log else "differences"
        notes.append(f"compared as {how}, as the first study asks; the second asks otherwise")
    judged = judge(one, values, labelled, notes=[*notes, *first.damage, *second.damage])
    if not one.primary or (first.record.tuning is None and second.record.tuning is None):
        return judged
    tried: dict[str, Sequence[Tried]] = {}
    chosen: dict[str, Chosen] = {}
    for study, name in zip((first, second), names, strict=True):
        own = tuned.tried(study)
        for arm in study.record.arms:
            # an arm at given values chose nothing and has lost nothing by it: one value, whatever it gave
            untuned = study.record.tuning is None
            tried[f"{arm.label} in {name}"] = [Tried({}, (1.0,))] if untuned else own.get(arm.label, [])
            chosen[f"{arm.label} in {name}"] = study.record.chosen.get(arm.label, {})
    return with_luck(judged, tried, chosen)


def _judged_by(study: Study, measure: Measure) -> tuple[str, bool, str | None]:
    """Metric and direction; of a user's function also which logged metric its endpoint is, None for what it returns."""
    code = study.record.code
    own = code.endpoint if code is not None and measure.endpoint.metric == PRIMARY else None
    return measure.endpoint.metric, measure.endpoint.maximize, own


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
    if one.tuning is None or two.tuning is None:
        if one.tuning != two.tuning:
            words = ["tuned" if record.tuning is not None else "not tuned" for record in (one, two)]
            found.append(f"arms are {words[0]} in the first and {words[1]} in the second")
    else:
        here, there = one.tuning.model_dump(), two.tuning.model_dump()
        found += [f"the tuning's {name} differ" for name in here if here[name] != there[name]]
    return found


def _arms_differ(first: Study, second: Study, pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Options, settings of their own and tuned values of the arms that are compared."""
    found = []
    for a, b in pairs:
        one, two = first.record.arm(a), second.record.arm(b)
        if one is None or two is None:
            continue
        here = one.options | one.settings | first.record.chosen.get(a, {})
        there = two.options | two.settings | second.record.chosen.get(b, {})
        if a == b and one.resolved is not None and two.resolved is not None:
            # what the options come down to: another version may have another default
            here, there = one.resolved.get("optimizer", {}) | here, two.resolved.get("optimizer", {}) | there
        for name in sorted({*here, *there}):
            x, y = (repr(of[name]) if name in of else "not set" for of in (here, there))
            if x != y:
                found.append(f"{a}: {name} is {x} in the first and {y} in the second")
    return found
