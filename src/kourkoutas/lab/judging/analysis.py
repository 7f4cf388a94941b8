"""The analysis of a study: made once, from one `Snapshot`; console, JSON, Python and page are views of it."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kourkoutas.lab.judging import endpoints as judged_by
from kourkoutas.lab.judging import headline as words
from kourkoutas.lab.judging import planned, tuned
from kourkoutas.lab.judging.attribution import summary
from kourkoutas.lab.judging.comparing import Comparison, compare_pairs
from kourkoutas.lab.judging.deciding import Lost
from kourkoutas.lab.judging.endpoints import Measure
from kourkoutas.lab.judging.intervals import RESAMPLES
from kourkoutas.lab.judging.sensitivity import Sensitivity
from kourkoutas.lab.judging.suspects import suspects
from kourkoutas.lab.judging.targets import Race, Reached, Target, races, reached
from kourkoutas.lab.judging.values import Seed, check_known, listed, to_json
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.results.store import StoredRun
from kourkoutas.lab.specs import optimizers as recipes
from kourkoutas.lab.specs.spec import RunResult

ENDS = ("ok", "diverged", "failed", "unfinished")


@dataclass(frozen=True)
class ArmSummary:
    """One arm's runs. Median and quartiles are of the primary endpoint with lost runs as the worst (infinite).

    Attributes:
      role: "treatment", "baseline" or "control".
      seconds: median of a run.
      seconds_per_step: median over the runs that recorded it; None when none did.
      times: medians of what the time was spent on: setup, data, compile, train, evaluate.
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
    times: Mapping[str, float]
    chosen: Mapping[str, float]


@dataclass(frozen=True)
class ToTarget:
    """How soon each arm reached a target, and who was first."""

    target: str
    arms: Mapping[str, Reached]
    contrasts: tuple[Race, ...]


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
      snapshot: what was analysed. Not part of `to_dict`.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; numbers that are not finite become the strings "nan", "inf" and "-inf"."""
        light: dict[str, Any] = to_json(dataclasses.replace(self, endpoints=()))
        return light | {"endpoints": [one.to_dict() for one in self.endpoints]}


def analyse(
    snapshot: Snapshot,
    *,
    endpoints: Sequence[str] = (),
    baseline: str | None = None,
    target: Target | None = None,
    resamples: int = RESAMPLES,
) -> Analysis:
    """What the runs of a study show.

    Args:
      snapshot: a results folder, as it was read.
      endpoints: metrics to judge by besides the primary endpoint, METRIC[:last|best|tail][:min|max][:log|linear].
      baseline: compare every other arm with this one instead of the planned pairs.
      target: adds how soon each arm reached it.
      resamples: of each bootstrap.
    """
    record = snapshot.record
    labels, seeds = [arm.label for arm in record.arms], set(record.seeds)
    own = [run for run in snapshot.runs if run.spec.optimizer in labels and run.spec.seed in seeds]
    tried = tuned.tried(snapshot)
    if baseline is not None:
        check_known(dict.fromkeys(labels), baseline, "baseline")
        planned_pairs = [(label, baseline) for label in labels if label != baseline]
    else:
        planned_pairs = planned.contrasts(record, labels)
    suspected = suspects(snapshot, own, planned_pairs)
    gone = planned.missing_seeds(record, own)
    to_come = sum(run.result is None for run in own) + sum(map(len, gone.values()))
    waiting = [arm for arm in labels if record.tuning is not None and arm not in record.chosen]
    finished = not to_come and not waiting
    pairs = [pair for pair in planned_pairs if suspected.allow(*pair)] if finished else []
    lost = tuned.lost(record, tried)
    judged = tuple(
        _compared(measure, own, pairs, resamples, len(planned_pairs), lost if measure.primary else {})
        for measure in judged_by.measures(record, endpoints)
    )
    return Analysis(
        testbed=record.testbed,
        confidence=0.95,
        seeds=tuple(record.seeds),
        finished=finished,
        rule=words.rule(tuned=bool(tried)),
        fairness=(*tuned.fairness(snapshot, tried), *suspected.notes),
        headline=_headline(snapshot, own, judged, to_come, waiting),
        answers=tuple(words.answer(c) for c in judged[0].contrasts),
        causes=tuple(summary(judged[0].attribution)),
        arms=tuple(_arms(record, own, gone, judged[0])),
        endpoints=judged,
        sensitivity=tuned.sensitivity(record, tried),
        target=None if target is None else _to_target(own, target, pairs, len(planned_pairs)),
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
    whose = "; ".join(f"{arm}: seed{'s' if len(seeds) > 1 else ''} {listed(seeds)}" for arm, seeds in gone.items())
    are = "run is" if count == 1 else "runs are"
    return [f"{count} {are} not in the folder ({whose}); a study of all its optimizers and seeds makes what is missing"]


def _compared(
    measure: Measure,
    runs: Sequence[StoredRun],
    pairs: Sequence[tuple[str, str]],
    resamples: int,
    family: int,
    lost: Mapping[str, Lost | None],
) -> Comparison:
    endpoint = measure.endpoint
    values = judged_by.values(runs, endpoint, measure.reduction)
    judged_by.check_logged(measure, values, runs)
    failed: dict[str, set[Seed]] = {}
    for run in runs:
        if run.result is not None and run.result.status == "failed":
            failed.setdefault(run.spec.optimizer, set()).add(run.spec.seed)
    return compare_pairs(
        values,
        pairs,
        log=endpoint.log,
        higher_is_better=endpoint.maximize,
        threshold=endpoint.threshold,
        resamples=resamples,
        family=family,
        lost=lost,
        failed=failed,
        name=measure.name,
        title=endpoint.title,
        primary=measure.primary,
        declared=measure.declared,
        notes=judged_by.without_value(measure, values, runs),
    )


def _to_target(runs: Sequence[StoredRun], target: Target, pairs: Sequence[tuple[str, str]], family: int) -> ToTarget:
    found = reached(runs, target)
    return ToTarget(str(target), found, tuple(races(found, pairs, family)))


def _arms(
    record: Any, runs: Sequence[StoredRun], gone: Mapping[str, Sequence[int]], primary: Comparison
) -> list[ArmSummary]:
    """One row per arm, in the order of the study."""
    by_arm: dict[str, list[StoredRun]] = {}
    for run in runs:
        by_arm.setdefault(run.spec.optimizer, []).append(run)
    first = record.arms[0].optimizer if record.arms else ""
    rows = []
    for arm in record.arms:
        own = by_arm.get(arm.label, [])
        ends = [run.result.status if run.result else "unfinished" for run in own]
        ends += ["unfinished" for _ in gone.get(arm.label, ())]
        found = primary.arms.get(arm.label, {})
        median, mean = found.get("median"), found.get("mean")
        quartiles = None if median is None else median.interval
        done = [run.result for run in own if run.result is not None and run.result.status == "ok"]
        paces = [pace for result in done if (pace := result.seconds_per_step) is not None]
        role = "treatment" if arm.optimizer == first else "control" if arm.optimizer in recipes.CONTROLS else "baseline"
        rows.append(
            ArmSummary(
                label=arm.label,
                optimizer=arm.optimizer,
                role=role,
                runs=len(ends),
                **{end: ends.count(end) for end in ENDS},
                median=None if median is None else median.value,
                q1=None if quartiles is None else quartiles.low,
                q3=None if quartiles is None else quartiles.high,
                mean=None if mean is None else mean.value,
                seconds=statistics.median(result.seconds for result in done) if done else None,
                seconds_per_step=statistics.median(paces) if paces else None,
                times=_times(done),
                chosen=record.chosen.get(arm.label, {}),
            )
        )
    return rows


def _times(results: Sequence[RunResult]) -> dict[str, float]:
    """Medians of what the runs spent their time on."""
    parts = [part for result in results for part in result.times if part != "per_step"]
    return {
        part: statistics.median(result.times[part] for result in results if part in result.times)
        for part in dict.fromkeys(parts)
    }


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
        "analysis": analysis.to_dict(),
    }


def _run(run: StoredRun) -> dict[str, Any]:
    ended = json.loads(run.result.model_dump_json(exclude={"curve"})) if run.result else {"status": "unfinished"}
    return {"id": run.id, "optimizer": run.spec.optimizer, "seed": run.spec.seed, **ended}
