"""Files that are whole or not there: a kill at any moment leaves the old file or the new one, never half of one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any


def replace(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Let `write` fill a file, bring it to the disk, and only then give it the name `path`.

    The temporary name is `.<name>.<process>.tmp`, in the same folder. An error of `write` or of the disk removes it and
    leaves `path` as it was; a kill leaves it behind, for the next writer to remove.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    if os.name == "nt":  # Windows cannot open a folder to sync it
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
