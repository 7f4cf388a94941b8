"""Checkpoints: a flat dict of arrays in one file, written so that a kill at any moment leaves a whole one behind.

A file is written under a temporary name, flushed to the disk, and only then given its name `step-<number>.npz`; older
ones go after that. What a kill leaves under a temporary name is removed by the next `Checkpoints`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from kourkoutas.lab.results import files
from kourkoutas.lab.results.files import Arrays

KEPT = 2


class Checkpoints:
    """The checkpoints of one run, in one folder, which is made for the first one; the `KEPT` newest stay."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        files.remove_stale(folder)

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, in order."""
        return sorted(int(path.stem.removeprefix("step-")) for path in self.folder.glob("step-*.npz"))

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:09d}.npz"

    def save(self, step: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        files.make_folder(self.folder)
        files.write_arrays(self._path(step), arrays)
        for old in self.steps()[:-KEPT]:
            files.remove(self._path(old))

    def newest(self) -> tuple[int, Arrays] | None:
        """The newest checkpoint that can be read, or None. One damaged on the disk is passed over for an older one."""
        for step in reversed(self.steps()):
            try:
                return step, files.read_arrays(self._path(step), "an older checkpoint is taken")
            except files.StoreError:
                continue
        return None

    def clear(self) -> None:
        for step in self.steps():
            files.remove(self._path(step))
        if self.folder.is_dir() and not any(self.folder.iterdir()):
            files.remove_folder(self.folder)
