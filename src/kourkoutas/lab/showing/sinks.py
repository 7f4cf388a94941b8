"""Sending a run's metrics to TensorBoard or Weights & Biases while it runs.

A run writes metrics.jsonl whatever the sink; a sink reads what is new there, so that testbeds and users' functions know
nothing about sinks and a resumed run sends its whole history again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from kourkoutas.lab.specs.spec import RunSpec
from kourkoutas.trace import Sink, TensorBoardSink, WandbSink

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


@contextlib.contextmanager
def following(name: str | None, spec: RunSpec, folder: Path) -> Iterator[Callable[[], None]]:
    """A function that sends the new rows of `folder`/metrics.jsonl; called once more at the end."""
    if name is None:
        yield lambda: None
        return
    sink, close = _open(name, spec, folder)
    sent = 0

    def follow() -> None:
        nonlocal sent
        file = folder / "metrics.jsonl"
        if not file.exists():
            return
        with file.open("rb") as stream:
            stream.seek(sent)
            new = stream.read()
        complete = new[: new.rfind(b"\n") + 1]
        sent += len(complete)
        for line in complete.splitlines():
            row = json.loads(line)
            sink.write(int(row["step"]), {key: float(x) for key, x in row.items() if key != "step"})

    try:
        yield follow
        follow()
    finally:
        close()


def _open(name: str, spec: RunSpec, folder: Path) -> tuple[Sink, Callable[[], None]]:
    if name == "tensorboard":
        logdir = folder / "tensorboard"
        shutil.rmtree(logdir, ignore_errors=True)  # a resumed run sends its rows again
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
