"""How far a study is: which runs have finished, which are under way, and how long the rest may take.

Everything is read from the results folder, so that any process can ask, at any time, without the study noticing.

    seconds left = (Σ waiting s + Σ running s·(1 - step/steps)) / runs under way
    s = median seconds of the arm's finished runs, or of all
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kourkoutas.lab import testbeds
from kourkoutas.lab.judging import planned
from kourkoutas.lab.judging.values import to_json
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.results.store import StoredRun, StudyRecord


@dataclass(frozen=True)
class Going:
    """One run under way; `step`, `steps` and `loss` are None before the first is logged, or where they are not.

    Attributes:
      values: {option: value} that a run of a tuning tries; empty for any other.
    """

    id: str
    optimizer: str
    seed: int
    values: Mapping[str, float | int]
    step: int | None
    steps: int | None
    loss: float | None

    @property
    def share(self) -> float:
        return min(1.0, self.step / self.steps) if self.step and self.steps else 0.0


@dataclass(frozen=True)
class ArmStatus:
    """The runs of one arm, by what they are doing."""

    label: str
    finished: int
    diverged: int
    failed: int
    running: int
    waiting: int


@dataclass(frozen=True)
class Status:
    """A study at one moment.

    Attributes:
      writer: the process that is making runs; None when nobody is.
      total: of a tuned study, the runs that its tuning has asked for so far and all that will be compared.
      tuning, tuned: how many of them are the tuning's, and how many of those have ended.
      finished: runs that gave a value; diverged and failed ones are counted apart.
      seconds_left: an estimate; None before a run has finished, and when nobody is making runs.
    """

    testbed: str
    writer: str | None
    total: int
    tuning: int
    tuned: int
    finished: int
    diverged: int
    failed: int
    running: int
    waiting: int
    seconds_left: float | None
    arms: tuple[ArmStatus, ...]
    going: tuple[Going, ...]

    @property
    def done(self) -> int:
        return self.finished + self.diverged + self.failed

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; a loss that is not finite becomes the string "nan", "inf" or "-inf"."""
        found: dict[str, Any] = to_json(self)
        return found


def status_of(snapshot: Snapshot) -> Status:
    """What the folder of a study showed when it was read, the runs of a tuning among them."""
    record, tuning, compared = snapshot.record, snapshot.tuning_runs, snapshot.runs
    every, later, missing = [*tuning, *compared], _later(record, compared), _missing_tuning_runs(record, tuning)
    holder = snapshot.holder
    going = [] if holder is None else [_going(record, run) for run in every if _under_way(run, holder.since)]
    under_way = {run.id for run in going}
    labels = list(dict.fromkeys([*(arm.label for arm in record.arms), *(r.spec.optimizer for r in every)]))
    arms = []
    for label in labels:
        own = [run for run in every if run.spec.optimizer == label]
        ends = [run.result.status if run.result else "" for run in own]
        running = sum(run.id in under_way for run in own)
        waiting = ends.count("") - running + later.get(label, 0) + missing.get(label, 0)
        arms.append(ArmStatus(label, ends.count("ok"), ends.count("diverged"), ends.count("failed"), running, waiting))
    return Status(
        testbed=record.testbed,
        writer=None if holder is None else holder.text,
        total=len(every) + sum(later.values()) + sum(missing.values()),
        tuning=len(tuning) + sum(missing.values()),
        tuned=sum(run.result is not None for run in tuning),
        finished=sum(arm.finished for arm in arms),
        diverged=sum(arm.diverged for arm in arms),
        failed=sum(arm.failed for arm in arms),
        running=len(going),
        waiting=sum(arm.waiting for arm in arms),
        seconds_left=None if holder is None else _seconds_left(every, going, Counter(later) + Counter(missing)),
        arms=tuple(arms),
        going=tuple(going),
    )


def _later(record: StudyRecord, compared: Sequence[StoredRun]) -> dict[str, int]:
    """{arm: runs to be compared that are not in the folder}: lost ones, and those that a tuning study plans only when
    the arm's values have been chosen."""
    gone = planned.missing_seeds(record, compared)
    to_come = [arm.label for arm in record.arms if record.tuning is not None and arm.label not in record.chosen]
    return {label: len(seeds) for label, seeds in gone.items()} | dict.fromkeys(to_come, len(record.seeds))


def _missing_tuning_runs(record: StudyRecord, tuning: Sequence[StoredRun]) -> dict[str, int]:
    """{arm: tuning runs that are not in the folder, of values that were tried on other seeds}."""
    question = record.tuning
    if question is None:
        return {}
    seeds: dict[tuple[str, str], set[int]] = {}
    for run in tuning:
        seeds.setdefault((run.spec.optimizer, repr(question.values(run.spec))), set()).add(run.spec.seed)
    found = Counter[str]()
    for (label, _), there in seeds.items():
        found[label] += len(set(question.seeds) - there)
    return found


def _under_way(run: StoredRun, since: float) -> bool:
    """Whether an unfinished run has written since the present process took the folder."""
    if run.result is not None:
        return False
    for name in ("metrics.jsonl", "output.txt", "checkpoint"):
        try:
            # a file system may keep times by the second or two
            if (run.folder / name).stat().st_mtime >= since - 2:
                return True
        except OSError:
            continue
    return False


def _going(record: StudyRecord, run: StoredRun) -> Going:
    rows = [row for row in run.metrics() if "step" in row]
    last = rows[-1] if rows else {}
    losses = [row["loss"] for row in rows if isinstance(row.get("loss"), int | float)]
    return Going(
        run.id,
        run.spec.optimizer,
        run.spec.seed,
        {} if record.tuning is None or run.spec.seed in record.seeds else record.tuning.values(run.spec),
        int(last["step"]) if last else None,
        _steps(record, run),
        float(losses[-1]) if losses else None,
    )


def _steps(record: StudyRecord, run: StoredRun) -> int | None:
    """The updates of a whole run of a testbed that names them among its settings."""
    if record.code is not None:
        return None
    try:
        settings = testbeds.settings_of(testbeds.get(record.testbed), run.spec.preset, run.spec.settings)
    except ValueError:
        return None
    steps = getattr(settings, "steps", None)
    return steps if isinstance(steps, int) else None


def _seconds_left(runs: Sequence[StoredRun], going: Sequence[Going], later: Mapping[str, int]) -> float | None:
    took: dict[str, list[float]] = {}
    for run in runs:
        if run.result is not None and run.result.status == "ok":
            took.setdefault(run.spec.optimizer, []).append(run.result.seconds)
    every = [x for own in took.values() for x in own]
    if not every:
        return None
    shares = {one.id: one.share for one in going}
    work = sum(
        statistics.median(took.get(run.spec.optimizer, every)) * (1 - shares.get(run.id, 0.0))
        for run in runs
        if run.result is None
    )
    work += sum(count * statistics.median(took.get(arm, every)) for arm, count in later.items())
    return work / max(1, len(going))


def name_of(run: Going) -> str:
    """A run in a few words: "kbeta, lr 0.001, seed 100"."""
    return ", ".join([run.optimizer, *(f"{name} {value:g}" for name, value in run.values.items()), f"seed {run.seed}"])


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


def words(status: Status) -> str:
    """The whole in one sentence."""
    counts = [
        f"{count} {name}"
        for name, count in (
            ("finished", status.finished),
            ("diverged", status.diverged),
            ("failed", status.failed),
            ("running", status.running),
            ("waiting", status.waiting),
        )
        if count or name == "finished"
    ]
    of_tuning = f", {status.tuning} of them to tune ({status.tuned} done)" if status.tuning else ""
    text = f"{status.total} runs{of_tuning}: {', '.join(counts)}."
    if status.seconds_left is not None and status.done < status.total:
        return f"{text} About {duration(status.seconds_left)} left."
    if status.writer is None and status.done < status.total:
        return f"{text} Nobody is making the rest: repeat the study's command to go on."
    return text
