"""The commands that make runs."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from kourkoutas.cli.app import FAILED, app, err, out
from kourkoutas.cli.arguments import (
    Aimed,
    AsJson,
    EndpointName,
    Engine,
    Every,
    Preset,
    Set,
    Target,
    Text,
    _optimizer,
    _optimizer_list,
)
from kourkoutas.cli.calling import aim_of, called_as, make_tuning, with_text
from kourkoutas.cli.printing import print_json, print_run, say


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
        typer.Option("--out", help="Keep the run in this results folder. [default: not kept]", show_default=False),
    ] = None,
    endpoint: EndpointName = None,
    checkpoint_every: Every = None,
    as_json: AsJson = False,
) -> None:
    """Make one run and print its result: a study of one optimizer and one seed."""
    from kourkoutas.lab import api
    from kourkoutas.lab.planning import plan as planning
    from kourkoutas.lab.showing import progress

    plan = planning.plan_study(
        target,
        optimizers=[optimizer],
        seeds=[seed],
        options=planning.parse_assignments("--set", with_text(set_, text)),
        preset=preset,
        engine=engine,
        endpoint=endpoint,
    )
    (spec,) = plan.specs()
    with (
        tempfile.TemporaryDirectory(prefix="kbeta-") as scratch,
        resumable(out_ is not None),
        progress.showing(err, plan) as observer,
    ):
        done = api.execute(
            plan,
            out_ or Path(scratch) / "run",
            command=called_as(),
            workers=1,
            retry_failed=True,
            checkpoint_every=checkpoint_every,
            observer=observer,
        )
    (result,) = [run.result for run in done.runs if run.spec == spec and run.result is not None]
    if as_json:
        print_json({"id": spec.id, **json.loads(result.model_dump_json())})
    else:
        print_run(plan, result)
    if result.status == "failed":
        err.print(result.error, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(FAILED)


@app.command()
def study(
    target: Target,
    seeds: Annotated[str, typer.Option(help="Numbers and ranges: 0-9 or 0,3,7.")] = "0-9",
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
        Path | None,
        typer.Option("--out", help="Results folder. [default: results/TESTBED or /FILE]", show_default=False),
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
        bool, typer.Option("--watch", help="Write the report again and again while the study goes on.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare optimizers over matched seeds; the same command again resumes after anything."""
    from kourkoutas.lab import api
    from kourkoutas.lab.planning import plan as planning
    from kourkoutas.lab.running.study import choose_executor
    from kourkoutas.lab.showing import progress

    chosen, aim = planning.parse_seeds(seeds), aim_of(target_)
    plan = planning.plan_study(
        target,
        optimizers=optimizers.split(",") if optimizers is not None else [],
        seeds=chosen,
        options=planning.parse_assignments("--set", with_text(set_, text)),
        grids=planning.parse_assignments("--grid", grid or []),
        preset=preset,
        engine=engine,
        endpoint=endpoint,
        log=log,
        higher_is_better=higher_is_better,
        tuning=make_tuning(tune, trials, tune_seeds, tune_budget, chosen),
    )
    start, attempts = choose_executor(
        ray=ray,
        workers=workers,
        cpus_per_run=cpus_per_run,
        gpus_per_run=gpus_per_run,
        storage=storage,
        retries=retries,
        timeout=timeout,
        memory_per_run=memory,
    )
    for line in plan.doubts():
        say(line)
    folder = out_ or api.results_folder(plan)
    with (
        resumable(True),
        contextlib.redirect_stdout(sys.stderr),  # where Ray tells of nodes it has lost
        watching(folder) if watched else contextlib.nullcontext(),
        progress.showing(err, plan) as observer,
    ):
        done = api.execute(
            plan,
            folder,
            command=called_as(),
            start=start,
            retries=attempts,
            retry_failed=retry_failed,
            checkpoint_every=checkpoint_every,
            observer=observer if aim is None else progress.Aiming(observer, aim),
        )
    from kourkoutas.lab.judging.analysis import analyse  # scipy takes a second, which the workers need not wait for
    from kourkoutas.lab.judging.analysis import as_json as to_json
    from kourkoutas.lab.showing import console, report

    judged = analyse(done, target=aim)
    page = None if no_report else done.path / "report.html"
    # The answer comes first: whatever happens to the page, it has been printed.
    if as_json:
        print_json(to_json(judged) | {"report": None if page is None else str(page)})
    else:
        out.print(console.Answer(judged, page))
    if page is not None:
        report.write(judged, page)
    every = [*judged.snapshot.tuning_runs, *judged.snapshot.runs]
    if failed := sum(stored.result is not None and stored.result.status == "failed" for stored in every):
        again = called_as() if retry_failed else f"{called_as()} --retry-failed"
        say(f"{failed} run{'' if failed == 1 else 's'} failed; to try again: {again}")
        raise typer.Exit(FAILED)


@contextlib.contextmanager
def resumable(kept: bool) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        if kept:
            say(f"Stopped; finished runs are kept. To resume: {called_as()}")
        else:
            say("Stopped.")
        raise typer.Exit(128 + signal.SIGINT) from None


@contextlib.contextmanager
def watching(folder: Path) -> Iterator[None]:
    from kourkoutas.lab.showing import watch as lab

    with lab.following(folder) as page:
        say(f"{page} shows the study as it goes on.")
        yield
