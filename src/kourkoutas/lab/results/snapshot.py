"""A results folder as it was at one moment: read once, and judged and shown from that."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import psutil

from kourkoutas.lab.results.store import StoredRun, StudyRecord, read_record, read_runs

SECONDS_OF_DOUBT = 60  # between the clocks of the file system and of the processes


@dataclass(frozen=True)
class Holder:
    """A process that writes to a results folder: its name and command, and when it began (seconds since 1970)."""

    text: str
    since: float


@dataclass(frozen=True)
class Snapshot:
    """What a results folder held when it was read.

    Attributes:
      record: study.json.
      runs: every planned run that is to be compared, in the order of the arms and then of the seeds.
      tuning_runs: every planned run of the tuning, in the same order.
      other_runs: runs on test seeds with values that were an arm's choice only for a while.
      damage: what could not be read, and why. A damaged result makes its run a failed one, which `--retry-failed` makes
        again; a folder without a readable spec.json is left out of the runs.
      holder: the process that was writing there.
      under_way: the runs that it was making.
    """

    path: Path
    record: StudyRecord
    runs: tuple[StoredRun, ...]
    tuning_runs: tuple[StoredRun, ...] = ()
    other_runs: tuple[StoredRun, ...] = ()
    damage: tuple[str, ...] = ()
    holder: Holder | None = None
    under_way: tuple[StoredRun, ...] = ()

    @classmethod
    def read(cls, path: str | Path) -> Snapshot:
        """Read the folder at `path`.

        Raises:
          StoreError: there is no study, or its study.json cannot be read.
        """
        path = Path(path)
        record, holder = read_record(path), holder_of(path)
        found, damage = read_runs(path, record.arms)
        going = [] if holder is None else [run for run in found if _has_written(run, holder.since)]
        return cls(
            path=path,
            record=record,
            runs=tuple(run for run in found if record.compares(run.spec)),
            tuning_runs=tuple(run for run in found if record.tunes(run.spec)),
            other_runs=tuple(run for run in found if not record.compares(run.spec) and not record.tunes(run.spec)),
            damage=tuple(damage),
            holder=holder,
            under_way=tuple(going),
        )


def _has_written(run: StoredRun, since: float) -> bool:
    """Whether an unfinished run has written something since the present process took the folder."""
    if run.result is not None:
        return False
    for name in ("metrics.jsonl", "output.txt", "checkpoint"):
        with contextlib.suppress(OSError):
            # a file system may keep times by the second or two
            if (run.folder / name).stat().st_mtime >= since - 2:
                return True
    return False


def holder_of(path: Path) -> Holder | None:
    """The process of this machine that is writing to a results folder, or None.

    NOTE: the lock itself is never tried, since a study that starts at that very moment would find it taken.
    """
    file = path / ".lock"
    try:
        text, since = file.read_text(encoding="utf-8"), file.stat().st_mtime
        began = psutil.Process(int(text.removeprefix("process ").partition(" ")[0])).create_time()
    except psutil.AccessDenied:
        began = since  # it is there, and somebody else's
    except (OSError, ValueError, OverflowError, psutil.NoSuchProcess):
        return None
    if began > since + SECONDS_OF_DOUBT:
        return None  # a lock file left by kill -9, and another process that got the number since
    return Holder(text, since)
