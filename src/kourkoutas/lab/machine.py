"""This machine and this process: processor, cores, and where caches are kept."""

from __future__ import annotations

import contextlib
import os
import platform
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """The machine, as far as it can matter to a result."""
    return {
        "platform": platform.platform(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": cores(),
        "python": platform.python_version(),
    }


def cores() -> int:
    """Cores this process may use: its affinity, and in a container the quota of its control group."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        count = min(count, max(1, int(quota) // int(period)))  # "max", no quota, is no number
    return count


def cache_folder() -> Path:
    """Where texts, data and functions that a study needs again are kept: `$KBETA_CACHE`, else `kbeta` where the system
    keeps caches (`~/.cache/kbeta` on Linux)."""
    import platformdirs  # which only the laboratory has

    return Path(os.environ.get("KBETA_CACHE") or platformdirs.user_cache_path("kbeta", appauthor=False))


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
