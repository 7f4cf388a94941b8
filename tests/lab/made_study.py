"""Results folders of made-up runs, written as a study writes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kourkoutas.lab.judging import table_file
from kourkoutas.lab.judging.analysis import Analysis, analyse
from kourkoutas.lab.results import store
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.showing import report
from kourkoutas.lab.specs.spec import RunResult, RunSpec
from kourkoutas.trace import Trace

TABLE = Path(__file__).parent / "data" / "rare_trigger.csv"
CONTROLS = ("kbeta-static", "kbeta-exact", "adam-mid", "adam95-warm", "adam999-warm", "lion")
FACTORS = {"kbeta-static": 1.0, "kbeta-exact": 1.12, "adam-mid": 1.11, "adam95-warm": 1.0, "adam999-warm": 1.0}
ERROR = "Traceback (most recent call last):\n  …\nRuntimeError: <no memory> & more"
Ends = Mapping[str, Mapping[int, "float | RunResult | None"]]


def finished(value: float, **more: Any) -> RunResult:
    return RunResult(status="ok", endpoint=value, seconds=2.0, **more)


def diverged(steps: Sequence[float] = (), losses: Sequence[float] = ()) -> RunResult:
    return RunResult(status="diverged", curve={"step": list(steps), "loss": list(losses)}, seconds=1.0)


def failed(error: str | None = ERROR) -> RunResult:
    return RunResult(status="failed", error=error, seconds=1.0)


def own(
    out: Path, ends: Ends, *, title: str = "loss", log: bool = False, higher_is_better: bool = False, **record: Any
) -> Snapshot:
    """A study of a user's function, with one endpoint; None is a run that has not finished, NaN one that diverged."""
    setup: dict[str, Any] = {"testbed": "task.train", "preset": "own", "engine": "own", "settings": {}}
    arms = [store.Arm(label=name, optimizer=name) for name in ends]
    code = store.Code(
        file="task.py", function="train", sha256="0" * 64, endpoint=title, log=log, higher_is_better=higher_is_better
    )
    seeds = sorted({seed for by_seed in ends.values() for seed in by_seed})
    command = "kbeta study task.py:train --seeds 0-2"
    with store.writing(out, **setup, arms=arms, seeds=seeds, command=command, code=code, **record) as writer:
        for arm, by_seed in ends.items():
            for seed, end in by_seed.items():
                spec = RunSpec(**setup, optimizer=arm, seed=seed)
                writer.plan([spec])
                if isinstance(end, float | int):
                    writer.finish(spec, finished(float(end)) if math.isfinite(end) else diverged())
                elif end is not None:
                    writer.finish(spec, end)
    return Snapshot.read(out)


def rare_trigger(out: Path, arms: Sequence[str] = (), seeds: int = 10) -> Snapshot:
    """The paper's Testbed C table with curves and traces; by default with control arms and every way for a run to end:
    lion diverges on seed 3 and fails on seeds 4 and 7."""
    table = table_file.read_table(TABLE)
    arms = arms or (*table, *CONTROLS)
    setup: dict[str, Any] = {
        "testbed": "rare_trigger",
        "preset": "paper",
        "engine": "jax",
        "settings": {"note": "<b>"},
    }
    made = [store.Arm(label=name, optimizer=name) for name in arms]
    command = f"kbeta study rare_trigger --seeds 0-{seeds - 1} --optimizers kbeta,adam95 --set 'note=<b>'"
    rng = np.random.default_rng(0)
    steps = np.arange(500, 30_001, 500)
    with store.writing(out, **setup, arms=made, seeds=range(seeds), command=command) as writer:
        for k, arm in enumerate(arms):
            for seed in range(seeds):
                spec = RunSpec(**setup, optimizer=arm, seed=seed)
                writer.plan([spec])
                if arm == "kbeta":
                    _traced(writer.folder(spec), rng)
                # made-up arms differ from kbeta by a factor and by noise whose logarithms sum to zero over the seeds
                noise = 10 ** (0.01 * math.sin(k + 2 * math.pi * (1 + k % 4) * seed / 10))
                value = table[arm][seed] if arm in table else table["kbeta"][seed] * FACTORS.get(arm, 3) * noise
                loss = value + np.exp(-steps / (4000 + 500 * k)) * rng.uniform(0.8, 1.2, len(steps))
                end = {3: "diverged", 4: "failed", 7: "failed"}.get(seed, "ok") if arm == "lion" else "ok"
                if end == "diverged":
                    writer.finish(spec, diverged(steps[:24].tolist(), loss[:24].tolist()))
                elif end == "failed":
                    writer.finish(spec, failed())
                elif end == "ok":
                    loss[-1] = value  # of the last batch, as a testbed records it
                    metrics = {
                        "last_batch_bce": value,
                        "heldout_bce": 0.05 + 0.001 * (k + rng.normal()),
                        "train_loss": 0.05 + value,
                    }
                    curve = {"step": steps.tolist(), "loss": loss.tolist(), "lr": [1e-2] * len(steps)}
                    settings = {"steps": 30_000, "lr": 1e-2, "optimizer": {"family": "adam", "beta2_min": 0.88}}
                    writer.finish(spec, finished(value, metrics=metrics, curve=curve, settings=settings))
    return Snapshot.read(out)


def _traced(folder: Path, rng: np.random.Generator) -> None:
    """Three buckets over 60 steps, of which w2 spikes."""
    trace = Trace(["w1", "w2", "a.very.long.name.of.a.bucket.weight"])
    ring = np.zeros((1024, 3, 3), np.float32)
    ring[:60, 0] = np.clip(rng.normal(0.5, 0.05, (60, 3)), 0, 0.99)
    ring[10:60:10, 0, 1] = 0.97
    ring[:60, 1] = 0.999 - 0.119 * ring[:60, 0]
    ring[:60, 2] = rng.lognormal(size=(60, 3))
    trace.pull(ring, count=60)
    trace.save(folder / "trace.npz")


def analysed(study: Snapshot, **how: Any) -> Analysis:
    """The analysis of a folder, without bootstraps unless told."""
    return analyse(Snapshot.read(study.path), **{"resamples": 0, **how})


def rendered(study: Snapshot, **how: Any) -> str:
    """Its page."""
    return report.render(analysed(study, **how))
