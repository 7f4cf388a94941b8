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
from rich.table import Table

if TYPE_CHECKING:
    from kourkoutas.lab.plan import Plan
    from kourkoutas.lab.spec import RunResult
    from kourkoutas.lab.stats import Comparison
    from kourkoutas.lab.store import Study

app = typer.Typer(
    name="kbeta",
    help="Kourkoutas-β: does it beat Adam here? Matched-seed studies with paired statistics.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console(soft_wrap=False)
err = Console(stderr=True)

FAILED, BAD_INPUT = 1, 2


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
    from kourkoutas.lab import optimizers

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
    typer.Option("--endpoint", help="Your own function: the logged metric to compare, instead of what it returns."),
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
    out_: Annotated[Path | None, typer.Option("--out", help="Keep the run in this results folder.")] = None,
    endpoint: EndpointName = None,
    checkpoint_every: Every = None,
    sink: Sink = None,
    as_json: AsJson = False,
) -> None:
    """Make one run and print its result."""
    from kourkoutas.lab import sinks, study

    plan = _plan(target, engine, preset, [optimizer], [seed], _with_text(set_, text), None, endpoint)
    sinks.check(sink)
    with _resumable(out_ is not None), _run_status() as on_progress:
        result = study.single(
            plan, out_, command=_command(), checkpoint_every=checkpoint_every, sink=sink, on_progress=on_progress
        )
    if as_json:
        _print_json({"id": plan.specs()[0].id, **json.loads(result.model_dump_json())})
    else:
        _print_run(plan, result)
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
    endpoint: EndpointName = None,
    log: Annotated[bool, typer.Option("--log", help="Your own function: compare ratios, on log10.")] = False,
    higher_is_better: Annotated[
        bool, typer.Option("--higher-is-better", help="Your own function: for accuracies and the like.")
    ] = False,
    checkpoint_every: Every = None,
    sink: Sink = None,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Make failed runs again.")] = False,
    no_report: Annotated[bool, typer.Option("--no-report", help="Do not write report.html.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare optimizers over matched seeds; the same command again resumes after anything."""
    from kourkoutas.lab import plan as planning
    from kourkoutas.lab import progress, sinks
    from kourkoutas.lab import study as lab

    names = optimizers.split(",") if optimizers is not None else []
    sets, chosen = _with_text(set_, text), planning.parse_seeds(seeds)
    plan = _plan(target, engine, preset, names, chosen, sets, grid, endpoint, log, higher_is_better)
    sinks.check(sink)
    folder = out_ or Path("results") / plan.testbed
    with _resumable(True), progress.showing(err) as observer:
        done = lab.execute(
            plan,
            folder,
            command=_command(),
            workers=workers,
            retry_failed=retry_failed,
            checkpoint_every=checkpoint_every,
            sink=sink,
            observer=observer,
        )
    compared = lab.compared(done)
    page = None if no_report else _report(done)
    if as_json:
        _print_json(lab.as_json(done, compared) | {"report": None if page is None else str(page)})
    else:
        _print_study(done, compared)
        if page is not None:
            out.print(f"Report: {page}", markup=False, highlight=False, soft_wrap=True)
    failed = [stored for stored in done.runs() if stored.result is not None and stored.result.status == "failed"]
    if failed:
        again = _command() if retry_failed else f"{_command()} --retry-failed"
        _say(f"{len(failed)} runs failed; to make them again: {again}")
        raise typer.Exit(FAILED)


@app.command()
def stats(
    table: Annotated[Path, typer.Argument(help="CSV with the columns seed, optimizer, value.")],
    baseline: Annotated[str, typer.Option(help="The optimizer that the others are compared with.")] = "adam95",
    log: Annotated[bool, typer.Option("--log", help="On log10: geometric-mean ratios.")] = False,
    higher_is_better: Annotated[bool, typer.Option("--higher-is-better", help="For accuracies and the like.")] = False,
    threshold: Annotated[
        float | None, typer.Option(help="A run that reaches it is a success: adds rates and McNemar's test.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Paired statistics of anybody's table of results."""
    from kourkoutas.lab import stats as lab
    from kourkoutas.lab import tables

    found = lab.compare(
        tables.read_table(table), baseline=baseline, log=log, higher_is_better=higher_is_better, threshold=threshold
    )
    if as_json:
        _print_json(found.to_dict())
    else:
        out.print(tables.render(found))


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="A results folder.")]) -> None:
    """Write report.html of a results folder again."""
    from kourkoutas.lab.store import Study

    page = _report(Study.open(folder))
    out.print(str(page), markup=False, highlight=False, soft_wrap=True)


@app.command()
def data(
    name: Annotated[str, typer.Argument(help="enwik8: its first 30 MB, checked.")],
    to: Annotated[Path | None, typer.Option(help="Folder. [default: the cache]", show_default=False)] = None,
    url: Annotated[str | None, typer.Option(help="Another address of enwik8.zip.", show_default=False)] = None,
) -> None:
    """Fetch the text of char-lm; then `--text enwik8`, or the path that is printed."""
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    from kourkoutas.lab import corpus
    from kourkoutas.lab.spec import unknown

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

    benchmark.main(context.args)


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
    shown = _table("testbed", "what", "optimizers")
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
    machine = f"{found['processor'] or found['machine']}, {found['cores']} cores, {found['memory_gib']} GiB"
    for line in (f"kbeta {found['kbeta']}, Python {found['python']}, {found['platform']}", machine):
        out.print(line, markup=False, highlight=False, soft_wrap=True)
    shown = _table("framework", "version", "devices", "threads", "front ends")
    for name, one in found["frameworks"].items():
        if "error" in one:
            shown.add_row(name, one["version"] or "-", one["error"], "", "")
            continue
        fronts = ", ".join(f"{front} {state}" for front, state in one["front_ends"].items())
        shown.add_row(name, one["version"], ", ".join(one["devices"]), str(one.get("threads", "")), fronts)
    out.print(shown)
    kernels = "; ".join(f"{name} {state or 'not in use'}" for name, state in found["kernels"].items())
    out.print(f"C kernels: {kernels}", markup=False, highlight=False, soft_wrap=True)
    if route := found["frameworks"]["torch"].get("route"):
        out.print(f"torch, a default step: {route}", markup=False, highlight=False, soft_wrap=True)
    for title in ("laboratory", "optional"):
        packages = ", ".join(f"{name} {version or 'not installed'}" for name, version in found[title].items())
        out.print(f"{title}: {packages}", markup=False, highlight=False, soft_wrap=True)


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
) -> Plan:
    from kourkoutas.lab import plan as planning

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
        )
    for name, given in (("--endpoint", endpoint), ("--log", log), ("--higher-is-better", higher_is_better)):
        if given:
            raise ValueError(f"{name} is for your own functions; a testbed says what it is judged by: leave it out")
    return planning.plan_testbed(
        target,
        preset=preset or "smoke",
        engine=engine or "torch",
        optimizers=optimizers,
        seeds=seeds,
        options=options,
        grids=grids,
    )


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


def _say(text: str) -> None:
    err.print(text, markup=False, highlight=False, soft_wrap=True)


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1, allow_nan=False) + "\n")


def _table(*columns: str) -> Table:
    from rich import box

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=number == 0)
    return table


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
    from kourkoutas.lab.progress import outcome

    spec = plan.specs()[0]
    shown = _table("metric", "value")
    for name, value in result.metrics.items():
        shown.add_row(name, f"{value:.6g}")
    title = f"{spec.testbed} {spec.optimizer} seed {spec.seed}: {outcome(result)} ({result.seconds:.1f} s)"
    out.print(title, markup=False, highlight=False, soft_wrap=True)
    if result.metrics:
        out.print(shown)


def _print_study(done: Study, compared: dict[str, Comparison]) -> None:
    from rich.markup import escape  # a label may hold brackets: kbeta[alpha=0.9]

    from kourkoutas.lab import study, tables
    from kourkoutas.lab.progress import outcome

    runs = done.runs()
    rows = study.summary(done)
    ends = ["ok", "diverged", "failed", *(["unfinished"] if any(row["unfinished"] for row in rows) else [])]
    counts = _table("optimizer", "runs", *ends, "median", "mean")
    for arm in rows:
        numbers = [str(arm[key]) for key in ("runs", *ends)]
        counts.add_row(escape(arm["optimizer"]), *numbers, tables.show(arm["median"]), tables.show(arm["mean"]))
    out.print(counts)
    for stored in runs:
        if stored.result is not None and stored.result.status == "failed":
            what = f"{stored.spec.optimizer} seed {stored.spec.seed}: {outcome(stored.result)}"
            out.print(f"{what} ({stored.folder / 'result.json'})", markup=False, highlight=False, soft_wrap=True)
    for title, comparison in compared.items():
        out.print(f"\nEndpoint: {title}", style="bold", markup=False, highlight=False)
        out.print(tables.render(comparison))


def _report(done: Study) -> Path:
    from kourkoutas.lab import report as lab

    return lab.build(done)


def main() -> None:
    """Run the command line; an error is one line on standard error and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except KeyboardInterrupt:
        _say("Stopped.")
        code = 128 + signal.SIGINT
    except (typer.Abort, EOFError):
        code = FAILED
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error of the parser
            message = error.format_message()
        elif isinstance(error, ValueError | TypeError | ImportError | OSError) and "KBETA_TRACEBACK" not in os.environ:
            message = str(error)
        else:
            raise
        _say(f"kbeta: {' '.join(message.split())}")
        code = BAD_INPUT
    sys.exit(code)


if __name__ == "__main__":
    main()
