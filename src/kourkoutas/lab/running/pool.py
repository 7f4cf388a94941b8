"""The executor on this machine: worker processes that make the runs of a study, are watched, and their end explained.

A worker takes one seed at a time and makes all its arms in a row, so that the seed's data are made once; a worker
without a seed left helps with another's. Workers wait for the next phase of a study, and for the next study, as long as
the pool is open, so that each imports its framework once.

NOTE: a worker that dies (kill -9, out of memory, a crash in native code) costs one run; a new worker takes its place.
One that dies while it waits costs none: if a run was given to it before its end could be seen, another worker makes it.

NOTE: a run that exceeds its limits is ended by killing the worker and what it has started, which also ends a function
that is stuck in native code. The next run gets a new worker.

NOTE: a worker's memory also holds what its earlier runs left there. So a run counts as too large only if it is its
worker's first; any other is ended too, and another worker makes it again.

NOTE: memory is looked at while the run goes on; what it takes within one look is not caught. RLIMIT_AS and RLIMIT_DATA
bound addresses, of which CUDA, XLA and thread pools reserve many gigabytes that they never touch, and making a control
group takes rights that a user of a shared machine does not have.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import BinaryIO, cast

import psutil

import kourkoutas
from kourkoutas.lab import machine
from kourkoutas.lab.errors import ArgumentError, argument
from kourkoutas.lab.results import store
from kourkoutas.lab.running.executor import GIB, Ended, Event, Limits, Progress, Started
from kourkoutas.lab.running.worker import Task

SECONDS_TO_WAIT = 0.5  # for something to happen; then limits are looked after
SECONDS_BETWEEN_LOOKS = 1.0  # at the memory
SECONDS_OF_A_LONG_RUN = 30.0  # beside which a few seconds for a new worker, which has more cores, are little


class Pool:
    """Worker processes on this machine, at most `workers` of them, which share its cores; by default one per core."""

    def __init__(self, workers: int | None = None, limits: Limits | None = None) -> None:
        if workers is not None and workers < 1:
            raise ArgumentError("workers", f"{argument('workers')} must be at least 1; got {workers}")
        self.size = 0
        self._workers, self._limits = workers, limits or Limits()
        self._env: dict[str, str] = {}
        self._waiting: list[Task] = []
        self._seeds: dict[int, int] = {}  # of each worker's last run
        self._working: dict[int, Process] = {}
        self._imports: frozenset[str] = frozenset()  # of the present runs
        self._imported: dict[int, frozenset[str]] = {}  # by each worker
        self._seconds: list[float] = []  # that runs took

    def prepare(self, study: store.Writer, tasks: Sequence[Task]) -> None:
        self._imports = imports_of(tasks)
        self.resize(len(tasks))

    def resize(self, runs: int) -> None:
        """Choose how many workers make so many runs; with fewer workers each has more cores.

        NOTE: how many cores a worker may use is settled when it imports a framework. So a few runs that follow many
        get new workers only if that pays.
        """
        cores = machine.cores()
        size = min(self._workers or cores, runs)
        if size < self.size and not self._has_long_runs():
            return
        env = worker_environment(max(1, cores // size), shared=size > 1)
        if env != self._env:
            self._end(list(self._working))
        self.size, self._env = size, env

    def _has_long_runs(self) -> bool:
        return bool(self._seconds) and sum(self._seconds) / len(self._seconds) > SECONDS_OF_A_LONG_RUN

    def submit(self, task: Task) -> None:
        self._waiting.append(task)

    def events(self) -> list[Event]:
        found = self._hand_out()
        if not found:
            connection.wait([process.fileno() for process in self._working.values()], timeout=SECONDS_TO_WAIT)
        for number, process in list(self._working.items()):
            found += process.happened()
            if not process.alive:
                del self._working[number]
                if process.task is not None:
                    self._waiting.insert(0, process.task)
        self._seconds += [event.seconds for event in found if isinstance(event, Ended)]
        return found

    def _hand_out(self) -> list[Event]:
        """Give every worker a run; one is started only for a run."""
        given: list[Event] = []
        for number in range(self.size):
            process = self._working.get(number)
            if process is not None and process.task is not None:
                continue
            task = self.take(number)
            if task is not None:
                self._worker(number).give(task)
                given.append(Started(task.spec.id))
        return given

    def _worker(self, number: int) -> Process:
        """Worker `number`: the one that waits, if it is alive and has imported nothing that these runs must not see."""
        process = self._working.get(number)
        if process is not None:
            process.happened()  # notices when it has ended while it waited
            if process.alive and self._imported[number] == self._imports:
                return process
            self._end([number])
        process = self._working[number] = Process(self._env, self._limits)
        self._imported[number] = self._imports
        return process

    def take(self, number: int) -> Task | None:
        """The next run of worker `number`: of its seed, else of a seed that no worker has, else any."""
        own, taken = self._seeds.get(number), set(self._seeds.values())
        for fits in (lambda seed: seed == own, lambda seed: seed not in taken, lambda seed: True):
            for at, task in enumerate(self._waiting):
                if fits(task.spec.seed):
                    self._seeds[number] = task.spec.seed
                    return self._waiting.pop(at)
        return None

    def cancel(self) -> None:
        self._waiting.clear()
        self._end([number for number, process in self._working.items() if process.task is not None])

    def close(self) -> None:
        self._end(list(self._working))

    def _end(self, numbers: Sequence[int]) -> None:
        ending = [self._working.pop(number) for number in numbers]
        for process in ending:
            process.stop()
        for process in ending:
            process.close()


def imports_of(tasks: Sequence[Task]) -> frozenset[str]:
    """What a worker has imported after these runs: a framework, and the modules of a user's folders.

    NOTE: modules of two folders may have the same name, and two frameworks compete for memory and threads. So runs of
    another folder or another engine get a new worker.
    """
    found = {f"engine {task.spec.engine}" for task in tasks}
    for task in tasks:
        found.update(str(Path(file).parent) for file in task.files)
    return frozenset(found)


class Process:
    """A worker process that makes one run at a time.

    Attributes:
      alive: False when the process has ended; another one has to make what is left.
      task: the run under way; of a process that has ended, one that another has to make.
    """

    def __init__(self, env: Mapping[str, str], limits: Limits) -> None:
        self._limits = limits
        self.task: Task | None = None
        self.alive = True
        self._begun = self._has_made_runs = self._to_be_made_again = False
        self._since = self._looked = 0.0
        self._killed: str | None = None
        self._unread = b""
        receive, send = os.pipe()
        try:
            self._process = subprocess.Popen(
                # -P keeps files of the working directory from standing in for installed packages.
                [sys.executable, "-P", "-m", "kourkoutas.lab.running.worker", str(send), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(send,),
                process_group=0,  # Ctrl-C goes to the study alone, which then ends its workers
                env=dict(env),
            )
        except BaseException:
            os.close(receive)
            raise
        finally:
            os.close(send)
        self._tasks = cast(BinaryIO, self._process.stdin)
        self._events = receive
        os.set_blocking(receive, False)

    def fileno(self) -> int:
        """Readable when something has happened."""
        return self._events

    def give(self, task: Task) -> None:
        self.task, self._begun, self._since = task, False, time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # a dead worker is dealt with when its end is seen
            self._tasks.write(task.model_dump_json().encode() + b"\n")
            self._tasks.flush()

    def happened(self) -> list[Event]:
        """What the worker has told since the last call, and its end."""
        if not self.alive:
            return []
        over = self._process.poll() is not None  # before reading: what it told last is read after its end
        found = self._read()
        if over or self._process.poll() is not None:
            found += self._read()
            found += self._end()
        elif self.task is not None and self._killed is None:
            self._hold_to_limits()
        return found

    def stop(self) -> None:
        """Ask the worker to end, whatever it is doing; `close` waits for it."""
        with contextlib.suppress(BrokenPipeError):
            self._tasks.close()
        if self.task is not None:
            self._process.terminate()

    def close(self) -> None:
        """Wait until the worker has ended; one that does not is killed."""
        if not self.alive:
            return
        try:
            self._process.wait(timeout=5)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            self._kill()
            self._process.wait()
        self._release()

    def _read(self) -> list[Event]:
        data = b""
        try:
            while more := os.read(self._events, 1 << 16):
                data += more
            with contextlib.suppress(subprocess.TimeoutExpired):  # the pipe has ended, so the process is about to
                self._process.wait(timeout=5)
        except BlockingIOError:
            pass
        *lines, self._unread = (self._unread + data).split(b"\n")
        found: list[Event] = []
        for line in lines:
            if self.task is None:
                continue
            told = json.loads(line)
            run = self.task.spec.id
            if told["event"] == "started":
                self._begun, self._since = True, time.monotonic()
            elif told["event"] == "progress":
                found.append(Progress(run, told["step"], told["steps"], told["loss"]))
            elif told["event"] == "full":
                raise store.DiskFull(told["error"])
            else:
                found.append(Ended(run, "the run ended but its result.json is gone", self._seconds()))
                self.task, self._has_made_runs = None, True
        return found

    def _end(self) -> list[Event]:
        """The process has ended: while it waited, in the middle of a run, or so that another makes its run.

        NOTE: one that ended before it began its first run counts as in the middle of it; else what a process cannot
        even import would be tried for ever.
        """
        self._release()
        ended_while_it_waited = self._has_made_runs and not self._begun and self._killed is None
        if self.task is None or self._to_be_made_again or ended_while_it_waited:
            return []
        code = self._process.returncode
        reason = (self._killed or _reason(code)) + _tail(self.task.folder / "output.txt")
        lost = self._killed is None and code == -signal.SIGKILL
        run, self.task = self.task.spec.id, None
        return [Ended(run, reason, self._seconds(), lost)]

    def _hold_to_limits(self) -> None:
        timeout, gib = self._limits.timeout, self._limits.memory
        if timeout is not None and self._begun and self._seconds() > timeout:
            self._killed = f"the run was ended after {timeout:g} s: {argument('timeout')} {timeout:g}"
        elif gib is not None and time.monotonic() - self._looked >= SECONDS_BETWEEN_LOOKS:
            self._looked = time.monotonic()
            held = rss_above(self._process.pid, int(gib * GIB))
            if held is not None and self._has_made_runs:
                self._to_be_made_again = True
            elif held is not None:
                self._killed = f"the run was ended when it held {held / GIB:.2f} GiB: {argument('memory')} {gib:g}"
        if self._killed is not None or self._to_be_made_again:
            self._kill()

    def _seconds(self) -> float:
        return time.monotonic() - self._since

    def _kill(self) -> None:
        """Kill the worker and its children; not reaped yet, it still owns its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _release(self) -> None:
        self.alive = False
        os.close(self._events)
        with contextlib.suppress(BrokenPipeError):  # a task that a dead worker never read
            self._tasks.close()


def rss_above(pid: int, limit: int) -> int | None:
    """The bytes of physical memory and swap that a process and its descendants hold, if more than `limit`, else None.

    Pages that several of them share are counted once in all, where the system tells (Linux). That sum is slow to get
    for large processes, so it is asked for only when the quick one, which counts them for each, is too large.
    """
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.Error:  # it has ended
        return None
    for look in (psutil.Process.memory_info, psutil.Process.memory_full_info):
        held = 0
        for one in family:
            with contextlib.suppress(psutil.Error):
                found = look(one)
                held += getattr(found, "pss", found.rss) + getattr(found, "swap", 0)
        if held <= limit:
            return None
    return held


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
