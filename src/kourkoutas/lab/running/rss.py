"""How much memory a run holds.

NOTE: RLIMIT_AS and RLIMIT_DATA bound addresses, not memory: CUDA, XLA and the stacks of a thread pool reserve many
gigabytes that they never touch, and under such a limit a run dies that would have fitted. Control groups bound memory,
but making one takes rights that a user of a shared machine does not have. So the memory is looked at while the run goes
on, and a run above its limit is killed; what it takes within one look is not caught.
"""

from __future__ import annotations

import contextlib

import psutil


def held(pid: int) -> int:
    """Bytes of physical memory and swap of the process and all its descendants; 0 for a process that has ended.

    Pages that several of them share are counted once in all, where the system tells (Linux). The exact sum is slow to
    get for large processes, so `above` asks for it only when the quick one, which counts shared pages for each, is too
    large.
    """
    total = 0
    for process in family(pid):
        with contextlib.suppress(psutil.Error):
            full = process.memory_full_info()
            total += getattr(full, "pss", full.rss) + getattr(full, "swap", 0)
    return total


def above(pid: int, limit: int) -> int | None:
    """The bytes held if they are more than `limit`, else None."""
    quick = 0
    for process in family(pid):
        with contextlib.suppress(psutil.Error):
            quick += process.memory_info().rss
    if quick <= limit:
        return None
    exact = held(pid)
    return exact if exact > limit else None


def family(pid: int) -> list[psutil.Process]:
    """The process and its descendants; none when it has ended."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.Error:
        return []
