"""A run on a node of a Ray cluster: what the Ray task does.

The task does not make the run itself. It unpacks what came with it, gives the run to a worker process exactly as the
local pool does, watches over it, and sends home what the run's folder holds at the end. So a run has the same
environment, limits and errors here as there, and the node's copy of the folder is nobody else's.

NOTE: the worker process stays for the next run of this Ray worker, as in the pool, unless runs have GPUs: their memory
has to be free for the next run, which may be in another Ray worker.
"""

from __future__ import annotations

import atexit
import contextlib
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path

from kourkoutas.lab import locks
from kourkoutas.lab.errors import argument
from kourkoutas.lab.results import parcel, store
from kourkoutas.lab.results.parcel import Backups
from kourkoutas.lab.running.executor import Ended, Limits, Progress, Started
from kourkoutas.lab.running.pool import Process, worker_environment
from kourkoutas.lab.running.worker import Task

SECONDS_BETWEEN_EVENTS = 1.0
SCRATCH = "kbeta-ray-"


@dataclass(frozen=True)
class Order:
    """A run for a node, with all that it needs.

    Attributes:
      task: its folder and the user's file are those of the driver, and are replaced by copies here.
      files: what the run's folder holds of an earlier attempt.
      storage: address and study of the backups.
      versions: of the driver's packages.
    """

    task: Task
    files: parcel.Files
    limits: Limits
    threads: int
    gpus: bool
    storage: tuple[str, str] | None
    versions: dict[str, str]


@dataclass(frozen=True)
class Home:
    """The last word of a run: how it ended, and what it left."""

    ended: Ended
    files: parcel.Files


class NodeError(RuntimeError):
    """This node cannot make runs of this study; another attempt would not help."""


def make(order: Order, code: dict[str, parcel.Files]) -> Iterator[Started | Progress | Home]:
    """Make the run of `order`, with the user's `code` by its path on the driver."""
    run = order.task.spec.id
    backups = _checked(order)
    scratch = _scratch()
    folder = scratch / "runs" / run
    folder.mkdir(parents=True)
    try:
        yield Started(run)
        parcel.unpack_run((backups.newest(run) if backups is not None else None) or order.files, folder)
        here = {file: str(_unpacked_code(scratch, files) / Path(file).name) for file, files in code.items()}
        task = order.task.model_copy(update={"folder": folder}).with_files(here)
        process = _worker(order, code)
        process.give(task)
        yield from _watch(process, folder, backups)
        if order.gpus:
            _let_go()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _watch(process: Process, folder: Path, backups: Backups | None) -> Iterator[Progress | Home]:
    told = 0.0
    saved, next_save = parcel.state_of_run(folder), 0.0
    while True:
        connection.wait([process.fileno()], timeout=0.5)
        for event in process.happened():
            if isinstance(event, Progress) and time.monotonic() - told >= SECONDS_BETWEEN_EVENTS:
                told = time.monotonic()
                yield event
            elif isinstance(event, Ended):
                yield Home(event, {} if event.lost else parcel.of_run(folder))
                return
        if not process.alive:  # and has left the run to another worker
            yield Home(Ended(folder.name, "the worker ended before it had made the run", 0.0, lost=True), {})
            return
        if backups is not None and time.monotonic() >= next_save:
            state = parcel.state_of_run(folder)
            if state and state != saved:
                start, saved = time.monotonic(), state
                # A backup that cannot be saved costs at most the way back to the last one, not the run.
                with contextlib.suppress(Exception):
                    backups.save(folder.name, parcel.of_run(folder))
                next_save = time.monotonic() + 9 * (time.monotonic() - start)  # a tenth of the time at most


def _checked(order: Order) -> Backups | None:
    """The backups of the study; raises if this node cannot make the study's runs."""
    here, node = store.versions(), platform.node()
    differ = [
        f"{name} {here[name]}, not {there}" for name, there in order.versions.items() if here.get(name, there) != there
    ]
    if differ:
        raise NodeError(f"node {node} has {'; '.join(differ)}: install the versions that the study is started with")
    if order.storage is None:
        return None
    backups = Backups(*order.storage)
    if not backups.seen():
        raise NodeError(
            f"{argument('storage')} {backups.address} is not shared with node {node}: name a place that every node has"
        )
    return backups


# What this Ray worker keeps from run to run.


_kept: tuple[object, Process] | None = None
_folder: Path | None = None


def _worker(order: Order, code: dict[str, parcel.Files]) -> Process:
    """The worker process of this Ray worker: the one of the last run if it fits this one."""
    global _kept
    env = worker_environment(order.threads, shared=True)
    fits = (env, order.limits, [parcel.digest(files) for files in code.values()])
    if _kept is not None and _kept[0] == fits:
        _kept[1].happened()  # notices when it has ended meanwhile
        if _kept[1].alive:
            return _kept[1]
    _let_go()
    process = Process(env, order.limits)
    _kept = (fits, process)
    return process


def _let_go() -> None:
    global _kept
    if _kept is not None:
        _kept[1].stop()
        _kept[1].close()
        _kept = None


def _scratch() -> Path:
    """A folder of this Ray worker; those of Ray workers that were killed are removed.

    NOTE: the lock belongs to the process, so one that can be had is of a process that has ended.
    """
    global _folder
    if _folder is not None:
        return _folder
    for old in Path(tempfile.gettempdir()).glob(f"{SCRATCH}*/lock"):
        with contextlib.suppress(OSError), old.open("r+") as lock:
            if locks.try_lock(lock):
                shutil.rmtree(old.parent, ignore_errors=True)
    _folder = Path(tempfile.mkdtemp(prefix=SCRATCH))
    held = (_folder / "new").open("w")
    locks.wait_for_lock(held)
    (_folder / "new").rename(_folder / "lock")  # held when others can see it
    atexit.register(shutil.rmtree, _folder, ignore_errors=True)
    atexit.register(held.close)
    return _folder


def _unpacked_code(scratch: Path, code: parcel.Files) -> Path:
    folder = scratch / "code" / parcel.digest(code)
    for name, content in code.items():
        path = folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return folder
