"""Backups of runs in a place that every machine reaches: where a run goes on when its machine is lost.

    ADDRESS/STUDY/seen                 tells a node that it looks at the same place as the study
    ADDRESS/STUDY/RUN/<time>-<pid>.zip the run's folder at that time, with a checksum behind it

ADDRESS is a shared folder or anything that fsspec knows (s3://..., gs://..., sftp://...). A backup is written under a
temporary name and renamed, so that a kill leaves no half of one; a damaged one is passed over for an older one.
"""

from __future__ import annotations

import os
import time
import zipfile
from pathlib import Path

from kourkoutas.lab.results import parcel
from kourkoutas.lab.results.files import sealed, unsealed

KEPT = 2


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

    def save(self, run: str, files: parcel.Files) -> None:
        # Names sort by age also when the clock was set back.
        kept = [int(name.rpartition("/")[2].partition("-")[0]) for name in self._names(run)]
        name = f"{self._root}/{run}/{max([time.time_ns(), *(at + 1 for at in kept)]):020d}-{os.getpid()}"
        self._files.makedirs(f"{self._root}/{run}", exist_ok=True)
        self._files.pipe_file(f"{name}.part", sealed(parcel.to_zip(files)))
        self._files.mv(f"{name}.part", f"{name}.zip")
        for old in self._names(run)[:-KEPT]:
            self._remove(old)

    def newest(self, run: str) -> parcel.Files | None:
        """The newest backup that can be read, or None."""
        for name in reversed(self._names(run)):
            try:
                return parcel.from_zip(unsealed(self._files.cat_file(name)))
            except (OSError, ValueError, zipfile.BadZipFile):
                continue
        return None

    def clear(self, run: str) -> None:
        """The run is over: nothing is to be continued."""
        if self._files.exists(f"{self._root}/{run}"):
            self._files.rm(f"{self._root}/{run}", recursive=True)

    def close(self) -> None:
        """Remove the place when no run has a backup left."""
        self._files.invalidate_cache()
        if {name.rpartition("/")[2] for name in self._files.ls(self._root, detail=False)} <= {"seen", ""}:
            self._files.rm(self._root, recursive=True)

    def _names(self, run: str) -> list[str]:
        self._files.invalidate_cache()
        try:
            found = self._files.ls(f"{self._root}/{run}", detail=False)
        except FileNotFoundError:
            return []
        return sorted(name for name in found if name.endswith(".zip"))

    def _remove(self, name: str) -> None:
        try:
            self._files.rm_file(name)
        except FileNotFoundError:  # an earlier attempt that has not yet noticed that it was given up
            return
