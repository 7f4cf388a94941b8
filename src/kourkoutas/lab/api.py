"""The conductor: plans, runs, tunes, judges, shows. The command line calls it, and so do notebooks.

`execute` makes the runs of a plan. `study` makes a study, `load` opens one, and both give a `Result`.

from kourkoutas.lab import study

result = study(train, optimizers=["kbeta", "adam95"], seeds=range(10), tune={"lr": (1e-4, 1e-1)})
result                       # in a notebook: the answer and the effect plot
result.compare()             # one row per contrast
result.frame()               # one row per run
"""

from __future__ import annotations

import base64
import contextlib
import functools
import html
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from kourkoutas.lab.judging import endpoints, tuned
from kourkoutas.lab.judging.failures import failures
from kourkoutas.lab.optimizers import looks
from kourkoutas.lab.planning import search, shipping
from kourkoutas.lab.planning.plan import Plan, parse_assignments, parse_seeds, plan_study, whole_seeds
from kourkoutas.lab.planning.search import Tried, Values
from kourkoutas.lab.results import export, store
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.running import executor as running
from kourkoutas.lab.running import pool
from kourkoutas.lab.running.executor import Executor, Observer
from kourkoutas.lab.specs import search_space
from kourkoutas.lab.specs.search_space import SearchSpace, Value
from kourkoutas.lab.specs.spec import RunSpec
from kourkoutas.lab.specs.study_options import DEFAULTS, WORDS, Range, StudyOptions

if TYPE_CHECKING:  # scipy takes a second, which the workers need not wait for
    import pandas as pd
    from rich.console import Console

    from kourkoutas.lab.judging.analysis import Analysis, ArmSummary
    from kourkoutas.lab.judging.comparing import Comparison, Contrast
    from kourkoutas.lab.showing.drawing import Drawing

Make = Callable[[Sequence[RunSpec]], None]


def in_python(text: str) -> str:
    """A message with the arguments of `study` in place of the command line's options.

    >>> in_python("--tune-seeds and --seeds share 3; add --tune lr=1e-4:1e-1, --set steps=9 or --retry-failed")
    "`tune_seeds` and `seeds` share 3; add tune={'lr': (1e-4, 1e-1)}, settings={'steps': 9} or `retry_failed`"
    >>> in_python("pip install --upgrade pyarrow")
    'pip install --upgrade pyarrow'
    """

    def argument(found: re.Match[str]) -> str:
        option, name, value = found.groups()
        word = "settings" if option == "set" else option.replace("-", "_")
        if word not in {*inspect.signature(study).parameters, "target"}:
            return found[0]
        if name is None:
            return f"`{word}`"
        shown = {"tune": f"({value.replace(':', ', ')})", "grid": f"[{value.replace(',', ', ')}]"}.get(option, value)
        return f"{word}={{{name!r}: {shown}}}"

    # an option, and with it NAME=VALUE as far as the punctuation of the sentence
    return re.sub(r"(?<![\w-])--([a-z][a-z-]+)(?: ([\w.-]+)=(\S+?)(?=[,;:.)]*(?:\s|$)))?", argument, text)


@contextlib.contextmanager
def _naming_arguments() -> Iterator[None]:
    """Errors of a call from Python name its arguments."""
    try:
        yield
    except (ValueError, TypeError, ImportError) as error:
        text = in_python(str(error))
        error.args = (text,)
        if isinstance(error, ImportError):
            error.msg = text
        raise


def results_folder(plan: Plan) -> Path:
    """Where a study is kept unless told: results/TESTBED, or results/FILE for the function `train` of FILE.py."""
    if plan.code is None:
        return Path("results") / plan.testbed
    stem, function = Path(plan.code.file).stem, plan.code.function
    return Path("results") / (stem if function == "train" else f"{stem}.{function}")


def plan_of(options: StudyOptions) -> Plan:
    """The plan of a study that was asked for, from words or values, with every one of them checked."""
    seeds = _seeds(options.seeds, "--seeds")
    return plan_study(
        options.train if isinstance(options.train, str) else shipping.target_of(options.train),
        optimizers=_names(options.optimizers),
        seeds=seeds,
        options=_assigned(options.settings, "--set"),
        grids=_assigned(options.grid, "--grid"),
        preset=options.preset,
        engine=options.engine,
        endpoint=options.endpoint,
        log=options.log,
        higher_is_better=options.higher_is_better,
        tuning=_search_space(options, seeds),
        margin=options.margin,
        count_failed=options.count_failed,
    )


def _names(optimizers: str | Sequence[str]) -> list[str]:
    return optimizers.split(",") if isinstance(optimizers, str) else list(optimizers)


def _seeds(seeds: str | Iterable[int], option: str) -> list[int]:
    return parse_seeds(seeds, option) if isinstance(seeds, str) else whole_seeds(seeds, option)


def _assigned(values: Mapping[str, Any] | Sequence[str], option: str) -> dict[str, Any]:
    return dict(values) if isinstance(values, Mapping) else parse_assignments(option, values)


def _search_space(options: StudyOptions, test_seeds: Sequence[int]) -> SearchSpace | None:
    """What is to be tuned; None for nothing, and then nothing else may be said about a tuning."""
    if not options.tune:
        for name in ("trials", "tune_seeds", "tune_budget"):
            if (given := getattr(options, name)) != DEFAULTS[name]:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"{option} {given} needs something to tune: add --tune lr=1e-4:1e-1, for example")
        return None
    return search_space.search_space(
        search_space.parse_tune(_ranges(options.tune)),
        trials=options.trials,
        seeds=_seeds(options.tune_seeds, "--tune-seeds"),
        test_seeds=test_seeds,
        budget=options.tune_budget,
    )


def _ranges(tune: Mapping[str, Range] | Sequence[str]) -> list[str]:
    """NAME=LOW:HIGH of each option that is tuned."""
    if not isinstance(tune, Mapping):
        return list(tune)
    for name, limits in tune.items():
        if not isinstance(limits, tuple | list):
            raise ValueError(f"`tune` must give {name} a range, for example (1e-4, 1e-1); got {limits!r}")
    return [f"{name}={':'.join(map(str, limits))}" for name, limits in tune.items()]


def conduct(
    options: StudyOptions,
    *,
    console: Console,
    say: Callable[[str], None],
    command: str | None = None,
    target: str | None = None,
) -> Snapshot:
    """Make a study; what its folder holds then.

    Args:
      options: what was asked for.
      console: where progress is shown.
      say: told what the study cannot show, before it begins.
      command: the call, to be recorded; one from Python unless told.
      target: METRIC<=VALUE that the runs are expected to log.
    """
    from kourkoutas.lab.showing.progress import showing

    aim = None
    if target is not None:
        from kourkoutas.lab.judging.targets import parse_target  # scipy again

        aim = parse_target(target)
    plan = plan_of(options)
    executor, retries = running.choose_executor(
        ray=options.ray,
        workers=options.workers,
        cpus_per_run=options.cpus_per_run,
        gpus_per_run=options.gpus_per_run,
        storage=options.storage,
        retries=options.retries,
        timeout=options.timeout,
        memory_per_run=options.memory,
    )
    for line in plan.doubts():
        say(line)
    with contextlib.closing(executor), showing(console, plan, aim) as observer:
        return execute(
            plan,
            results_folder(plan) if options.out is None else options.out,
            command=command or f"kourkoutas.lab.study({plan.testbed!r}, ...)",
            executor=executor,
            retries=retries,
            retry_failed=options.retry_failed,
            checkpoint_every=options.checkpoint_every,
            observer=observer,
        )


P = ParamSpec("P")


def _with_arguments_of(
    describe: Callable[P, StudyOptions],
) -> Callable[[Callable[[StudyOptions], Result]], Callable[P, Result]]:
    """Give a function of a `StudyOptions` the arguments of its constructor, and tell of them in its documentation."""
    signature = inspect.signature(describe)

    def decorated(function: Callable[[StudyOptions], Result]) -> Callable[P, Result]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{function.__name__}: {error}") from None
            return function(describe(*args, **kwargs))

        arguments = [f"  {name}: {words.help} {words.in_python}".rstrip() for name, words in WORDS.items()]
        call.__doc__ = "\n".join([inspect.getdoc(function) or "", *arguments])
        call.__signature__ = signature.replace(return_annotation="Result")  # type: ignore[attr-defined]
        return call

    return decorated


@_with_arguments_of(StudyOptions)
@_naming_arguments()
def study(options: StudyOptions) -> Result:
    """Compare optimizers over matched seeds, as `kbeta study` does; the same call again resumes after anything.

    Returns:
      The study, finished.

    Args:
      train: a function of a `trial`, "FILE.py:FUNC", or the name of a testbed.
      progress: show it, on standard error.
    """
    from rich.console import Console

    console = Console(stderr=True, quiet=not options.progress)

    def say(line: str) -> None:
        console.print(in_python(line), markup=False, highlight=False, soft_wrap=True)

    return Result(conduct(options, console=console, say=say))


def load(out: str | Path) -> Result:
    """The study in a results folder."""
    return Result(Snapshot.read(out))


def execute(
    plan: Plan,
    out: str | Path,
    *,
    command: str,
    workers: int | None = None,
    retry_failed: bool = False,
    checkpoint_every: int | None = None,
    observer: Observer = running.NOBODY,
    executor: Executor | None = None,
    retries: int = 0,
) -> Snapshot:
    """Tune what is to be tuned, make every run of `plan` that the folder `out` does not hold yet; what it holds then.

    `executor` makes the runs, and stays open for the next study; by default `workers` processes of this machine that
    end with this one. A lost run is made again up to `retries` times.

    Raises:
      StoreError: `out` holds another configuration, is in use, or is broken; nothing was changed.
      KeyboardInterrupt: on Ctrl-C, after the workers have ended; finished runs are kept.
    """
    plan = _with_tuned_arms(plan, Path(out))
    with contextlib.ExitStack() as open_until_done:
        open_until_done.enter_context(running.terminated_as_interrupt())
        study = open_until_done.enter_context(running.holding(plan, out, command))
        if executor is None:
            executor = open_until_done.enter_context(contextlib.closing(pool.Pool(workers)))
        make = functools.partial(
            running.make_runs,
            study,
            code=plan.code,
            executor=executor,
            retries=retries,
            retry_failed=retry_failed,
            checkpoint_every=checkpoint_every,
            observer=observer,
        )
        if plan.tuning is not None:
            chosen = tune(plan, plan.tuning, study, make)
            study.choose(chosen)
            plan = plan.chosen(chosen)
        make(plan.specs())
    return Snapshot.read(out)


def _with_tuned_arms(plan: Plan, out: Path) -> Plan:
    """The plan with the arms that the folder has tuned before: arms are tuned alike only if they are tuned together."""
    if plan.tuning is None or not (out / "study.json").exists():
        return plan
    record, named = store.read_record(out), {arm.label for arm in plan.arms}
    kept = [arm for arm in record.arms if arm.label in record.chosen and arm.label not in named]
    return replace(plan, arms=[*plan.arms, *(arm.model_copy(update={"resolved": None}) for arm in kept)])


def tune(plan: Plan, space: SearchSpace, study: store.Writer, make: Make) -> dict[str, dict[str, Value]]:
    """{arm: its best values}; `make` makes those of the runs that are not there yet.

    NOTE: nothing but runs is kept. After a kill the decisions are taken again from the runs that have finished; they
    are the same, so that only what is missing is made.

    Raises:
      ValueError: every value that an arm tried has a failed run, and failures do not count.
    """
    primary = endpoints.measures(study.record)[0]
    by = {"maximize": primary.endpoint.maximize, "log": primary.endpoint.log}
    arms = {arm.label: arm for arm in plan.arms}
    tried: dict[str, list[Tried]] = {label: [] for label in arms}
    errors: dict[str, list[str]] = {label: [] for label in arms}

    def takes(label: str, values: Values) -> bool:
        try:
            plan.valued(arms[label], values)
        except (ValueError, TypeError):
            return False
        return True

    while requests := search.next_requests(space, plan.axes(), tried, takes, **by):
        valued = [plan.valued(arms[label], values) for label, values in requests]
        make([plan.spec(arm, seed) for seed in space.seeds for arm in valued])
        for (label, values), arm in zip(requests, valued, strict=True):
            runs = [study.run(plan.spec(arm, seed)) for seed in space.seeds]
            tried[label].append(tuned.of_runs(values, runs, primary, count_failed=plan.count_failed))
            errors[label] += [failure.summary for failure in failures(runs)]
        for label, own in tried.items():  # before more is tried, and other arms' ranges are widened for nothing
            _check_some_value(label, own, errors[label])
    return {label: dict(one.values) for label, one in search.choose(tried, **by).items()}


def _check_some_value(label: str, tried: Sequence[Tried], errors: Sequence[str]) -> None:
    """Divergence everywhere is a result; an error everywhere is not."""
    if tried and all(one.failed for one in tried):
        runs, failed = sum(len(one.scores) for one in tried), sum(one.failed for one in tried)
        which = f"all {runs} tuning runs of {looks.name_of(label)} failed"
        if failed < runs:
            which = f"every value that {looks.name_of(label)} tried has a tuning run that failed ({failed} of {runs})"
        raise ValueError(
            f"{which}, so that nothing can be chosen for it; the first one: {errors[0]}. Correct that and use "
            "--retry-failed"
        )


class Result:
    """A study and what it shows; in a notebook, its display.

    Attributes:
      snapshot: what the results folder held when it was read.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot

    @property
    def path(self) -> Path:
        return self.snapshot.path

    @property
    def chosen(self) -> dict[str, dict[str, float | int]]:
        """{arm: {option: value}} that the tuning gave; empty for a study without one."""
        return self.snapshot.record.chosen

    @functools.cached_property
    def analysis(self) -> Analysis:
        """What the study shows by its declared endpoints: the object that every view here is made from."""
        return self._analysed()

    def _analysed(self, **how: Any) -> Analysis:
        from kourkoutas.lab.judging.analysis import analyse

        return analyse(self.snapshot, **how)

    def frame(self, *, tuning: bool = False) -> pd.DataFrame:
        """One row per run that is compared, or of the tuning, with the columns of `kbeta export`."""
        return _table(export.rows(self.snapshot, tuning=tuning))

    def curves(self, *, tuning: bool = False) -> pd.DataFrame:
        """One row per logged point: optimizer, seed, step and the metrics."""
        return _table(export.rows(self.snapshot, "curves", tuning=tuning))

    def summary(self) -> pd.DataFrame:
        """One row per arm."""
        return _table([_arm_row(arm) for arm in self.analysis.arms]).set_index("optimizer")

    @_naming_arguments()
    def compare(self, *endpoints: str) -> pd.DataFrame:
        """One row per endpoint and contrast: the effect and p that decide, the verdict, then every other statistic.

        By the declared endpoints, or by the primary one and those named: METRIC[:last|best|tail][:min|max][:log].
        """
        found = (self._analysed(endpoints=endpoints) if endpoints else self.analysis).endpoints
        return _table([_contrast_row(endpoint, c) for endpoint in found for c in endpoint.contrasts])

    def sensitivity(self) -> pd.DataFrame:
        """One row per arm: how much it depends on the tuned option; empty unless one option was tuned."""
        names = ("arm", "option", "best", "low", "high", "ratio", "open_below", "open_above", "sensitivity")
        rows = [[getattr(one, name) for name in names] for one in self.analysis.sensitivity]
        return _table(rows, columns=["optimizer", *names[1:]]).set_index("optimizer")

    @_naming_arguments()
    def to_target(self, target: str) -> pd.DataFrame:
        """One row per arm: how many runs reached, for example, "val_loss<=0.5", and how soon.

        The row of a baseline also says on how many seeds the treatment was there before it, and later.
        """
        found = self._analysed(target=target).target
        names = ("runs", "reached", "median_steps", "median_seconds")
        rows = {arm: {name: getattr(one, name) for name in names} for arm, one in found.arms.items()} if found else {}
        for race in found.contrasts if found else ():
            first = {"treatment": race.treatment, "treatment_first": race.wins, "treatment_later": race.losses}
            rows[race.baseline] |= {**first, "p_holm": race.p_holm}
        return _table(rows.values(), index=rows).rename_axis("optimizer")

    def plot(self) -> Drawing:
        """The effect plot, which a notebook shows: every contrast with its interval, right of the line where better.

        Its `svg` is the text of an SVG file.
        """
        from kourkoutas.lab.showing import report

        return report.effect_plot(self.analysis)

    @_naming_arguments()
    def report(self, *, target: str | None = None) -> Path:
        """Write report.html into the folder, and say where; with how soon a `target` as of `to_target` was reached."""
        from kourkoutas.lab.showing import report

        return report.write(self.analysis if target is None else self._analysed(target=target))

    def __repr__(self) -> str:
        found = self.analysis
        rows = [", ".join(f"{name} {_shown(cell)}" for name, cell in _arm_row(arm).items()) for arm in found.arms]
        lines = [found.headline, *rows, *found.answers, *map(in_python, found.fairness)]
        return "\n".join([f"Study of {self.snapshot.record.testbed} in {self.path}", *lines])

    def _repr_html_(self) -> str:
        """For notebooks: the answer, the effect plot, one row per arm, and the numbers."""
        found = self.analysis
        parts = [f"<p><b>{html.escape(found.headline)}</b></p>"]
        if any(endpoint.contrasts for endpoint in found.endpoints):
            drawn = self.plot()
            data = base64.b64encode(drawn.svg.encode()).decode()
            parts.append(f'<img alt="{html.escape(drawn.description)}" src="data:image/svg+xml;base64,{data}">')
        parts.append(self.summary().reset_index().map(_shown).to_html(index=False, border=0))
        parts += [f"<p>{html.escape(line)}</p>" for line in (*found.answers, *map(in_python, found.fairness))]
        return f"<div>{''.join(parts)}</div>"


def _table(rows: Iterable[Any], **how: Any) -> pd.DataFrame:
    import pandas as pd  # which takes a second

    return pd.DataFrame(list(rows), **how)


def _contrast_row(endpoint: Comparison, c: Contrast) -> dict[str, Any]:
    """What decides, then every statistic of the list: its value, its interval and its p."""
    row: dict[str, Any] = {"endpoint": endpoint.title, "decides": endpoint.primary}
    row["standing"] = endpoint.standing
    names = ("treatment", "baseline", "verdict", "small", "why", "n", "wins", "ties", "losses", "family")
    row |= {name: getattr(c, name) for name in names}
    row["carried_by"] = ", ".join(str(seed) for seed, _ in c.carried_by)
    deciding = {} if c.effect is None else {"effect": replace(c.effect, p=c.p, p_holm=c.p_holm)}
    for name, found in {**({"percent": c.percent} if c.percent else {}), **deciding, **c.statistics}.items():
        row[name] = found.value
        if found.interval is not None:
            row |= {f"{name}_low": found.interval.low, f"{name}_high": found.interval.high}
        if found.p is not None:
            row |= {f"{name}_p": found.p, f"{name}_p_holm": found.p_holm}
    return row


def _arm_row(arm: ArmSummary) -> dict[str, Any]:
    from kourkoutas.lab.judging.analysis import ENDS

    numbers = {name: getattr(arm, name) for name in ("runs", *ENDS, "median", "mean", "seconds", "seconds_per_step")}
    return {"optimizer": arm.label, **arm.chosen, **numbers}


def _shown(cell: Any) -> str:
    from kourkoutas.lab.judging.statistics import show

    return show(cell) if isinstance(cell, float) else str(cell)
