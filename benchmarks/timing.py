"""Timing contestants against each other: in turns, so that what the machine does meanwhile hits all of them."""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAMPLE_SECONDS = 0.01


@dataclass(frozen=True)
class Contestant:
    """Something to time.

    Attributes:
      steps: run k steps and return the seconds they took.
      baseline: the name of the contestant it is compared with.
      state_bytes: bytes of optimizer state.
      elsewhere: whether it runs in another process, whose memory is not seen from here.
      peak: run a step and return by how many bytes it raised the memory of its device; None on the CPU.
    """

    steps: Callable[[int], float]
    baseline: str
    state_bytes: int
    elsewhere: bool = False
    peak: Callable[[], int] | None = None


def timed(step: Callable[[], Any], finish: Callable[[], Any] = lambda: None) -> Callable[[int], float]:
    """The function that runs `step` k times, then `finish`, and returns the seconds it took."""

    def steps(k: int) -> float:
        gc.disable()
        start = time.perf_counter()
        for _ in range(k):
            step()
        finish()
        elapsed = time.perf_counter() - start
        gc.enable()
        return elapsed

    return steps


def alternate(contestants: Mapping[str, Contestant], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Seconds per step of every contestant in every round; each round runs the order of the last one backwards.

    Stops after `rounds` rounds, or after `seconds` once there are three.
    """
    per_sample: dict[str, int] = {}
    for name, contestant in contestants.items():
        contestant.steps(2)
        k = 1
        while (elapsed := contestant.steps(k)) < SAMPLE_SECONDS / 2 and k < 10_000:
            k = max(2 * k, min(int(k * SAMPLE_SECONDS / max(elapsed, 1e-9)), 10_000))
        per_sample[name] = k
    times: dict[str, list[float]] = {name: [] for name in contestants}
    order = list(contestants)
    spent = 0.0
    for done in range(rounds):
        if done >= 3 and spent > seconds:
            break
        for name in order:
            # The contestant before it has left its own data in the caches: a few steps are not timed.
            if untimed := per_sample[name] // 4:
                contestants[name].steps(untimed)
            elapsed = contestants[name].steps(per_sample[name])
            spent += elapsed
            times[name].append(elapsed / per_sample[name])
        order.reverse()
    return times


def _peak(contestant: Contestant) -> int | None:
    return peak_over(contestant.steps) if contestant.peak is None else contestant.peak()


def peak_over(step: Callable[[int], float]) -> int | None:
    """By how many bytes one step raises the resident memory at its peak; None where the system does not say."""
    if not sys.platform.startswith("linux"):
        return None
    step(1)
    try:
        # Freed memory that malloc keeps would hide the next step's temporaries.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return None
    before = _kilobytes("VmRSS")
    step(1)
    return max(_kilobytes("VmHWM") - before, 0) * 1024


def _kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def compare(
    contestants: Mapping[str, Contestant], parameters: int, rounds: int, seconds: float
) -> list[dict[str, Any]]:
    """One row per contestant: median time, and the median over rounds of its ratio to its baseline."""
    times = alternate(contestants, rounds, seconds)
    rows = []
    for name, contestant in contestants.items():
        base = times[contestant.baseline]
        ratios = sorted(t / b for t, b in zip(times[name], base, strict=True))
        peak = None if contestant.elsewhere else _peak(contestant)
        rows.append(
            {
                "contestant": name,
                "baseline": contestant.baseline,
                "seconds": statistics.median(times[name]),
                "ratio": statistics.median(ratios),
                "ratio_quartiles": [ratios[len(ratios) // 4], ratios[(3 * len(ratios)) // 4]],
                "rounds": len(ratios),
                "state_bytes_per_parameter": contestant.state_bytes / parameters,
                "peak_bytes_per_parameter": None if peak is None else peak / parameters,
            }
        )
    return rows
