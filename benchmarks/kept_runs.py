"""The runs of a study, kept in the repository: a table, and an archive from which `kbeta study` goes on.

NAME.csv has a row for every run that was made. NAME.tar.xz is a results folder with its finished runs; of their
curves at most one metric is kept.
"""

from __future__ import annotations

import csv
import io
import math
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from kourkoutas import atomic
from kourkoutas.lab.results import files, store
from kourkoutas.lab.results.snapshot import Snapshot


def keep(out: Path, testbed: str, to: Path, evaluated: str | None = None) -> int:
    """Write the table and the archive of one testbed, with the curve of one metric if named; the number of runs."""
    study = Snapshot.read(out / testbed)
    runs = [run for run in (*study.runs, *study.tuning_runs, *study.other_runs) if run.result is not None]
    if study.damage:
        raise store.StoreError(study.damage[0])
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / testbed
        files.make_folder(copy)
        files.write_json(copy / "study.json", _without_folders(study.record, out))
        for run in runs:
            files.make_folder(folder := copy / "runs" / run.id)
            files.write_json(folder / "spec.json", run.spec)
            store.write_result(folder, run.result.model_copy(update={"curve": _thinned(run.result.curve, evaluated)}))
            rows.append(_row(testbed, study.record, run))
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w:xz", preset=9) as tar:
            for file in sorted(path for path in copy.rglob("*") if path.is_file()):
                entry = tarfile.TarInfo(file.relative_to(scratch).as_posix())  # no owner, no time: the same bytes again
                entry.size = file.stat().st_size
                with file.open("rb") as content:
                    tar.addfile(entry, content)
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    to.mkdir(parents=True, exist_ok=True)
    atomic.replace(to / f"{testbed}.csv", lambda stream: stream.write(table.getvalue().encode()))
    atomic.replace(to / f"{testbed}.tar.xz", lambda stream: stream.write(archive.getvalue()))
    return len(runs)


def _without_folders(record: store.StudyRecord, out: Path) -> store.StudyRecord:
    """The record with its commands as if they had been given in `out`, and a function's file without its folder."""

    def shorter(command: str) -> str:
        return command.replace(f"{out.absolute()}/", "")

    calls = [call.model_copy(update={"command": shorter(call.command)}) for call in record.calls]
    code = record.code and record.code.model_copy(update={"file": Path(record.code.file).name})
    return record.model_copy(update={"command": shorter(record.command), "calls": calls, "code": code})


def _thinned(curve: Mapping[str, Sequence[float]], metric: str | None) -> dict[str, list[float]]:
    """The points of a curve at which the metric was evaluated."""
    if metric is None or metric not in curve:
        return {}
    points = [(step, value) for step, value in zip(curve["step"], curve[metric], strict=True) if math.isfinite(value)]
    return {"step": [step for step, _ in points], metric: [value for _, value in points]}


def _row(testbed: str, record: store.StudyRecord, run: store.StoredRun) -> dict[str, object]:
    """A run of the tuning, of the test, or on a test seed with a value that wider tuning has replaced."""
    spec, result = run.spec, run.result
    phase = "tuning" if record.tunes(spec) else "test" if record.compares(spec) else "replaced"
    return {
        "testbed": testbed,
        "arm": spec.optimizer,
        "phase": phase,
        **record.tuning.values(spec),
        "seed": spec.seed,
        "status": result.status,
        **result.metrics,
        "seconds": round(result.seconds, 1),
    }


def unpack(out: Path, testbed: str, source: Path) -> bool:
    """Put the kept runs where the study looks for them; False if there is nothing to do."""
    archive = source / f"{testbed}.tar.xz"
    if (out / testbed).exists() or not archive.exists():
        return False
    with tarfile.open(archive) as tar:
        tar.extractall(out, filter="data")
    return True
