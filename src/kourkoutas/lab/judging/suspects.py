"""Studies of a user's function that compare nothing: told, instead of compared.

* The function neither asked for `trial.optimizer` nor read `trial.arm`: all arms are one.
* Two arms logged the same numbers to the last bit and ended alike on every seed: the option that
  distinguishes them was never used.
* An arm logged the same numbers to the last bit at every value that its tuning tried: the tuned option was never used.
* The function returned nothing and no --endpoint was named: its runs end at the last logged loss, one batch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.results.store import StoredRun, StudyRecord


@dataclass(frozen=True)
class Suspects:
    """What is told, and the pairs of arms that are not compared; `everything` when none is."""

    notes: tuple[str, ...] = ()
    pairs: frozenset[frozenset[str]] = frozenset()
    everything: bool = False

    def allow(self, a: str, b: str) -> bool:
        return not self.everything and frozenset((a, b)) not in self.pairs


def suspects(snapshot: Snapshot, runs: Sequence[StoredRun], pairs: Sequence[tuple[str, str]]) -> Suspects:
    """What is wrong with the planned `pairs` of a study; a testbed's arms are never suspected."""
    code = snapshot.record.code
    finished = [run for run in runs if run.result is not None and run.result.status == "ok"]
    used = [run.result.settings["used"] for run in finished if run.result and "used" in run.result.settings]
    if code is None or not used:
        return Suspects()
    notes = []
    if not any({"optimizer", "arm"} & set(names) for names in used):
        notes.append(
            f"Not compared: {code.function} never asked for trial.optimizer, so that every arm trains alike; "
            "write optimizer = trial.optimizer(model, lr=...)."
        )
    if code.endpoint is None and not any("returned" in names for names in used):
        notes.append(
            f"Not compared: {code.function} returned nothing, so that its runs end at the last logged loss, often one "
            "batch's; return the number to compare, or name a logged metric with --endpoint."
        )
    if notes:
        return Suspects(tuple(notes), everything=True)
    twins = [(a, b) for a, b in pairs if _same(finished, a, b)]
    ignoring = _ignores_tuned_option(snapshot.record, snapshot.tuning_runs)
    told = [
        f"Not compared: {a} and {b} logged the same numbers to the last bit on every seed; "
        f"{code.function} never used the option that distinguishes them."
        for a, b in twins
    ]
    told += [
        f"Not compared: {arm} logged the same numbers to the last bit at every {option} that its tuning tried, so "
        f"{code.function} never used {option}; write trial.optimizer(model, lr=...) without reading "
        f"trial.settings[{option!r}], or use what is read."
        for arm, option in ignoring.items()
    ]
    dropped = {frozenset(pair) for pair in pairs if pair in twins or not ignoring.keys().isdisjoint(pair)}
    return Suspects(tuple(told), frozenset(dropped))


def _ignores_tuned_option(record: StudyRecord, runs: Sequence[StoredRun]) -> dict[str, str]:
    """{arm: the tuned options} of arms whose runs are the same, seed by seed, at two or more values."""
    question = record.tuning
    found: dict[str, dict[int, dict[str, str]]] = {}
    for run in runs if question is not None else ():
        if run.result is not None and run.result.status == "ok" and len(run.result.curve) > 1:
            values = repr(sorted(question.values(run.spec).items())) if question else ""
            curves = found.setdefault(run.spec.optimizer, {}).setdefault(run.spec.seed, {})
            curves[values] = repr((run.result.curve, run.result.endpoint))
    options = "" if question is None else " and ".join(axis.name for axis in question.axes)
    return {
        arm: options
        for arm, by_seed in found.items()
        if all(len(curves) > 1 and len(set(curves.values())) == 1 for curves in by_seed.values())
    }


def _same(runs: Sequence[StoredRun], a: str, b: str) -> bool:
    """Whether the arms' curves and endpoints are equal on all common seeds; one number alone may be so by chance."""
    one, two = (
        {run.spec.seed: run.result for run in runs if run.spec.optimizer == label and run.result} for label in (a, b)
    )
    common = one.keys() & two.keys()
    logged = any(len(one[seed].curve) > 1 for seed in common)
    return logged and all(
        one[seed].endpoint == two[seed].endpoint and repr(one[seed].curve) == repr(two[seed].curve) for seed in common
    )
