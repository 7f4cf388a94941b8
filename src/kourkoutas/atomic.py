"""Files that are whole or not there: a kill at any moment leaves the old file or the new one, never half of one."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]


def replace(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Let `write` fill a file, bring it to the disk, and only then give it the name `path`.

    The temporary name is `.<name>.<16 hex digits>.tmp`, in the same folder. An error of `write` or of the disk removes
    it and leaves `path` as it was. A kill leaves it behind, and the next writer of `path` removes it.

    NOTE: a writer holds the lock (flock) of its temporary file until the file has its final name. The lock ends with
    the process, however it ends, so a temporary file that can be locked is one that nobody writes any more. Where there
    are no such locks, on Windows and on some network file systems, what a kill leaves behind stays.
    """
    _remove_leftovers(path)
    temporary, file = _open_temporary(path)
    try:
        with file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            if fcntl is not None:
                os.replace(temporary, path)
        if fcntl is None:  # Windows cannot rename an open file
            os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _open_temporary(path: Path) -> tuple[Path, IO[bytes]]:
    """A new file beside `path`, locked where the file system has locks."""
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        file = temporary.open("xb")
        if fcntl is None:
            return temporary, file
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another writer of `path` found it before it was locked, and removes it
            file.close()
            continue
        except OSError:  # no locks on this file system, so nobody removes it either
            return temporary, file
        if temporary.exists():
            return temporary, file
        file.close()  # another writer has removed it


def _remove_leftovers(path: Path) -> None:
    """Remove the temporary files of writers of `path` that were killed."""
    if fcntl is None:
        return
    ours = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.tmp")
    for found in path.parent.iterdir():
        if not ours.fullmatch(found.name):
            continue
        try:
            with found.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found.unlink(missing_ok=True)
        except OSError:  # its writer is alive, or has just finished, or it is not ours to remove
            continue


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    if os.name == "nt":  # Windows cannot open a folder to sync it
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
