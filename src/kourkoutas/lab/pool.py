"""Worker processes that make the runs of a study.

A worker takes one seed at a time and makes all its arms in a row, so that the seed's data are made once; a worker
without a seed left helps with another's.

NOTE: a worker that dies (kill -9, out of memory, a crash in native code) costs one run, which is recorded as failed
with the reason; a new worker takes its place.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast

import kourkoutas
from kourkoutas.lab import store, worker
from kourkoutas.lab.spec import RunResult, RunSpec

if TYPE_CHECKING:
    pass


class Observer(Protocol):
    """Told what happens while a study is executed."""

    def planned(self, total: int, kept: int, failed: int, workers: int, threads: int) -> None: ...

    def started(self, spec: RunSpec) -> None: ...

    def progress(self, spec: RunSpec, step: int, steps: int | None, loss: float | None) -> None: ...

    def finished(self, spec: RunSpec, result: RunResult) -> None: ...


class Queue:
    """Which run a worker makes next: one of its seed, else of a seed that no worker has, else of the longest queue."""

    def __init__(self, specs: Sequence[RunSpec]) -> None:
        self._seeds: dict[int, deque[RunSpec]] = {}
        for spec in specs:
            self._seeds.setdefault(spec.seed, deque()).append(spec)
        self._owner: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._seeds.values())

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


@dataclass
class _Worker:
    number: int
    process: subprocess.Popen[bytes]
    tasks: BinaryIO
    events: int
    spec: RunSpec | None = None
    since: float = 0.0
    unread: bytes = b""


@dataclass
class Pool:
    """The worker processes of one execution."""

    study: store.Writer
    queue: Queue
    tasks: Mapping[str, worker.Task]
    observer: Observer | None
    threads: int
    shared: bool
    alive: list[_Worker] = field(default_factory=list)

    def run(self, count: int) -> None:
        with selectors.DefaultSelector() as selector, _terminated_as_interrupt():
            try:
                for number in range(count):
                    self._start(number, selector)
                while self.alive:
                    for key, _ in selector.select(timeout=0.5):
                        self._read(key.data)
                    for member in list(self.alive):
                        if member.process.poll() is not None:
                            self._gone(member, selector)
            finally:
                self._stop(selector)

    def _start(self, number: int, selector: selectors.BaseSelector) -> None:
        """Start a worker and give it its first run; none is started when nothing is waiting."""
        spec = self.queue.take(number)
        if spec is None:
            return
        receive, send = os.pipe()
        try:
            process = subprocess.Popen(
                # -P keeps files of the working directory from standing in for installed packages.
                [sys.executable, "-P", "-m", "kourkoutas.lab.worker", str(send), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(send,),
                process_group=0,  # Ctrl-C goes to the study alone, which then ends its workers
                env=worker_environment(self.threads, shared=self.shared),
            )
        except BaseException:
            os.close(receive)
            raise
        finally:
            os.close(send)
        member = _Worker(number, process, cast(BinaryIO, process.stdin), receive)
        os.set_blocking(receive, False)
        selector.register(receive, selectors.EVENT_READ, member)
        self.alive.append(member)
        self._give(member, spec)

    def _give(self, member: _Worker, spec: RunSpec) -> None:
        member.spec, member.since = spec, time.perf_counter()
        if self.observer is not None:
            self.observer.started(spec)
        with contextlib.suppress(BrokenPipeError):  # a dead worker is dealt with when its end is seen
            member.tasks.write(self.tasks[spec.id].model_dump_json().encode() + b"\n")
            member.tasks.flush()

    def _read(self, member: _Worker) -> None:
        try:
            data = os.read(member.events, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.process.wait(timeout=5)
            return
        *lines, member.unread = (member.unread + data).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if member.spec is None:
                continue
            if event["event"] == "progress":
                if self.observer is not None:
                    self.observer.progress(member.spec, event["step"], event["steps"], event["loss"])
            else:
                self._finished(member.spec, member.since, "the run ended but its result.json is gone")
                member.spec = None
                if (spec := self.queue.take(member.number)) is not None:
                    self._give(member, spec)
                else:
                    member.tasks.close()

    def _finished(self, spec: RunSpec, since: float, otherwise: str) -> None:
        """Tell the result of a run; `otherwise` is its error when it left none."""
        result = self.study.result(spec)
        if result is None:
            result = worker.failed(otherwise, time.perf_counter() - since)
            self.study.finish(spec, result)
        if self.observer is not None:
            self.observer.finished(spec, result)

    def _gone(self, member: _Worker, selector: selectors.BaseSelector) -> None:
        """A worker has ended: by itself when it had nothing left, else in the middle of a run."""
        self._read(member)
        self._release(member, selector)
        self.alive.remove(member)
        if member.spec is None:
            return
        output = _tail(self.study.folder(member.spec) / "output.txt")
        self._finished(member.spec, member.since, _reason(member.process.returncode) + output)
        self._start(member.number, selector)

    def _stop(self, selector: selectors.BaseSelector) -> None:
        """End what is left: only after an interrupt or an error is there any."""
        for member in self.alive:
            member.process.terminate()
        for member in self.alive:
            try:
                member.process.wait(timeout=5)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                member.process.kill()
                member.process.wait()
            self._release(member, selector)
        self.alive.clear()

    @staticmethod
    def _release(member: _Worker, selector: selectors.BaseSelector) -> None:
        selector.unregister(member.events)
        os.close(member.events)
        with contextlib.suppress(BrokenPipeError):  # a task that a dead worker never read
            member.tasks.close()


def worker_environment(threads: int, *, shared: bool) -> dict[str, str]:
    """The environment of a worker that may use `threads` cores; what the caller has set stays.

    NOTE: thread counts have to be there before a framework is imported. XLA's CPU client takes its pool from NPROC, and
    its matrix products use that pool only with multi_thread_eigen.
    """
    env = dict(os.environ)
    count = str(threads)
    for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB_MAXIMUM"):
        env.setdefault(f"{name}_{'THREADS' if name == 'VECLIB_MAXIMUM' else 'NUM_THREADS'}", count)
    env.setdefault("NPROC", count)
    env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", count)
    if threads == 1 and "xla_cpu_multi_thread_eigen" not in env.get("XLA_FLAGS", ""):
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
    if shared:  # else the first worker takes the accelerator's whole memory
        env.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    root = Path(kourkoutas.__file__).parents[1]
    if root.name not in ("site-packages", "dist-packages"):  # a source tree, which a new interpreter may not know
        env["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [env.get("PYTHONPATH")])])
    return env


def _reason(code: int) -> str:
    if code >= 0:
        return f"the worker process ended by itself with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown signal"
    hint = " (often the system's answer to a lack of memory)" if -code == signal.SIGKILL else ""
    return f"the worker process was ended by signal {-code}, {name}{hint}"


def _tail(output: Path, lines: int = 20) -> str:
    """The end of what the run printed, for its error message."""
    if not output.exists():
        return ""
    text = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-lines:]
    return "\nIts last output:\n" + "\n".join(text) if text else ""


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
