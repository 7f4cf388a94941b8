"""Many runs: make what is planned, resume after anything, and compare what came out.

execute   the runs of a plan in worker processes; the same call again resumes: finished runs are kept, unfinished
          ones continue, failed ones wait for `retry_failed`
single    one run in this process
compared  paired comparisons of the endpoints
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import statistics
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kourkoutas.lab import testbeds
from kourkoutas.lab.judging import tuning as judging
from kourkoutas.lab.judging.sensitivity import Sensitivity, sensitivities
from kourkoutas.lab.judging.suspects import Suspects, suspects
from kourkoutas.lab.results import store
from kourkoutas.lab.running import tuning, worker
from kourkoutas.lab.running.pool import Observer, Pool, Queue
from kourkoutas.lab.running.trial import UNREAD
from kourkoutas.lab.specs import optimizers as recipes
from kourkoutas.lab.specs.plan import Plan
from kourkoutas.lab.specs.spec import RunResult, RunSpec
from kourkoutas.lab.testbeds import Endpoint

if TYPE_CHECKING:
    from kourkoutas.lab.judging.confirming import Confirmed
    from kourkoutas.lab.judging.stats import Comparison
    from kourkoutas.lab.judging.targets import Race, Reached, Target

PRIMARY = "endpoint"


def execute(
    plan: Plan,
    out: str | Path,
    *,
    command: str,
    workers: int | None = None,
    retry_failed: bool = False,
    checkpoint_every: int | None = None,
    sink: str | None = None,
    observer: Observer | None = None,
) -> store.Study:
    """Make every run of `plan` that the folder `out` does not hold yet, and return the folder.

    Raises:
      StoreError: `out` holds another configuration, is in use, or is broken; nothing was changed.
      KeyboardInterrupt: on Ctrl-C, after the workers have ended; finished runs are kept.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"--workers must be at least 1; got {workers}")
    if plan.code is not None:
        observer = Guard(observer)
    with holding(plan, out, command) as study:
        make = functools.partial(
            _make,
            study,
            code=plan.code,
            workers=workers,
            retry_failed=retry_failed,
            checkpoint_every=checkpoint_every,
            sink=sink,
            observer=observer,
        )
        if plan.tuning is not None:
            chosen = tuning.tune(plan, study, make, maximize=endpoints(study)[0].maximize)
            study.choose(chosen)
            plan = plan.chosen(chosen)
        make(plan.specs())
        return store.Study(study.path, study.record)


class Guard:
    """Tells an observer what happens, and stops the study at the first run that shows that it has to be corrected."""

    def __init__(self, observer: Observer | None) -> None:
        self._observer = observer

    def planned(self, total: int, kept: int, failed: int, workers: int, threads: int) -> None:
        if self._observer is not None:
            self._observer.planned(total, kept, failed, workers, threads)

    def started(self, spec: RunSpec) -> None:
        if self._observer is not None:
            self._observer.started(spec)

    def progress(self, spec: RunSpec, step: int, steps: int | None, loss: float | None) -> None:
        if self._observer is not None:
            self._observer.progress(spec, step, steps, loss)

    def finished(self, spec: RunSpec, result: RunResult) -> None:
        if self._observer is not None:
            self._observer.finished(spec, result)
        last = (result.error or "").strip().rpartition("\n")[2]
        if last.startswith(UNREAD):
            raise ValueError(f"stopped after the first run: {last.removeprefix(UNREAD)}")


def _make(
    study: store.Writer,
    specs: Sequence[RunSpec],
    *,
    code: store.Code | None,
    workers: int | None,
    retry_failed: bool,
    checkpoint_every: int | None,
    sink: str | None,
    observer: Observer | None,
) -> None:
    """Make those of the runs that the folder does not hold."""
    pending, kept, failed = [], 0, 0
    for spec in specs:
        result = study.result(spec)
        if result is not None and result.status == "failed" and retry_failed:
            study.reopen(spec)
            result = None
        if result is None:
            pending.append(spec)
        else:
            kept += 1
            failed += result.status == "failed"
    study.plan(specs)
    cores = store.cores()
    # A seed's data are made once by the worker that has the seed; tuning has few seeds and many values for each.
    apart = len(pending) if any(study.record.tunes(spec) for spec in specs) else len({spec.seed for spec in specs})
    count = min(workers or min(cores, apart), len(pending))
    threads = max(1, cores // max(count, 1))
    if observer is not None:
        observer.planned(len(specs), kept, failed, count, threads)
    if pending:
        tasks = {
            spec.id: worker.Task(
                spec=spec,
                folder=study.folder(spec).resolve(),
                code=code,
                checkpoint_every=checkpoint_every,
                sink=sink,
            )
            for spec in pending
        }
        Pool(study, Queue(pending), tasks, observer, threads, shared=count > 1).run(count)


def single(
    plan: Plan,
    out: str | Path | None,
    *,
    command: str,
    checkpoint_every: int | None = None,
    sink: str | None = None,
    on_progress: worker.Report = lambda step, steps, loss: None,
) -> RunResult:
    """Make the one run of `plan` in this process; without `out` nothing is kept."""
    (spec,) = plan.specs()
    task = worker.Task(spec=spec, folder=Path(), code=plan.code, checkpoint_every=checkpoint_every, sink=sink)
    if out is None:
        with tempfile.TemporaryDirectory(prefix="kbeta-") as folder:
            return worker.make(task.model_copy(update={"folder": Path(folder)}), on_progress)
    with holding(plan, out, command) as study:
        study.plan([spec])
        kept = study.result(spec)
        if kept is not None and kept.status != "failed":
            return kept
        return worker.make(task.model_copy(update={"folder": study.folder(spec).resolve()}), on_progress)


def holding(plan: Plan, out: str | Path, command: str) -> contextlib.AbstractContextManager[store.Writer]:
    """The folder `out`, locked for the runs of `plan`."""
    return store.writing(
        out,
        testbed=plan.testbed,
        preset=plan.preset,
        engine=plan.engine,
        settings=plan.settings,
        arms=plan.arms,
        seeds=plan.seeds,
        command=command,
        code=plan.code,
        tuning=plan.tuning,
    )


def endpoints(study: store.Study) -> list[Endpoint]:
    """What the runs are judged by, the primary one first; a user's function has one."""
    if study.record.code is not None:
        code = study.record.code
        title = code.endpoint or f"value of {code.function}"
        return [Endpoint(PRIMARY, title, log=code.log, maximize=code.higher_is_better)]
    return list(testbeds.get(study.record.testbed).endpoints)


def values(runs: Sequence[store.StoredRun], endpoint: Endpoint) -> dict[str, dict[int | str, float]]:
    """{arm: {seed: value}} of the runs that gave one: NaN for a diverged run, none for a failed or unfinished one."""
    found: dict[str, dict[int | str, float]] = {}
    for run in runs:
        if run.result is None or run.result.status == "failed":
            continue
        value: float | None = math.nan
        if run.result.status == "ok":
            value = run.result.endpoint if endpoint.metric == PRIMARY else run.result.metrics.get(endpoint.metric)
        if value is not None:
            found.setdefault(run.spec.optimizer, {})[run.spec.seed] = value
    return found


def contrasts(record: store.StudyRecord, labels: Collection[str]) -> list[tuple[str, str]]:
    """(treatment, baseline) pairs: the arms of the first optimizer against those of the others, or, with one optimizer
    only, its first arm against the rest. Controls ask why, not whether, and are left out unless there is nothing else.
    """
    arms = [arm for arm in record.arms if arm.label in labels]
    if not arms:
        return []
    treatments = [arm for arm in arms if arm.optimizer == arms[0].optimizer]
    others = [arm for arm in arms if arm.optimizer != arms[0].optimizer]
    baselines = [arm for arm in others if arm.optimizer not in recipes.CONTROLS] or others
    if not baselines:
        treatments, baselines = treatments[:1], treatments[1:]
    return [(treatment.label, baseline.label) for treatment in treatments for baseline in baselines]


def doubts(study: store.Study, runs: Sequence[store.StoredRun]) -> Suspects:
    """What of the planned contrasts compares nothing."""
    return suspects(study, runs, contrasts(study.record, [arm.label for arm in study.record.arms]))


def compared(study: store.Study) -> dict[str, Comparison]:
    """{title of the endpoint: paired comparison}, of the endpoints that two arms have a value of."""
    from kourkoutas.lab.judging import stats  # scipy and statsmodels take a second, which a run does not need

    runs = study.runs()
    found = {}
    suspected = doubts(study, runs)
    for endpoint in endpoints(study):
        by_arm = values(runs, endpoint)
        pairs = [(a, b) for a, b in contrasts(study.record, by_arm) if not by_arm[a].keys().isdisjoint(by_arm[b])]
        pairs = [(a, b) for a, b in pairs if suspected.allow(a, b)]
        if pairs:
            found[endpoint.title] = stats.compare_pairs(
                by_arm,
                pairs,
                log=endpoint.log and all(x > 0 for arm in by_arm.values() for x in arm.values() if math.isfinite(x)),
                higher_is_better=endpoint.maximize,
                threshold=endpoint.threshold,
            )
    return found


def confirmed(study: store.Study, comparisons: Mapping[str, Comparison]) -> dict[str, tuple[Confirmed, ...]]:
    """{title of the endpoint: verdicts with the luck of the tuning counted}: of the primary endpoint, which was tuned
    for; a study that was not tuned has none."""
    title = endpoints(study)[0].title
    if study.record.tuning is None or title not in comparisons:
        return {}
    from kourkoutas.lab.judging.confirming import confirm

    return {title: confirm(comparisons[title], tuning.tried(study), study.record.chosen)}


def fairness(study: store.Study) -> list[str]:
    """How the arms came by their learning rates, for the head of every account of a study."""
    record = study.record
    told = doubts(study, study.runs()).notes
    if record.tuning is None:
        rates = {arm.settings["lr"] for arm in record.arms if "lr" in arm.settings}
        how = f"{len(rates)} learning rates" if len(rates) > 1 else "one learning rate"
        return [
            f"Compared at {how}; tuned alike, the answer may be another: "
            "--tune lr=LOW:HIGH tunes every optimizer on other seeds first.",
            *told,
        ]
    question, found = record.tuning, tuning.tried(study)
    ranges = ", ".join(f"{axis.name} in {axis.low:g} to {axis.high:g}" for axis in question.axes)
    runs = study.tuning_runs()
    most = max((len(own) for own in found.values()), default=0)
    wider = f", {most} after widening" if most > question.trials else ""
    lines = [
        f"Tuned alike: {ranges}, {question.trials} trials{wider} on {len(question.seeds)} tuning seeds for each "
        "optimizer; the best median of each is compared on other seeds."
    ]
    for label, values in record.chosen.items():
        side = judging.edge(question, found[label], values)
        if side is not None:
            name, value = next(iter(values.items()))
            lines.append(
                f"{label}: its best {name}, {value:g}, is the {side} tried; it may do better beyond. Give --tune a "
                "wider range or raise --tune-budget."
            )
    lines += told
    failed = sum(run.result is not None and run.result.status == "failed" for run in runs)
    if failed:
        lines.append(
            f"{failed} of {len(runs)} tuning runs failed; they rank as the worst. --retry-failed repeats them."
        )
    return lines


def summary(study: store.Study) -> list[dict[str, Any]]:
    """One row per arm: counts of runs by their end, and median and mean of the primary endpoint over the ok ones."""
    runs = study.runs()
    rows = []
    for arm in study.record.arms:
        own = [run for run in runs if run.spec.optimizer == arm.label]
        ends = [run.result.status if run.result else "unfinished" for run in own]
        numbers = [run.result.endpoint for run in own if run.result and run.result.endpoint is not None]
        rows.append(
            {
                "optimizer": arm.label,
                "chosen": study.record.chosen.get(arm.label, {}),
                "runs": len(own),
                **{end: ends.count(end) for end in ("ok", "diverged", "failed", "unfinished")},
                "median": statistics.median(numbers) if numbers else None,
                "mean": statistics.fmean(numbers) if numbers else None,
                "seconds_per_step": _median([run.result.seconds_per_step for run in own if run.result]),
                "times": {
                    part: _median([run.result.times.get(part) for run in own if run.result])
                    for part in ("setup", "data", "compile", "train", "evaluate")
                },
            }
        )
    return rows


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def sensitivity(study: store.Study) -> dict[str, Sensitivity]:
    """{arm: how much it depends on the tuned option}, of a study that tuned one."""
    question = study.record.tuning
    if question is None or len(question.axes) > 1:
        return {}
    return sensitivities(tuning.tried(study), question.axes[0].name, maximize=endpoints(study)[0].maximize)


def to_target(study: store.Study, target: Target) -> tuple[dict[str, Reached], list[Race]]:
    """({arm: its way to the target}, the planned contrasts of the steps that it took)."""
    from kourkoutas.lab.judging import targets

    runs = study.runs()
    found = targets.reached(runs, target)
    suspected = doubts(study, runs)
    pairs = [(a, b) for a, b in contrasts(study.record, list(found)) if suspected.allow(a, b)]
    return found, targets.races(found, pairs)


def as_json(study: store.Study, comparisons: Mapping[str, Comparison], target: Target | None = None) -> dict[str, Any]:
    """A study for machines: every run without its curve, the summary and the comparisons."""
    runs = [
        {
            "id": run.id,
            "optimizer": run.spec.optimizer,
            "seed": run.spec.seed,
            **(json.loads(run.result.model_dump_json(exclude={"curve"})) if run.result else {"status": "unfinished"}),
        }
        for run in study.runs()
    ]
    return {
        "out": str(study.path),
        **json.loads(study.record.model_dump_json()),
        "fairness": fairness(study),
        "runs": runs,
        "tuning_runs": [
            {
                "id": run.id,
                "optimizer": run.spec.optimizer,
                "seed": run.spec.seed,
                "values": study.record.tuning.values(run.spec) if study.record.tuning else {},
                "status": run.result.status if run.result else "unfinished",
                "endpoint": run.result.endpoint if run.result else None,
            }
            for run in study.tuning_runs()
        ],
        "summary": summary(study),
        "comparisons": {title: comparison.to_dict() for title, comparison in comparisons.items()},
        "sensitivity": {arm: one.to_dict() for arm, one in sensitivity(study).items()},
        "target": None if target is None else _target_json(study, target),
        "confirmed": {
            title: [dataclasses.asdict(one) for one in found] for title, found in confirmed(study, comparisons).items()
        },
    }


def _target_json(study: store.Study, target: Target) -> dict[str, Any]:
    from kourkoutas.lab.judging.sensitivity import plain

    found, races = to_target(study, target)
    return {
        "target": str(target),
        "arms": plain([dataclasses.asdict(one) for one in found.values()]),
        "contrasts": [dataclasses.asdict(race) for race in races],
    }
