"""Many runs: make what is planned and resume after anything.

The same call again resumes: finished runs are kept, unfinished ones continue, failed ones wait for `retry_failed`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from kourkoutas.lab.planning.plan import Plan
from kourkoutas.lab.results import store
from kourkoutas.lab.running import executor, pool, worker
from kourkoutas.lab.running.executor import ExecutorFactory, Limits, Observer
from kourkoutas.lab.specs.spec import Code, RunSpec

# Machines of a cluster come and go; what is killed on one machine mostly lacked memory, and would again.
RAY_RETRIES = 2


def choose_executor(
    *,
    ray: str | None = None,
    workers: int | None = None,
    cpus_per_run: float | None = None,
    gpus_per_run: float | None = None,
    storage: str | None = None,
    retries: int | None = None,
    timeout: float | None = None,
    memory_per_run: float | None = None,
) -> tuple[ExecutorFactory, int]:
    """(what starts the executor, how often a lost run is made again), from the words of a command line."""
    limits = Limits(timeout, memory_per_run)
    if retries is not None and retries < 0:
        raise ValueError(f"--retries must be 0 or above; got {retries}")
    if ray is None:
        given = {"--cpus-per-run": cpus_per_run, "--gpus-per-run": gpus_per_run, "--storage": storage}
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} {value} is for runs on a Ray cluster: add --ray, or leave it out")
        return pool.local(workers, limits), retries or 0
    if workers is not None:
        raise ValueError(
            f"--workers {workers} is for processes of this machine; with --ray the nodes and --cpus-per-run say how "
            "many runs are made at once: leave it out"
        )
    from kourkoutas.lab.running import ray as cluster

    factory = cluster.on_cluster(
        ray,
        cpus=1.0 if cpus_per_run is None else cpus_per_run,
        gpus=0.0 if gpus_per_run is None else gpus_per_run,
        storage=storage,
        limits=limits,
    )
    return factory, RAY_RETRIES if retries is None else retries


def make_runs(
    study: store.Writer,
    specs: Sequence[RunSpec],
    *,
    code: Code | None,
    start: ExecutorFactory,
    retries: int = 0,
    retry_failed: bool = False,
    checkpoint_every: int | None = None,
    observer: Observer | None = None,
) -> None:
    """Make those of the runs that the folder does not hold.

    `start` gets who makes them. A lost run is made again up to `retries` times.
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
        worker.Task(spec=spec, folder=study.folder(spec).resolve(), code=code, checkpoint_every=checkpoint_every)
        for spec in pending
    ]
    with contextlib.closing(start(study, tasks)) as started:
        if observer is not None:
            observer.planned(len(specs), kept, failed, started.size, started.threads)
        executor.run_all(tasks, started, study, observer, retries)


def holding(plan: Plan, out: str | Path, command: str) -> contextlib.AbstractContextManager[store.Writer]:
    """The folder `out`, locked for the runs of `plan`."""
    configuration = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    return store.writing(out, command=command, **{**configuration, "arms": plan.recorded_arms()})
