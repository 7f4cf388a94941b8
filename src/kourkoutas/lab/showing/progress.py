"""What a study is doing, on a terminal (bars that move) or in a file (one line per finished run)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kourkoutas.lab.judging.values import seed_ranges
from kourkoutas.lab.optimizers.looks import name_of
from kourkoutas.lab.planning.plan import Plan
from kourkoutas.lab.running.executor import Observer
from kourkoutas.lab.showing.drawing import shorten
from kourkoutas.lab.showing.status import outcome
from kourkoutas.lab.specs.spec import RunResult, RunSpec

ENGINES = {"jax": "JAX", "torch": "PyTorch", "mlx": "MLX"}
NAME = 30  # characters of a bar's name at 80 columns


@contextlib.contextmanager
def showing(console: Console, plan: Plan) -> Iterator[Observer]:
    """An observer that writes to `console`: what is studied, each phase by its name, and every run."""
    view = (Bars if console.is_terminal else Lines)(console, plan)
    with guarding(view) as guard:
        yield Harmless(view, guard)
    guard.tell(view.done)


class Screen(Protocol):
    """What is begun and ended around a view, and where a line can be written."""

    def begin_showing(self) -> None: ...

    def end_showing(self) -> None: ...

    def say(self, text: str) -> None: ...


@contextlib.contextmanager
def guarding(screen: Screen) -> Iterator[Guard]:
    """A guard of what is shown on `screen`, which is begun and ended here."""
    guard = Guard(screen)
    guard.tell(screen.begin_showing)
    try:
        yield guard
    finally:
        with contextlib.suppress(Exception, SystemExit):
            screen.end_showing()


class Guard:
    """Lets things be shown, until one raises an error: then nothing more is shown, and the study goes on."""

    def __init__(self, screen: Screen) -> None:
        self._screen, self._fine = screen, True

    def tell(self, show: Callable[..., None], *what: Any) -> None:
        if not self._fine:
            return
        try:
            show(*what)
        except (Exception, SystemExit) as error:  # which rich raises where nobody reads any more
            self._fine = False
            text = f"Progress can no longer be shown ({type(error).__name__}: {error}); the study goes on."
            with contextlib.suppress(Exception, SystemExit):
                self._screen.end_showing()
                self._screen.say(text)


class Harmless(Observer):
    """Passes on to a view what happens, by way of a guard."""

    def __init__(self, view: Observer, guard: Guard) -> None:
        self._view, self._tell = view, guard.tell

    def planned(self, total: int, kept: int, failed: int, workers: int) -> None:
        self._tell(self._view.planned, total, kept, failed, workers)

    def started(self, spec: RunSpec) -> None:
        self._tell(self._view.started, spec)

    def progress(self, spec: RunSpec, step: int, steps: int | None, loss: float | None) -> None:
        self._tell(self._view.progress, spec, step, steps, loss)

    def finished(self, spec: RunSpec, result: RunResult) -> None:
        self._tell(self._view.finished, spec, result)


@dataclass(frozen=True)
class Planned:
    """The runs of a phase, how many of them are there already, how many of those failed, and who makes the rest."""

    total: int
    kept: int
    failed: int
    workers: int

    def line(self, phase: str = "") -> str:
        """The phase in one line before it starts.

        >>> Planned(30, 0, 0, 2).line(), Planned(12, 4, 1, 1).line("widening")
        ('30 runs, 2 workers', 'widening: 12 runs, 4 already finished (1 of them failed), 1 worker')
        """
        parts = [f"{self.total} run{'' if self.total == 1 else 's'}"]
        if self.kept:
            parts.append(f"{self.kept} already finished" + (f" ({self.failed} of them failed)" if self.failed else ""))
        if self.kept < self.total:
            parts.append("1 worker" if self.workers == 1 else f"{self.workers} workers")
        return (f"{phase}: " if phase else "") + ", ".join(parts)


class Lines(Observer):
    """Tells what is studied, names each phase with runs to make when its first run starts, and then every run."""

    def __init__(self, console: Console, plan: Plan) -> None:
        self.console, self.tuning = console, plan.tuning
        self._title = title_of(plan)
        self._rounds = 0
        self._planned: Planned | None = None  # of a phase that has not begun
        self._done = self._total = 0

    def begin_showing(self) -> None: ...

    def end_showing(self) -> None: ...

    def planned(self, total: int, kept: int, failed: int, workers: int) -> None:
        self._rounds += 1
        self._planned = Planned(total, kept, failed, workers)

    def started(self, spec: RunSpec) -> None:
        if self._planned is not None:
            planned, self._planned = self._planned, None
            self._total, self._done = planned.total, planned.kept
            phase = self._phase(spec)
            self.begin(phase, planned.line("" if phase == "runs" else phase))

    def _phase(self, spec: RunSpec) -> str:
        if self.tuning is None:
            return "runs"
        if spec.seed not in self.tuning.seeds:
            return "confirming"
        return "widening" if self._rounds > 1 else "tuning"  # of the range, after the first round

    def begin(self, phase: str, line: str) -> None:
        """Announce a phase; the first one after what is studied."""
        self.say(" · ".join(part for part in (self._title, line) if part))
        self._title = ""

    def finished(self, spec: RunSpec, result: RunResult) -> None:
        self._done += 1
        self.say(f"[{self._done}/{self._total}] {self.name(spec)}: {outcome(result)} ({result.seconds:.1f} s)")

    def done(self) -> None:
        """Where nothing was to be made, say so."""
        if self._title and self._planned is not None:
            self.say(f"{self._title} · {self._planned.line()}")

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def name(self, spec: RunSpec) -> str:
        """A run in a few words: "K-β lr=0.001 seed 100"."""
        values = {} if self.tuning is None else self.tuning.values(spec)
        options = (f"{name}={value:.3g}" for name, value in values.items())
        return " ".join([name_of(spec.optimizer), *options, f"seed {spec.seed}"])


class Bars(Lines):
    """A bar for each phase and one for each run under way."""

    def __init__(self, console: Console, plan: Plan) -> None:
        super().__init__(console, plan)
        self.bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}", markup=False),
            TimeElapsedColumn(),
            console=console,
        )
        self._bar: TaskID | None = None
        self._runs: dict[str, TaskID] = {}

    def begin_showing(self) -> None:
        self.bars.start()

    def end_showing(self) -> None:
        self.bars.stop()

    def begin(self, phase: str, line: str) -> None:
        if self._title:  # later phases are told by their bars
            super().begin(phase, line)
        self._bar = self.bars.add_task(phase, total=self._total, completed=self._done, loss="")

    def started(self, spec: RunSpec) -> None:
        super().started(spec)
        name = f"  {shorten(self.name(spec), NAME)}"
        self._runs[spec.id] = self.bars.add_task(name, total=None, loss="")

    def progress(self, spec: RunSpec, step: int, steps: int | None, loss: float | None) -> None:
        text = "" if loss is None else f"loss {loss:.4g}"
        self.bars.update(self._runs[spec.id], completed=step, total=steps, loss=text)

    def finished(self, spec: RunSpec, result: RunResult) -> None:
        self.bars.remove_task(self._runs.pop(spec.id))
        if result.status != "ok":
            self.say(f"{self.name(spec)}: {outcome(result)}")
        if self._bar is not None:
            self.bars.advance(self._bar)


def title_of(plan: Plan) -> str:
    """What is studied: "rare_trigger · paper preset · JAX · seeds 0-9"."""
    made = [] if plan.code is not None else [f"{plan.preset} preset", ENGINES.get(plan.engine, plan.engine)]
    return " · ".join([plan.testbed, *made, f"seed{'s' if len(plan.seeds) > 1 else ''} {seed_ranges(plan.seeds)}"])
