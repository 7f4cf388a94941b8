"""How the arms of a study came by their learning rates, and what their tuning shows beyond the choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kourkoutas.lab.judging import endpoints
from kourkoutas.lab.judging.deciding import Lost, lost_by_tuning
from kourkoutas.lab.judging.sensitivity import Sensitivity, sensitivities
from kourkoutas.lab.planning.search import Tried, edge
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.results.store import StudyRecord
from kourkoutas.lab.specs.search_space import Value
from kourkoutas.lab.specs.spec import Endpoint

AllTried = Mapping[str, Sequence[Tried]]


def tried(snapshot: Snapshot) -> dict[str, list[Tried]]:
    """{arm: what its tuning runs gave}, by rising values; a study that was not tuned has none.

    A value whose runs have not all ended has the scores of those that have, and says how many are missing.
    """
    question = snapshot.record.tuning
    if question is None:
        return {}
    primary = endpoints.declared(snapshot.record)[0]
    found: dict[str, dict[tuple[tuple[str, Value], ...], dict[int, float]]] = {}
    for run in snapshot.tuning_runs:
        values = tuple(question.values(run.spec).items())
        scores = found.setdefault(run.spec.optimizer, {}).setdefault(values, {})
        if run.result is not None:
            scores[run.spec.seed] = endpoints.score(run, primary)
    return {
        label: [
            Tried(
                dict(values),
                tuple(scores[seed] for seed in question.seeds if seed in scores),
                len(set(question.seeds) - scores.keys()),
            )
            for values, scores in sorted(own.items())
        ]
        for label, own in found.items()
    }


def lost(record: StudyRecord, found: AllTried) -> dict[str, Lost | None]:
    """{arm: what its tuning may have lost}, None where a tuning run is missing; empty for a study without a tuning."""
    if record.tuning is None:
        return {}
    primary = endpoints.declared(record)[0]
    return {arm: _lost(found.get(arm, ()), values, primary) for arm, values in record.chosen.items()}


def _lost(found: Sequence[Tried], chosen: Mapping[str, Value], endpoint: Endpoint) -> Lost | None:
    at = next((k for k, one in enumerate(found) if dict(one.values) == dict(chosen)), None)
    if at is None or any(one.missing for one in found):
        return None
    return lost_by_tuning([[endpoints.as_loss(x, endpoint) for x in one.scores] for one in found], at)


def sensitivity(record: StudyRecord, found: AllTried) -> tuple[Sensitivity, ...]:
    """How much each arm depends on the tuned option, of a study that tuned one."""
    question = record.tuning
    if question is None or len(question.axes) > 1:
        return ()
    primary = endpoints.declared(record)[0]
    ended = {arm: [one for one in own if one.scores] for arm, own in found.items()}
    option = question.axes[0].name
    return tuple(sensitivities(ended, option, maximize=primary.maximize, log=primary.log).values())


def fairness(snapshot: Snapshot, found: AllTried) -> list[str]:
    """How the arms came by their learning rates, for the head of every account of a study."""
    record = snapshot.record
    if record.tuning is None:
        rates = {arm.settings["lr"] for arm in record.arms if "lr" in arm.settings}
        how = f"{len(rates)} learning rates" if len(rates) > 1 else "one learning rate"
        return [
            f"Compared at {how}. Tuned alike, the answer may be another: --tune lr=LOW:HIGH tunes every optimizer on "
            "other seeds first."
        ]
    question = record.tuning
    ranges = ", ".join(f"{axis.name} in {axis.low:g} to {axis.high:g}" for axis in question.axes)
    most = max((len(own) for own in found.values()), default=0)
    wider = f" ({most} after widening the range)" if most > question.trials else ""
    lines = [
        f"Tuned alike: {ranges}, {question.trials} trials{wider} on {len(question.seeds)} tuning seeds for each "
        "optimizer; the best mean of each is compared on other seeds."
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
            f"{missing} tuning run{' is' if missing == 1 else 's are'} missing. Without them nobody knows what an "
            "optimizer may have lost by its tuning, so no difference from it is clear. The study's command makes them."
        )
    failed = sum(run.result is not None and run.result.status == "failed" for run in snapshot.tuning_runs)
    if failed:
        lines.append(
            f"{failed} of {len(snapshot.tuning_runs)} tuning runs failed; they rank as the worst. --retry-failed "
            "repeats them."
        )
    return lines
