"""Files as bytes, to cross from one machine to another: a run's folder, and a user's code; and backups of runs.

Backups are in a place that every machine reaches, where a run goes on when its machine is lost:

    ADDRESS/STUDY/seen                 tells a node that it looks at the same place as the study
    ADDRESS/STUDY/RUN.zip              the run's folder when it was last saved, with a checksum behind it

ADDRESS is a shared folder or anything that fsspec knows (s3://..., gs://..., sftp://...). A backup is written under a
temporary name and renamed, so that a kill leaves no half of one; from a damaged one nothing is continued.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import platform
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from kourkoutas.lab.results.files import TEMPORARY, remove, remove_folder, sealed, unsealed, write_bytes

Files = dict[str, bytes]  # by path below the folder

HOME = "spec.json"  # stays where the results folder is


def of_run(folder: Path) -> Files:
    """What a run's folder holds, also while the run goes on.

    NOTE: logs are read last. A checkpoint says how long metrics.jsonl was when it was taken, so that a log which is
    newer than the checkpoint can be cut to fit, and an older one could not.
    """
    paths = sorted(_complete(folder), key=lambda path: (path.suffix in (".jsonl", ".txt"), path))
    files = {}
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # an old checkpoint that has made way meanwhile
            files[path.relative_to(folder).as_posix()] = path.read_bytes()
    files.pop(HOME, None)
    return files


def state_of_run(folder: Path) -> frozenset[tuple[str, int, int]]:
    """Changes whenever there is something new to continue from: any file but the logs."""
    found = set()
    for path in _complete(folder):
        with contextlib.suppress(FileNotFoundError):
            if path.suffix not in (".jsonl", ".txt"):
                found.add((str(path), path.stat().st_mtime_ns, path.stat().st_size))
    return frozenset(found)


def unpack_run(files: Mapping[str, bytes], folder: Path) -> None:
    """Make `folder` hold these files of a run and no others; result.json, which makes the run finished, comes last."""
    for name in files:
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{name!r} leads out of the run's folder")
    for name, content in files.items():
        if name != "result.json":
            write_bytes(folder / name, content)
    for path in list(_complete(folder)):
        if path.relative_to(folder).as_posix() not in {*files, HOME}:
            remove(path)
    for path in folder.iterdir():
        if path.is_dir() and not any(file.is_file() for file in path.rglob("*")):
            remove_folder(path)
    if "result.json" in files:
        write_bytes(folder / "result.json", files["result.json"])


def of_code(file: Path) -> Files:
    """The user's file with the modules it can import from its folder: the .py files there, and packages with theirs;
    and the pickle of a function that has no file of its own."""
    paths = {file, *file.parent.glob("*.py"), *file.parent.glob(f"{file.stem}.pickle")}
    for package in file.parent.glob("*/__init__.py"):
        paths |= {path for path in package.parent.rglob("*.py") if path.is_file()}
    return {path.relative_to(file.parent).as_posix(): path.read_bytes() for path in sorted(paths)}


def digest(files: Mapping[str, bytes]) -> str:
    """Names these files by their content."""
    return hashlib.sha256(to_zip(files)).hexdigest()[:16]


def to_zip(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name), content)
    return buffer.getvalue()


def from_zip(data: bytes) -> Files:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _complete(folder: Path) -> Iterator[Path]:
    """Every file below `folder` but those that are being written under a temporary name."""
    return (path for path in folder.rglob("*") if path.is_file() and path.suffix not in TEMPORARY)


def resolved(address: str) -> str:
    """The address as every process understands it: a relative folder is one of this process only."""
    return address if "://" in address else str(Path(address).expanduser().resolve())


class Backups:
    """The backups of one study; `study` names it."""

    def __init__(self, address: str, study: str) -> None:
        import fsspec

        self.address = address
        self._files, root = fsspec.core.url_to_fs(address)
        self._root = f"{root.rstrip('/')}/{study}"

    def prepare(self) -> None:
        """Make the place; raises if it cannot be written."""
        self._files.makedirs(self._root, exist_ok=True)
        self._files.pipe_file(f"{self._root}/seen", b"kbeta")

    def seen(self) -> bool:
        """Whether this machine sees the place that was prepared."""
        self._files.invalidate_cache()
        return bool(self._files.exists(f"{self._root}/seen"))

    def save(self, run: str, files: Files) -> None:
        part = f"{self._root}/{run}.{platform.node()}-{os.getpid()}.part"  # an attempt that was given up may go on
        self._files.pipe_file(part, sealed(to_zip(files)))
        self._files.mv(part, self._name(run))

    def newest(self, run: str) -> Files | None:
        """What was saved last, or None where that is nothing that can be read."""
        try:
            return from_zip(unsealed(self._files.cat_file(self._name(run))))
        except (OSError, ValueError, zipfile.BadZipFile):
            return None

    def clear(self, run: str) -> None:
        """The run is over: nothing is to be continued."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._name(run))

    def close(self) -> None:
        """Remove the place when no run has a backup left."""
        self._files.invalidate_cache()
        if not any(name.endswith(".zip") for name in self._files.ls(self._root, detail=False)):
            self._files.rm(self._root, recursive=True)

    def _name(self, run: str) -> str:
        return f"{self._root}/{run}.zip"
