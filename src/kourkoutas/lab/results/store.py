"""The results folder of a study: what is in it, who may write, and what fits together.

    OUT/study.json              what was asked for: testbed, preset, engine, arms, seeds, settings, command, environment
    OUT/.lock                   held while a process writes here
    OUT/report.html             made from the rest
    OUT/runs/<id>/spec.json     what this run is; written for every planned run before the first one starts
    OUT/runs/<id>/metrics.jsonl one JSON object per logged step, append-only
    OUT/runs/<id>/trace.npz     sun and β2 per bucket (Kourkoutas-β arms)
    OUT/runs/<id>/params.npz    the final parameters (testbeds)
    OUT/runs/<id>/checkpoint/   where an unfinished run continues
    OUT/runs/<id>/output.txt    what the run printed, where a worker process ran it
    OUT/runs/<id>/result.json   there if and only if the run is finished

NOTE: `kourkoutas.lab.results.files` writes and reads the files themselves, so that a kill at any moment leaves an old
file or a new one, and damage is seen.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import functools
import importlib.metadata
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from kourkoutas.lab.errors import argument
from kourkoutas.lab.machine import environment
from kourkoutas.lab.results import files
from kourkoutas.lab.results.files import StoreError as StoreError
from kourkoutas.lab.specs.spec import Arm, Code, RunResult, RunSpec, SearchSpace, Value

VERSIONED = ("kourkoutas-beta", "numpy", "torch", "jax", "jaxlib", "optax", "mlx", "scipy")


class DiskFull(StoreError):
    """Nothing more can be written. The study stops, and goes on where it was when there is room again."""

    @classmethod
    def of(cls, error: OSError) -> DiskFull:
        where = f" for {error.filename}" if error.filename else ""
        return cls(
            f"no room left on the disk{where} ({error.strerror}): free some and run the same command again; "
            "finished runs are kept"
        )


def is_full(error: BaseException) -> bool:
    """Whether the disk, a quota or the allowed size of a file has come to its end."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Call(BaseModel):
    """One command that wrote to the folder.

    Attributes:
      runs: how many it set out to make. Folders of older versions do not say.
      late_arms, late_seeds: what it added when results were there already.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    command: str
    at: str
    versions: dict[str, str]
    runs: int | None = None
    late_arms: list[str] = []
    late_seeds: list[int] = []


class StudyRecord(BaseModel):
    """study.json.

    Attributes:
      primary: the endpoint of a testbed that decides; None for its first.
      margin: percent of the baseline within which a difference does not matter; None where nobody said.
      count_failed: whether a run that fails ranks as the worst, as one that diverges does.
      tuning: how the arms are tuned; None for a study at given values.
      chosen: {arm: {option: value}}, what the tuning gave; empty until it has ended.
    """

    model_config = ConfigDict(extra="forbid")

    testbed: str
    preset: str
    engine: str
    settings: dict[str, Any]
    code: Code | None = None
    arms: list[Arm]
    seeds: list[int]
    primary: str | None = None
    margin: float | None = None
    count_failed: bool = False
    tuning: SearchSpace | None = None
    chosen: dict[str, dict[str, Value]] = {}
    command: str
    created: str
    environment: dict[str, Any]
    versions: dict[str, str]
    calls: list[Call]

    def tunes(self, spec: RunSpec) -> bool:
        """Whether the run is one of the tuning."""
        return self.tuning is not None and spec.seed in self.tuning.seeds

    def compares(self, spec: RunSpec) -> bool:
        """Whether the run is one of those compared: in a tuned study, one with the chosen values on a test seed."""
        if self.tuning is None:
            return True
        chosen = self.chosen.get(spec.optimizer)
        return chosen is not None and not self.tunes(spec) and self.tuning.values(spec) == chosen


@dataclass(frozen=True)
class StoredRun:
    """One run of a study on disk; `result` is None until it has finished.

    NOTE: whoever asks for the metrics gets those of the first question, so that all views of a run that goes on agree.
    Trace and parameters are large, and only one view needs each: they are read when asked for, of a finished run only.
    """

    spec: RunSpec
    result: RunResult | None
    folder: Path

    @property
    def id(self) -> str:
        return self.folder.name

    def metrics(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl; a last line cut short by a kill is left out while the run is unfinished."""
        return self._rows

    @functools.cached_property
    def _rows(self) -> list[dict[str, Any]]:
        file, finished = self.folder / "metrics.jsonl", self.result is not None
        return files.read_lines(file, finished=finished, remedy=_redo(self.folder))

    def trace(self) -> dict[str, NDArray[Any]] | None:
        """The arrays `names`, `steps`, `sun`, `beta2` and `norm` of the trace, or None when the run recorded none."""
        return self._arrays("trace.npz", "trace")

    def params(self) -> dict[str, NDArray[Any]] | None:
        """The final parameters, or None when the run kept none."""
        return self._arrays("params.npz", "file of arrays")

    def _arrays(self, name: str, what: str) -> dict[str, NDArray[Any]] | None:
        path = self.folder / name
        if self.result is None or not path.exists():
            return None
        return files.read_arrays(path, _redo(self.folder), what)


def read_record(path: str | Path) -> StudyRecord:
    """`path`/study.json.

    Example:
      >>> read_record("no-such-folder")
      Traceback (most recent call last):
      kourkoutas.lab.results.files.StoreError: no-such-folder/study.json: not found; ...
    """
    file = Path(path) / "study.json"
    if not file.exists():
        raise StoreError(f"{file}: not found; `kbeta study ... --out {path}` makes one")
    record = files.read_json(file, StudyRecord, f"move {path} away and run the study again, or restore the file")
    if record.versions.get("kourkoutas-beta", "").startswith("0.1."):
        raise StoreError(f"{file}: written by version 0.1, which is no longer read; run the study again")
    return record


def read_runs(path: Path, arms: Sequence[Arm]) -> tuple[list[StoredRun], list[str]]:
    """(every run, in the order of the arms and then of the seeds; what could not be read and is left out).

    NOTE: a damaged file costs its own run. A result that cannot be read makes its run a failed one, which
    `--retry-failed` makes again; a folder without a readable spec.json is left out.
    """
    found, damage = [], []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(path / "runs"):
            folder = Path(entry.path)
            if not entry.is_dir():
                continue
            try:
                found.append(StoredRun(_read_spec(folder), _read_result(folder), folder))
            except StoreError as error:
                if any(_kept(folder)):  # an empty one was left by a kill while the study was being planned
                    damage.append(str(error))
    order = {arm.label: i for i, arm in enumerate(arms)}
    found.sort(key=lambda run: (order.get(run.spec.optimizer, len(order)), run.spec.seed, run.id))
    return found, sorted(damage)


class Writer:
    """A results folder that this process holds the lock of; made by `writing`."""

    def __init__(self, path: Path, record: StudyRecord) -> None:
        self.path, self.record = path, record

    def folder(self, spec: RunSpec) -> Path:
        return self.path / "runs" / spec.id

    def run(self, spec: RunSpec) -> StoredRun:
        """One run, finished or not; one with a damaged result has failed."""
        folder = self.folder(spec)
        return StoredRun(spec, _read_result(folder), folder)

    def plan(self, specs: Sequence[RunSpec]) -> None:
        """Put down every run that is to be made, so that none can be forgotten."""
        for spec in specs:
            folder = self.folder(spec)
            file = folder / "spec.json"
            try:
                _read_spec(folder)
            except StoreError:
                files.make_folder(folder)
                _write(file, spec)

    def finish(self, spec: RunSpec, result: RunResult) -> None:
        """Write result.json: from now on the run is finished."""
        write_result(self.folder(spec), result)

    def begin(self, runs: int) -> None:
        """Record that the present command sets out to make so many runs."""
        call = self.record.calls[-1]
        self.record.calls[-1] = call.model_copy(update={"runs": (call.runs or 0) + runs})
        _write(self.path / "study.json", self.record)

    def choose(self, chosen: Mapping[str, Mapping[str, Value]]) -> None:
        """Record what the tuning gave: from now on the runs with these values are the ones compared."""
        self.record.chosen = {label: dict(values) for label, values in chosen.items()}
        _write(self.path / "study.json", self.record)

    def reopen(self, spec: RunSpec) -> None:
        """Make a finished run unfinished again; what it has on disk stays, so that it can continue."""
        files.remove(self.folder(spec) / "result.json")


def write_result(folder: Path, result: RunResult) -> None:
    """Write result.json atomically: from now on the run in `folder` is finished."""
    _write(folder / "result.json", result)


@contextlib.contextmanager
def writing(
    path: str | Path,
    *,
    seeds: Iterable[int],
    command: str,
    also: Callable[[StudyRecord], Sequence[Arm]] | None = None,
    **configuration: Any,
) -> Iterator[Writer]:
    """Hold the folder at `path` for writing runs of this configuration, which are fields of `StudyRecord`.

    A new folder is made. An existing one is extended by new arms and seeds; one of another configuration is an error
    that lists what differs, and is left as it was. `also` says which arms of an existing record are to go on, too.
    """
    path = Path(path)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    call = Call(command=command, at=now, versions=versions())
    record = StudyRecord(
        **configuration,
        seeds=sorted(set(seeds)),
        command=command,
        created=now,
        environment=environment(),
        versions=call.versions,
        calls=[call],
    )
    _check_free(path)
    with _locked(path, command):
        if (path / "study.json").exists():
            there = read_record(path)
            if also is not None:
                record.arms += also(there)
            record = _extend(path, there, record)
        _write(path / "study.json", record)
        for folder in (path, *path.glob("runs/*")):
            files.remove_stale(folder)
        yield Writer(path, record)


def versions() -> dict[str, str]:
    """Installed versions, read without importing anything."""
    found = {}
    for name in VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _redo(folder: Path) -> str:
    return f"delete the folder {folder} and run the study again to redo this run"


def _read_result(folder: Path) -> RunResult | None:
    file = folder / "result.json"
    if not file.exists():
        return None
    try:
        return files.read_json(file, RunResult, f"use {argument('retry_failed')}, or {_redo(folder)}")
    except StoreError as error:
        return RunResult(status="failed", error=str(error))


def _read_spec(folder: Path) -> RunSpec:
    file = folder / "spec.json"
    if not file.exists():
        raise StoreError(f"{file}: not found; {_redo(folder)}")
    spec = files.read_json(file, RunSpec, _redo(folder))
    if spec.id != folder.name:
        raise StoreError(f"{file}: describes run {spec.id}, not its folder; it was edited or moved: {_redo(folder)}")
    return spec


def _write(file: Path, content: BaseModel) -> None:
    try:
        files.write_json(file, content)
    except OSError as error:
        if is_full(error):
            raise DiskFull.of(OSError(error.errno, error.strerror, str(file))) from None
        raise


def _kept(folder: Path) -> Iterator[Path]:
    """What is in a folder but for the lock and temporary files."""
    return (p for p in folder.iterdir() if p.name != ".lock" and not p.name.endswith(".tmp"))


def _check_free(path: Path) -> None:
    """Refuse a folder that holds something else, before a lock file is left in it."""
    if path.exists() and not path.is_dir():
        raise StoreError(f"{argument('out')} {path} is a file; name a folder")
    if path.is_dir() and not (path / "study.json").exists():
        others = sorted(p.name for p in _kept(path))
        if others:
            raise StoreError(
                f"{argument('out')} {path} is not a results folder and not empty (it holds {', '.join(others[:3])}); "
                "name a new folder"
            )


@contextlib.contextmanager
def _locked(path: Path, command: str) -> Iterator[None]:
    """Hold the lock of a folder, which is made, and goes again if no study comes to be in it."""
    created = not path.exists()
    try:
        files.make_folder(path)
    except OSError as error:
        if is_full(error):
            raise DiskFull.of(error) from None
        raise StoreError(
            f"{argument('out')} {path} cannot be made ({error.strerror}); name a folder that you may write"
        ) from None
    with files.locked(path, f"process {os.getpid()} ({command})"):
        try:
            yield
        finally:
            if created and not (path / "study.json").exists():
                files.remove_folder(path)


def _extend(path: Path, old: StudyRecord, new: StudyRecord) -> StudyRecord:
    """`old` with the arms and seeds of `new` added, or an error that lists what differs."""
    differs = _differences(_configuration(old, new), _configuration(new, old))
    if old.code is not None and new.code is not None and old.code.sha256 != new.code.sha256:
        differs.append(f"{new.code.file}:{new.code.function} or a value that it uses has changed since")
    if old.tuning is not None and new.tuning is None:
        raise StoreError(
            f"{argument('out')} {path} holds a tuned study: add {argument('tune')} as there, "
            f"or choose another {argument('out')}"
        )
    if old.tuning is None and new.tuning is not None:
        raise StoreError(
            f"{argument('out')} {path} holds a study that was not tuned: leave out {argument('tune')}, or choose "
            f"another {argument('out')}"
        )
    if differs:
        raise StoreError(
            f"{argument('out')} {path} holds results of another configuration: {'; '.join(differs)}. "
            f"Nothing was written: name another {argument('out')}, or repeat the command recorded in its study.json"
        )
    known = {arm.label for arm in old.arms}
    added_arms = [arm for arm in new.arms if arm.label not in known]
    added_seeds = [seed for seed in new.seeds if seed not in old.seeds]
    (call,) = new.calls
    if any(path.glob("runs/*/result.json")):
        late = {"late_arms": [arm.label for arm in added_arms], "late_seeds": added_seeds}
        call = call.model_copy(update=late)
    old.arms += added_arms
    old.seeds = sorted([*old.seeds, *added_seeds])
    old.code = new.code  # the same, maybe in another place
    old.command, old.versions, old.environment = new.command, new.versions, new.environment
    old.calls.append(call)
    return old


def _configuration(record: StudyRecord, other: StudyRecord) -> dict[str, Any]:
    """What has to be the same in both for their runs to be compared: shared settings, and the arms that both have."""
    resolved = record.arms[0].resolved or {}
    settings = {**record.settings, **resolved.get("settings", {})}
    own: set[str] = set()  # what arms set for themselves, and so do not share
    for arm in (*record.arms, *other.arms):
        own |= arm.settings.keys()
    both = {arm.label for arm in other.arms}
    arms = {
        f"optimizer {arm.label}": {
            "options": arm.options,
            "settings": arm.settings,
            "optimizer": (arm.resolved or {}).get("optimizer"),
        }
        for arm in record.arms
        if arm.label in both
    }
    return {
        **record.model_dump(include={"testbed", "preset", "engine", "primary", "margin", "count_failed"}),
        "version of the testbed": resolved.get("testbed"),
        "settings": {name: value for name, value in settings.items() if name not in own},
        "code": record.code and record.code.model_dump(exclude={"file", "sha256"}),
        "tuning": record.tuning and record.tuning.model_dump(mode="json"),
        **arms,
    }


def _differences(there: Mapping[str, Any], here: Mapping[str, Any], within: str = "") -> list[str]:
    """Every value that is not the same, by its dotted name."""
    found = []
    for name in sorted({*there, *here}):
        old, new = there.get(name), here.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += _differences(old, new, f"{within}{name}.")
        elif old != new:
            found.append(f"{within}{name} is {old!r} there and {new!r} here")
    return found
