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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec

from kourkoutas.lab.errors import ArgumentError, argument, in_python
from kourkoutas.lab.judging import endpoints
from kourkoutas.lab.planning import shipping
from kourkoutas.lab.planning.plan import Plan, parse_assignments, parse_seeds, plan_study, whole_seeds
from kourkoutas.lab.results import export
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.running import pool
from kourkoutas.lab.running.executor import (
    NOBODY,
    Executor,
    Observer,
    choose_executor,
    holding,
    make_runs,
    terminated_as_interrupt,
    tuned_before,
)
from kourkoutas.lab.specs.spec import SearchSpace
from kourkoutas.lab.specs.study_options import DEFAULTS, WORDS, Range, StudyOptions
from kourkoutas.lab.tuning import search

if TYPE_CHECKING:  # scipy takes a second, which the workers need not wait for
    import pandas as pd
    from rich.console import Console

    from kourkoutas.lab.judging.analysis import Analysis, ArmSummary
    from kourkoutas.lab.judging.comparing import Comparison, Contrast
    from kourkoutas.lab.showing.drawing import Drawing


def results_folder(plan: Plan) -> Path:
    """Where a study is kept unless told: results/TESTBED, or results/FILE for the function `train` of FILE.py."""
    if plan.code is None:
        return Path("results") / plan.testbed
    stem, function = Path(plan.code.file).stem, plan.code.function
    return Path("results") / (stem if function == "train" else f"{stem}.{function}")


def plan_of(options: StudyOptions) -> Plan:
    """The plan of a study that was asked for, from words or values, with every one of them checked."""
    seeds = _seeds(options.seeds, "seeds")
    return plan_study(
        options.train if isinstance(options.train, str) else shipping.target_of(options.train),
        optimizers=_names(options.optimizers),
        seeds=seeds,
        options=_assigned(options.settings, "settings"),
        grids=_assigned(options.grid, "grid"),
        preset=options.preset,
        engine=options.engine,
        endpoint=options.endpoint,
        log=options.log,
        higher_is_better=options.higher_is_better,
        tuning=_search_space(options, seeds),
        margin=options.margin,
        count_failed=options.count_failed,
    )


def _names(optimizers: str | Sequence[Any]) -> list[str]:
    given = optimizers.split(",") if isinstance(optimizers, str) else optimizers
    return [shipping.optimizer_of(one) for one in given]


def _seeds(seeds: str | Iterable[int], name: str) -> list[int]:
    return parse_seeds(seeds, name) if isinstance(seeds, str) else whole_seeds(seeds, name)


def _assigned(values: Mapping[str, Any] | Sequence[str], name: str) -> dict[str, Any]:
    return dict(values) if isinstance(values, Mapping) else parse_assignments(name, values)


def _search_space(options: StudyOptions, test_seeds: Sequence[int]) -> SearchSpace | None:
    """What is to be tuned; None for nothing, and then nothing else may be said about a tuning."""
    if not options.tune:
        for name in ("trials", "tune_seeds", "tune_budget"):
            if (given := getattr(options, name)) != DEFAULTS[name]:
                what = f"{argument(name)} {given}"
                add = argument("tune", "lr=1e-4:1e-1")
                raise ArgumentError(name, f"{what} needs something to tune: add {add}, for example")
        return None
    return search.search_space(
        search.parse_tune(_ranges(options.tune)),
        trials=options.trials,
        seeds=_seeds(options.tune_seeds, "tune_seeds"),
        test_seeds=test_seeds,
        budget=options.tune_budget,
    )


def _ranges(tune: Mapping[str, Range] | Sequence[str]) -> list[str]:
    """NAME=LOW:HIGH of each option that is tuned."""
    if not isinstance(tune, Mapping):
        return list(tune)
    for name, limits in tune.items():
        if not isinstance(limits, tuple | list):
            raise ArgumentError("tune", f"`tune` must give {name} a range, for example (1e-4, 1e-1); got {limits!r}")
    return [f"{name}={':'.join(map(str, limits))}" for name, limits in tune.items()]


def conduct(
    options: StudyOptions,
    *,
    console: Console,
    say: Callable[[str], None],
    command: str | None = None,
) -> Snapshot:
    """Make a study; what its folder holds then.

    Args:
      options: what was asked for.
      console: where progress is shown.
      say: told what the study cannot show, before it begins.
      command: the call, to be recorded; one from Python unless told.
    """
    from kourkoutas.lab.showing.progress import showing

    plan = plan_of(options)
    executor, retries = choose_executor(
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
    with contextlib.closing(executor), showing(console, plan) as observer:
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
@in_python()
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
        console.print(line, markup=False, highlight=False, soft_wrap=True)

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
    observer: Observer = NOBODY,
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
    with contextlib.ExitStack() as open_until_done:
        open_until_done.enter_context(terminated_as_interrupt())
        study = open_until_done.enter_context(holding(plan, out, command))
        plan = replace(plan, arms=[*plan.arms, *tuned_before(plan, study.record)])
        if executor is None:
            executor = open_until_done.enter_context(contextlib.closing(pool.Pool(workers)))
        make = functools.partial(
            make_runs,
            study,
            code=plan.code,
            executor=executor,
            retries=retries,
            retry_failed=retry_failed,
            checkpoint_every=checkpoint_every,
            observer=observer,
        )
        if plan.tuning is not None:
            primary = endpoints.measures_of(study.record)[0]
            chosen = search.tune(plan, plan.tuning, study, make, score=primary.score, endpoint=primary.endpoint)
            study.choose(chosen)
            plan = plan.chosen(chosen)
        make(plan.specs())
    return Snapshot.read(out)


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
        """{optimizer: {option: value}} that the tuning gave; empty for a study without one."""
        return self.snapshot.record.chosen

    @functools.cached_property
    def analysis(self) -> Analysis:
        """What the study shows by its declared endpoints: the object that every view here is made from."""
        return self._analysed()

    @in_python()
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
        """One row per optimizer."""
        return _table([_arm_row(arm) for arm in self.analysis.arms]).set_index("optimizer")

    @in_python()
    def compare(self, *endpoints: str) -> pd.DataFrame:
        """One row per endpoint and contrast: the effect and p that decide, the verdict, then every other statistic.

        By the declared endpoints, and by those named: METRIC[:last|best|tail][:min|max][:log]. METRIC:until=VALUE is
        the steps until it is reached, METRIC:seconds_until=VALUE the seconds.
        """
        found = (self._analysed(endpoints=endpoints) if endpoints else self.analysis).endpoints
        rows = []
        for endpoint in found:
            rows += [_contrast_row(endpoint, c) for c in endpoint.contrasts]
        return _table(rows)

    def sensitivity(self) -> pd.DataFrame:
        """One row per optimizer: how much it depends on the tuned option; empty unless one option was tuned."""
        names = ("arm", "option", "best", "low", "high", "ratio", "open_below", "open_above", "sensitivity")
        rows = [[getattr(one, name) for name in names] for one in self.analysis.sensitivity]
        return _table(rows, columns=["optimizer", *names[1:]]).set_index("optimizer")

    def plot(self) -> Drawing:
        """The effect plot, which a notebook shows: every contrast with its interval, right of the line where better.

        Its `svg` is the text of an SVG file.
        """
        from kourkoutas.lab.showing import report

        return report.effect_plot(self.analysis)

    @in_python()
    def report(self, *endpoints: str) -> Path:
        """Write report.html into the folder, and say where; judged by `endpoints`, too, as of `compare`."""
        from kourkoutas.lab.showing import report

        return report.write(self._analysed(endpoints=endpoints) if endpoints else self.analysis)

    def __repr__(self) -> str:
        found = self.analysis
        rows = [", ".join(f"{name} {_shown(cell)}" for name, cell in _arm_row(arm).items()) for arm in found.arms]
        lines = [found.headline, *rows, *found.answers, *found.fairness]
        return "\n".join([f"Study of {self.snapshot.record.testbed} in {self.path}", *lines])

    def _repr_html_(self) -> str:
        """For notebooks: the answer, the effect plot, one row per optimizer, and the numbers."""
        found = self.analysis
        parts = [f"<p><b>{html.escape(found.headline)}</b></p>"]
        if any(endpoint.contrasts for endpoint in found.endpoints):
            drawn = self.plot()
            data = base64.b64encode(drawn.svg.encode()).decode()
            parts.append(f'<img alt="{html.escape(drawn.description)}" src="data:image/svg+xml;base64,{data}">')
        parts.append(self.summary().reset_index().map(_shown).to_html(index=False, border=0))
        parts += [f"<p>{html.escape(line)}</p>" for line in (*found.answers, *found.fairness)]
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
