"""The analysis of a study: made once, from one `Snapshot`; console, JSON, Python and page are views of it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kourkoutas.lab.errors import unknown
from kourkoutas.lab.judging import endpoints as judged_by
from kourkoutas.lab.judging import headline as words
from kourkoutas.lab.judging import planned, tuned
from kourkoutas.lab.judging.attribution import summary
from kourkoutas.lab.judging.comparing import Comparison, compare_pairs
from kourkoutas.lab.judging.intervals import CONFIDENCE, RESAMPLES
from kourkoutas.lab.judging.statistics import Result
from kourkoutas.lab.judging.targets import ToTarget, parse_target, to_target
from kourkoutas.lab.judging.tuned import Sensitivity
from kourkoutas.lab.judging.values import Seed, of_seeds, to_json
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.results.store import StoredRun, StudyRecord
from kourkoutas.lab.specs import optimizers as recipes
from kourkoutas.lab.specs.looks import label

ENDS = ("ok", "diverged", "failed", "unfinished")


@dataclass(frozen=True)
class ArmSummary:
    """One arm's runs. Median and quartiles are of the primary endpoint with lost runs as the worst (infinite).

    Attributes:
      role: "treatment", "baseline" or "control".
      seconds: median of a run.
      seconds_per_step: median over the runs that recorded it; None when none did.
      chosen: {option: value} that the tuning gave it.
    """

    label: str
    optimizer: str
    role: str
    runs: int
    ok: int
    diverged: int
    failed: int
    unfinished: int
    median: float | None
    q1: float | None
    q3: float | None
    mean: float | None
    seconds: float | None
    seconds_per_step: float | None
    chosen: Mapping[str, float]


@dataclass(frozen=True)
class Analysis:
    """What a study shows.

    Attributes:
      finished: whether every planned run has ended. Before that nothing is compared.
      rule: the one rule that the headline follows.
      fairness: how the arms came by their learning rates, and which of them are no comparison at all.
      headline: the answer in a sentence or a few.
      answers: one sentence per contrast of the primary endpoint, with its numbers.
      causes: what the controls say about where a difference comes from; empty without controls.
      arms: in the order of the study.
      endpoints: the primary one first.
      sensitivity: of each arm to the tuned option, on the tuning seeds; empty unless one option was tuned.
      target: None unless a target was asked for.
      notes: about the study as a whole, missing pairs and unreadable runs among them.
      snapshot: what was analysed. Not part of its JSON.
    """

    testbed: str
    confidence: float
    seeds: tuple[Seed, ...]
    finished: bool
    rule: str
    fairness: tuple[str, ...]
    headline: str
    answers: tuple[str, ...]
    causes: tuple[str, ...]
    arms: tuple[ArmSummary, ...]
    endpoints: tuple[Comparison, ...]
    sensitivity: tuple[Sensitivity, ...]
    target: ToTarget | None
    notes: tuple[str, ...]
    snapshot: Snapshot = field(repr=False)

    @property
    def primary(self) -> Comparison:
        return self.endpoints[0]


def analyse(
    snapshot: Snapshot,
    *,
    endpoints: Sequence[str] = (),
    baseline: str | None = None,
    target: str | None = None,
    resamples: int = RESAMPLES,
) -> Analysis:
    """What the runs of a study show.

    Args:
      snapshot: a results folder, as it was read.
      endpoints: metrics to judge by besides the primary endpoint, METRIC[:last|best|tail][:min|max][:log|linear].
      baseline: compare every other arm with this one instead of the planned pairs.
      target: METRIC<=VALUE or METRIC>=VALUE: adds how soon each arm reached it.
      resamples: of each bootstrap.
    """
    record = snapshot.record
    labels, seeds = [arm.label for arm in record.arms], set(record.seeds)
    own = [run for run in snapshot.runs if run.spec.optimizer in labels and run.spec.seed in seeds]
    tried = tuned.tried(snapshot)
    if baseline is None:
        pairs = planned.contrasts(record.arms)
    elif baseline in labels:
        pairs = [(label, baseline) for label in labels if label != baseline]
    else:
        raise unknown("baseline", baseline, labels)
    family = len(pairs)
    pairs, suspected = planned.comparable(snapshot, own, pairs)
    gone = planned.missing_seeds(record, own)
    to_come = sum(run.result is None for run in own) + sum(map(len, gone.values()))
    waiting = [arm for arm in labels if record.tuning is not None and arm not in record.chosen]
    finished = not to_come and not waiting
    if not finished:
        pairs = []
    failed: dict[str, set[Seed]] = {}
    for run in own:
        if run.result is not None and run.result.status == "failed":
            failed.setdefault(run.spec.optimizer, set()).add(run.spec.seed)
    judged = []
    for measure in judged_by.measures(record, endpoints):
        endpoint = measure.endpoint
        values = judged_by.values(own, endpoint, measure.reduction)
        found = compare_pairs(
            values,
            pairs,
            log=endpoint.log,
            higher_is_better=endpoint.maximize,
            threshold=endpoint.threshold,
            resamples=resamples,
            family=family,
            lost=tuned.lost(record, tried) if measure.primary else {},
            failed=failed,
            notes=judged_by.without_value(measure, values, own),
            name=measure.name,
            title=endpoint.title,
            primary=measure.primary,
            declared=measure.declared,
        )
        judged.append(found)
    return Analysis(
        testbed=record.testbed,
        confidence=CONFIDENCE,
        seeds=tuple(record.seeds),
        finished=finished,
        rule=words.rule(tuned=bool(tried)),
        fairness=(*tuned.fairness(snapshot, tried), *suspected),
        headline=_headline(snapshot, own, judged, to_come, waiting),
        answers=tuple(words.answer(c) for c in judged[0].contrasts),
        causes=tuple(summary(judged[0].attribution)),
        arms=tuple(_arms(record, own, gone, judged[0])),
        endpoints=tuple(judged),
        sensitivity=tuned.sensitivity(record, tried),
        target=None if target is None else to_target(own, parse_target(target), pairs, family),
        notes=(*snapshot.damage, *_missing(gone)),
        snapshot=snapshot,
    )


def _headline(
    snapshot: Snapshot,
    runs: Sequence[StoredRun],
    judged: Sequence[Comparison],
    to_come: int,
    waiting: Sequence[str],
) -> str:
    """The answer, or why there is none yet."""
    total = len(runs) + to_come - sum(run.result is None for run in runs)
    if waiting:
        ended = sum(run.result is not None for run in snapshot.tuning_runs)
        return f"The optimizers are being tuned, {ended} runs so far; the comparison follows."
    if total and not to_come and all(run.result is not None and run.result.status == "failed" for run in runs):
        return f"All {total} runs failed: there is nothing to compare."
    if to_come:
        return f"{total - to_come} of {total} runs have ended. The verdict comes when all have."
    return words.headline(judged)


def _missing(gone: Mapping[str, Sequence[int]]) -> list[str]:
    """What is said of runs that are not in the folder."""
    count = sum(map(len, gone.values()))
    if not count:
        return []
    whose = "; ".join(f"{label(arm)}: {of_seeds(seeds)}" for arm, seeds in gone.items())
    are = "run is" if count == 1 else "runs are"
    return [f"{count} {are} not in the folder ({whose}); a study of all its optimizers and seeds makes what is missing"]


def _arms(
    record: StudyRecord, runs: Sequence[StoredRun], gone: Mapping[str, Sequence[int]], primary: Comparison
) -> list[ArmSummary]:
    """One row per arm, in the order of the study."""
    by_arm: dict[str, list[StoredRun]] = {arm.label: [] for arm in record.arms}
    for run in runs:
        by_arm[run.spec.optimizer].append(run)
    rows = []
    for arm in record.arms:
        own = by_arm[arm.label]
        ends = [run.result.status if run.result else "unfinished" for run in own]
        ends += ["unfinished" for _ in gone.get(arm.label, ())]
        found = primary.arms.get(arm.label, {})
        median, mean = (found.get(name, Result(None)) for name in ("median", "mean"))
        done = [run.result for run in own if run.result is not None and run.result.status == "ok"]
        role = "control" if arm.optimizer in recipes.CONTROLS else "baseline"
        rows.append(
            ArmSummary(
                label=arm.label,
                optimizer=arm.optimizer,
                role="treatment" if arm.optimizer == record.arms[0].optimizer else role,
                runs=len(ends),
                **{end: ends.count(end) for end in ENDS},
                median=median.value,
                q1=median.interval.low if median.interval else None,
                q3=median.interval.high if median.interval else None,
                mean=mean.value,
                seconds=_median(result.seconds for result in done),
                seconds_per_step=_median(result.seconds_per_step for result in done),
                chosen=record.chosen.get(arm.label, {}),
            )
        )
    return rows


def _median(numbers: Iterable[float | None]) -> float | None:
    known = [x for x in numbers if x is not None]
    return statistics.median(known) if known else None


def as_json(analysis: Analysis) -> dict[str, Any]:
    """A study for machines: every run without its curve, and the analysis."""
    snapshot = analysis.snapshot
    question = snapshot.record.tuning
    return {
        "out": str(snapshot.path),
        **json.loads(snapshot.record.model_dump_json()),
        "runs": [_run(run) for run in snapshot.runs],
        "tuning_runs": [
            {**_run(run), "values": {} if question is None else question.values(run.spec)}
            for run in snapshot.tuning_runs
        ],
        "analysis": to_json(analysis),
    }


def _run(run: StoredRun) -> dict[str, Any]:
    ended = json.loads(run.result.model_dump_json(exclude={"curve"})) if run.result else {"status": "unfinished"}
    return {"id": run.id, "optimizer": run.spec.optimizer, "seed": run.spec.seed, **ended}
