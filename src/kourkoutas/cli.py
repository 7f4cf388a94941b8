"""The `kbeta` command: parse, call, print.

Nothing of the laboratory is imported before a command needs it, so that `--help` and completion answer at once.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from kourkoutas.lab.judging.analysis import Analysis
    from kourkoutas.lab.judging.targets import Target as Aim
    from kourkoutas.lab.results.store import StoredRun, Study
    from kourkoutas.lab.specs.plan import Plan
    from kourkoutas.lab.specs.spec import RunResult
    from kourkoutas.lab.specs.tuning import Tuning

app = typer.Typer(
    name="kbeta",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console(soft_wrap=False)
err = Console(stderr=True)

FAILED, BAD_INPUT = 1, 2
LAB_PACKAGES = ("scipy", "matplotlib", "pydantic", "jinja2", "pandas", "cloudpickle")


def _version(wanted: bool) -> None:
    if wanted:
        from kourkoutas import __version__

        out.print(f"kbeta {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Kourkoutas-β: does it beat Adam here? Matched-seed studies with paired statistics."""


def _starting(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def _testbeds(incomplete: str) -> list[str]:
    from kourkoutas.lab import testbeds

    return _starting(testbeds.every(), incomplete)


def _engines(incomplete: str) -> list[str]:
    from kourkoutas.lab import engines

    return _starting(engines.NAMES, incomplete)


def _presets(incomplete: str) -> list[str]:
    from kourkoutas.lab import testbeds

    return _starting(testbeds.PRESETS, incomplete)


def _optimizer(incomplete: str) -> list[str]:
    from kourkoutas.lab.specs import optimizers

    return _starting(optimizers.LABELS, incomplete)


def _optimizer_list(incomplete: str) -> list[str]:
    """Complete the last name of a comma-separated list."""
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in _optimizer(last)]


Target = Annotated[
    str,
    typer.Argument(
        help="A testbed (see `kbeta testbeds`), or your own function as FILE.py:FUNC.", autocompletion=_testbeds
    ),
]
Engine = Annotated[
    str | None,
    typer.Option(
        help="torch, jax or mlx. [default: torch; your own function brings its framework]",
        autocompletion=_engines,
        show_default=False,
    ),
]
Preset = Annotated[
    str | None,
    typer.Option(
        help="smoke (seconds), laptop (minutes) or paper. [default: smoke]", autocompletion=_presets, show_default=False
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", help="A setting (steps=500) or an optimizer's option (kbeta.alpha=0.9)."
    ),
]
Text = Annotated[
    str | None, typer.Option("--text", metavar="FILE", help="The text of char-lm: a UTF-8 file (.gz too), or enwik8.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]
EndpointName = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        help="The logged metric that decides, instead of what your function returns or a testbed's first endpoint.",
    ),
]
Folder = Annotated[Path, typer.Argument(help="A results folder.")]
Asked = Annotated[
    list[str] | None,
    typer.Option(
        "--endpoint",
        metavar="METRIC[:best|tail][:max][:log]",
        help="Also judge by a logged metric: val_acc:max, val_loss:best. Marked as secondary.",
    ),
]
Aimed = Annotated[
    str | None,
    typer.Option("--target", metavar="METRIC<=VALUE", help="Also compare steps to a target: 'val_loss<=0.5'."),
]
Sink = Annotated[str | None, typer.Option(help="Also send metrics to tensorboard or wandb.")]
Every = Annotated[
    int | None,
    typer.Option(
        "--checkpoint-every",
        min=0,
        help="Steps between checkpoints of a testbed run; 0 for none. [default: one a minute]",
    ),
]


@app.command()
def run(
    target: Target,
    optimizer: Annotated[str, typer.Option(help="The optimizer.", autocompletion=_optimizer)] = "kbeta",
    seed: Annotated[int, typer.Option(min=0, help="Of data, init and order.")] = 0,
    engine: Engine = None,
    preset: Preset = None,
    set_: Set = None,
    text: Text = None,
    out_: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Keep the run in this results folder. [default: not kept; with --sink, results/ID]",
            show_default=False,
        ),
    ] = None,
    endpoint: EndpointName = None,
    checkpoint_every: Every = None,
    sink: Sink = None,
    as_json: AsJson = False,
) -> None:
    """Make one run and print its result."""
    from kourkoutas.lab.running import study
    from kourkoutas.lab.showing import sinks

    plan = _plan(target, engine, preset, [optimizer], [seed], _with_text(set_, text), None, endpoint)
    sinks.check(sink)
    folder = Path("results") / plan.specs()[0].id if out_ is None and sink is not None else out_
    with _resumable(folder is not None), _run_status() as on_progress:
        result = study.single(
            plan, folder, command=_command(), checkpoint_every=checkpoint_every, sink=sink, on_progress=on_progress
        )
    if as_json:
        _print_json({"id": plan.specs()[0].id, **json.loads(result.model_dump_json())})
    else:
        _print_run(plan, result)
    if out_ is None and folder is not None:
        _say(f"Kept in {folder}")
    if result.status == "failed":
        err.print(result.error, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(FAILED)


@app.command()
def study(
    target: Target,
    seeds: Annotated[str, typer.Option(help="Numbers and ranges: 0-9 or 0,3,7.")] = "0-4",
    optimizers: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated; the first is compared with the others. [default: the testbed's]",
            autocompletion=_optimizer_list,
            show_default=False,
        ),
    ] = None,
    engine: Engine = None,
    preset: Preset = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes; they share the cores. [default: one per core]", show_default=False),
    ] = None,
    out_: Annotated[
        Path | None, typer.Option("--out", help="Results folder. [default: results/TESTBED]", show_default=False)
    ] = None,
    set_: Set = None,
    text: Text = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=V1,V2", help="One arm per value: kbeta.alpha=0.85,0.9 or a setting, lr=0.1,0.01."),
    ] = None,
    tune: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=LOW:HIGH",
            help="Tune every arm alike on other seeds, then compare the best: lr=1e-4:1e-1. Twice or more: by Optuna.",
        ),
    ] = None,
    trials: Annotated[
        int | None, typer.Option(help="Values tried for each arm. [default: 8]", show_default=False)
    ] = None,
    tune_seeds: Annotated[
        str | None, typer.Option(help="Seeds of the tuning, none of --seeds. [default: 100-102]", show_default=False)
    ] = None,
    tune_budget: Annotated[
        int | None,
        typer.Option(
            help="How often the range may be widened when a best value is at its edge. [default: 2]", show_default=False
        ),
    ] = None,
    endpoint: EndpointName = None,
    log: Annotated[bool, typer.Option("--log", help="Your own function: compare ratios, on log10.")] = False,
    higher_is_better: Annotated[
        bool, typer.Option("--higher-is-better", help="Your own function: for accuracies and the like.")
    ] = False,
    checkpoint_every: Every = None,
    target_: Aimed = None,
    sink: Sink = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]",
            help="Make the runs on a Ray cluster: HOST:PORT, or auto for the one that runs here. "
            "[without ADDRESS: $RAY_ADDRESS, else a cluster of this machine]",
            show_default=False,
        ),
    ] = None,
    cpus_per_run: Annotated[float | None, typer.Option(help="Of a node of --ray. [default: 1]")] = None,
    gpus_per_run: Annotated[float | None, typer.Option(help="Of a node of --ray. [default: 0]")] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="PLACE",
            help="A folder that all nodes of --ray share, or an fsspec address: runs of a lost node go on from there.",
        ),
    ] = None,
    retries: Annotated[
        int | None, typer.Option(help="How often a run is made again whose worker was lost. [default: 0; with --ray 2]")
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="End a run after this time; it has failed.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(metavar="GIB", help="End a run that holds more memory; it has failed.")
    ] = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Make failed runs again.")] = False,
    no_report: Annotated[bool, typer.Option("--no-report", help="Do not write report.html.")] = False,
    watched: Annotated[
        bool, typer.Option("--watch", help="Serve the report on this machine while the study goes on.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare optimizers over matched seeds; the same command again resumes after anything."""
    from kourkoutas.lab.running import hiring
    from kourkoutas.lab.running import study as lab
    from kourkoutas.lab.showing import progress, sinks
    from kourkoutas.lab.specs import plan as planning

    names = optimizers.split(",") if optimizers is not None else []
    sets, chosen = _with_text(set_, text), planning.parse_seeds(seeds)
    question = _tuning(tune, trials, tune_seeds, tune_budget, chosen)
    aim = _aim(target_)
    plan = _plan(target, engine, preset, names, chosen, sets, grid, endpoint, log, higher_is_better, question)
    sinks.check(sink)
    hire, attempts = hiring.choose(
        ray=ray,
        workers=workers,
        cpus_per_run=cpus_per_run,
        gpus_per_run=gpus_per_run,
        storage=storage,
        retries=retries,
        timeout=timeout,
        memory_per_run=memory,
    )
    folder = out_ or Path("results") / plan.testbed
    with (
        _resumable(True),
        contextlib.redirect_stdout(sys.stderr),  # where Ray tells of nodes it has lost
        _watching(folder) if watched else contextlib.nullcontext(),
        progress.showing(err, plan.tuning) as observer,
    ):
        done = lab.execute(
            plan,
            folder,
            command=_command(),
            hire=hire,
            retries=attempts,
            retry_failed=retry_failed,
            checkpoint_every=checkpoint_every,
            sink=sink,
            observer=observer,
        )
    from kourkoutas.lab.judging import analysis as judging  # scipy takes a second, which the workers need not wait for

    runs = done.runs()
    judged = judging.analyse(done, runs=runs)
    page = None if no_report else _report(done, aim=aim)
    if as_json:
        _print_json(judging.as_json(done, judged, runs, aim) | {"report": None if page is None else str(page)})
    else:
        _print_study(runs, judged)
        if aim is not None:
            _print_target(done, runs, aim)
        if page is not None:
            out.print(f"Report: {page}", markup=False, highlight=False, soft_wrap=True)
    every = [*done.tuning_runs(), *runs]
    failed = [stored for stored in every if stored.result is not None and stored.result.status == "failed"]
    if failed:
        again = _command() if retry_failed else f"{_command()} --retry-failed"
        _say(f"{len(failed)} runs failed; to make them again: {again}")
        raise typer.Exit(FAILED)


@app.command()
def stats(
    source: Annotated[Path, typer.Argument(help="A results folder, or a CSV with the columns seed, optimizer, value.")],
    baseline: Annotated[
        str | None,
        typer.Option(
            help="The optimizer that the others are compared with. [default: adam95; of a folder, as planned]",
            show_default=False,
        ),
    ] = None,
    endpoint: Asked = None,
    log: Annotated[bool, typer.Option("--log", help="On log10: geometric-mean ratios.")] = False,
    higher_is_better: Annotated[bool, typer.Option("--higher-is-better", help="For accuracies and the like.")] = False,
    threshold: Annotated[
        float | None, typer.Option(help="A run that reaches it is a success: adds rates and McNemar's test.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Paired statistics of a results folder, or of anybody's table of results."""
    from kourkoutas.lab.judging import stats as lab
    from kourkoutas.lab.judging import tables

    if (source / "study.json").exists():
        for name, given in (("--log", log), ("--higher-is-better", higher_is_better), ("--threshold", threshold)):
            if given:
                raise ValueError(f"{name} is for a table; of a folder write --endpoint METRIC:max:log, for example")
        judged = _analysis(source, endpoint, baseline)
        if as_json:
            _print_json(judged.to_dict())
        else:
            out.print(tables.render_arms(judged))
            out.print(tables.render_analysis(judged))
        return
    if endpoint:
        raise ValueError(f"--endpoint {endpoint[0]} is for a results folder; {source} is none")
    found = lab.compare(
        tables.read_table(source),
        baseline=baseline or "adam95",
        log=log,
        higher_is_better=higher_is_better,
        threshold=threshold,
    )
    if as_json:
        _print_json(found.to_dict())
    else:
        out.print(tables.render(found))


@app.command()
def power(
    folder: Folder,
    difference: Annotated[
        list[str] | None,
        typer.Option(help="A difference to find: 5%, or a size in the endpoint's units. [default: 1%, 2%, 5%, 10%]"),
    ] = None,
    probability: Annotated[float, typer.Option("--power", help="The probability of finding it.")] = 0.8,
    endpoint: Annotated[str | None, typer.Option(help="A logged metric, as in `kbeta stats`.")] = None,
    as_json: AsJson = False,
) -> None:
    """How many seeds a difference needs, and what the seeds of a study could have shown."""
    import dataclasses

    from kourkoutas.lab.judging import power as lab
    from kourkoutas.lab.judging import tables

    if not 0 < probability < 1:
        raise ValueError(f"--power must be between 0 and 1, for example 0.8; got {probability}")
    judged = _analysis(folder, [endpoint] if endpoint else None).endpoints[-1 if endpoint else 0]
    scale: dict[str, Any] = {"log": judged.log, "higher_is_better": judged.maximize, "power": probability}
    rows = []
    for finding in judged.findings:
        c = finding.contrast
        found = [lab.needed(c, text, **scale) for text in difference or ("1%", "2%", "5%", "10%")]
        rows.append((finding, lab.detectable(c, **scale), [one for one in found if one is not None]))
    if as_json:
        _print_json(
            [
                {
                    "treatment": finding.treatment,
                    "baseline": finding.baseline,
                    "detectable": None if shown is None else dataclasses.asdict(shown),
                    "needed": [dataclasses.asdict(one) for one in needed],
                }
                for finding, shown, needed in rows
            ]
        )
        return
    out.print(tables.render_power(judged.title, rows, difference or ("1%", "2%", "5%", "10%"), probability))


@app.command()
def compare(
    first: Folder,
    second: Folder,
    endpoint: Annotated[str | None, typer.Option(help="A logged metric of both, as in `kbeta stats`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two studies arm by arm, paired by the seeds that both have."""
    from kourkoutas.lab.judging import across, tables
    from kourkoutas.lab.results.store import Study

    judged = across.compare_studies(Study.open(first), Study.open(second), endpoint)
    if as_json:
        _print_json(judged.to_dict())
    else:
        for finding in judged.findings if judged.primary else ():
            out.print(f"{finding.answer}: {finding.sentence}", markup=False, highlight=False, soft_wrap=True)
        out.print(tables.render_judged(judged))


@app.command()
def export(
    folder: Folder,
    to: Annotated[
        Path | None, typer.Option(help="A name ending in .csv or .parquet. [default: OUT/runs.csv]", show_default=False)
    ] = None,
    curves: Annotated[bool, typer.Option("--curves", help="One row per recorded point instead of per run.")] = False,
) -> None:
    """Write the runs of a results folder, or their curves, as one CSV or Parquet table."""
    from kourkoutas.lab.results import export as lab
    from kourkoutas.lab.results.store import Study

    to = to or folder / ("curves.csv" if curves else "runs.csv")
    count = lab.write(Study.open(folder), to, "curves" if curves else "runs")
    out.print(f"{to}: {count} rows", markup=False, highlight=False, soft_wrap=True)


@app.command()
def norms(
    folder: Folder,
    optimizer: Annotated[str | None, typer.Option(help="One arm, bucket by bucket.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Which memory, which β2, would have predicted the recorded gradient norms best?"""
    from kourkoutas.lab.results.store import Study
    from kourkoutas.lab.showing import memories

    study = Study.open(folder)
    runs, arms = study.runs(), [arm.label for arm in study.record.arms]
    if optimizer is not None and optimizer not in arms:
        raise ValueError(f"`--optimizer` {optimizer!r} is not in {folder}; it has {', '.join(arms)}")
    chosen = arms if optimizer is None else [optimizer]
    found = memories.of_arms(runs, chosen)
    if not found:
        raise ValueError(
            f"{folder} has no recorded norms: they come from Kourkoutas-β arms (kbeta-fixed is Adam), made by this "
            "version or a later one"
        )
    if as_json:
        _print_json({arm: one.to_json() for arm, one in found.items()})
        return
    _print_table("What each memory loses, in nats per step", *memories.table(found))
    if optimizer is not None:
        _print_table(f"Best β of each bucket, {optimizer}", *memories.buckets(found[optimizer]))
    out.print(memories.NOTE, markup=False, highlight=False)


@app.command()
def report(folder: Folder, endpoint: Asked = None, target: Aimed = None) -> None:
    """Write report.html of a results folder again."""
    from kourkoutas.lab.results.store import Study

    page = _report(Study.open(folder), endpoint or (), _aim(target))
    out.print(str(page), markup=False, highlight=False, soft_wrap=True)


@app.command()
def watch(
    folder: Folder,
    port: Annotated[int, typer.Option(help="Of 127.0.0.1; 0 for any free one.")] = 0,
) -> None:
    """Serve the report on this machine while a study goes on, renewed as its runs progress; Ctrl-C ends it."""
    from kourkoutas.lab.showing import watch as lab

    def ready(address: str) -> None:
        out.print(f"{address} shows {folder}; Ctrl-C ends this, and not the study.", highlight=False, soft_wrap=True)

    with contextlib.suppress(KeyboardInterrupt):
        lab.serve(folder, port, ready=ready)


@app.command()
def status(folder: Folder, as_json: AsJson = False) -> None:
    """How far a study is: finished, diverged, failed, running and waiting runs, and the time left."""
    from kourkoutas.lab.results.store import Study
    from kourkoutas.lab.showing import progress
    from kourkoutas.lab.showing import status as lab

    found = lab.status_of(Study.open(folder))
    if as_json:
        _print_json(found.to_dict())
    else:
        out.print(progress.render_status(found))


@app.command()
def data(
    name: Annotated[str, typer.Argument(help="enwik8: its first 30 MB, checked.")],
    to: Annotated[Path | None, typer.Option(help="Folder. [default: the cache]", show_default=False)] = None,
    url: Annotated[str | None, typer.Option(help="Another address of enwik8.zip.", show_default=False)] = None,
) -> None:
    """Fetch the text of char-lm; then `--text enwik8`, or the path that is printed."""
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    from kourkoutas.lab import corpus
    from kourkoutas.lab.specs.spec import unknown

    if name != "enwik8":
        raise unknown("data", name, ("enwik8",))
    with Progress(*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn(), console=err) as shown:
        task = shown.add_task("enwik8.zip", total=None)
        path = corpus.fetch_enwik8(
            to or corpus.cache_folder(),
            (url,) if url else corpus.enwik8.URLS,
            on_progress=lambda got, total: shown.update(task, completed=got, total=total or None),
        )
    out.print(str(path), markup=False, highlight=False, soft_wrap=True)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Measure step time and memory against each framework's Adam; `kbeta bench --help` lists its options."""
    from kourkoutas import bench as benchmark

    raise typer.Exit(benchmark.main(context.args))


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def script(
    file: Annotated[str, typer.Argument(help="A Python script that imports kbeta.optim, as the paper's listings do.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own.")] = None,
) -> None:
    """Run a script of the paper as `python FILE` would, with kbeta.optim being kourkoutas.paper."""
    from kourkoutas import paper

    paper.script(file, arguments or ())


@app.command("testbeds")
def list_testbeds(as_json: AsJson = False) -> None:
    """List what can be studied."""
    import dataclasses

    from kourkoutas.lab import testbeds
    from kourkoutas.lab.judging.fitting import Fitting

    every = testbeds.every()
    if as_json:
        _print_json(
            {
                name: {
                    "title": bed.title,
                    "endpoints": [dataclasses.asdict(endpoint) for endpoint in bed.endpoints],
                    "optimizers": list(bed.arms),
                    "kbeta": dict(bed.kbeta),
                    "presets": {preset: dataclasses.asdict(settings) for preset, settings in bed.presets.items()},
                }
                for name, bed in every.items()
            }
        )
        return
    shown = Fitting("", ["testbed", "what", "optimizers"], words=["what", "optimizers"])
    for name, bed in every.items():
        shown.add_row(name, bed.title, ", ".join(bed.arms))
    out.print(shown)
    out.print("Endpoints, and the settings of each preset: kbeta testbeds --json", highlight=False)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Show what is installed and works here: frameworks, devices, threads, front ends, C kernels."""
    from kourkoutas.lab import doctor as lab

    found = lab.examine()
    if as_json:
        _print_json(found)
        return
    sys.stdout.write(lab.text(found))


def _with_text(sets: list[str] | None, text: str | None) -> list[str]:
    """`--set` with the text of `--text`, named by its content too, so that a changed file is another configuration."""
    if text is None:
        return sets or []
    from kourkoutas.lab import corpus

    return [*(sets or []), *(f"{name}={value}" for name, value in corpus.pin(text).items())]


def _plan(
    target: str,
    engine: str | None,
    preset: str | None,
    optimizers: Sequence[str],
    seeds: Sequence[int],
    sets: list[str] | None,
    grid: list[str] | None,
    endpoint: str | None,
    log: bool = False,
    higher_is_better: bool = False,
    tuning: Tuning | None = None,
) -> Plan:
    from kourkoutas.lab.specs import plan as planning

    options, grids = planning.parse_assignments("--set", sets or []), planning.parse_assignments("--grid", grid or [])
    if ".py" in target:
        for name, value in (("--engine", engine), ("--preset", preset)):
            if value is not None:
                raise ValueError(f"{name} {value} is for testbeds; {target} brings its own: leave it out")
        return planning.plan_own(
            target,
            optimizers=optimizers,
            seeds=seeds,
            options=options,
            grids=grids,
            endpoint=endpoint,
            log=log,
            higher_is_better=higher_is_better,
            tuning=tuning,
        )
    for name, given in (("--log", log), ("--higher-is-better", higher_is_better)):
        if given:
            raise ValueError(f"{name} is for your own functions; a testbed says how it is judged: leave it out")
    return planning.plan_testbed(
        target,
        preset=preset or "smoke",
        engine=engine or "torch",
        optimizers=optimizers,
        seeds=seeds,
        options=options,
        grids=grids,
        endpoint=endpoint,
        tuning=tuning,
    )


def _tuning(
    tune: list[str] | None, trials: int | None, tune_seeds: str | None, budget: int | None, test_seeds: Sequence[int]
) -> Tuning | None:
    from kourkoutas.lab.specs import plan as planning
    from kourkoutas.lab.specs import tuning

    if not tune:
        for name, given in (("--trials", trials), ("--tune-seeds", tune_seeds), ("--tune-budget", budget)):
            if given is not None:
                raise ValueError(f"{name} {given} needs something to tune: add --tune lr=1e-4:1e-1, for example")
        return None
    return tuning.tuning(
        tuning.parse_tune(tune),
        trials=8 if trials is None else trials,
        seeds=planning.parse_seeds(tune_seeds or "100-102", "--tune-seeds"),
        test_seeds=test_seeds,
        budget=2 if budget is None else budget,
    )


def _aim(target: str | None) -> Aim | None:
    from kourkoutas.lab.judging import targets

    return None if target is None else targets.parse_target(target)


def _command() -> str:
    """This call, quoted for a shell."""
    name = Path(sys.argv[0]).name
    program = ["kbeta"] if name == "kbeta" else ["python", "-m", "kourkoutas"]
    return shlex.join([*program, *sys.argv[1:]])


@contextlib.contextmanager
def _resumable(kept: bool) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        if kept:
            _say(f"Stopped; finished runs are kept. To resume: {_command()}")
        else:
            _say("Stopped.")
        raise typer.Exit(128 + signal.SIGINT) from None


@contextlib.contextmanager
def _watching(folder: Path) -> Iterator[None]:
    from kourkoutas.lab.showing import watch as lab

    with lab.serving(folder) as address:
        _say(f"{address} shows the study as it goes on.")
        yield


def _say(text: str) -> None:
    err.print(text, markup=False, highlight=False, soft_wrap=True)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1, allow_nan=False) + "\n")


@contextlib.contextmanager
def _run_status() -> Iterator[Callable[[int, int | None, float | None], None]]:
    if not err.is_terminal:
        yield lambda step, steps, loss: None
        return
    with err.status("starting") as status:

        def show(step: int, steps: int | None, loss: float | None) -> None:
            of = "" if steps is None else f" of {steps}"
            status.update(f"step {step}{of}" + ("" if loss is None else f", loss {loss:.4g}"))

        yield show


def _print_run(plan: Plan, result: RunResult) -> None:
    from kourkoutas.lab.judging.fitting import Fitting
    from kourkoutas.lab.showing.progress import outcome

    spec = plan.specs()[0]
    shown = Fitting("", ["metric", "value"])
    for name, value in result.metrics.items():
        shown.add_row(name, f"{value:.6g}")
    title = f"{spec.testbed} {spec.optimizer} seed {spec.seed}: {outcome(result)} ({result.seconds:.1f} s)"
    out.print(title, markup=False, highlight=False, soft_wrap=True)
    if result.metrics:
        out.print(shown)


def _print_study(runs: Sequence[StoredRun], judged: Analysis) -> None:
    from kourkoutas.lab.judging import tables
    from kourkoutas.lab.showing.progress import outcome

    for line in judged.fairness:
        out.print(line, markup=False, highlight=False)
    out.print(tables.render_arms(judged))
    for stored in runs:
        if stored.result is not None and stored.result.status == "failed":
            what = f"{stored.spec.optimizer} seed {stored.spec.seed}: {outcome(stored.result)}"
            out.print(f"{what} ({stored.folder / 'result.json'})", markup=False, highlight=False, soft_wrap=True)
    out.print(tables.render_analysis(judged))
    _print_sensitivity(judged)


def _print_sensitivity(judged: Analysis) -> None:
    from kourkoutas.lab.showing import sensitivity

    if judged.sensitivity:
        option = judged.sensitivity[0].option
        _print_table(f"Sensitivity to {option}, on the tuning seeds", *sensitivity.table(judged.sensitivity))


def _print_target(done: Study, runs: Sequence[StoredRun], aim: Aim) -> None:
    from kourkoutas.lab.judging import tuned
    from kourkoutas.lab.showing import reaching

    found, races = tuned.to_target(done, runs, aim)
    _print_table(f"Until {aim}", *reaching.table(found))
    for race in races:
        out.print(race.sentence, markup=False, highlight=False)


def _print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from kourkoutas.lab.judging.fitting import Fitting

    shown = Fitting("", head)
    for row in rows:
        shown.add_row(*row)
    out.print(f"\n{title}", style="bold", markup=False, highlight=False)
    out.print(shown)


def _analysis(folder: Path, endpoints: Sequence[str] | None, baseline: str | None = None) -> Analysis:
    from kourkoutas.lab.judging import analysis
    from kourkoutas.lab.results.store import Study

    return analysis.analyse(Study.open(folder), endpoints=endpoints or (), baseline=baseline)


def _report(done: Study, endpoints: Sequence[str] = (), aim: Aim | None = None) -> Path:
    from kourkoutas.lab.showing import report as lab

    return lab.build(done, endpoints=endpoints, target=aim)


def _disk_full(error: OSError) -> str | None:
    from kourkoutas.lab.results import store

    return str(store.DiskFull.of(error)) if store.is_full(error) else None


def _with_address(arguments: Sequence[str]) -> list[str]:
    """The arguments with an empty ADDRESS where `--ray` stands alone: the parser knows no optional values.

    >>> _with_address(["study", "rare_trigger", "--ray", "--seeds", "0-3"])
    ['study', 'rare_trigger', '--ray=', '--seeds', '0-3']
    """
    after = [*arguments, "-"][1:]
    return [
        "--ray=" if argument == "--ray" and following.startswith("-") else argument
        for argument, following in zip(arguments, after, strict=True)
    ]


def main() -> None:
    """Run the command line; an error is one line on standard error and exit code 2."""
    try:
        code = app(_with_address(sys.argv[1:]), standalone_mode=False)
    except KeyboardInterrupt:
        _say("Stopped.")
        code = 128 + signal.SIGINT
    except (typer.Abort, EOFError):
        code = FAILED
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error of the parser
            message = error.format_message()
        elif isinstance(error, ValueError | TypeError | ImportError | OSError) and "KBETA_TRACEBACK" not in os.environ:
            message = _disk_full(error) or str(error) if isinstance(error, OSError) else str(error)
            if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in LAB_PACKAGES:
                message += ": pip install 'kourkoutas-beta[lab]'"
        else:
            raise
        _say(f"kbeta: {' '.join(message.split())}")
        code = BAD_INPUT
    sys.exit(code)


if __name__ == "__main__":
    main()
