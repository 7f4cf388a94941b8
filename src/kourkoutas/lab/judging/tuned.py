"""How the arms of a study came by their learning rates, and what their tuning shows beyond the choice."""

from __future__ import annotations

from collections.abc import Sequence

from kourkoutas.lab.judging import endpoints, planned
from kourkoutas.lab.judging.sensitivity import Sensitivity, sensitivities
from kourkoutas.lab.judging.suspects import Suspects, suspects
from kourkoutas.lab.judging.targets import Race, Reached, Target, races, reached
from kourkoutas.lab.planning.search import Tried, edge
from kourkoutas.lab.results.store import StoredRun, Study
from kourkoutas.lab.specs.search_space import Value


def tried(study: Study, runs: Sequence[StoredRun] | None = None) -> dict[str, list[Tried]]:
    """{arm: what its tuning runs gave}, by rising values; a study that was not tuned has none.

    A value whose runs have not all ended has the scores of those that have, and says how many are missing.
    """
    question = study.record.tuning
    if question is None:
        return {}
    primary = endpoints.declared(study)[0]
    found: dict[str, dict[tuple[tuple[str, Value], ...], dict[int, float]]] = {}
    for run in study.tuning_runs() if runs is None else runs:
        values = tuple(question.values(run.spec).items())
        scores = found.setdefault(run.spec.optimizer, {}).setdefault(values, {})
        if run.result is not None:
            scores[run.spec.seed] = endpoints.score(run, primary)
    return {
        label: [
            Tried(dict(values), tuple(scores.values()), len(set(question.seeds) - scores.keys()))
            for values, scores in sorted(own.items())
        ]
        for label, own in found.items()
    }


def sensitivity(study: Study, found: dict[str, list[Tried]]) -> tuple[Sensitivity, ...]:
    """How much each arm depends on the tuned option, of a study that tuned one."""
    question = study.record.tuning
    if question is None or len(question.axes) > 1:
        return ()
    maximize = endpoints.declared(study)[0].maximize
    ended = {arm: [one for one in own if one.scores] for arm, own in found.items()}
    return tuple(sensitivities(ended, question.axes[0].name, maximize=maximize).values())


def doubts(study: Study, runs: Sequence[StoredRun]) -> Suspects:
    """What of the planned contrasts compares nothing."""
    pairs = planned.contrasts(study.record, [arm.label for arm in study.record.arms])
    return suspects(study, runs, pairs, study.tuning_runs())


def to_target(study: Study, runs: Sequence[StoredRun], target: Target) -> tuple[dict[str, Reached], list[Race]]:
    """({arm: its way to the target}, the planned contrasts of the steps that it took)."""
    found = reached(runs, target)
    suspected = doubts(study, runs)
    pairs = planned.contrasts(study.record, [arm.label for arm in study.record.arms])
    return found, races(found, [(a, b) for a, b in pairs if suspected.allow(a, b)], len(pairs))


def fairness(study: Study, tuning_runs: Sequence[StoredRun], found: dict[str, list[Tried]]) -> list[str]:
    """How the arms came by their learning rates, for the head of every account of a study."""
    record = study.record
    if record.tuning is None:
        rates = {arm.settings["lr"] for arm in record.arms if "lr" in arm.settings}
        how = f"{len(rates)} learning rates" if len(rates) > 1 else "one learning rate"
        return [
            f"Compared at {how}; tuned alike, the answer may be another: "
            "--tune lr=LOW:HIGH tunes every optimizer on other seeds first."
        ]
    question = record.tuning
    ranges = ", ".join(f"{axis.name} in {axis.low:g} to {axis.high:g}" for axis in question.axes)
    most = max((len(own) for own in found.values()), default=0)
    wider = f" ({most} after widening the range)" if most > question.trials else ""
    lines = [
        f"Tuned alike: {ranges}, {question.trials} trials{wider} on {len(question.seeds)} tuning seeds for each "
        "optimizer; the best median of each is compared on other seeds."
    ]
    for label, values in record.chosen.items():
        side = edge(question, found.get(label, ()), values)
        if side is not None:
            name, value = next(iter(values.items()))
            lines.append(
                f"{label}: its best {name}, {value:g}, is the {side} tried; it may do better beyond. Give --tune a "
                "wider range or raise --tune-budget."
            )
    missing = sum(one.missing for own in found.values() for one in own)
    if missing and record.chosen:
        lines.append(
            f"{missing} tuning run{' is' if missing == 1 else 's are'} missing. What an optimizer may have lost by its "
            "tuning is not known without all of its runs, so nothing is shown against it; the study's command repeats "
            "them."
        )
    failed = sum(run.result is not None and run.result.status == "failed" for run in tuning_runs)
    if failed:
        lines.append(
            f"{failed} of {len(tuning_runs)} tuning runs failed; they rank as the worst. --retry-failed repeats them."
        )
    return lines
