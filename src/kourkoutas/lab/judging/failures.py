"""Which runs failed, and why, in as few words as can be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kourkoutas.lab.judging.values import of_seeds
from kourkoutas.lab.optimizers.looks import name_of
from kourkoutas.lab.results.store import StoredRun, StudyRecord
from kourkoutas.lab.specs.spec import last_line

MOST_CHARACTERS = 120  # of an error


def repeat(record: StudyRecord) -> str:
    """The command that makes the failed runs of a study again."""
    asked = "--retry-failed" in record.command
    return record.command if asked else f"{record.command} --retry-failed"


@dataclass(frozen=True)
class Failure:
    """One error and the runs that ended with it."""

    error: str
    runs: tuple[StoredRun, ...]

    @property
    def summary(self) -> str:
        return last_line(self.error)

    @property
    def words(self) -> str:
        """ "2 failed (Lion, seeds 4, 5): OSError: gone"."""
        return f"{len(self.runs)} failed ({self.who}): {self.summary[:MOST_CHARACTERS].rstrip('.')}"

    @property
    def who(self) -> str:
        """The runs in a few words: "Lion, seeds 4, 5; Adam 0.95, seed 2"."""
        by_arm: dict[str, list[int]] = {}
        for run in self.runs:
            by_arm.setdefault(name_of(run.spec.optimizer), []).append(run.spec.seed)
        return "; ".join(f"{arm}, {of_seeds(seeds)}" for arm, seeds in by_arm.items())


def failures(runs: Sequence[StoredRun]) -> list[Failure]:
    """The most frequent first. Errors that differ only in addresses of memory are the same."""
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        if run.result is not None and run.result.status == "failed":
            groups.setdefault(re.sub(r"0x[0-9a-fA-F]+", "0x…", run.result.error or ""), []).append(run)
    made = [
        Failure((same[0].result and same[0].result.error) or "no error was recorded", tuple(same))
        for same in groups.values()
    ]
    return sorted(made, key=lambda one: -len(one.runs))
