"""A results folder as one table: pandas in Python, CSV for everybody, Parquet where pyarrow is installed.

runs     one row per run: what it is, its tuned values, how it ended, its endpoint, every metric, the resolved settings
curves   one row per recorded point of a run's curve

A metric whose name is that of another column, `seconds` or `seed` for example, is the column `metrics.seconds`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from kourkoutas import atomic
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.results.store import StoredRun, StoreError

Row = dict[str, Any]
What = Literal["runs", "curves"]
FORMATS = (".csv", ".parquet")
ENDS = ("status", "endpoint", "seconds", "seconds_per_step", "error")


def rows(snapshot: Snapshot, what: What = "runs", *, tuning: bool = False) -> list[Row]:
    """The rows of a table of the runs that are compared, or of the tuning's; every row has every column, None where it
    has no value."""
    own, question = snapshot.record.code is not None, snapshot.record.tuning
    made: list[Row] = []
    for run in snapshot.tuning_runs if tuning else snapshot.runs:
        head = {"id": run.id, "optimizer": run.spec.optimizer, "seed": run.spec.seed}
        head |= {} if question is None else question.values(run.spec)
        made += _points(run, own, head) if what == "curves" else [_row(run, head)]
    columns = names_in(made)
    return [{name: row.get(name) for name in columns} for row in made]


def names_in(rows: Iterable[Iterable[str]]) -> list[str]:
    """The names in rows of {name: value}, each once, in the order in which they first come up.

    >>> names_in([{"step": 1, "loss": 0.5}, {"step": 2, "accuracy": 0.9}])
    ['step', 'loss', 'accuracy']
    """
    return list(dict.fromkeys(itertools.chain.from_iterable(rows)))


def _row(run: StoredRun, head: Row) -> Row:
    if run.result is None:
        return head | {"status": "unfinished"}
    row = head | {name: getattr(run.result, name) for name in ENDS}
    settings = {f"settings.{name}": value for name, value in _flat(run.result.settings).items()}
    return row | _metrics(run.result.metrics, row) | settings


def _points(run: StoredRun, own: bool, head: Row) -> list[Row]:
    """The curve of a run, or, of a user's `own` function that logs metrics in calls of their own, what it logged: its
    curve would hold gaps, and in long runs not every metric."""
    if run.result is None or not run.result.curve:
        return []
    columns = run.result.curve
    points: list[Mapping[str, Any]] = [
        dict(zip(columns, point, strict=True)) for point in zip(*columns.values(), strict=True)
    ]
    if own and any(map(math.isnan, itertools.chain.from_iterable(columns.values()))):
        with contextlib.suppress(StoreError):  # a damaged file costs what only it holds
            points = [{name: float(x) for name, x in row.items()} for row in run.metrics()] or points
    return [head | _metrics(point, head) for point in points]


def _metrics(logged: Mapping[str, Any], taken: Iterable[str]) -> Row:
    """Metrics as columns; no column of the table's own is overwritten."""
    own = set(taken)
    return {
        f"metrics.{name}" if name in own or name.startswith(("settings.", "metrics.")) else name: value
        for name, value in logged.items()
    }


def _flat(settings: dict[str, Any]) -> Row:
    """Nested names joined by dots; lists as JSON text, so that a column has one kind of value."""
    found: Row = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= {f"{name}.{inner}": x for inner, x in _flat(value).items()}
        else:
            found[name] = json.dumps(value) if isinstance(value, list | tuple) else value
    return found


def write(snapshot: Snapshot, to: Path, what: What = "runs") -> int:
    """Write a table and return its number of rows; the ending of `to` says which format."""
    if to.suffix not in FORMATS:
        raise ValueError(f"--to {to}: the name must end in {' or '.join(FORMATS)}")
    if to.suffix == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise ImportError("Parquet needs pyarrow, which is not installed: pip install pyarrow, or export CSV")
    import pandas as pd

    # One type per column: a setting may be a number in one arm and a word in another.
    table = pd.DataFrame(rows(snapshot, what)).convert_dtypes()
    table = table.astype(dict.fromkeys(table.select_dtypes("object").columns, "string"))
    if table.empty:
        raise StoreError(f"{snapshot.path} holds no {what} yet: nothing was written")
    to.parent.mkdir(parents=True, exist_ok=True)
    write_as = table.to_parquet if to.suffix == ".parquet" else table.to_csv
    atomic.replace(to, lambda stream: write_as(stream, index=False))
    return len(table)
