"""A results folder as it was at one moment: read once, and judged and shown from that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kourkoutas.lab.results.store import Holder, StoredRun, Study, StudyRecord


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
    """

    path: Path
    record: StudyRecord
    runs: tuple[StoredRun, ...]
    tuning_runs: tuple[StoredRun, ...] = ()
    other_runs: tuple[StoredRun, ...] = ()
    damage: tuple[str, ...] = ()
    holder: Holder | None = None

    @classmethod
    def read(cls, path: str | Path) -> Snapshot:
        """Read the folder at `path`.

        Raises:
          StoreError: there is no study, or its study.json cannot be read.
        """
        study = Study.open(path)
        holder = study.holder()
        found, damage = study.scan()
        record = study.record
        return cls(
            path=study.path,
            record=record,
            runs=tuple(run for run in found if record.compares(run.spec)),
            tuning_runs=tuple(run for run in found if record.tunes(run.spec)),
            other_runs=tuple(run for run in found if not record.compares(run.spec) and not record.tunes(run.spec)),
            damage=tuple(damage),
            holder=holder,
        )
