"""Many runs: make what is planned, resume after anything, and compare what came out.

execute   the runs of a plan by a crew; the same call again resumes: finished runs are kept, unfinished ones continue,
          failed ones wait for `retry_failed`
single    one run in this process
compared  paired comparisons of the endpoints
"""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kourkoutas.lab import testbeds
from kourkoutas.lab.results import store
from kourkoutas.lab.running import crew, pool, worker
from kourkoutas.lab.specs import optimizers as recipes
from kourkoutas.lab.specs.plan import Plan
from kourkoutas.lab.specs.spec import RunResult
from kourkoutas.lab.testbeds import Endpoint

if TYPE_CHECKING:
    from kourkoutas.lab.judging.stats import Comparison

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
    observer: crew.Observer | None = None,
    hire: crew.Hire | None = None,
    retries: int = 0,
) -> store.Study:
    """Make every run of `plan` that the folder `out` does not hold yet, and return the folder.

    `hire` gets those who make the runs: by default `workers` processes here. A lost run is made again up to `retries`
    times.

    Raises:
      StoreError: `out` holds another configuration, is in use, or is broken; nothing was changed.
      KeyboardInterrupt: on Ctrl-C, after the workers have ended; finished runs are kept.
    """
    hire = hire or pool.hire(workers)
    specs = plan.specs()
    with holding(plan, out, command) as study:
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
        if not pending:
            if observer is not None:
                observer.planned(len(specs), kept, failed, 0, 0)
            return store.Study(study.path, study.record)
        tasks = [
            worker.Task(
                spec=spec,
                folder=study.folder(spec).resolve(),
                code=plan.code,
                checkpoint_every=checkpoint_every,
                sink=sink,
            )
            for spec in pending
        ]
        with contextlib.closing(hire(study, tasks)) as hired:
            if observer is not None:
                observer.planned(len(specs), kept, failed, hired.size, hired.threads)
            crew.make(tasks, hired, study, observer, retries)
        return store.Study(study.path, study.record)


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


def compared(study: store.Study) -> dict[str, Comparison]:
    """{title of the endpoint: paired comparison}, of the endpoints that two arms have a value of."""
    from kourkoutas.lab.judging import stats  # scipy and statsmodels take a second, which a run does not need

    runs = study.runs()
    found = {}
    for endpoint in endpoints(study):
        by_arm = values(runs, endpoint)
        pairs = [(a, b) for a, b in contrasts(study.record, by_arm) if not by_arm[a].keys().isdisjoint(by_arm[b])]
        if pairs:
            found[endpoint.title] = stats.compare_pairs(
                by_arm,
                pairs,
                log=endpoint.log and all(x > 0 for arm in by_arm.values() for x in arm.values() if math.isfinite(x)),
                higher_is_better=endpoint.maximize,
                threshold=endpoint.threshold,
            )
    return found


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
                "runs": len(own),
                **{end: ends.count(end) for end in ("ok", "diverged", "failed", "unfinished")},
                "median": statistics.median(numbers) if numbers else None,
                "mean": statistics.fmean(numbers) if numbers else None,
            }
        )
    return rows


def as_json(study: store.Study, comparisons: Mapping[str, Comparison]) -> dict[str, Any]:
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
        "runs": runs,
        "summary": summary(study),
        "comparisons": {title: comparison.to_dict() for title, comparison in comparisons.items()},
    }
