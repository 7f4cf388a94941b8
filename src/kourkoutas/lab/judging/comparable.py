"""Which of the planned contrasts can be made: what is missing, and what compares nothing.

Studies of a user's function that compare nothing are told, instead of compared:

* The function neither asked for `trial.optimizer` nor read `trial.arm`: all arms are one.
* Two arms logged the same numbers to the last bit and ended alike on every seed: the option that
  distinguishes them was never used.
* An arm logged the same numbers to the last bit at every value that its tuning tried: the tuned option was never used.
* The function returned nothing and no endpoint was named: its runs end at the last logged loss, one batch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kourkoutas.lab.optimizers.looks import name_of
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.results.store import StoredRun, StudyRecord
from kourkoutas.lab.specs.spec import RunResult


def missing_seeds(record: StudyRecord, runs: Sequence[StoredRun]) -> dict[str, list[int]]:
    """{arm: seeds whose runs are not in the folder}: deleted ones, or those of an arm that was added for fewer seeds.

    An arm that is still to be tuned has no runs to lose.
    """
    there: dict[str, set[int]] = {}
    for run in runs:
        there.setdefault(run.spec.optimizer, set()).add(run.spec.seed)
    made = [arm.label for arm in record.arms if record.tuning is None or arm.label in record.chosen]
    gone = {label: [seed for seed in record.seeds if seed not in there.get(label, ())] for label in made}
    return {label: seeds for label, seeds in gone.items() if seeds}


def comparable_pairs(
    snapshot: Snapshot, runs: Sequence[StoredRun], pairs: Sequence[tuple[str, str]]
) -> tuple[list[tuple[str, str]], list[str]]:
    """(the planned pairs that compare something, what is told of the others); a testbed's arms are never suspected."""
    code = snapshot.record.code
    finished: dict[str, dict[int, RunResult]] = {}
    for run in runs:
        if run.result is not None and run.result.status == "ok":
            finished.setdefault(run.spec.optimizer, {})[run.spec.seed] = run.result
    used: list[set[str]] = []  # by each run, of what a trial offers
    for own in finished.values():
        used += [set(result.settings["used"]) for result in own.values() if "used" in result.settings]
    if code is None or not used:
        return list(pairs), []
    told = []
    if not any({"optimizer", "arm"} & names for names in used):
        told.append(
            f"Not compared: {code.function} never asked for trial.optimizer, so that every optimizer trains alike; "
            "write optimizer = trial.optimizer(model, lr=...)."
        )
    if code.endpoint is None and not any("returned" in names for names in used):
        told.append(
            f"Not compared: {code.function} returned nothing, so that its runs end at the last logged loss, often one "
            "batch's; return the number to compare, or name a logged metric as the endpoint."
        )
    if told:
        return [], told
    twins = [(a, b) for a, b in pairs if _same(finished.get(a, {}), finished.get(b, {}))]
    deaf = _ignoring_tuned_option(snapshot)
    told += [
        f"Not compared: {name_of(a)} and {name_of(b)} logged the same numbers to the last bit on every seed; "
        f"{code.function} never used the option that distinguishes them."
        for a, b in twins
    ]
    told += [
        f"Not compared: {name_of(arm)} logged the same numbers to the last bit at every {option} that its tuning "
        f"tried, so {code.function} never used {option}; write trial.optimizer(model, lr=...) without reading "
        f"trial.settings[{option!r}], or use what is read."
        for arm, option in deaf.items()
    ]
    return [pair for pair in pairs if pair not in twins and deaf.keys().isdisjoint(pair)], told


def _ignoring_tuned_option(snapshot: Snapshot) -> dict[str, str]:
    """{arm: the tuned options} of arms whose runs are the same, seed by seed, at two or more values."""
    question = snapshot.record.tuning
    if question is None:
        return {}
    found: dict[str, dict[int, list[str]]] = {}
    for run in snapshot.tuning_runs:
        if run.result is not None and run.result.status == "ok" and len(run.result.curve) > 1:
            found.setdefault(run.spec.optimizer, {}).setdefault(run.spec.seed, []).append(_numbers(run.result))
    options = " and ".join(axis.name for axis in question.axes)
    return {
        arm: options
        for arm, by_seed in found.items()
        if all(len(logged) > 1 and len(set(logged)) == 1 for logged in by_seed.values())
    }


def _same(one: Mapping[int, RunResult], two: Mapping[int, RunResult]) -> bool:
    """Whether two arms' numbers are equal on all common seeds; an endpoint alone may be so by chance."""
    common = one.keys() & two.keys()
    logged = any(len(one[seed].curve) > 1 for seed in common)
    return logged and all(_numbers(one[seed]) == _numbers(two[seed]) for seed in common)


def _numbers(result: RunResult) -> str:
    return repr((result.curve, result.endpoint))
