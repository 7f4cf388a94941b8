"""Failed runs, the same error told once with a count."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kourkoutas.lab.results.store import StoredRun
from kourkoutas.lab.showing.progress import last_line


@dataclass(frozen=True)
class Failure:
    """One error and the runs that ended with it."""

    summary: str
    error: str
    runs: tuple[StoredRun, ...]

    @property
    def who(self) -> str:
        """The runs in a few words: "lion, seeds 4, 5; adam95, seed 2"."""
        by_arm: dict[str, list[str]] = {}
        for run in self.runs:
            by_arm.setdefault(run.spec.optimizer, []).append(str(run.spec.seed))
        return "; ".join(f"{arm}, seed{'s' if len(s) > 1 else ''} {', '.join(s)}" for arm, s in by_arm.items())


def failures(runs: Sequence[StoredRun]) -> list[Failure]:
    """The most frequent first. Errors that differ only in addresses of memory are the same."""
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        if run.result is not None and run.result.status == "failed":
            groups.setdefault(re.sub(r"0x[0-9a-fA-F]+", "0x…", run.result.error or ""), []).append(run)
    made = []
    for same in groups.values():
        error = (same[0].result.error if same[0].result else None) or "no error was recorded"
        made.append(Failure(last_line(error), error, tuple(same)))
    return sorted(made, key=lambda one: -len(one.runs))
