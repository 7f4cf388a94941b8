"""What a study is doing, on a terminal (bars that move) or in a file (one line per finished run)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from kourkoutas.lab.judging.values import seed_ranges
from kourkoutas.lab.planning.plan import Plan
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
def showing(console: Console, plan: Plan) -> Iterator[Observer]:
    """An observer that writes to `console`: what is studied, each phase by its name, and every run."""
    if not console.is_terminal:
        lines = Lines(console, plan)
        yield lines
        lines.done()
        return
    bars = Bars(console, plan)
    with bars.bars:
        yield bars
    bars.done()


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


class Phases:
    """Tells what is studied, once, and names each phase with runs to make when its first run starts."""

    def __init__(self, console: Console, plan: Plan) -> None:
        self.console, self.tuning = console, plan.tuning
        self._title: str | None = title_of(plan)
        self._rounds = 0
        self._waiting: tuple[int, int, int, int] | None = None
        self._told = False

    def planned(self, total: int, kept: int, failed: int, workers: int, threads: int) -> None:
        self._rounds += 1
        self._waiting = (total, kept, failed, workers)

    def begins(self, spec: RunSpec) -> tuple[str, int, int] | None:
        """(phase, runs, runs that were there) if this is the first run of a phase, which is told."""
        if self._waiting is None:
            return None
        (total, kept, failed, workers), self._waiting = self._waiting, None
        phase = "runs" if self.tuning is None else "confirming"
        if self.tuning is not None and spec.seed in self.tuning.seeds:
            # A round after the first widens the range, where one option is tuned; else it is Optuna's next trial.
            phase = "widening" if self._rounds > 1 and len(self.tuning.axes) == 1 else "tuning"
        self._tell(phase_line("" if phase == "runs" else phase, total, kept, failed, workers))
        return phase, total, kept

    def done(self) -> None:
        """Nothing was to be made: say so."""
        if not self._told and self._waiting is not None:
            self._tell(phase_line("", *self._waiting))

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _tell(self, line: str) -> None:
        self.say(" · ".join(part for part in (self._title, line) if part))
        self._title, self._told = None, True

    def name(self, spec: RunSpec) -> str:
        return name_of(spec, self.tuning)


class Lines(Phases):
    """One line per finished run."""

    _done = _total = 0

    def started(self, spec: RunSpec) -> None:
        if (phase := self.begins(spec)) is not None:
            _, self._total, self._done = phase

    def progress(self, spec: RunSpec, step: int, steps: int | None, loss: float | None) -> None:
        pass

    def finished(self, spec: RunSpec, result: RunResult) -> None:
        self._done += 1
        self.say(f"[{self._done}/{self._total}] {self.name(spec)}: {outcome(result)} ({result.seconds:.1f} s)")


class Bars(Phases):
    """A bar for each phase and one for each run under way."""

    def __init__(self, console: Console, plan: Plan) -> None:
        super().__init__(console, plan)
        self.bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}", markup=False),
            TimeElapsedColumn(),
            console=console,
        )
        self._phase: TaskID | None = None
        self._runs: dict[str, TaskID] = {}

    def started(self, spec: RunSpec) -> None:
        if (phase := self.begins(spec)) is not None:
            name, total, kept = phase
            self._phase = self.bars.add_task(name, total=total, completed=kept, loss="")
        self._runs[spec.id] = self.bars.add_task(f"  {self.name(spec)}", total=None, loss="")

    def progress(self, spec: RunSpec, step: int, steps: int | None, loss: float | None) -> None:
        text = "" if loss is None else f"loss {loss:.4g}"
        self.bars.update(self._runs[spec.id], completed=step, total=steps, loss=text)

    def finished(self, spec: RunSpec, result: RunResult) -> None:
        self.bars.remove_task(self._runs.pop(spec.id))
        if result.status != "ok":
            self.say(f"{self.name(spec)}: {outcome(result)}")
        if self._phase is not None:
            self.bars.advance(self._phase)


def title_of(plan: Plan) -> str:
    """What is studied: "rare_trigger · paper preset · JAX · seeds 0-9"."""
    engine = {"jax": "JAX", "torch": "PyTorch", "mlx": "MLX"}.get(plan.engine, plan.engine)
    made = [] if plan.code is not None else [f"{plan.preset} preset", engine]
    return " · ".join([plan.testbed, *made, f"seed{'s' if len(plan.seeds) > 1 else ''} {seed_ranges(plan.seeds)}"])


def phase_line(phase: str, total: int, kept: int, failed: int, workers: int) -> str:
    """A phase in one line before it starts.

    >>> phase_line("", 30, 0, 0, 2), phase_line("widening", 12, 4, 1, 1)
    ('30 runs, 2 workers', 'widening: 12 runs, 4 already finished (1 of them failed), 1 worker')
    """
    parts = [f"{total} run{'' if total == 1 else 's'}"]
    if kept:
        parts.append(f"{kept} already finished" + (f" ({failed} of them failed)" if failed else ""))
    if kept < total:
        parts.append("1 worker" if workers == 1 else f"{workers} workers")
    return (f"{phase}: " if phase else "") + ", ".join(parts)
