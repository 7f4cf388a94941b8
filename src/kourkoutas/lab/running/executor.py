"""Who makes the runs of a study: the contract that local processes (`pool`) and a Ray cluster (`ray`) fulfil.

An executor takes runs and tells what becomes of them. Nothing else of the laboratory knows which one is at work.

NOTE: when an executor tells that a run has ended, everything that the run left is in the run's folder, its result.json
last. A run that left no result.json is made again if it was lost (its process was killed from outside, its machine went
away) and attempts are left; else it is recorded as failed, with the reason. So every run is recorded exactly once.
"""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kourkoutas.lab.results import store
from kourkoutas.lab.running import worker
from kourkoutas.lab.running.trial import MISTAKE
from kourkoutas.lab.running.worker import Task
from kourkoutas.lab.specs.spec import RunResult, RunSpec

GIB = 2**30


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
                raise ValueError(f"--{name} must be a number of {unit} above 0, or left out for no limit; got {value}")


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

    Attributes:
      size: how many runs are made at the same time.
      threads: cores for each.
    """

    size: int
    threads: int

    def submit(self, task: Task) -> None:
        """Make this run when its turn comes; what its folder holds of an earlier attempt is to be continued."""
        ...

    def events(self) -> Iterable[Event]:
        """What has happened since the last call, each run's events in order; waits a moment if nothing has."""
        ...

    def close(self) -> None:
        """End what is still running, and leave no process behind."""
        ...


ExecutorFactory = Callable[[store.Study, Sequence[Task]], Executor]
"""Starts an executor for these runs of this study."""


class Observer(Protocol):
    """Told what happens while a study is executed."""

    def planned(self, total: int, kept: int, failed: int, workers: int, threads: int) -> None: ...

    def started(self, spec: RunSpec) -> None: ...

    def progress(self, spec: RunSpec, step: int, steps: int | None, loss: float | None) -> None: ...

    def finished(self, spec: RunSpec, result: RunResult) -> None: ...


def run_all(
    tasks: Sequence[Task], executor: Executor, study: store.Writer, observer: Observer | None = None, retries: int = 0
) -> None:
    """Have the executor make these runs; a lost one is given out again up to `retries` times."""
    left = {task.spec.id: task for task in tasks}
    again = dict.fromkeys(left, retries)
    started: set[str] = set()
    with _terminated_as_interrupt():
        for task in tasks:
            executor.submit(task)
        while left:
            for event in executor.events():
                task = left[event.run]
                if event.run not in started:
                    started.add(event.run)
                    if observer is not None:
                        observer.started(task.spec)
                if isinstance(event, Progress):
                    if observer is not None:
                        observer.progress(task.spec, event.step, event.steps, event.loss)
                elif isinstance(event, Ended):
                    result = study.result(task.spec)
                    if result is None and event.lost and again[event.run] > 0:
                        again[event.run] -= 1
                        executor.submit(task)
                        continue
                    if result is None:
                        attempts = f"\nAttempts: {retries + 1}" if event.lost and retries else ""
                        result = worker.failed(event.reason + attempts, event.seconds)
                        study.finish(task.spec, result)
                    del left[event.run]
                    if observer is not None:
                        observer.finished(task.spec, result)
                    _check_study(result)


def _check_study(result: RunResult) -> None:
    """Stop at the first run of a user's function that shows that the study has to be corrected."""
    last = (result.error or "").strip().rpartition("\n")[2]
    if last.startswith(MISTAKE):
        raise ValueError(f"stopped after the first run: {last.partition(': ')[2]}")


@contextlib.contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
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
