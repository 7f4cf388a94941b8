"""Which arms of a study are compared: planned by how the study was asked for, never by its results."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kourkoutas.lab.results.store import StoredRun, StudyRecord
from kourkoutas.lab.specs import optimizers as recipes
from kourkoutas.lab.specs.spec import Arm


def contrasts(record: StudyRecord, labels: Collection[str]) -> list[tuple[str, str]]:
    """(treatment, baseline) pairs: the first optimizer against the others, or, with one optimizer only, its first arm
    against the rest. Controls ask why, not whether, and are left out unless there is nothing else.

    NOTE: a grid is not a cross product of contrasts. Arms of a grid over settings meet their like: kbeta[lr=0.1] meets
    adam95[lr=0.1] and no other learning rate. Where only one optimizer has a grid of its own, each of its arms meets
    the other's arm; where both have, the first arm of each meets all arms of the other. So there are about as many
    contrasts as arms.
    """
    wanted = set(labels)
    arms = [arm for arm in record.arms if arm.label in wanted]
    by_optimizer: dict[str, list[Arm]] = {}
    for arm in arms:
        by_optimizer.setdefault(arm.optimizer, []).append(arm)
    if not by_optimizer:
        return []
    first, *others = by_optimizer
    baselines = [name for name in others if name not in recipes.CONTROLS] or others
    pairs = [pair for name in baselines for pair in _between(by_optimizer[first], by_optimizer[name])]
    if not pairs:
        lead, *rest = arms
        return [(lead.label, arm.label) for arm in rest]
    order = {arm.label: i for i, arm in enumerate(arms)}
    return sorted(pairs, key=lambda pair: (order[pair[0]], order[pair[1]]))


def missing_seeds(record: StudyRecord, runs: Sequence[StoredRun]) -> dict[str, list[int]]:
    """{arm: seeds whose runs are not in the folder}: deleted ones, or those of an arm that was added for fewer seeds.

    An arm that is still to be tuned has no runs to lose, and a folder of single runs (`kbeta run --out`) was never
    asked for all seeds of all arms.
    """
    words = [call.command.split() for call in record.calls]
    if any(call[1:2] == ["run"] or call[1:4] == ["-m", "kourkoutas", "run"] for call in words):
        return {}
    there: dict[str, set[int]] = {}
    for run in runs:
        there.setdefault(run.spec.optimizer, set()).add(run.spec.seed)
    made = [arm.label for arm in record.arms if record.tuning is None or arm.label in record.chosen]
    gone = {label: [seed for seed in record.seeds if seed not in there.get(label, ())] for label in made}
    return {label: seeds for label, seeds in gone.items() if seeds}


def _between(treatments: list[Arm], baselines: list[Arm]) -> list[tuple[str, str]]:
    """The pairs of two optimizers' arms."""
    if len(treatments) == 1 or len(baselines) == 1:
        return [(a.label, b.label) for a in treatments for b in baselines]
    alike: dict[str, list[Arm]] = {}
    for arm in baselines:
        alike.setdefault(_settings(arm), []).append(arm)
    pairs: dict[tuple[str, str], None] = {}
    met: set[str] = set()
    for arm in treatments:
        same = alike.get(_settings(arm), [])
        # Of several with the same settings, which differ in their own options: the first meets all, the others one.
        for other in same if _settings(arm) not in met else same[:1]:
            pairs[arm.label, other.label] = None
        met.add(_settings(arm))
    return list(pairs)


def _settings(arm: Arm) -> str:
    return repr(sorted(arm.settings.items()))
