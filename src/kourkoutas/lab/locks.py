"""Locks on files (flock) that end with the process that holds them, however it ends."""

from __future__ import annotations

import fcntl
from typing import IO


def try_lock(file: IO) -> bool:
    """Take the lock of an open file until it is closed; False if another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def wait_for_lock(file: IO) -> None:
    """Take the lock of an open file until it is closed, as soon as nobody else has it."""
    fcntl.flock(file, fcntl.LOCK_EX)
