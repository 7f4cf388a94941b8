"""Many runs: make what is planned and resume after anything.

The same call again resumes: finished runs are kept, unfinished ones continue, failed ones wait for `retry_failed`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from kourkoutas.lab.planning.plan import Plan
from kourkoutas.lab.results import store
from kourkoutas.lab.running import crew, worker
from kourkoutas.lab.running.trial import UNREAD
from kourkoutas.lab.specs.spec import Code, RunResult, RunSpec


class Guard:
    """Tells an observer what happens, and stops the study at the first run that shows that it has to be corrected."""

    def __init__(self, observer: crew.Observer | None) -> None:
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


def make_runs(
    study: store.Writer,
    specs: Sequence[RunSpec],
    *,
    code: Code | None,
    hire: crew.Hire,
    retries: int = 0,
    retry_failed: bool = False,
    checkpoint_every: int | None = None,
    observer: crew.Observer | None = None,
) -> None:
    """Make those of the runs that the folder does not hold.

    `hire` gets those who make them. A lost run is made again up to `retries` times.
    """
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
        return
    tasks = [
        worker.Task(
            spec=spec,
            folder=study.folder(spec).resolve(),
            code=code,
            checkpoint_every=checkpoint_every,
        )
        for spec in pending
    ]
    with contextlib.closing(hire(study, tasks)) as hired:
        if observer is not None:
            observer.planned(len(specs), kept, failed, hired.size, hired.threads)
        crew.make(tasks, hired, study, observer, retries)


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
        tuning=plan.tuning,
        primary=plan.primary,
    )
