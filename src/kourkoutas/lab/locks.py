"""Locks on files that end with the process that holds them, however it ends.

On Linux and macOS this is flock. On Windows it is msvcrt's lock of one byte, far behind the text that the file may
hold, so that others can still read who has it; that part was never run.
"""

from __future__ import annotations

import sys
import time
from typing import IO

SECONDS_BETWEEN_TRIES = 0.1

if sys.platform == "win32":
    import msvcrt

    FAR = 2**30

    def try_lock(file: IO) -> bool:
        """Take the lock of an open file until it is closed; False if another process has it."""
        place = file.tell()
        file.seek(FAR)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        finally:
            file.seek(place)
        return True
else:
    import fcntl

    def try_lock(file: IO) -> bool:
        """Take the lock of an open file until it is closed; False if another process has it."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


def wait_for_lock(file: IO) -> None:
    """Take the lock of an open file until it is closed, as soon as nobody else has it."""
    while not try_lock(file):
        time.sleep(SECONDS_BETWEEN_TRIES)
