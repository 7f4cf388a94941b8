"""Many runs: who makes them, that each is made once, and how a study resumes after anything.

`Executor` is the contract that local processes (`pool`) and a Ray cluster (`ray`) fulfil: it takes runs and tells what
becomes of them. Nothing else of the laboratory knows which one is at work. The same call again resumes: finished runs
are kept, unfinished ones continue, failed ones wait for `retry_failed`.

NOTE: when an executor tells that a run has ended, everything that the run left is in the run's folder, its result.json
last. A run that left no result.json is made again if it was lost (its process was killed from outside, its machine went
away) and attempts are left; else it is recorded as failed, with the reason. So every run is recorded exactly once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kourkoutas.lab.errors import ArgumentError, StudyError, argument
from kourkoutas.lab.planning.plan import Plan
from kourkoutas.lab.results import store
from kourkoutas.lab.running.worker import Task
from kourkoutas.lab.specs.spec import Arm, Code, RunResult, RunSpec

GIB = 2**30
# Machines of a cluster come and go; what is killed on one machine mostly lacked memory, and would again.
RAY_RETRIES = 2


@dataclass(frozen=True)
class Limits:
    """What one run may take; None is no limit.

    Attributes:
      timeout: seconds from when a worker begins the run until it is killed.
      memory: GiB that the run's process and its children hold together.
    """

    timeout: float | None = None
    memory: float | None = None

    def __post_init__(self) -> None:
        for name, value, unit in (("timeout", self.timeout, "seconds"), ("memory", self.memory, "GiB")):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ArgumentError(
                    name, f"{argument(name)} must be a number of {unit} above 0, or left out for no limit; got {value}"
                )


@dataclass(frozen=True)
class Started:
    """A worker has taken the run."""

    run: str


@dataclass(frozen=True)
class Progress:
    run: str
    step: int
    steps: int | None
    loss: float | None


@dataclass(frozen=True)
class Ended:
    """The run is over, or its worker is.

    Attributes:
      reason: the error to record if the run left no result.json.
      seconds: since the run was begun.
      lost: whether another attempt may succeed.
    """

    run: str
    reason: str
    seconds: float
    lost: bool = False


Event = Started | Progress | Ended


class Executor(Protocol):
    """Makes runs, some of them at the same time.

    One executor serves a whole study, tuning included, and one study after another: its workers import a framework
    once. Whoever made it closes it.

    Attributes:
      size: how many of the runs that it was prepared for are made at the same time.
    """

    size: int

    def prepare(self, study: store.Writer, tasks: Sequence[Task]) -> None:
        """Get ready for these runs of this study, after all earlier ones have ended or were cancelled."""
        ...

    def submit(self, task: Task) -> None:
        """Make this run when its turn comes; what its folder holds of an earlier attempt is to be continued."""
        ...

    def events(self) -> Iterable[Event]:
        """What has happened since the last call, each run's events in order; waits a moment if nothing has."""
        ...

    def cancel(self) -> None:
        """End the runs under way, and forget those that wait."""
        ...

    def close(self) -> None:
        """Cancel, and leave no process behind."""
        ...


class Observer:
    """Told what happens while a study is executed; this one does nothing about it."""

    def planned(self, total: int, kept: int, failed: int, workers: int) -> None: ...

    def started(self, spec: RunSpec) -> None: ...

    def progress(self, spec: RunSpec, step: int, steps: int | None, loss: float | None) -> None: ...

    def finished(self, spec: RunSpec, result: RunResult) -> None: ...


NOBODY = Observer()


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
) -> tuple[Executor, int]:
    """(the executor, how often a lost run is made again), from the words of a command line.

    Nothing is started yet: the executor starts its workers, or connects, when it is prepared for the first runs.
    """
    limits = Limits(timeout, memory_per_run)
    if retries is not None and retries < 0:
        raise ArgumentError("retries", f"{argument('retries')} must be 0 or above; got {retries}")
    if ray is None:
        _check_without_cluster(cpus_per_run=cpus_per_run, gpus_per_run=gpus_per_run, storage=storage)
        from kourkoutas.lab.running import pool

        return pool.Pool(workers, limits), retries or 0
    if workers is not None:
        raise ArgumentError(
            "workers",
            f"{argument('workers')} {workers} is for processes of this machine; with {argument('ray')} the nodes and "
            f"{argument('cpus_per_run')} say how many runs are made at once: leave it out",
        )
    from kourkoutas.lab.running.ray import on_cluster

    executor = on_cluster(
        ray,
        cpus=1.0 if cpus_per_run is None else cpus_per_run,
        gpus=0.0 if gpus_per_run is None else gpus_per_run,
        storage=storage,
        limits=limits,
    )
    return executor, RAY_RETRIES if retries is None else retries


def _check_without_cluster(**for_clusters: Any) -> None:
    """Raise at the first of these arguments that has a value."""
    for name, value in for_clusters.items():
        if value is not None:
            raise ArgumentError(
                name, f"{argument(name)} {value} is for runs on a Ray cluster: add {argument('ray')}, or leave it out"
            )


def holding(plan: Plan, out: str | Path, command: str) -> contextlib.AbstractContextManager[store.Writer]:
    """The folder `out`, locked for the runs of `plan` and of the arms that were tuned there before."""

    def resolved(arms: Iterable[Arm]) -> list[Arm]:
        return [arm.model_copy(update={"resolved": plan.resolved(arm)}) for arm in arms]

    configuration = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    configuration["arms"] = resolved(plan.arms)
    return store.writing(out, command=command, also=lambda there: resolved(tuned_before(plan, there)), **configuration)


def tuned_before(plan: Plan, record: store.StudyRecord) -> list[Arm]:
    """The arms that the folder has tuned and `plan` does not name: arms are tuned alike only if tuned together."""
    if plan.tuning is None:
        return []
    named = {arm.label for arm in plan.arms}
    kept = [arm for arm in record.arms if arm.label in record.chosen and arm.label not in named]
    return [arm.model_copy(update={"resolved": None}) for arm in kept]


def make_runs(
    study: store.Writer,
    specs: Sequence[RunSpec],
    *,
    code: Code | None,
    executor: Executor,
    retries: int = 0,
    retry_failed: bool = False,
    checkpoint_every: int | None = None,
    observer: Observer = NOBODY,
) -> None:
    """Make those of the runs that the folder does not hold.

    A lost run is made again up to `retries` times.
    """
    results = _results(study, specs, retry_failed)
    pending = [spec for spec, result in zip(specs, results, strict=True) if result is None]
    kept, failed = len(specs) - len(pending), sum(map(_failed, results))
    study.plan(specs)
    if not pending:
        observer.planned(len(specs), kept, failed, 0)
        return
    study.begin(len(pending))
    tasks = [
        Task(
            spec=spec,
            folder=study.folder(spec).resolve(),
            code=code,
            endpoint=study.record.primary,
            checkpoint_every=checkpoint_every,
        )
        for spec in pending
    ]
    executor.prepare(study, tasks)
    observer.planned(len(specs), kept, failed, executor.size)
    try:
        with terminated_as_interrupt():  # again: Ray has set a handler of its own
            run_all(tasks, executor, study, observer, retries)
    except BaseException:
        executor.cancel()  # before this process lets go of the folder, where another one may go on
        raise


def _results(study: store.Writer, specs: Sequence[RunSpec], retry_failed: bool) -> list[RunResult | None]:
    """What the folder holds of these runs, where failed ones that are to be made again are unfinished from now on."""
    found = []
    for spec in specs:
        result = study.run(spec).result
        if retry_failed and _failed(result):
            study.reopen(spec)
            result = None
        found.append(result)
    return found


def _failed(result: RunResult | None) -> bool:
    return result is not None and result.status == "failed"


def run_all(
    tasks: Sequence[Task], executor: Executor, study: store.Writer, observer: Observer = NOBODY, retries: int = 0
) -> None:
    """Have the executor make these runs; a lost one is given out again up to `retries` times."""
    left = {task.spec.id: task for task in tasks}
    again = dict.fromkeys(left, retries)
    started: set[str] = set()
    for task in tasks:
        executor.submit(task)
    while left:
        for event in executor.events():
            task = left[event.run]
            if event.run not in started:
                started.add(event.run)
                observer.started(task.spec)
            if isinstance(event, Progress):
                observer.progress(task.spec, event.step, event.steps, event.loss)
            elif isinstance(event, Ended):
                result = study.run(task.spec).result
                if result is None and event.lost and again[event.run] > 0:
                    again[event.run] -= 1
                    executor.submit(task)
                    continue
                if result is None:
                    attempts = f"\nAttempts: {retries + 1}" if event.lost and retries else ""
                    result = RunResult(status="failed", error=event.reason + attempts, seconds=event.seconds)
                    study.finish(task.spec, result)
                del left[event.run]
                observer.finished(task.spec, result)
                _check_study(result)


def _check_study(result: RunResult) -> None:
    """Stop at the first run of a user's function that shows that the study has to be corrected."""
    if result.mistake is not None:
        raise StudyError(f"stopped after the first run: {result.mistake}")


@contextlib.contextmanager
def terminated_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C, so that a stopped job ends as cleanly as one stopped by hand."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before: dict[int, Any] = {}
    try:
        for signalled in (signal.SIGTERM, signal.SIGHUP):
            with contextlib.suppress(ValueError):  # only the main thread may set handlers
                before[signalled] = signal.signal(signalled, interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
