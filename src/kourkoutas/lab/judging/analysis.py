"""The analysis of a study: made once, from one `Snapshot`; console, JSON, Python and page are views of it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kourkoutas.lab.errors import unknown
from kourkoutas.lab.judging import afterwards, comparable, headline
from kourkoutas.lab.judging.attribution import Attribution, attribute, summary
from kourkoutas.lab.judging.comparing import Comparison, Judged, Question, comparison, judge
from kourkoutas.lab.judging.endpoints import Measure, Until, measures_of, notes_on, values_of
from kourkoutas.lab.judging.failures import failures, repeat
from kourkoutas.lab.judging.fairness import fairness, with_conditions
from kourkoutas.lab.judging.intervals import CONFIDENCE, RESAMPLES
from kourkoutas.lab.judging.next_step import for_a_paper, next_step
from kourkoutas.lab.judging.statistics import Finding
from kourkoutas.lab.judging.values import Seed, of_seeds, to_json, without_logarithm
from kourkoutas.lab.optimizers import recipes
from kourkoutas.lab.optimizers.looks import name_of
from kourkoutas.lab.planning.contrasts import Family, contrasts
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.results.store import StoredRun, StudyRecord
from kourkoutas.lab.tuning import luck, trials
from kourkoutas.lab.tuning.sensitivity import Sensitivity, sensitivity
from kourkoutas.lab.tuning.trials import Tried

MOST_FAILURES = 2
ENDS = ("ok", "diverged", "failed", "unfinished")


@dataclass(frozen=True)
class ArmSummary:
    """One arm's runs. Median and quartiles are of the primary endpoint, with diverged runs as the worst (infinite)
    and without failed ones, unless the study counts them.

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
      afterwards: what came after the first results: seeds, optimizers, versions, a baseline, a margin.
      answers: one sentence per contrast of the primary endpoint, with its numbers.
      causes: what the controls say about where a difference comes from; empty without controls.
      attribution: {endpoint: the shares of each cause} that the controls show.
      arms: in the order of the study.
      endpoints: the primary one first.
      sensitivity: of each arm to the tuned option, on the tuning seeds; empty unless one option was tuned.
      next_step: the command that would settle what is open; empty where nothing is.
      for_a_paper: the result in sentences to paste.
      failures: which runs failed, why, and how to repeat them; the most frequent errors.
      notes: about the study as a whole, missing pairs and unreadable runs among them.
      judged: of every endpoint the values in pairs, from which its comparison was made. Not part of the JSON.
      snapshot: what was analysed. Not part of its JSON.
    """

    testbed: str
    confidence: float
    seeds: tuple[Seed, ...]
    finished: bool
    rule: str
    fairness: tuple[str, ...]
    headline: str
    afterwards: tuple[str, ...]
    answers: tuple[str, ...]
    causes: tuple[str, ...]
    attribution: Mapping[str, tuple[Attribution, ...]]
    arms: tuple[ArmSummary, ...]
    endpoints: tuple[Comparison, ...]
    sensitivity: tuple[Sensitivity, ...]
    failures: tuple[str, ...]
    notes: tuple[str, ...]
    next_step: str
    for_a_paper: str
    judged: tuple[Judged, ...] = field(repr=False)
    snapshot: Snapshot = field(repr=False)

    @property
    def primary(self) -> Comparison:
        return self.endpoints[0]


def analyse(
    snapshot: Snapshot,
    *,
    endpoints: Sequence[str] = (),
    baseline: str | None = None,
    margin: float | None = None,
    resamples: int = RESAMPLES,
) -> Analysis:
    """What the runs of a study show.

    Args:
      snapshot: a results folder, as it was read.
      endpoints: what to judge by besides the declared ones, METRIC[:last|best|tail|until=VALUE][:min|max][:log|linear].
      baseline: compare every other arm with this one instead of the planned pairs.
      margin: percent of the baseline within which a difference does not matter, instead of the declared one.
      resamples: of each bootstrap.
    """
    record = snapshot.record
    runs = _runs_of(snapshot)
    to_do = _to_do(record, runs)
    planned = _pairs(record, baseline)
    pairs, suspected = comparable.comparable_pairs(snapshot, runs, planned)
    margin_used = record.margin if margin is None else margin
    measures = measures_of(record, endpoints)
    tried = {measure.name: trials.of_study(snapshot, measure.score) for measure in measures}
    by_primary = tried[measures[0].name]
    in_pairs = judge(
        [_question(record, runs, measure, tried[measure.name]) for measure in measures],
        pairs if to_do.finished else [],
        planned=len(planned),
        margin=margin_used,
        failed=_failed(runs),
        count_failed=record.count_failed,
        resamples=resamples,
    )
    judged = tuple(comparison(one, margin_used) for one in in_pairs)
    attribution = {one.name: attribute(one) for one in judged}
    late = afterwards.told(record, baseline=baseline, margin=margin)
    how_tuned = fairness(snapshot, by_primary)
    family = Family(len(planned), sum(measure.declared for measure in measures))
    return Analysis(
        testbed=record.testbed,
        confidence=CONFIDENCE,
        seeds=tuple(record.seeds),
        finished=to_do.finished,
        rule=headline.rule(family, tuned=bool(by_primary), margin=margin_used),
        fairness=(*how_tuned, *suspected),
        headline=" ".join([_headline(snapshot, runs, judged, to_do), *late]),
        afterwards=late,
        answers=tuple(headline.answer(c, margin_used) for c in judged[0].contrasts),
        causes=tuple(summary(attribution[judged[0].name])),
        attribution=attribution,
        arms=tuple(_arms(record, runs, to_do.missing, judged[0])),
        endpoints=judged,
        sensitivity=sensitivity(record, by_primary, measures[0].endpoint),
        failures=tuple(f"{one.words}. To repeat: {repeat(record)}" for one in failures(runs)[:MOST_FAILURES]),
        notes=(*snapshot.damage, *_missing(to_do.missing)),
        next_step=next_step(snapshot, judged[0]),
        for_a_paper=for_a_paper(snapshot, judged[0], how_tuned),
        judged=tuple(in_pairs),
        snapshot=snapshot,
    )


def _runs_of(snapshot: Snapshot) -> list[StoredRun]:
    """The runs of the arms and seeds that are the study's."""
    labels, seeds = [arm.label for arm in snapshot.record.arms], set(snapshot.record.seeds)
    return [run for run in snapshot.runs if run.spec.optimizer in labels and run.spec.seed in seeds]


@dataclass(frozen=True)
class _ToDo:
    """What the study still has to do.

    Attributes:
      missing: {arm: seeds whose runs are not in the folder}.
      runs: how many have not ended, missing ones among them.
      untuned: arms for which the tuning has chosen nothing yet.
    """

    missing: Mapping[str, Sequence[int]]
    runs: int
    untuned: Sequence[str]

    @property
    def finished(self) -> bool:
        return not self.runs and not self.untuned


def _to_do(record: StudyRecord, runs: Sequence[StoredRun]) -> _ToDo:
    missing = comparable.missing_seeds(record, runs)
    unfinished = sum(run.result is None for run in runs)
    untuned = [arm.label for arm in record.arms if record.tuning is not None and arm.label not in record.chosen]
    return _ToDo(missing, unfinished + sum(map(len, missing.values())), untuned)


def _pairs(record: StudyRecord, baseline: str | None) -> list[tuple[str, str]]:
    """The contrasts: as planned, or every other arm with a baseline."""
    if baseline is None:
        return contrasts(record.arms)
    labels = [arm.label for arm in record.arms]
    if baseline not in labels:
        raise unknown("baseline", baseline, labels)
    return [(label, baseline) for label in labels if label != baseline]


def _question(
    record: StudyRecord, runs: Sequence[StoredRun], measure: Measure, tried: Mapping[str, Sequence[Tried]]
) -> Question:
    """One endpoint with the values of all runs, and with what each tuning may have lost on the same scale."""
    values = values_of(runs, measure)
    log = trials.as_ratios(trials.of_all_arms(tried), measure.endpoint.log) and not without_logarithm(values)
    notes = notes_on(measure, values, runs)
    if measure.endpoint.log and not log:
        notes.append("values at or below 0 have no logarithm: compared as differences instead of ratios")
    endpoint = replace(measure.endpoint, log=log)
    return Question(
        values,
        log=log,
        higher_is_better=endpoint.maximize,
        threshold=endpoint.threshold,
        lost=luck.lost(record, tried, endpoint),
        notes=notes,
        name=measure.name,
        title=endpoint.title,
        is_time=isinstance(measure.reduction, Until),
        primary=measure.primary,
        declared=measure.declared,
    )


def _failed(runs: Sequence[StoredRun]) -> dict[str, set[Seed]]:
    """{arm: seeds whose runs failed}."""
    failed: dict[str, set[Seed]] = {}
    for run in runs:
        if run.result is not None and run.result.status == "failed":
            failed.setdefault(run.spec.optimizer, set()).add(run.spec.seed)
    return failed


def _headline(snapshot: Snapshot, runs: Sequence[StoredRun], judged: Sequence[Comparison], to_do: _ToDo) -> str:
    """The answer, or why there is none yet."""
    total = len(runs) + sum(map(len, to_do.missing.values()))
    if to_do.untuned:
        ended = sum(run.result is not None for run in snapshot.tuning_runs)
        return f"The optimizers are being tuned, {ended} runs so far; the comparison follows."
    if total and not to_do.runs and all(run.result is not None and run.result.status == "failed" for run in runs):
        return f"All {total} runs failed: there is nothing to compare."
    if to_do.runs:
        return f"{total - to_do.runs} of {total} runs have ended. The verdict comes when all have."
    answer = headline.headline(judged)
    judgements = {c.verdict for c in judged[0].contrasts} - {"untested", "unfinished"}
    return with_conditions(answer, snapshot) if judgements else answer


def _missing(gone: Mapping[str, Sequence[int]]) -> list[str]:
    """What is said of runs that are not in the folder."""
    count = sum(map(len, gone.values()))
    if not count:
        return []
    whose = "; ".join(f"{name_of(arm)}: {of_seeds(seeds)}" for arm, seeds in gone.items())
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
        median, mean = (found.get(name, Finding(None)) for name in ("median", "mean"))
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
