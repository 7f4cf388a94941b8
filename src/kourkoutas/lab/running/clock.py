"""Where the time of a run went: set-up, data, compiling, training and evaluation, and the pace of a training step.

NOTE: compiling cannot be seen from outside: it happens in the first call with a new number of steps. What such a call
took beyond the pace of the others is counted as compiling; a run of one call only cannot be told apart, and its pace
holds both.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator, Mapping

PARTS = ("setup", "data", "compile", "train", "evaluate")


class Clock:
    """Seconds by part of a run; `chunks` holds (steps, seconds) of every call of training."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self.chunks: list[tuple[int, float]] = []

    @contextlib.contextmanager
    def timing(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.parts[part] = self.parts.get(part, 0.0) + time.perf_counter() - start

    @contextlib.contextmanager
    def training(self, steps: int) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.chunks.append((steps, time.perf_counter() - start))

    def add(self, earlier: Mapping[str, float]) -> None:
        """Count the parts of an interrupted attempt, as `times` gave them."""
        for part, seconds in earlier.items():
            if part in PARTS:
                self.parts[part] = self.parts.get(part, 0.0) + seconds

    def times(self) -> dict[str, float]:
        """Seconds of every part, and `per_step`: the median pace of a training step.

        >>> clock = Clock()
        >>> clock.chunks = [(10, 6.0), (10, 1.0), (10, 1.2), (5, 3.0)]
        >>> {name: round(seconds, 3) for name, seconds in clock.times().items()}
        {'compile': 7.35, 'train': 3.85, 'per_step': 0.11}
        """
        found = dict(self.parts)
        first = {steps: i for i, (steps, _) in reversed(list(enumerate(self.chunks)))}
        steady = [seconds / steps for i, (steps, seconds) in enumerate(self.chunks) if i not in first.values()]
        paces = steady or [seconds / steps for steps, seconds in self.chunks]
        if not paces:
            return found
        pace = statistics.median(paces)
        beyond = sum(max(0.0, self.chunks[i][1] - pace * self.chunks[i][0]) for i in first.values()) if steady else 0.0
        spent = sum(seconds for _, seconds in self.chunks)
        found["compile"] = found.get("compile", 0.0) + beyond
        found["train"] = found.get("train", 0.0) + spent - beyond
        found["per_step"] = pace
        return found
