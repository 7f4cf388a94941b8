"""The executor on a Ray cluster: every run is a Ray task.

The driver, which is the process that the user started, owns the results folder: tasks send events and at the end the
run's files, and only the driver writes them. So a run that was given up as lost, or whose driver was killed, leaves
nothing in the results folder, and every run is recorded exactly once.

The user's code, which is the training function and optimizers of files, goes with the tasks by content: each file with
the Python modules of its folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import logging
import math
import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kourkoutas.lab import machine
from kourkoutas.lab.errors import ArgumentError, argument
from kourkoutas.lab.results import parcel, store
from kourkoutas.lab.results.parcel import Backups, resolved
from kourkoutas.lab.running import node
from kourkoutas.lab.running.executor import GIB, Ended, Event, Limits
from kourkoutas.lab.running.worker import Task

LOCAL = "local"  # a cluster of this machine, which lives as long as the study
SECONDS_TO_WAIT = 0.5
SECONDS_TO_CONNECT = 10


class RayExecutor:
    """Ray tasks on the cluster at `address`.

    Args:
      cpus, gpus: that Ray sets aside for each run.
      storage: where the backups are kept from which runs of lost nodes go on.
    """

    def __init__(self, address: str, cpus: float, gpus: float, limits: Limits, storage: str | None) -> None:
        import ray

        self._ray = ray
        self._address, self._storage = address, storage
        self._limits, self._cpus, self._gpus = limits, cpus, gpus
        self.size = 0
        self._threads = max(1, int(cpus))
        self._versions = store.versions()
        self._streams: dict[Any, tuple[Task, float]] = {}
        self._place: tuple[str, str] | None = None  # address and study of the backups
        self._connection = contextlib.ExitStack()  # empty before the first runs
        self._connected = False

    def prepare(self, study: store.Writer, tasks: Sequence[Task]) -> None:
        if self._storage is not None and (place := _backups_of(study, self._storage)) != self._place:
            self._remove_backups()
            _check_writable(place, self._storage)
            self._place = place
        if not self._connected:
            self._connection.enter_context(_connected(self._address))
            self._connected = True
        wanted = {"CPU": self._cpus, "GPU": self._gpus, "memory": (self._limits.memory or 0) * GIB}
        self.size = sum(_fitting(each["Resources"], wanted) for each in self._ray.nodes() if each["Alive"])
        if self.size == 0:
            asked = {"cpus_per_run": self._cpus, "gpus_per_run": self._gpus, "memory": self._limits.memory}
            given = ", ".join(f"{argument(name)} {amount:g}" for name, amount in asked.items() if amount)
            raise ValueError(f"no node of the Ray cluster has room for a run with {given}: ask for less, or add nodes")
        files = sorted(set(itertools.chain.from_iterable(task.files for task in tasks)))
        self._code = self._ray.put({file: parcel.of_code(Path(file)) for file in files})
        self._make = self._ray.remote(node.make).options(
            num_cpus=self._cpus,
            num_gpus=self._gpus,
            memory=int(wanted["memory"]) or None,
            max_retries=0,  # whether a lost run is made again is decided by executor.run_all
        )

    def submit(self, task: Task) -> None:
        order = node.Order(
            task, parcel.of_run(task.folder), self._limits, self._threads, self._gpus > 0, self._place, self._versions
        )
        self._streams[self._make.remote(order, self._code)] = (task, time.monotonic())

    def events(self) -> Iterator[Event]:
        streams = list(self._streams)
        ready, _ = self._ray.wait(streams, num_returns=1, timeout=SECONDS_TO_WAIT)
        if ready:
            ready, _ = self._ray.wait(streams, num_returns=len(streams), timeout=0)
        for stream in ready:
            yield self._next(stream)

    def _next(self, stream: Any) -> Event:
        """The next event of a task; what it brings home is in the run's folder before its end is told."""
        task, since = self._streams[stream]
        told: Event | node.Home
        lost = None
        try:
            told = self._ray.get(next(stream))
        except self._ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, OSError):
                raise ArgumentError(
                    "ray", f"{argument('ray')}: a node cannot make runs of this study: {error.cause}"
                ) from None
            lost = f"a node could not make the run: {error.cause}"
        except (self._ray.exceptions.RayError, StopIteration) as error:
            first = (str(error).strip().splitlines() or ["it ended without a word"])[0]
            lost = f"the node or its Ray worker was lost: {type(error).__name__}: {first}"
        if lost is not None:
            told = Ended(task.spec.id, lost, time.monotonic() - since, lost=True)
        elif isinstance(told, node.Home):
            if not told.ended.lost:
                parcel.unpack_run(told.files, task.folder)
                if self._place is not None:
                    with contextlib.suppress(Exception):  # what stays there is of no use, and no reason to stop
                        Backups(*self._place).clear(task.spec.id)
            told = told.ended
        if isinstance(told, Ended):
            del self._streams[stream]
        return told

    def close(self) -> None:
        self.cancel()
        self._remove_backups()
        self._connection.close()
        self._connected = False

    def cancel(self) -> None:
        if self._streams:
            self._place = None  # what is there is where these runs go on
        for stream in self._streams:
            with contextlib.suppress(self._ray.exceptions.RayError, ValueError):
                self._ray.cancel(stream, force=True)
        self._streams.clear()

    def _remove_backups(self) -> None:
        """The study has ended: remove the place of its backups, unless a run has one to go on from."""
        if self._place is not None:
            with contextlib.suppress(Exception):
                Backups(*self._place).close()
            self._place = None


def on_cluster(
    address: str = "", *, cpus: float = 1.0, gpus: float = 0.0, storage: str | None = None, limits: Limits | None = None
) -> RayExecutor:
    """An executor on the Ray cluster at `address`.

    Args:
      address: HOST:PORT, "auto" for the cluster that runs on this machine, "local" for a new one that ends with the
        study; "" is $RAY_ADDRESS if it is set, else "local". In a process that is connected already, its cluster.
      storage: a shared folder or fsspec address, for runs to go on when their node is lost.
    """
    if importlib.util.find_spec("ray") is None:
        raise ArgumentError(
            "ray", f"{argument('ray')} needs ray, which is not installed: pip install 'kourkoutas-beta[ray]'"
        )
    if address.startswith("ray://"):
        raise ArgumentError(
            "ray",
            f"{argument('ray')} {address}: a study is started on a node of its cluster, not through the Ray client; "
            "log in there, and give the address as HOST:PORT or auto",
        )
    if not (math.isfinite(cpus) and cpus > 0):
        raise ArgumentError("cpus_per_run", f"{argument('cpus_per_run')} must be above 0; got {cpus}")
    if not (math.isfinite(gpus) and gpus >= 0):
        raise ArgumentError("gpus_per_run", f"{argument('gpus_per_run')} must be 0 or above; got {gpus}")
    chosen = address or os.environ.get("RAY_ADDRESS") or LOCAL
    return RayExecutor(chosen, cpus, gpus, limits or Limits(), storage)


@contextlib.contextmanager
def _connected(address: str) -> Iterator[None]:
    """A connection to the cluster, which ends with it if it is this study's own."""
    import ray

    if ray.is_initialized():
        yield
        return
    host, colon, port = address.rpartition(":")
    if colon:  # Ray itself would try for minutes
        try:
            socket.create_connection((host, int(port)), timeout=SECONDS_TO_CONNECT).close()
        except (OSError, ValueError, OverflowError) as error:
            raise ArgumentError(
                "ray",
                f"{argument('ray')} {address}: no Ray cluster answers there ({error}): "
                "give the HOST:PORT that `ray start --head` printed, or auto",
            ) from None
    own: dict[str, Any] = {"num_cpus": machine.cores(), "include_dashboard": False} if address == LOCAL else {}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        first = str(error).strip().splitlines()[0]
        raise ArgumentError(
            "ray", f"{argument('ray')} {address}: no Ray cluster could be reached or started: {first}"
        ) from None
    try:
        yield
    finally:
        ray.shutdown()


def _backups_of(study: store.Writer, address: str) -> tuple[str, str]:
    """Address and name of the study's backups.

    NOTE: the name is the same whenever the same results folder is continued, and another for any other folder.
    """
    own = hashlib.sha256(f"{study.path.resolve()} {study.record.created}".encode()).hexdigest()[:12]
    return resolved(address), f"{study.path.resolve().name}-{own}"


def _check_writable(place: tuple[str, str], address: str) -> None:
    try:
        Backups(*place).prepare()
    except Exception as error:  # every file system of fsspec has errors of its own
        raise ArgumentError(
            "storage", f"{argument('storage')} {address} cannot be written: {type(error).__name__}: {error}"
        ) from None


def _fitting(has: dict[str, float], wanted: dict[str, float]) -> int:
    """How many runs fit on a node."""
    return int(min(has.get(name, 0.0) / amount for name, amount in wanted.items() if amount))
