"""Many runs: plan them, make them in worker processes, resume after anything.

    plan      arms × seeds, each a `RunSpec`
    execute   workers take one seed at a time and make all its arms in a row, so that the seed's data are made once;
              a worker without a seed left helps with another's
    resume    the same command again: finished runs are kept, unfinished ones continue, failed ones wait for
              `retry_failed`

NOTE: a worker that dies (kill -9, out of memory, a crash in native code) costs one run, which is recorded as failed
with the reason; a new worker takes its place.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import json
import math
import os
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, cast

import kbeta
from kbeta.lab import engines, store, testbeds, worker
from kbeta.lab import optimizers as recipes
from kbeta.lab.spec import RunResult, RunSpec, guess, unknown
from kbeta.lab.testbeds import Endpoint
from kbeta.lab.trial import OWN_SETTINGS

if TYPE_CHECKING:
    from kbeta.lab.stats import Comparison

PRIMARY = "endpoint"
OWN = "own"  # engine and preset of a study of a user's function, which brings both


@dataclass(frozen=True)
class Plan:
    """What a study is to do; every field but the seeds and arms is its configuration."""

    testbed: str
    preset: str
    engine: str
    settings: Mapping[str, Any]
    arms: Sequence[store.Arm]
    seeds: Sequence[int]
    code: store.Code | None = None

    def spec(self, arm: store.Arm, seed: int) -> RunSpec:
        settings = {**self.settings, **arm.settings}
        if self.code is not None:
            # Part of the run's id: a result of other code, or another endpoint, is another run.
            settings |= {"code": self.code.sha256[:16], "endpoint": self.code.endpoint}
        return RunSpec(
            testbed=self.testbed,
            preset=self.preset,
            engine=self.engine,
            optimizer=arm.label,
            seed=seed,
            settings=settings,
            options=arm.options,
        )

    def specs(self) -> list[RunSpec]:
        """All runs, seed by seed."""
        return [self.spec(arm, seed) for seed in self.seeds for arm in self.arms]


class Observer(Protocol):
    """Told what happens while a study is executed."""

    def planned(self, total: int, kept: int, failed: int, workers: int, threads: int) -> None: ...

    def started(self, spec: RunSpec) -> None: ...

    def progress(self, spec: RunSpec, step: int, steps: int | None, loss: float | None) -> None: ...

    def finished(self, spec: RunSpec, result: RunResult) -> None: ...


# ---------------------------------------------------------------------------------------------------------------- plan


def parse_seeds(text: str) -> list[int]:
    """Seeds from numbers and ranges.

    >>> parse_seeds("0-3,7")
    [0, 1, 2, 3, 7]
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            low, high = int(first), int(last if dash else first)
        except ValueError:
            raise ValueError(f"--seeds must be numbers and ranges like 0-9 or 0,3,7; got {text!r}") from None
        if high < low:
            raise ValueError(f"--seeds: the range {part.strip()!r} runs backwards; write {high}-{low}")
        seeds += range(low, high + 1)
    return list(dict.fromkeys(seeds))


def parse_assignments(option: str, texts: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE` strings as a mapping; the last one of a name counts.

    >>> parse_assignments("--set", ["steps=100", "kbeta.alpha=0.9"])
    {'steps': '100', 'kbeta.alpha': '0.9'}
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (equals and name.strip() and value.strip()):
            raise ValueError(f"{option} must look like NAME=VALUE, for example {option} kbeta.alpha=0.9; got {text!r}")
        found[name.strip()] = value.strip()
    return found


def arms_of(
    optimizers: Sequence[str], options: Mapping[str, str], grids: Mapping[str, str]
) -> tuple[dict[str, Any], list[store.Arm]]:
    """(settings of the testbed, arms) from `--optimizers`, `--set` and `--grid`.

    `NAME=VALUE` sets the testbed for every arm, `OPTIMIZER.NAME=VALUE` one optimizer. A grid splits the
    optimizer's arm, or every arm, into one per value:

    >>> settings, arms = arms_of(["kbeta", "adam95"], {"steps": "50"}, {"kbeta.alpha": "0.85,0.9"})
    >>> settings, [arm.label for arm in arms]
    ({'steps': 50}, ['kbeta[alpha=0.85]', 'kbeta[alpha=0.9]', 'adam95'])
    """
    names = list(dict.fromkeys(name.strip() for name in optimizers if name.strip()))
    if not names:
        raise ValueError("--optimizers must name at least one optimizer, for example kbeta,adam95")
    settings = {name: guess(value) for name, value in options.items() if "." not in name}
    own: dict[str, dict[str, Any]] = {name: {} for name in names}
    for name, value in options.items():
        if "." in name:
            optimizer, option = _split(name, names)
            own[optimizer][option] = guess(value)
    for name in grids:
        if "." in name:
            _split(name, names)

    arms = []
    for optimizer in names:
        axes = {
            key: list(dict.fromkeys(guess(value.strip()) for value in values.split(",") if value.strip()))
            for key, values in grids.items()
            if "." not in key or _split(key, names)[0] == optimizer
        }
        for point in itertools.product(*axes.values()):
            values = dict(zip(axes, point, strict=True))
            label = ",".join(f"{key.rpartition('.')[2]}={value}" for key, value in values.items())
            arms.append(
                store.Arm(
                    label=f"{optimizer}[{label}]" if label else optimizer,
                    optimizer=optimizer,
                    options=own[optimizer] | {_split(k, names)[1]: v for k, v in values.items() if "." in k},
                    settings={k: v for k, v in values.items() if "." not in k},
                )
            )
    return settings, arms


def _split(name: str, optimizers: Sequence[str]) -> tuple[str, str]:
    """("kbeta", "alpha") of "kbeta.alpha"; the optimizer's own name may hold dots, as "torch.SGD" does."""
    found = [optimizer for optimizer in optimizers if name.startswith(f"{optimizer}.")]
    if not found:
        raise unknown(f"optimizer in `{name}`", name.rpartition(".")[0], optimizers)
    optimizer = max(found, key=len)
    return optimizer, name.removeprefix(f"{optimizer}.")


def plan_testbed(
    name: str,
    *,
    preset: str,
    engine: str,
    optimizers: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    options: Mapping[str, str] | None = None,
    grids: Mapping[str, str] | None = None,
) -> Plan:
    """A study of a testbed, with every name and value checked before anything is run or written."""
    testbed = testbeds.get(name)
    if engine not in engines.NAMES:
        raise unknown("engine", engine, engines.NAMES)
    check_installed(engine)
    settings, arms = arms_of(optimizers or testbed.arms, options or {}, grids or {})
    checked = []
    for arm in arms:
        resolved = testbeds.settings_of(testbed, preset, {**settings, **arm.settings})
        recipe = recipes.recipe(arm.label, testbed.kbeta, arm.options)
        recipes.check(recipe, engine)
        own = _canonical({name: getattr(resolved, name) for name in arm.settings})
        checked.append(_checked(arm, recipe).model_copy(update={"settings": own}))
    shared = testbeds.settings_of(testbed, preset, settings)
    return Plan(
        testbed.name, preset, engine, _canonical({name: getattr(shared, name) for name in settings}), checked, seeds
    )


def plan_own(
    target: str,
    *,
    optimizers: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    options: Mapping[str, str] | None = None,
    grids: Mapping[str, str] | None = None,
    endpoint: str | None = None,
    log: bool = False,
    higher_is_better: bool = False,
) -> Plan:
    """A study of the user's function FILE.py:FUNC; the framework shows when it is run."""
    code = code_of(target, endpoint, log=log, higher_is_better=higher_is_better)
    settings, arms = arms_of(optimizers or ("kbeta", "adam95", "adam999"), options or {}, grids or {})
    for name in OWN_SETTINGS:
        if name in settings or any(name in arm.settings for arm in arms):
            raise ValueError(f"--set {name}=...: {name!r} is taken by kbeta itself; use another name in your code")
    checked = [_checked(arm, recipes.recipe(arm.label, {}, arm.options)) for arm in arms]
    return Plan(f"{Path(code.file).stem}.{code.function}", OWN, OWN, settings, checked, seeds, code)


def _checked(arm: store.Arm, recipe: recipes.Recipe) -> store.Arm:
    """The arm with its options as the recipe understood them, so that 1e2 and 100 are the same run."""
    known = {**recipe.options, "lr_scale": recipe.lr_scale}
    return arm.model_copy(update={"options": _canonical({k: known.get(k, v) for k, v in arm.options.items()})})


def _canonical(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as they come back from JSON: lists for tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def check_installed(engine: str) -> None:
    """Raise unless the framework of `engine` is installed; imports nothing."""
    for package in {"jax": ("jax", "optax"), "mlx": ("mlx",)}.get(engine, (engine,)):
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"--engine {engine} needs {package}, which is not installed: pip install 'kourkoutas-beta[{engine}]'"
            )


def code_of(
    target: str, endpoint: str | None = None, *, log: bool = False, higher_is_better: bool = False
) -> store.Code:
    """The user's function named by FILE.py:FUNC; only its text is read here."""
    file, _, function = target.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"{target!r}: there is no file {file}; name a Python file and a function in it, FILE.py:FUNC")
    if not function.isidentifier():
        raise ValueError(f"{target!r}: {function!r} is not a function name; write {file}:train, for example")
    return store.Code(
        file=str(path.resolve()),
        function=function,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        endpoint=endpoint,
        log=log,
        higher_is_better=higher_is_better,
    )


# ------------------------------------------------------------------------------------------------------------- execute


def execute(
    plan: Plan,
    out: str | Path,
    *,
    command: str,
    workers: int | None = None,
    retry_failed: bool = False,
    checkpoint_every: int | None = None,
    sink: str | None = None,
    observer: Observer | None = None,
) -> store.Study:
    """Make every run of `plan` that the folder `out` does not hold yet, and return the folder.

    Raises:
      StoreError: `out` holds another configuration, is in use, or is broken; nothing was changed.
      KeyboardInterrupt: on Ctrl-C, after the workers have ended; finished runs are kept.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"--workers must be at least 1; got {workers}")
    specs = plan.specs()
    with holding(plan, out, command) as study:
        pending, kept, failed = [], 0, 0
        for spec in specs:
            result = study.result(spec)
            if result is not None and result.status == "failed" and retry_failed:
                study.reopen(spec)
                result = None
            if result is None:
                pending.append(spec)
            else:
                kept += 1
                failed += result.status == "failed"
        study.plan(specs)
        cores = store.cores()
        count = min(workers or min(cores, len(set(plan.seeds))), len(pending))
        threads = max(1, cores // max(count, 1))
        if observer is not None:
            observer.planned(len(specs), kept, failed, count, threads)
        if pending:
            tasks = {
                spec.id: worker.Task(
                    spec=spec,
                    folder=study.folder(spec).resolve(),
                    code=plan.code,
                    checkpoint_every=checkpoint_every,
                    sink=sink,
                )
                for spec in pending
            }
            _Pool(study, _Queue(pending), tasks, observer, threads, shared=count > 1).run(count)
        return store.Study(study.path, study.record)


def single(
    plan: Plan,
    out: str | Path | None,
    *,
    command: str,
    checkpoint_every: int | None = None,
    sink: str | None = None,
    on_progress: worker.Report = lambda step, steps, loss: None,
) -> RunResult:
    """Make the one run of `plan` in this process; without `out` nothing is kept."""
    (spec,) = plan.specs()
    task = worker.Task(spec=spec, folder=Path(), code=plan.code, checkpoint_every=checkpoint_every, sink=sink)
    if out is None:
        with tempfile.TemporaryDirectory(prefix="kbeta-") as folder:
            return worker.make(task.model_copy(update={"folder": Path(folder)}), on_progress)
    with holding(plan, out, command) as study:
        study.plan([spec])
        kept = study.result(spec)
        if kept is not None and kept.status != "failed":
            return kept
        return worker.make(task.model_copy(update={"folder": study.folder(spec).resolve()}), on_progress)


def holding(plan: Plan, out: str | Path, command: str) -> contextlib.AbstractContextManager[store.Writer]:
    """The folder `out`, locked for the runs of `plan`."""
    return store.writing(
        out,
        testbed=plan.testbed,
        preset=plan.preset,
        engine=plan.engine,
        settings=plan.settings,
        arms=plan.arms,
        seeds=plan.seeds,
        command=command,
        code=plan.code,
    )


class _Queue:
    """Which run a worker makes next: its seed's, else one of a seed nobody has, else one of the longest queue."""

    def __init__(self, specs: Sequence[RunSpec]) -> None:
        self._seeds: dict[int, deque[RunSpec]] = {}
        for spec in specs:
            self._seeds.setdefault(spec.seed, deque()).append(spec)
        self._owner: dict[int, int] = {}

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._seeds.values())

    def take(self, taker: int) -> RunSpec | None:
        waiting = {seed: queue for seed, queue in self._seeds.items() if queue}
        if not waiting:
            return None
        mine = [seed for seed in waiting if self._owner.get(seed) == taker]
        free = [seed for seed in waiting if seed not in self._owner]
        if mine or free:
            seed = (mine or free)[0]
            self._owner[seed] = taker
            return waiting[seed].popleft()
        return max(waiting.values(), key=len).pop()


@dataclass
class _Worker:
    number: int
    process: subprocess.Popen[bytes]
    tasks: BinaryIO
    events: int
    spec: RunSpec | None = None
    since: float = 0.0
    unread: bytes = b""


@dataclass
class _Pool:
    """The worker processes of one execution."""

    study: store.Writer
    queue: _Queue
    tasks: Mapping[str, worker.Task]
    observer: Observer | None
    threads: int
    shared: bool
    alive: list[_Worker] = field(default_factory=list)

    def run(self, count: int) -> None:
        with selectors.DefaultSelector() as selector, _terminated_as_interrupt():
            try:
                for number in range(count):
                    self._start(number, selector)
                while self.alive:
                    for key, _ in selector.select(timeout=0.5):
                        self._read(key.data)
                    for member in list(self.alive):
                        if member.process.poll() is not None:
                            self._gone(member, selector)
            finally:
                self._stop(selector)

    def _start(self, number: int, selector: selectors.BaseSelector) -> None:
        """Start a worker and give it its first run; none is started when nothing is waiting."""
        spec = self.queue.take(number)
        if spec is None:
            return
        receive, send = os.pipe()
        try:
            process = subprocess.Popen(
                # -P keeps files of the working directory from standing in for installed packages.
                [sys.executable, "-P", "-m", "kbeta.lab.worker", str(send), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(send,),
                process_group=0,  # Ctrl-C goes to the study alone, which then ends its workers
                env=worker_environment(self.threads, shared=self.shared),
            )
        except BaseException:
            os.close(receive)
            raise
        finally:
            os.close(send)
        member = _Worker(number, process, cast(BinaryIO, process.stdin), receive)
        os.set_blocking(receive, False)
        selector.register(receive, selectors.EVENT_READ, member)
        self.alive.append(member)
        self._give(member, spec)

    def _give(self, member: _Worker, spec: RunSpec) -> None:
        member.spec, member.since = spec, time.perf_counter()
        if self.observer is not None:
            self.observer.started(spec)
        with contextlib.suppress(BrokenPipeError):  # a dead worker is dealt with when its end is seen
            member.tasks.write(self.tasks[spec.id].model_dump_json().encode() + b"\n")
            member.tasks.flush()

    def _read(self, member: _Worker) -> None:
        try:
            data = os.read(member.events, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            with contextlib.suppress(subprocess.TimeoutExpired):
                member.process.wait(timeout=5)
            return
        *lines, member.unread = (member.unread + data).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if member.spec is None:
                continue
            if event["event"] == "progress":
                if self.observer is not None:
                    self.observer.progress(member.spec, event["step"], event["steps"], event["loss"])
            else:
                self._finished(member.spec, member.since, "the run ended but its result.json is gone")
                member.spec = None
                if (spec := self.queue.take(member.number)) is not None:
                    self._give(member, spec)
                else:
                    member.tasks.close()

    def _finished(self, spec: RunSpec, since: float, otherwise: str) -> None:
        """Tell the result of a run; `otherwise` is its error when it left none."""
        result = self.study.result(spec)
        if result is None:
            result = worker.failed(otherwise, time.perf_counter() - since)
            self.study.finish(spec, result)
        if self.observer is not None:
            self.observer.finished(spec, result)

    def _gone(self, member: _Worker, selector: selectors.BaseSelector) -> None:
        """A worker has ended: by itself when it had nothing left, else in the middle of a run."""
        self._read(member)
        self._release(member, selector)
        self.alive.remove(member)
        if member.spec is None:
            return
        output = _tail(self.study.folder(member.spec) / "output.txt")
        self._finished(member.spec, member.since, _reason(member.process.returncode) + output)
        self._start(member.number, selector)

    def _stop(self, selector: selectors.BaseSelector) -> None:
        """End what is left: only after an interrupt or an error is there any."""
        for member in self.alive:
            member.process.terminate()
        for member in self.alive:
            try:
                member.process.wait(timeout=5)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                member.process.kill()
                member.process.wait()
            self._release(member, selector)
        self.alive.clear()

    @staticmethod
    def _release(member: _Worker, selector: selectors.BaseSelector) -> None:
        selector.unregister(member.events)
        os.close(member.events)
        with contextlib.suppress(BrokenPipeError):  # a task that a dead worker never read
            member.tasks.close()


# ------------------------------------------------------------------------------------------------------------- results


def endpoints(study: store.Study) -> list[Endpoint]:
    """What the runs are judged by, the primary one first; a user's function has one."""
    if study.record.code is not None:
        code = study.record.code
        title = code.endpoint or f"value of {code.function}"
        return [Endpoint(PRIMARY, title, log=code.log, maximize=code.higher_is_better)]
    return list(testbeds.get(study.record.testbed).endpoints)


def values(runs: Sequence[store.StoredRun], endpoint: Endpoint) -> dict[str, dict[int | str, float]]:
    """{arm: {seed: value}} of the runs that gave one: NaN for a diverged run, none for a failed or unfinished one."""
    found: dict[str, dict[int | str, float]] = {}
    for run in runs:
        if run.result is None or run.result.status == "failed":
            continue
        value: float | None = math.nan
        if run.result.status == "ok":
            value = run.result.endpoint if endpoint.metric == PRIMARY else run.result.metrics.get(endpoint.metric)
        if value is not None:
            found.setdefault(run.spec.optimizer, {})[run.spec.seed] = value
    return found


def contrasts(record: store.StudyRecord, labels: Collection[str]) -> list[tuple[str, str]]:
    """(treatment, baseline) pairs: the arms of the first optimizer against those of the others, or, with one optimizer
    only, its first arm against the rest. Controls ask why, not whether, and are left out unless there is nothing else.
    """
    arms = [arm for arm in record.arms if arm.label in labels]
    if not arms:
        return []
    treatments = [arm for arm in arms if arm.optimizer == arms[0].optimizer]
    others = [arm for arm in arms if arm.optimizer != arms[0].optimizer]
    baselines = [arm for arm in others if arm.optimizer not in recipes.CONTROLS] or others
    if not baselines:
        treatments, baselines = treatments[:1], treatments[1:]
    return [(treatment.label, baseline.label) for treatment in treatments for baseline in baselines]


def compared(study: store.Study) -> dict[str, Comparison]:
    """{title of the endpoint: paired comparison}, of the endpoints that two arms have a value of."""
    from kbeta.lab import stats  # scipy and statsmodels take a second, which a run does not need

    runs = study.runs()
    found = {}
    for endpoint in endpoints(study):
        by_arm = values(runs, endpoint)
        pairs = [(a, b) for a, b in contrasts(study.record, by_arm) if not by_arm[a].keys().isdisjoint(by_arm[b])]
        if pairs:
            found[endpoint.title] = stats.compare_pairs(
                by_arm,
                pairs,
                log=endpoint.log and all(x > 0 for arm in by_arm.values() for x in arm.values() if math.isfinite(x)),
                higher_is_better=endpoint.maximize,
                threshold=endpoint.threshold,
            )
    return found


def summary(study: store.Study) -> list[dict[str, Any]]:
    """One row per arm: counts of runs by their end, and median and mean of the primary endpoint over the ok ones."""
    runs = study.runs()
    rows = []
    for arm in study.record.arms:
        own = [run for run in runs if run.spec.optimizer == arm.label]
        ends = [run.result.status if run.result else "unfinished" for run in own]
        numbers = [run.result.endpoint for run in own if run.result and run.result.endpoint is not None]
        rows.append(
            {
                "optimizer": arm.label,
                "runs": len(own),
                **{end: ends.count(end) for end in ("ok", "diverged", "failed", "unfinished")},
                "median": statistics.median(numbers) if numbers else None,
                "mean": statistics.fmean(numbers) if numbers else None,
            }
        )
    return rows


def as_json(study: store.Study, comparisons: Mapping[str, Comparison]) -> dict[str, Any]:
    """A study for machines: every run without its curve, the summary and the comparisons."""
    runs = [
        {
            "id": run.id,
            "optimizer": run.spec.optimizer,
            "seed": run.spec.seed,
            **(json.loads(run.result.model_dump_json(exclude={"curve"})) if run.result else {"status": "unfinished"}),
        }
        for run in study.runs()
    ]
    return {
        "out": str(study.path),
        **json.loads(study.record.model_dump_json()),
        "runs": runs,
        "summary": summary(study),
        "comparisons": {title: comparison.to_dict() for title, comparison in comparisons.items()},
    }


def worker_environment(threads: int, *, shared: bool) -> dict[str, str]:
    """The environment of a worker that may use `threads` cores; what the caller has set stays.

    NOTE: thread counts have to be there before a framework is imported. XLA's CPU client takes its pool from NPROC, and
    its matrix products use that pool only with multi_thread_eigen.
    """
    env = dict(os.environ)
    count = str(threads)
    for name in ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "VECLIB_MAXIMUM"):
        env.setdefault(f"{name}_{'THREADS' if name == 'VECLIB_MAXIMUM' else 'NUM_THREADS'}", count)
    env.setdefault("NPROC", count)
    env.setdefault("TORCHINDUCTOR_COMPILE_THREADS", count)
    if threads == 1 and "xla_cpu_multi_thread_eigen" not in env.get("XLA_FLAGS", ""):
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
    if shared:  # else the first worker takes the accelerator's whole memory
        env.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    root = Path(kbeta.__file__).parents[1]
    if root.name not in ("site-packages", "dist-packages"):  # a source tree, which a new interpreter may not know
        env["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [env.get("PYTHONPATH")])])
    return env


def _reason(code: int) -> str:
    if code >= 0:
        return f"the worker process ended by itself with exit code {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else "unknown signal"
    hint = " (often the system's answer to a lack of memory)" if -code == signal.SIGKILL else ""
    return f"the worker process was ended by signal {-code}, {name}{hint}"


def _tail(output: Path, lines: int = 20) -> str:
    """The end of what the run printed, for its error message."""
    if not output.exists():
        return ""
    text = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-lines:]
    return "\nIts last output:\n" + "\n".join(text) if text else ""


@contextlib.contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM and SIGHUP as Ctrl-C, so that a stopped job ends as cleanly as one stopped by hand."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before: dict[int, Any] = {}
    try:
        for signalled in (signal.SIGTERM, signal.SIGHUP):
            with contextlib.suppress(ValueError):  # only the main thread may set handlers
                before[signalled] = signal.signal(signalled, interrupt)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
