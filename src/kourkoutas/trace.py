"""Recording sun, β2 and the gradient norm n per bucket while training.

With `diagnostics=True` an optimizer writes one row per step into a ring of `WINDOW` rows that lives where its other
state lives (device memory, the JAX state, the MLX state): no transfer, no synchronisation. A `Trace` on the host pulls
the rows that are new since its last pull, in one copy, and keeps them under the buckets' names. Pull at least every
`WINDOW` steps; rows that were overwritten before a pull are counted in `Trace.lost`, never invented.

    ring    float array (WINDOW, 3, buckets): ring[(t-1) % WINDOW] = (sun, β2, n) of step t
    count   the number of rows ever written

A bucket that had no gradient at a step, or was skipped, has NaN there.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kourkoutas import atomic

WINDOW = 1024
KEYS = ("sun", "beta2", "norm")


class Sink(Protocol):
    """Where a trace sends its rows: anything with `write(step, values)` and `close()`."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Trace:
    """sun, β2 and n of named buckets over training, on the host.

    Args:
      names: bucket names, in the order of the ring's last axis.
      sinks: also send each row there, as `sun/<bucket>`, `beta2/<bucket>` and `norm/<bucket>`.
      every: keep every k-th step only, those that k divides.

    Example:
      >>> ring = np.zeros((WINDOW, 3, 1), np.float32)
      >>> ring[0] = [[0.5], [0.9395], [2.0]]
      >>> trace = Trace(["layer"])
      >>> trace.pull(ring, count=1)
      >>> {name: round(v["beta2"], 4) for name, v in trace.snapshot().items()}
      {'layer': 0.9395}
    """

    def __init__(self, names: Sequence[str], sinks: Iterable[Sink] = (), every: int = 1) -> None:
        if every < 1:
            raise ValueError(f"`every` must be a whole number >= 1; got {every!r}")
        self.names = tuple(names)
        self.sinks = tuple(sinks)
        self.every = every
        self.lost = 0
        self._seen = 0
        self._steps: list[NDArray[np.int64]] = []
        self._rows: list[NDArray[np.float32]] = []

    def pull(self, ring: Any, count: int, before: int = 0) -> None:
        """Take over the rows written since the last pull.

        Args:
          ring: anything NumPy can read.
          count: the number of rows ever written into it.
          before: how many steps were taken before the ring was made: its first row is step `before` + 1.
        """
        ring = np.asarray(ring)
        if ring.ndim != 3 or ring.shape[1:] != (len(KEYS), len(self.names)):
            raise ValueError(
                f"`ring` must have shape (window, {len(KEYS)}, {len(self.names)}) for the {len(self.names)} buckets of "
                f"this trace; got {ring.shape}: make the Trace with the names of the same optimizer"
            )
        last = int(before) + int(count)
        if last < self._seen:
            raise ValueError(f"`count` went back from {self._seen} to {last}: use a new Trace after loading a state")
        wanted = max(self._seen, int(before))
        first = max(wanted, last - ring.shape[0])
        self.lost += first - wanted
        self._seen = last
        steps = np.arange(first + 1, last + 1, dtype=np.int64)
        steps = steps[steps % self.every == 0]
        if not steps.size:
            return
        rows = ring[(steps - before - 1) % ring.shape[0]].astype(np.float32)
        self._steps.append(steps)
        self._rows.append(rows)
        if self.sinks:
            for step, row in zip(steps, rows, strict=True):
                self._send(int(step), row)

    def _send(self, step: int, row: NDArray[np.float32]) -> None:
        """One row to every sink."""
        values = {}
        for key, entries in zip(KEYS, row.tolist(), strict=True):
            for name, value in zip(self.names, entries, strict=True):
                values[f"{key}/{name}"] = value
        for sink in self.sinks:
            sink.write(step, values)

    @property
    def steps(self) -> NDArray[np.int64]:
        """The recorded steps, from 1."""
        return np.concatenate(self._steps) if self._steps else np.zeros(0, np.int64)

    @property
    def sun(self) -> NDArray[np.float32]:
        """Sunspikes, (steps, buckets)."""
        return self._column(0)

    @property
    def beta2(self) -> NDArray[np.float32]:
        """β2, (steps, buckets)."""
        return self._column(1)

    @property
    def norm(self) -> NDArray[np.float32]:
        """Pooled gradient norms n, (steps, buckets)."""
        return self._column(2)

    def _column(self, k: int) -> NDArray[np.float32]:
        if not self._rows:
            return np.zeros((0, len(self.names)), np.float32)
        return np.concatenate(self._rows)[:, k]

    def snapshot(self) -> dict[str, dict[str, float]]:
        """The newest row: bucket name → {"sun": …, "beta2": …, "norm": …}; empty before the first step."""
        if not self._rows:
            return {}
        of_buckets = self._rows[-1][-1].T.tolist()
        return {name: dict(zip(KEYS, values, strict=True)) for name, values in zip(self.names, of_buckets, strict=True)}

    def save(self, path: str | Path) -> None:
        """Write all rows to an .npz file with arrays `names`, `steps`, `sun`, `beta2` and `norm`."""
        np.savez_compressed(
            path, names=np.array(self.names), steps=self.steps, sun=self.sun, beta2=self.beta2, norm=self.norm
        )

    def close(self) -> None:
        for sink in self.sinks:
            sink.close()

    def __enter__(self) -> Trace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class CsvSink:
    """Rows to a CSV file: `step`, then one column per value.

    Values may come in several calls, those of the trace and your own: each call is a row, and a column that it has
    no value for stays empty. When a name comes for the first time, the file is written anew with one more column.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._columns = ["step"]
        self._file = self._open("w")
        self._writer = csv.DictWriter(self._file, self._columns)

    def _open(self, mode: str) -> IO[str]:
        return open(self._path, mode, newline="", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        new = [name for name in values if name not in self._columns]
        if new:
            self._add_columns(new)
        self._writer.writerow({"step": step, **values})

    def _add_columns(self, names: Sequence[str]) -> None:
        self._file.close()
        with self._open("r") as file:
            rows = list(csv.DictReader(file))
        self._columns.extend(names)
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns)
        writer.writeheader()
        writer.writerows(rows)
        atomic.replace(self._path, lambda file: file.write(text.getvalue().encode()))
        self._file = self._open("a")
        self._writer = csv.DictWriter(self._file, self._columns)

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Rows as TensorBoard scalars, through torch's SummaryWriter."""

    def __init__(self, logdir: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ImportError("TensorBoardSink needs torch and tensorboard: pip install torch tensorboard") from None
        self._writer = SummaryWriter(str(logdir))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Rows to a Weights & Biases run: the one given, or the active one.

    NOTE: W&B throws away what is logged for a step before its own last one. A trace is pulled now and then and holds
    older steps, so each row carries its step as the metric `step`, which is the x axis of everything sent here. Send
    your own metrics through `write` too, or with `run.log({...})` without a `step=`.
    """

    def __init__(self, run: Any = None) -> None:
        if run is None:
            try:
                import wandb
            except ImportError:
                raise ImportError("WandbSink needs wandb: pip install wandb") from None
            run = wandb.run
            if run is None:
                raise ValueError("`run` is None and no W&B run is active: call wandb.init() first, or pass a run")
        self._run = run
        self._known: set[str] = set()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name in values.keys() - self._known:
            self._run.define_metric(name, step_metric="step")
            self._known.add(name)
        self._run.log({"step": step, **values})

    def close(self) -> None:
        """The run belongs to the caller and stays open."""
