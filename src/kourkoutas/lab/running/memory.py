"""How much memory a run holds.

NOTE: RLIMIT_AS and RLIMIT_DATA bound addresses, not memory: CUDA, XLA and the stacks of a thread pool reserve many
gigabytes that they never touch, and under such a limit a run dies that would have fitted. Control groups bound memory,
but making one takes rights that a user of a shared machine does not have. So the memory is looked at while the run goes
on, and a run above its limit is killed; what it takes within one look is not caught.
"""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")


def measurable() -> bool:
    """Whether this system tells how much memory a process holds."""
    return (PROC / "self" / "smaps_rollup").exists()


def held(pid: int) -> int:
    """Bytes of physical memory and swap of the process and all its descendants; 0 for a process that has ended.

    Pages that several of them share are counted once in all. The exact sum is slow to get for large processes, so it
    is asked for by `above` only when the quick one, which counts shared pages for each, is too large.
    """
    return sum(_proportional(each) for each in family(pid))


def above(pid: int, limit: int) -> int | None:
    """The bytes held if they are more than `limit`, else None."""
    if sum(_resident(each) for each in family(pid)) <= limit:
        return None
    exact = held(pid)
    return exact if exact > limit else None


def family(pid: int) -> list[int]:
    """The process and its descendants."""
    found = [pid]
    for each in found:
        try:
            for children in (PROC / str(each) / "task").glob("*/children"):
                found += [int(child) for child in children.read_text(encoding="ascii").split()]
        except OSError:  # ended meanwhile
            continue
    return found


def _resident(pid: int) -> int:
    fields = _fields(pid, "status")
    return fields.get("VmRSS", 0) + fields.get("VmSwap", 0)


def _proportional(pid: int) -> int:
    fields = _fields(pid, "smaps_rollup")
    return fields.get("Pss", 0) + fields.get("SwapPss", 0)


def _fields(pid: int, file: str) -> dict[str, int]:
    """The `Name: 12 kB` lines of a file of /proc, in bytes."""
    try:
        text = (PROC / str(pid) / file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    rows = (line.split() for line in text.splitlines() if line.endswith(" kB"))
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3}
