"""How far a study is: which runs have finished, which are under way, how long the rest may take, and what failed.

Everything is read from the results folder, so that any process can ask, at any time, without the study noticing.

    seconds left = Σ s of all runs that have not ended / runs under way
    s = median seconds of the arm's finished runs, or of all
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kourkoutas.lab.judging import comparable
from kourkoutas.lab.optimizers.looks import name_of
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.results.store import StoredRun, StudyRecord
from kourkoutas.lab.specs.spec import RunResult, last_line

ENDED = {"ok": "finished", "diverged": "diverged", "failed": "failed"}
STATES = (*ENDED.values(), "running", "waiting")


@dataclass(frozen=True)
class Going:
    """One run under way; `step` and `loss` are None before the first is logged, or where they are not.

    Attributes:
      values: {option: value} that a run of a tuning tries; empty for any other.
    """

    id: str
    optimizer: str
    seed: int
    values: Mapping[str, float | int]
    step: int | None
    loss: float | None

    def __str__(self) -> str:
        """In a few words: "K-β, lr 0.001, seed 100: step 20, loss 0.31"."""
        values = [f"{name} {value:g}" for name, value in self.values.items()]
        text = ", ".join([name_of(self.optimizer), *values, f"seed {self.seed}"])
        text += "" if self.step is None else f": step {self.step}"
        return text if self.loss is None else f"{text}, loss {self.loss:.4g}"


@dataclass(frozen=True)
class Status:
    """A study at one moment.

    Attributes:
      writer: the process that is making runs; None when nobody is.
      tuning, tuned: how many of the runs are the tuning's, and how many of those have ended.
      arms: {optimizer: {state: runs}}, of a tuned study with the runs that its tuning has asked for so far.
      seconds_left: an estimate; None before a run has finished, and when nobody is making runs.
    """

    testbed: str
    writer: str | None
    tuning: int
    tuned: int
    arms: Mapping[str, Mapping[str, int]]
    going: tuple[Going, ...]
    seconds_left: float | None

    def count(self, *states: str) -> int:
        """The runs in these states, or all."""
        total = 0
        for own in self.arms.values():
            total += sum(own[state] for state in states or STATES)
        return total

    @property
    def done(self) -> int:
        return self.count(*ENDED.values())

    @property
    def state(self) -> str:
        if self.done == self.count():
            return "finished"
        return "stopped" if self.writer is None else "running"

    def __str__(self) -> str:
        counts = [f"{n} {state}" for state in STATES if (n := self.count(state)) or state == "finished"]
        of_tuning = f", {self.tuning} of them to tune ({self.tuned} done)" if self.tuning else ""
        text = f"{self.count()} runs{of_tuning}: {', '.join(counts)}."
        if self.state == "stopped":
            return f"{text} Nobody is making the rest: repeat the study's command to go on."
        if self.state == "running" and self.seconds_left is not None:
            return f"{text} About {duration(self.seconds_left)} left."
        return text


def status_of(snapshot: Snapshot) -> Status:
    """What the folder of a study showed when it was read, the runs of a tuning among them."""
    record, holder = snapshot.record, snapshot.holder
    every = [*snapshot.tuning_runs, *snapshot.runs]
    going = [_going(record, run) for run in snapshot.under_way]
    under_way = {run.id for run in going}
    missing_tuning = _missing_tuning_runs(record, snapshot.tuning_runs)
    to_come = missing_tuning + _missing_runs(record, snapshot.runs)
    arms = {arm.label: Counter(dict.fromkeys(STATES, 0)) for arm in record.arms}
    for run in every:
        state = ENDED[run.result.status] if run.result else "running" if run.id in under_way else "waiting"
        arms.setdefault(run.spec.optimizer, Counter(dict.fromkeys(STATES, 0)))[state] += 1
    for arm, count in to_come.items():
        arms[arm]["waiting"] += count
    return Status(
        testbed=record.testbed,
        writer=None if holder is None else holder.text,
        tuning=len(snapshot.tuning_runs) + missing_tuning.total(),
        tuned=sum(run.result is not None for run in snapshot.tuning_runs),
        arms=arms,
        going=tuple(going),
        seconds_left=None if holder is None else _seconds_left(every, len(going), to_come),
    )


def _missing_runs(record: StudyRecord, compared: Sequence[StoredRun]) -> Counter[str]:
    """Runs to be compared that are not in the folder: lost ones, and those that a tuning study plans only when the
    arm's values have been chosen."""
    found = Counter({arm: len(seeds) for arm, seeds in comparable.missing_seeds(record, compared).items()})
    unchosen = [arm.label for arm in record.arms if record.tuning is not None and arm.label not in record.chosen]
    found.update(dict.fromkeys(unchosen, len(record.seeds)))
    return found


def _missing_tuning_runs(record: StudyRecord, tuning: Sequence[StoredRun]) -> Counter[str]:
    """Tuning runs that are not in the folder, of values that were tried on other seeds."""
    found = Counter[str]()
    if record.tuning is not None:
        tried = Counter((run.spec.optimizer, repr(record.tuning.values(run.spec))) for run in tuning)
        for (arm, _), there in tried.items():
            found[arm] += len(record.tuning.seeds) - there
    return found


def _going(record: StudyRecord, run: StoredRun) -> Going:
    rows = [row for row in run.metrics() if "step" in row]
    losses = [row["loss"] for row in rows if isinstance(row.get("loss"), int | float)]
    return Going(
        run.id,
        run.spec.optimizer,
        run.spec.seed,
        {} if record.tuning is None or run.spec.seed in record.seeds else record.tuning.values(run.spec),
        int(rows[-1]["step"]) if rows else None,
        float(losses[-1]) if losses else None,
    )


def _seconds_left(runs: Sequence[StoredRun], going: int, to_come: Mapping[str, int]) -> float | None:
    took: dict[str, list[float]] = {}
    for run in runs:
        if run.result is not None and run.result.status == "ok":
            took.setdefault(run.spec.optimizer, []).append(run.result.seconds)
    every = list(itertools.chain.from_iterable(took.values()))
    if not every:
        return None
    work = Counter(run.spec.optimizer for run in runs if run.result is None) + Counter(to_come)
    left = sum(count * statistics.median(took.get(arm, every)) for arm, count in work.items())
    return left / max(1, going)


def duration(seconds: float) -> str:
    """A length of time in one or two units.

    >>> [duration(x) for x in (0.4, 42, 90, 3700, 200000)]
    ['1 s', '42 s', '1 min 30 s', '1 h 1 min', '2 d 7 h']
    """
    whole = max(1, round(seconds))
    for big, small, names in ((86400, 3600, ("d", "h")), (3600, 60, ("h", "min")), (60, 1, ("min", "s"))):
        if whole >= big:
            rest = whole % big // small
            return f"{whole // big} {names[0]}" + (f" {rest} {names[1]}" if rest else "")
    return f"{whole} s"


def outcome(result: RunResult) -> str:
    """A result in a few words."""
    if result.status == "failed":
        return f"failed: {last_line(result.error)}"
    if result.status == "diverged":
        at = result.metrics.get("diverged_at")
        return "diverged" + ("" if at is None else f" at step {at:.0f}")
    return "ok" if result.endpoint is None else f"{result.endpoint:.6g}"
