"""Making a suite: all its studies in one folder, by one set of workers, with one bar. The same call again resumes.

OUT/suite.json        which studies belong to it, and who is the baseline
OUT/suite.html        the answer
OUT/<study>/          a results folder as any other, with its page
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kourkoutas.lab import api
from kourkoutas.lab.errors import argument
from kourkoutas.lab.planning.plan import Plan
from kourkoutas.lab.results import files
from kourkoutas.lab.results.files import StoreError
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.running.executor import Executor, Observer
from kourkoutas.lab.showing.drawing import shorten
from kourkoutas.lab.showing.progress import NAME, Harmless, Lines, guarding
from kourkoutas.lab.showing.status import outcome
from kourkoutas.lab.specs.spec import RunResult, RunSpec
from kourkoutas.lab.suites.asking import Suite

RECORD = "suite.json"


class SuiteRecord(BaseModel):
    """suite.json."""

    model_config = ConfigDict(extra="forbid")

    name: str
    about: str
    baseline: str
    studies: list[str]
    command: str
    created: str


def read_record(out: Path) -> SuiteRecord:
    """`out`/suite.json."""
    return files.read_json(out / RECORD, SuiteRecord, "run the suite again, which writes it")


def read_studies(out: Path, record: SuiteRecord) -> dict[str, Snapshot]:
    """{study: what its folder holds}, of those that have begun."""
    return {name: Snapshot.read(out / name) for name in record.studies if (out / name / "study.json").exists()}


def conduct(
    suite: Suite,
    out: Path,
    *,
    executor: Executor,
    retries: int = 0,
    retry_failed: bool = False,
    checkpoint_every: int | None = None,
    console: Console,
    command: str,
    pages: bool = True,
) -> SuiteRecord:
    """Make every run of every study that is not there yet; the executor's workers serve all of them.

    Raises:
      StoreError: `out` is something else, is in use, or one of its studies is of another configuration.
      KeyboardInterrupt: on Ctrl-C; finished runs are kept.
    """
    with holding(suite, out, command) as record, showing(console, suite) as observers:
        for name, plan in suite.plans.items():
            try:
                done = api.execute(
                    plan,
                    out / name,
                    command=f"{command} # {name}",
                    executor=executor,
                    retries=retries,
                    retry_failed=retry_failed,
                    checkpoint_every=checkpoint_every,
                    observer=observers[name],
                )
            except ValueError as error:
                error.args = (f"study {name}: {error}",)
                raise
            if pages:
                api.Result(done).report()
    return record


@contextlib.contextmanager
def holding(suite: Suite, out: Path, command: str) -> Iterator[SuiteRecord]:
    """The folder `out`, locked, with the record of this suite.

    Studies that the folder has and the suite no longer names stay part of it: leaving out a problem after its results
    are known would be choosing the answer.
    """
    if (out / "study.json").exists():
        raise StoreError(f"{argument('out')} {out} is the folder of a single study; name another one for the suite")
    others = [path.name for path in out.iterdir() if path.name != ".lock"] if out.is_dir() else []
    if others and not (out / RECORD).exists():
        raise StoreError(
            f"{argument('out')} {out} is no suite's folder and not empty (it holds {others[0]}); name a new one"
        )
    files.make_folder(out)
    with files.locked(out, f"process {os.getpid()} ({command})"):
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        studies = list(suite.plans)
        if (out / RECORD).exists():
            old = read_record(out)
            now = old.created
            studies += [name for name in old.studies if name not in suite.plans]
        record = SuiteRecord(
            name=suite.name,
            about=suite.about,
            baseline=suite.baseline,
            studies=studies,
            command=command,
            created=now,
        )
        files.write_json(out / RECORD, record)
        yield record


def expected_runs(plan: Plan) -> int:
    """The runs of a study, as far as they are known before it: the widening of a range comes on top."""
    arms = len(plan.arms)
    tuned = 0 if plan.tuning is None else arms * plan.tuning.trials * len(plan.tuning.seeds)
    return tuned + arms * len(plan.seeds)


@contextlib.contextmanager
def showing(console: Console, suite: Suite) -> Iterator[Mapping[str, Observer]]:
    """{study: an observer that shows how far the whole suite is}, on a terminal as one bar, else as lines.

    If it can no longer be shown, the suite goes on without it.
    """
    total = sum(expected_runs(plan) for plan in suite.plans.values())
    far: Far = (Bar if console.is_terminal else Far)(console, suite.name, total, len(suite.plans))
    with guarding(far) as guard:
        observers: dict[str, Observer] = {}
        for number, (name, plan) in enumerate(suite.plans.items(), start=1):
            observers[name] = Harmless(Watched(far, name, number, plan), guard)
        yield observers


class Far:
    """How far a suite is: one line per run."""

    def __init__(self, console: Console, name: str, total: int, studies: int) -> None:
        self.console, self.name, self.studies = console, name, studies
        self.total, self.done = total, 0

    def begin_showing(self) -> None:
        studies = "1 study" if self.studies == 1 else f"{self.studies} studies"
        self.say(f"{self.name} · {studies} · about {self.total} runs")

    def end_showing(self) -> None: ...

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def grow(self, runs: int) -> None:
        """More is to be done than was expected."""
        self.total += runs

    def skip(self, runs: int) -> None:
        """Runs that an earlier call has made."""
        self.done += runs

    def started(self, run: str, what: str) -> None: ...

    def progress(self, run: str, step: int, steps: int | None, loss: float | None) -> None: ...

    def finished(self, run: str, what: str, result: RunResult) -> None:
        self.done += 1
        self.say(f"[{self.done}/{self.total}] {what}: {outcome(result)} ({result.seconds:.1f} s)")

    def study(self, line: str) -> None:
        self.say(line)


class Bar(Far):
    """One bar for the suite, and one for each run under way."""

    def __init__(self, console: Console, name: str, total: int, studies: int) -> None:
        super().__init__(console, name, total, studies)
        self.bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}", markup=False),
            TimeElapsedColumn(),
            console=console,
        )
        self._bar = self.bars.add_task(name, total=total, loss="")
        self._runs: dict[str, TaskID] = {}

    def begin_showing(self) -> None:
        self.bars.start()

    def end_showing(self) -> None:
        self.bars.stop()

    def grow(self, runs: int) -> None:
        super().grow(runs)
        self.bars.update(self._bar, total=self.total)

    def skip(self, runs: int) -> None:
        super().skip(runs)
        self.bars.update(self._bar, completed=self.done)

    def started(self, run: str, what: str) -> None:
        self._runs[run] = self.bars.add_task(f"  {shorten(what, NAME)}", total=None, loss="")

    def progress(self, run: str, step: int, steps: int | None, loss: float | None) -> None:
        text = "" if loss is None else f"loss {loss:.4g}"
        self.bars.update(self._runs[run], completed=step, total=steps, loss=text)

    def finished(self, run: str, what: str, result: RunResult) -> None:
        self.done += 1
        self.bars.remove_task(self._runs.pop(run))
        self.bars.update(self._bar, completed=self.done)
        if result.status != "ok":
            self.say(f"{what}: {outcome(result)}")

    def study(self, line: str) -> None:
        self.bars.update(self._bar, description=shorten(f"{self.name}: {line}", NAME + 2))


class Watched(Observer):
    """Tells `far` what happens in one study."""

    def __init__(self, far: Far, name: str, number: int, plan: Plan) -> None:
        self.far, self.study, self.number = far, name, number
        self._left = expected_runs(plan)  # of what was expected
        self._lines = Lines(far.console, plan)
        self._begun = False

    def planned(self, total: int, kept: int, failed: int, workers: int) -> None:
        if total > self._left:
            self.far.grow(total - self._left)
        self._left = max(0, self._left - total)
        self.far.skip(kept)
        if not self._begun:
            self._begun = True
            self.far.study(f"{self.study} ({self.number} of {self.far.studies})")

    def started(self, spec: RunSpec) -> None:
        self.far.started(spec.id, self._what(spec))

    def progress(self, spec: RunSpec, step: int, steps: int | None, loss: float | None) -> None:
        self.far.progress(spec.id, step, steps, loss)

    def finished(self, spec: RunSpec, result: RunResult) -> None:
        self.far.finished(spec.id, self._what(spec), result)

    def _what(self, spec: RunSpec) -> str:
        return f"{self.study} {self._lines.name(spec)}"
