"""What a study is doing, on a terminal (bars that move) or in a file (one line per finished run)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from kourkoutas.lab.running.executor import Observer
from kourkoutas.lab.showing.drawing import shorten
from kourkoutas.lab.showing.fitting import NAME, Fitting
from kourkoutas.lab.showing.status import Status, words
from kourkoutas.lab.showing.status import name_of as status_name
from kourkoutas.lab.specs.search_space import SearchSpace
from kourkoutas.lab.specs.spec import RunResult, RunSpec

if TYPE_CHECKING:
    from kourkoutas.lab.judging.targets import Target


@contextlib.contextmanager
def showing(console: Console, tuning: SearchSpace | None = None) -> Iterator[Observer]:
    """An observer that writes to `console`; of tuning runs it shows the values."""
    if not console.is_terminal:
        yield Lines(console, tuning)
        return
    bars = Bars(console, tuning)
    with bars.bars:
        yield bars


def name_of(spec: RunSpec, tuning: SearchSpace | None) -> str:
    """A run in a few words: "kbeta lr=0.001 seed 100"."""
    values = {} if tuning is None else tuning.values(spec)
    return " ".join([spec.optimizer, *(f"{name}={value:g}" for name, value in values.items()), f"seed {spec.seed}"])


def outcome(result: RunResult) -> str:
    """A result in a few words."""
    if result.status == "failed":
        return f"failed: {last_line(result.error)}"
    if result.status == "diverged":
        at = result.metrics.get("diverged_at")
        return "diverged" + ("" if at is None else f" at step {at:.0f}")
    return "ok" if result.endpoint is None else f"{result.endpoint:.6g}"


def render_status(status: Status) -> RenderableType:
    """How far a study is, for a console: no number of it is broken across lines at 80 columns."""
    ends = ("finished", "diverged", "failed", "running", "waiting")
    rows = Fitting("", ["optimizer", *ends])
    for arm in status.arms:
        rows.add_row(shorten(arm.label, NAME), *(str(getattr(arm, end)) for end in ends))
    lines = []
    for run in status.going:
        step = "" if run.step is None else f": step {run.step}" + ("" if run.steps is None else f" of {run.steps}")
        lines.append(f"{status_name(run)}{step}" + ("" if run.loss is None else f", loss {run.loss:.4g}"))
    return Group(Text(words(status)), rows, *(Text(line) for line in lines))


def last_line(error: str | None) -> str:
    """The line of an error that says most: the last of a traceback, the first of anything else."""
    lines = [line for line in (error or "").splitlines() if line.strip()]
    if not lines:
        return "no reason recorded"
    return lines[-1].strip() if lines[0].startswith("Traceback") else lines[0].strip()


class Aiming:
    """Tells an observer what happens, and stops the study if its first good run has not the metric of --target."""

    def __init__(self, observer: Observer, aim: Target) -> None:
        self._observer = observer
        self._aim: Target | None = aim
        self.planned, self.started, self.progress = observer.planned, observer.started, observer.progress

    def finished(self, spec: RunSpec, result: RunResult) -> None:
        self._observer.finished(spec, result)
        if self._aim is not None and result.status == "ok":
            from kourkoutas.lab.judging.targets import check_logged

            aim, self._aim = self._aim, None
            check_logged(aim, [result])


class Lines:
    """One line per finished run."""

    def __init__(self, console: Console, tuning: SearchSpace | None = None) -> None:
        self._console, self._tuning = console, tuning
        self._done = self._total = 0

    def planned(self, total: int, kept: int, failed: int, workers: int, threads: int) -> None:
        self._done, self._total = kept, total
        self._print(plan_line(total, kept, failed, workers, threads))

    def started(self, spec: RunSpec) -> None:
        pass

    def progress(self, spec: RunSpec, step: int, steps: int | None, loss: float | None) -> None:
        pass

    def finished(self, spec: RunSpec, result: RunResult) -> None:
        self._done += 1
        what = f"{name_of(spec, self._tuning)}: {outcome(result)} ({result.seconds:.1f} s)"
        self._print(f"[{self._done}/{self._total}] {what}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Bars:
    """A bar for the study and one for each run under way."""

    def __init__(self, console: Console, tuning: SearchSpace | None = None) -> None:
        self._tuning = tuning
        self.bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}", markup=False),
            TimeElapsedColumn(),
            console=console,
        )
        self._study: TaskID | None = None
        self._runs: dict[str, TaskID] = {}

    def planned(self, total: int, kept: int, failed: int, workers: int, threads: int) -> None:
        self._say(plan_line(total, kept, failed, workers, threads))
        if self._study is not None:  # a round of the tuning has ended
            self.bars.remove_task(self._study)
        self._study = self.bars.add_task("runs", total=total, completed=kept, loss="")

    def started(self, spec: RunSpec) -> None:
        self._runs[spec.id] = self.bars.add_task(f"  {name_of(spec, self._tuning)}", total=None, loss="")

    def progress(self, spec: RunSpec, step: int, steps: int | None, loss: float | None) -> None:
        text = "" if loss is None else f"loss {loss:.4g}"
        self.bars.update(self._runs[spec.id], completed=step, total=steps, loss=text)

    def finished(self, spec: RunSpec, result: RunResult) -> None:
        self.bars.remove_task(self._runs.pop(spec.id))
        if result.status != "ok":
            self._say(f"{name_of(spec, self._tuning)}: {outcome(result)}")
        if self._study is not None:
            self.bars.advance(self._study)

    def _say(self, text: str) -> None:
        self.bars.console.print(text, markup=False, highlight=False, soft_wrap=True)


def plan_line(total: int, kept: int, failed: int, workers: int, threads: int) -> str:
    """The study in one line before it starts."""
    parts = [f"{total} run{'' if total == 1 else 's'}"]
    if kept:
        parts.append(f"{kept} already finished" + (f" ({failed} of them failed)" if failed else ""))
    if kept < total:
        makers = "1 worker" if workers == 1 else f"{workers} workers"
        parts.append(f"{total - kept} to make: {makers} with {threads} thread{'' if threads == 1 else 's'} each")
    return ", ".join(parts)
