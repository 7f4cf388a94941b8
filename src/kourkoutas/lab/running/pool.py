"""The executor on this machine: worker processes that make the runs of a study.

A worker takes one seed at a time and makes all its arms in a row, so that the seed's data are made once; a worker
without a seed left helps with another's.

NOTE: a worker that dies (kill -9, out of memory, a crash in native code) costs one run; a new worker takes its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from multiprocessing import connection

from kourkoutas.lab import machine
from kourkoutas.lab.results import store
from kourkoutas.lab.running.executor import Event, Executor, ExecutorFactory, Limits, Started
from kourkoutas.lab.running.process import Process, worker_environment
from kourkoutas.lab.running.worker import Task
from kourkoutas.lab.specs.spec import RunSpec

SECONDS_TO_WAIT = 0.5  # for something to happen; then limits are looked after


class Queue:
    """Which run a worker makes next: its seed's, else one of a seed nobody has, else one of the longest queue."""

    def __init__(self) -> None:
        self._seeds: dict[int, deque[RunSpec]] = {}
        self._owner: dict[int, int] = {}

    def add(self, spec: RunSpec) -> None:
        self._seeds.setdefault(spec.seed, deque()).append(spec)

    def take(self, taker: int) -> RunSpec | None:
        waiting = {seed: queue for seed, queue in self._seeds.items() if queue}
        if not waiting:
            return None
        mine = [seed for seed in waiting if self._owner.get(seed) == taker]
        free = [seed for seed in waiting if seed not in self._owner]
        if mine or free:
            seed = (mine or free)[0]
            self._owner[seed] = taker
            return waiting[seed].popleft()
        return max(waiting.values(), key=len).pop()


class Pool:
    """`size` worker processes on this machine."""

    def __init__(self, size: int, threads: int, limits: Limits) -> None:
        self.size, self.threads = size, threads
        self._limits = limits
        self._env = worker_environment(threads, shared=size > 1)
        self._queue = Queue()
        self._tasks: dict[str, Task] = {}
        self._working: dict[int, Process] = {}
        self._retired: list[Process] = []

    def submit(self, task: Task) -> None:
        self._tasks[task.spec.id] = task
        self._queue.add(task.spec)

    def events(self) -> list[Event]:
        found = self._hand_out()
        if not found:
            connection.wait([process.fileno() for process in self._working.values()], timeout=SECONDS_TO_WAIT)
        for number, process in list(self._working.items()):
            found += process.happened()
            if not process.alive:
                del self._working[number]
        return found

    def _hand_out(self) -> list[Event]:
        """Give every worker a run; one is started only for a run, and let go when there is none."""
        given: list[Event] = []
        for number in range(self.size):
            process = self._working.get(number)
            if process is not None and process.task is not None:
                continue
            spec = self._queue.take(number)
            if spec is not None:
                if process is None:
                    process = self._working[number] = Process(self._env, self._limits)
                process.give(self._tasks[spec.id])
                given.append(Started(spec.id))
            elif process is not None:
                process.retire()
                self._retired.append(self._working.pop(number))
        return given

    def close(self) -> None:
        every = [*self._working.values(), *self._retired]
        for process in every:
            process.stop()
        for process in every:
            process.close()
        self._working.clear()
        self._retired.clear()


def local(workers: int | None = None, limits: Limits | None = None) -> ExecutorFactory:
    """A pool of `workers` processes that share the cores; by default one per core, but not more than seeds."""
    if workers is not None and workers < 1:
        raise ValueError(f"--workers must be at least 1; got {workers}")

    def start(study: store.Study, tasks: Sequence[Task]) -> Executor:
        cores = machine.cores()
        # A seed's data are made once by the worker that has the seed; tuning has few seeds and many values for each.
        tuning = any(study.record.tunes(task.spec) for task in tasks)
        size = min(workers or min(cores, len(tasks) if tuning else len(study.record.seeds)), len(tasks))
        return Pool(size, max(1, cores // size), limits or Limits())

    return start
