"""Many runs: make what is planned and resume after anything. What came out is judged in `kourkoutas.lab.judging`.

execute   the runs of a plan in worker processes; the same call again resumes: finished runs are kept, unfinished
          ones continue, failed ones wait for `retry_failed`
single    one run in this process
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from kourkoutas.lab import machine
from kourkoutas.lab.results import store
from kourkoutas.lab.running import worker
from kourkoutas.lab.running.pool import Observer, Pool, Queue
from kourkoutas.lab.specs.plan import Plan
from kourkoutas.lab.specs.spec import RunResult


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
        cores = machine.cores()
        count = min(workers or min(cores, len(set(plan.seeds))), len(pending))
        threads = max(1, cores // max(count, 1))
        if observer is not None:
            observer.planned(len(specs), kept, failed, count, threads)
        if pending:
            tasks = {
                spec.id: worker.Task(
                    spec=spec,
                    folder=study.folder(spec).resolve(),
                    code=plan.code,
                    checkpoint_every=checkpoint_every,
                    sink=sink,
                )
                for spec in pending
            }
            Pool(study, Queue(pending), tasks, observer, threads, shared=count > 1).run(count)
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
        arms=plan.recorded_arms(),
        seeds=plan.seeds,
        command=command,
        code=plan.code,
    )
