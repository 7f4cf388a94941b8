"""A worker process: makes runs one after another, so that a framework is imported, and a step compiled, only once.

`kourkoutas.lab.running.pool` starts it as `python -m kourkoutas.lab.running.worker FD PARENT`. Tasks come as JSON
lines on standard input; events go as JSON lines to the file descriptor FD:

    {"event": "started"}                      the run's time begins
    {"event": "progress", "step": 300, "steps": 30000, "loss": 0.05}
    {"event": "finished"}                     result.json has been written
    {"event": "full", "error": "…"}           the disk is full: the study has to stop

What a run prints goes to output.txt in its folder, with the stack of a crash in native code.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, cast

from pydantic import BaseModel

from kourkoutas.lab.errors import StudyError
from kourkoutas.lab.results import files, store
from kourkoutas.lab.specs.spec import Code, Report, RunResult, RunSpec

SECONDS_BETWEEN_EVENTS = 0.2


class Task(BaseModel):
    """One run to make, as it is sent to a worker; `endpoint` is the one of a testbed that decides, if not its first."""

    spec: RunSpec
    folder: Path
    code: Code | None = None
    endpoint: str | None = None
    checkpoint_every: int | None = None

    @property
    def files(self) -> list[str]:
        """The user's files that the run needs."""
        own = [] if self.code is None else [self.code.file]
        origin = self.spec.origin
        return [*own, origin.place] if origin is not None and origin.in_file else own

    def with_files(self, places: Mapping[str, str]) -> Task:
        """The same task on another machine, where these files are elsewhere."""
        code, origin = self.code, self.spec.origin
        if code is not None:
            code = code.model_copy(update={"file": places[code.file]})
        if origin is not None and origin.in_file:
            origin = origin.model_copy(update={"place": places[origin.place]})
        return self.model_copy(update={"code": code, "spec": self.spec.model_copy(update={"origin": origin})})


def make(task: Task, report: Report) -> RunResult:
    """Make one run and write its result.json; an exception becomes a failed result with its traceback.

    Raises:
      DiskFull: the run has no result; it is made again when the study is resumed.
    """
    start = time.perf_counter()
    try:
        if task.code is not None:
            from kourkoutas.lab.running import trial

            result = trial.run(task.spec, task.folder, task.code, on_progress=report)
        else:
            from kourkoutas.lab.running import train

            result = train.run(
                task.spec,
                task.folder,
                endpoint=task.endpoint,
                on_progress=report,
                checkpoint_every=task.checkpoint_every,
            )
    except (Exception, SystemExit) as error:
        if store.is_full(error):
            raise store.DiskFull.of(cast(OSError, error)) from None
        text = "".join(traceback.format_exception(error))
        mistake = str(error) if isinstance(error, StudyError) else None
        result = RunResult(status="failed", error=text, mistake=mistake, seconds=time.perf_counter() - start)
    store.write_result(task.folder, result)
    return result


def main(fd: int, parent: int) -> None:
    """Serve tasks until standard input ends."""
    _end_with(parent)
    os.set_inheritable(fd, False)
    rest = os.dup(2)
    tasks = open(os.dup(0), encoding="utf-8")  # noqa: SIM115 - read until it ends, with the process
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a training function that reads its input must not eat the tasks
    os.close(nothing)
    with open(fd, "w", encoding="utf-8", buffering=1) as events:

        def send(**event: Any) -> None:
            events.write(json.dumps(event) + "\n")
            events.flush()

        for line in tasks:
            task = Task.model_validate_json(line)
            send(event="started")
            try:
                with _output_to(task.folder / "output.txt", rest):
                    make(task, _throttled(send))
            except OSError as error:  # of output.txt
                if not store.is_full(error):
                    raise
                return send(event="full", error=str(store.DiskFull.of(error)))
            except store.DiskFull as error:
                return send(event="full", error=str(error))
            send(event="finished")


def _throttled(send: Callable[..., None]) -> Report:
    last = 0.0

    def report(step: int, steps: int | None, loss: float | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_EVENTS:
            last = now
            send(event="progress", step=int(step), steps=steps, loss=None if loss is None else float(loss))

    return report


@contextlib.contextmanager
def _output_to(path: Path, rest: int) -> Iterator[None]:
    """Standard output and error of the process, native code included, go to a file, and then to `rest` again."""
    with files.output(path) as file:
        faulthandler.enable(file)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):  # what was printed does not fit on the disk
                    stream.flush()
            os.dup2(rest, 1)
            os.dup2(rest, 2)
            faulthandler.disable()
    if path.stat().st_size == 0:
        files.remove(path)


def _end_with(parent: int) -> None:
    """Leave no worker behind when the study is killed: it would write beside the one that resumes.

    Linux kills the worker itself; elsewhere a thread notices that the parent has changed.
    """
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _leave() -> NoReturn:
    """End the process as the interpreter would, but for taking it apart: with a framework that takes a second.

    NOTE: what a run's code has registered for the end is called. Everything else of the process is the system's.
    """
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
    _leave()
