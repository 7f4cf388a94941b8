"""One run: a problem, an optimizer and an engine, trained in chunks, recorded, and continued where it was killed.

metrics.jsonl gets one line per block of steps (step, loss, lr) and per evaluation; `kourkoutas.lab.results.store` lists
the other files.

NOTE: chunks start at multiples of the problem's chunk size whether or not the run was interrupted, and checkpoints
are taken between chunks only. So a continued run makes the same calls with the same arrays as an uninterrupted one
and ends with the same bits. Lines of metrics.jsonl that are newer than the checkpoint are cut off when it is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kourkoutas.lab import engines, testbeds
from kourkoutas.lab.engines import Engine, Trainer
from kourkoutas.lab.optimizers import recipes
from kourkoutas.lab.results.files import Arrays, Checkpoints, Lines, write_arrays
from kourkoutas.lab.specs.spec import LARGEST, Report, RunResult, RunSpec
from kourkoutas.lab.testbeds import Problem
from kourkoutas.trace import KEYS, WINDOW

CURVE_POINTS = 300
TRACE_ROWS = 2_000
SECONDS_BETWEEN_CHECKPOINTS = 60.0


def run(
    spec: RunSpec,
    folder: Path | None = None,
    *,
    endpoint: str | None = None,
    on_progress: Report | None = None,
    checkpoint_every: int | None = None,
) -> RunResult:
    """Make the run of `spec`, or finish it from the newest checkpoint in `folder`.

    Args:
      spec: the run.
      folder: where its files go; None keeps none of them.
      endpoint: the metric that is the result's endpoint; the testbed's first unless told.
      on_progress: called as (steps taken, steps in all, loss) after every chunk.
      checkpoint_every: steps between checkpoints, rounded up to whole chunks; the last state is kept too. None saves
        about once a minute and removes the checkpoints at the end; 0 never saves.

    Returns:
      The result. A run whose loss exceeds 1e100, or whose parameters stop being finite, gives the status "diverged";
      errors are raised.
    """
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="kbeta-") as scratch:
            return run(spec, Path(scratch), endpoint=endpoint, on_progress=on_progress, checkpoint_every=0)
    if checkpoint_every is not None and checkpoint_every < 0:
        raise ValueError(f"`checkpoint_every` must be a number of steps >= 0 (0: never); got {checkpoint_every!r}")
    testbed = testbeds.get(spec.testbed)
    settings = testbeds.settings_of(testbed, spec.preset, spec.settings)
    recipe = recipes.recipe(spec.optimizer, testbed.kbeta, spec.options, spec.origin)
    engine = engines.get(spec.engine)
    recipes.check(recipe, spec.engine)
    problem = testbed.problem(settings, spec.seed)
    if recipe.full_batch and problem.batches(0, 1):
        raise ValueError(
            f"optimizer {spec.optimizer!r} needs the same loss at every step, and {testbed.name} draws batches: "
            "use it on burgers, pinnacle or heat3d, or take another optimizer"
        )
    recipe = recipe.over(problem.steps)
    with contextlib.closing(_Run(spec, problem, engine, recipe, folder, checkpoint_every)) as it:
        it.resume()
        it.loop(on_progress)
        it.finish()
    metrics = it.final_metrics()
    return RunResult(
        status="ok" if it.diverged_at is None else "diverged",
        endpoint=metrics[endpoint or testbed.endpoints[0].metric] if it.diverged_at is None else None,
        metrics=metrics,
        curve=it.curve(),
        settings={**dataclasses.asdict(settings), "optimizer": recipe.described},
        seconds=it.seconds(),
        times=it.times(),
    )


def pace_of(calls: Sequence[tuple[int, float]]) -> float | None:
    """The median seconds of a step, from (steps, seconds) of every call of training.

    NOTE: the first call with a new number of steps may compile, and counts only where there is no other.

    >>> pace_of([(10, 6.0), (10, 1.0), (10, 1.2), (5, 3.0)])
    0.11
    """
    lengths = [steps for steps, _ in calls]
    again = [call for i, call in enumerate(calls) if call[0] in lengths[:i]]
    paces = [seconds / steps for steps, seconds in again or calls]
    return statistics.median(paces) if paces else None


class _Run:
    """The state of a run between chunks; all of it goes into a checkpoint."""

    def __init__(
        self,
        spec: RunSpec,
        problem: Problem,
        engine: Engine,
        recipe: recipes.Recipe,
        folder: Path,
        checkpoint_every: int | None,
    ) -> None:
        self._spec, self._problem, self._engine, self._recipe = spec, problem, engine, recipe
        self._folder, self._every = folder, checkpoint_every
        self._checkpoints = Checkpoints(folder / "checkpoint")
        self._chunk = min(problem.chunk, WINDOW)
        self._block = max(1, math.ceil(problem.steps / CURVE_POINTS))
        self._losses = np.full(problem.steps, math.nan)
        self._evaluations: list[dict[str, float]] = []
        self._before: Arrays = {}
        self._resumed_at = 0
        self._start, self._earlier = time.perf_counter(), 0.0
        self._saved_at = time.monotonic()
        self.step = 0
        self.diverged_at: int | None = None
        self._trainer: Trainer = engine.trainer(
            problem.loss,
            problem.params,
            recipe,
            constants=problem.constants,
            trace_every=math.ceil(problem.steps / TRACE_ROWS),
            compile=problem.compile,
        )
        self._calls: list[tuple[int, float]] = []
        self._log = Lines(folder / "metrics.jsonl")

    def close(self) -> None:
        self._log.close()

    def seconds(self) -> float:
        return self._earlier + time.perf_counter() - self._start

    def times(self) -> dict[str, float]:
        pace = pace_of(self._calls)
        return {} if pace is None else {"per_step": pace}

    def loop(self, on_progress: Report | None) -> None:
        """Chunk after chunk, until the end or until it diverges."""
        problem = self._problem
        evaluated = int(self._evaluations[-1]["step"]) if self._evaluations else 0
        while self.step < problem.steps and self.diverged_at is None:
            stop = min(problem.steps, self.step + self._chunk)
            losses = self._take(self.step, stop)
            evaluating = problem.evaluate_every and stop - evaluated >= problem.evaluate_every
            bad = np.flatnonzero(~(np.abs(losses) <= LARGEST))
            if bad.size:
                stop = self.step + int(bad[0]) + 1
                self.diverged_at = stop
            elif stop == problem.steps or evaluating:
                evaluated = stop
                self._evaluate(stop)
            self._record(self.step, stop)
            self.step = stop
            if on_progress is not None:
                on_progress(stop, problem.steps, float(self._losses[stop - 1]))
            self._checkpoint()

    def _take(self, start: int, stop: int) -> NDArray[np.float64]:
        steps = np.arange(start, stop)
        # γ_t of the schedule, times the factor of the arm at its update t = step + 1
        lrs = self._problem.lr(steps) * self._recipe.lr_factor(steps + 1)
        batches = self._problem.batches(start, stop)
        began = time.perf_counter()
        losses = self._trainer.run(batches, lrs)
        self._calls.append((stop - start, time.perf_counter() - began))
        self._losses[start:stop] = losses
        return losses

    def _evaluate(self, step: int) -> None:
        if not all(np.isfinite(p).all() for p in self._trainer.params().values()):
            self.diverged_at = step
            return
        metrics = self._problem.evaluate(self._engine, self._trainer.arrays(), step)
        if step == self._problem.steps and not all(abs(v) <= LARGEST for v in metrics.values()):
            self.diverged_at = step
        self._evaluations.append({"step": step, **metrics})

    def _record(self, start: int, stop: int) -> None:
        """Lines for the blocks that end in start < step ≤ stop, and for an evaluation at stop."""
        for end in range(start // self._block * self._block + self._block, stop + 1, self._block):
            self._log.write({"step": end, **self._block_row(end)})
        if stop % self._block and (stop == self._problem.steps or self.diverged_at is not None):
            self._log.write({"step": stop, **self._block_row(stop)})
        for row in self._evaluations:
            if row["step"] == stop:
                self._log.write(row)

    def _block_row(self, end: int) -> dict[str, float]:
        first = (end - 1) // self._block * self._block
        return {"loss": float(np.mean(self._losses[first:end])), "lr": self._lr(end)}

    def _lr(self, step: int) -> float:
        """The learning rate of update number `step`, counted from 1."""
        return float(self._problem.lr(np.array([step - 1]))[0] * self._recipe.lr_factor(step))

    def curve(self) -> dict[str, list[float]]:
        """At most `CURVE_POINTS` block means, then the last step itself; evaluation metrics in columns of their own."""
        ends = [*range(self._block, self.step, self._block), self.step] if self.step else []
        rows = [self._block_row(end) for end in ends]
        curve = {
            "step": [float(end) for end in ends],
            "loss": [row["loss"] for row in rows],
            "lr": [row["lr"] for row in rows],
        }
        if ends:
            curve["loss"][-1] = float(self._losses[self.step - 1])
        for row in self._evaluations:
            at = min(range(len(ends)), key=lambda k, step=row["step"]: abs(ends[k] - step))  # type: ignore[misc]
            for name, value in row.items():
                if name != "step":
                    curve.setdefault(name, [math.nan] * len(ends))[at] = value
        return curve

    def final_metrics(self) -> dict[str, float]:
        if self.diverged_at is not None:
            return {"diverged_at": float(self.diverged_at)}
        last = {name: value for name, value in self._evaluations[-1].items() if name != "step"}
        tail = self._losses[max(0, self._problem.steps - self._problem.tail) :]
        return {**last, "train_loss": float(np.mean(tail))}

    # Files

    def finish(self) -> None:
        """What is left on the disk of a run that came to its end."""
        rows = self._trace()
        if rows:
            write_arrays(self._folder / "trace.npz", rows)
        write_arrays(self._folder / "params.npz", self._trainer.params())
        if self._every is None:
            self._checkpoints.clear()

    def _trace(self) -> Arrays:
        """Recorded rows: those of the checkpoint, and those since."""
        trace = self._trainer.trace
        if trace is None:
            return {}
        new = trace.steps > self._resumed_at
        rows: Arrays = {"steps": trace.steps[new], **{key: getattr(trace, key)[new] for key in KEYS}}
        before = self._before
        joined = {k: np.concatenate([before[k], x]) if k in before else x for k, x in rows.items()}
        return {"names": np.array(trace.names), **joined}

    def _checkpoint(self) -> None:
        # A diverged run that is killed here diverges again from an older checkpoint.
        if self._every == 0 or self.diverged_at is not None:
            return
        if self._every is None:
            due = time.monotonic() - self._saved_at >= SECONDS_BETWEEN_CHECKPOINTS and self.step < self._problem.steps
        else:
            last = self.step - 1 - (self.step - 1) % self._chunk
            due = self.step // self._every > last // self._every or self.step == self._problem.steps
        if not due:
            return
        self._saved_at = time.monotonic()
        notes = {
            "run": self._spec.id,
            "offset": self._log.sync(),
            "evaluations": self._evaluations,
            "seconds": self.seconds(),
        }
        trace = {f"trace/{k}": x for k, x in self._trace().items()}
        self._checkpoints.save(
            self.step,
            {
                **{f"trainer/{k}": x for k, x in self._trainer.state().items()},
                **trace,
                "losses": self._losses[: self.step],
                "notes": np.frombuffer(json.dumps(notes).encode(), np.uint8),
            },
        )

    def resume(self) -> None:
        """Take over the newest checkpoint, or start afresh."""
        found = self._checkpoints.newest()
        if found is None:
            self._log.cut(0)
            return
        self.step, saved = found
        notes: dict[str, Any] = json.loads(bytes(saved["notes"]).decode())
        if notes["run"] != self._spec.id:
            raise ValueError(
                f"{self._checkpoints.folder} holds checkpoints of run {notes['run']!r}, not of {self._spec.id!r}: "
                "use another folder, or remove that one"
            )
        self._log.cut(notes["offset"])
        self._losses[: self.step] = saved["losses"]
        self._evaluations = notes["evaluations"]
        self._earlier = notes["seconds"]
        self._before = {k.removeprefix("trace/"): x for k, x in saved.items() if k.startswith("trace/")}
        self._trainer.restore({k.removeprefix("trainer/"): x for k, x in saved.items() if k.startswith("trainer/")})
        self._resumed_at = self.step
