"""Sending a run's metrics to TensorBoard or Weights & Biases while it runs.

Loss, learning rate and whatever else a run logs go to metrics.jsonl whatever the sink; the sink gets what is new there.
sun and β2 per bucket go to it from the run's trace. Testbeds and users' functions know nothing about sinks, and a
resumed run sends its whole history again.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kourkoutas.lab.results import files
from kourkoutas.lab.specs.spec import RunSpec
from kourkoutas.trace import KEYS, Sink, TensorBoardSink, WandbSink

SINKS = {"tensorboard": ("torch", "tensorboard"), "wandb": ("wandb",)}


def check(name: str | None) -> None:
    """Raise unless the sink is known and its packages are installed; imports nothing."""
    if name is None:
        return
    if name not in SINKS:
        raise ValueError(f"--sink must be one of {', '.join(SINKS)}; got {name!r}")
    missing = [package for package in SINKS[name] if importlib.util.find_spec(package) is None]
    if missing:
        raise ValueError(f"--sink {name} needs {' and '.join(missing)}: pip install {' '.join(missing)}")


class Follower:
    """Sends what a run has recorded since the last call: metrics from its file, sun and β2 from its trace.

    Args:
      sink: where the rows go; None sends nothing.
      folder: of the run.
    """

    def __init__(self, sink: Sink | None, folder: Path) -> None:
        self._sink, self._file = sink, folder / "metrics.jsonl"
        self._bytes, self._step = 0, 0

    @property
    def wants_trace(self) -> bool:
        return self._sink is not None

    def metrics(self) -> None:
        """Send the new rows of metrics.jsonl."""
        if self._sink is None or not self._file.exists():
            return
        with self._file.open("rb") as stream:
            stream.seek(self._bytes)
            new = stream.read()
        complete = new[: new.rfind(b"\n") + 1]
        self._bytes += len(complete)
        for line in complete.splitlines():
            row = files.row_of(line.decode())
            self._sink.write(int(row["step"]), {key: float(x) for key, x in row.items() if key != "step"})

    def trace(self, rows: Mapping[str, NDArray[Any]]) -> None:
        """Send the rows of a trace (arrays `names`, `steps`, `sun`, `beta2`) that are newer than the last one sent."""
        if self._sink is None or not rows:
            return
        names = [str(name) for name in rows["names"]]
        for k in np.flatnonzero(rows["steps"] > self._step):
            self._step = int(rows["steps"][k])
            values = {f"{key}/{name}": float(x) for key in KEYS for name, x in zip(names, rows[key][k], strict=True)}
            self._sink.write(self._step, values)


@contextlib.contextmanager
def following(name: str | None, spec: RunSpec, folder: Path) -> Iterator[Follower]:
    """A follower of the run in `folder`, closed at the end, after the last metrics were sent."""
    if name is None:
        yield Follower(None, folder)
        return
    sink, close = _open(name, spec, folder)
    follower = Follower(sink, folder)
    try:
        yield follower
        follower.metrics()
    finally:
        close()


def _open(name: str, spec: RunSpec, folder: Path) -> tuple[Sink, Callable[[], None]]:
    if name == "tensorboard":
        logdir = folder / "tensorboard"
        with contextlib.suppress(OSError):
            files.remove_folder(logdir)  # a resumed run sends its rows again
        board = TensorBoardSink(logdir)
        return board, board.close
    import wandb

    run = wandb.init(
        project="kbeta",
        group=spec.testbed,
        name=folder.name,
        id=folder.name,
        resume="allow",
        dir=str(folder),
        config=spec.model_dump(),
    )
    return WandbSink(run), run.finish
