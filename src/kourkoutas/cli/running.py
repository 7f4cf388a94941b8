"""The commands that make runs."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
    completing,
    of_output,
    of_place,
    of_runs,
    of_tuning,
)
from kourkoutas.cli.command import FAILED, answer, app, err, out, print_json, print_table, say

if TYPE_CHECKING:
    from kourkoutas.lab.specs.search_space import SearchSpace

EXAMPLE = (
    "Example: kbeta study rare_trigger --engine jax --tune lr=1e-2:1\n\n"
    "It tunes every optimizer on other seeds, then compares the best of each on ten seeds."
)


@app.command()
def run(
    target: Target,
    optimizer: Annotated[str, of_runs(help="The optimizer.", autocompletion=completing("optimizer"))] = "kbeta",
    seed: Annotated[int, of_runs(min=0, help="Of data, init and order.")] = 0,
    engine: Engine = None,
    preset: Preset = None,
    set_: Set = None,
    text: Text = None,
    out_: Annotated[
        Path | None, of_output("--out", help="Keep the run in this results folder.", show_default="not kept")
    ] = None,
    endpoint: EndpointName = None,
    checkpoint_every: Every = None,
    as_json: AsJson = False,
) -> None:
    """Make one run and print its result: a study of one optimizer and one seed."""
    from kourkoutas.lab import api
    from kourkoutas.lab.planning import plan as planning
    from kourkoutas.lab.showing import progress
    from kourkoutas.lab.showing.status import outcome
    from kourkoutas.lab.specs.looks import label

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
        answer(f"{spec.testbed} {label(optimizer)} seed {seed}: {outcome(result)} ({result.seconds:.1f} s)")
        if result.metrics:
            print_table(["metric", "value"], [(name, f"{value:.6g}") for name, value in result.metrics.items()])
    if result.status == "failed":
        say(result.error or "")
        raise typer.Exit(FAILED)


@app.command(epilog=EXAMPLE)
def study(
    target: Target,
    seeds: Annotated[str, of_runs(help="Numbers and ranges: 0-9 or 0,3,7.")] = "0-9",
    optimizers: Annotated[
        str | None,
        of_runs(
            help="Comma-separated; the first is compared with the others.",
            show_default="the testbed's",
            autocompletion=completing("optimizer"),
        ),
    ] = None,
    engine: Engine = None,
    preset: Preset = None,
    set_: Set = None,
    text: Text = None,
    grid: Annotated[
        list[str] | None,
        of_runs(metavar="NAME=V1,V2", help="One optimizer per value: kbeta.alpha=0.85,0.9 or a setting, lr=0.1,0.01."),
    ] = None,
    endpoint: EndpointName = None,
    log: Annotated[bool, of_runs("--log", help="Your own function: compare ratios, on log10.")] = False,
    higher_is_better: Annotated[
        bool, of_runs("--higher-is-better", help="Your own function: for accuracies and the like.")
    ] = False,
    margin: Annotated[
        str | None,
        of_runs(
            metavar="PERCENT", help="Differences within it do not matter: 1%. What lies within it is called equal."
        ),
    ] = None,
    count_failed: Annotated[
        bool,
        of_runs("--count-failed", help="Rank a failed run as the worst, for example with --timeout as a budget."),
    ] = False,
    tune: Annotated[
        list[str] | None,
        of_tuning(
            metavar="NAME=LOW:HIGH",
            help="Tune every optimizer alike on other seeds, then compare the best: lr=1e-4:1e-1. Several: spread out.",
        ),
    ] = None,
    trials: Annotated[int | None, of_tuning(help="Values tried for each optimizer.", show_default="8")] = None,
    tune_seeds: Annotated[
        str | None, of_tuning(help="Seeds of the tuning, none of --seeds.", show_default="100-102")
    ] = None,
    tune_budget: Annotated[
        int | None, of_tuning(help="How often to widen the range when a best value is at its edge.", show_default="2")
    ] = None,
    workers: Annotated[
        int | None, of_place(min=1, help="Processes; they share the cores.", show_default="one per core")
    ] = None,
    timeout: Annotated[
        float | None, of_place(metavar="SECONDS", help="End a run after this time; it has failed (--count-failed).")
    ] = None,
    memory: Annotated[
        float | None, of_place(metavar="GIB", help="End a run that holds more memory; it has failed.")
    ] = None,
    checkpoint_every: Every = None,
    retries: Annotated[
        int | None, of_place(help="How often to repeat a run whose worker was lost.", show_default="0; with --ray 2")
    ] = None,
    retry_failed: Annotated[bool, of_place("--retry-failed", help="Make failed runs again.")] = False,
    ray: Annotated[
        str | None,
        of_place(
            metavar="[ADDRESS]",
            help="Make the runs on a Ray cluster: HOST:PORT, or auto for the one that runs here; without ADDRESS "
            "$RAY_ADDRESS, else a cluster of this machine.",
        ),
    ] = None,
    cpus_per_run: Annotated[float | None, of_place(help="Of a node of --ray.", show_default="1")] = None,
    gpus_per_run: Annotated[float | None, of_place(help="Of a node of --ray.", show_default="0")] = None,
    storage: Annotated[
        str | None,
        of_place(
            metavar="PLACE",
            help="A folder that all nodes of --ray share, or an fsspec address: runs of a lost node go on from there.",
        ),
    ] = None,
    out_: Annotated[
        Path | None, of_output("--out", help="Results folder.", show_default="results/TESTBED or results/FILE")
    ] = None,
    target_: Aimed = None,
    no_report: Annotated[bool, of_output("--no-report", help="Do not write report.html.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare optimizers over matched seeds; the same command again resumes after anything."""
    from kourkoutas.lab import api
    from kourkoutas.lab.planning import plan as planning
    from kourkoutas.lab.running.executor import choose_executor
    from kourkoutas.lab.showing import progress

    chosen, aim = planning.parse_seeds(seeds), None
    if target_ is not None:
        from kourkoutas.lab.judging import targets

        aim = targets.parse_target(target_)
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
        margin=margin,
        count_failed=count_failed,
    )
    executor, attempts = choose_executor(
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
        contextlib.closing(executor),
        progress.showing(err, plan, aim) as observer,
    ):
        done = api.execute(
            plan,
            folder,
            command=called_as(),
            executor=executor,
            retries=attempts,
            retry_failed=retry_failed,
            checkpoint_every=checkpoint_every,
            observer=observer,
        )
    from kourkoutas.lab.judging import analysis  # scipy takes a second, which the workers need not wait for
    from kourkoutas.lab.showing import console, report

    judged = analysis.analyse(done, target=target_)
    page = None if no_report else done.path / "report.html"
    # The answer comes first: whatever happens to the page, it has been printed.
    if as_json:
        print_json(analysis.as_json(judged) | {"report": None if page is None else str(page)})
    else:
        out.print(console.Answer(judged, page))
    if page is not None:
        report.write(judged)
    every = [*judged.snapshot.tuning_runs, *judged.snapshot.runs]
    if failed := sum(stored.result is not None and stored.result.status == "failed" for stored in every):
        again = called_as() if retry_failed else f"{called_as()} --retry-failed"
        say(f"{failed} run{'' if failed == 1 else 's'} failed; to try again: {again}")
        raise typer.Exit(FAILED)


def with_text(sets: list[str] | None, text: str | None) -> list[str]:
    """`--set` with the text of `--text`, named by its content too, so that a changed file is another configuration."""
    if text is None:
        return sets or []
    from kourkoutas.lab import corpus

    return [*(sets or []), *(f"{name}={value}" for name, value in corpus.pin(text).items())]


def make_tuning(
    tune: list[str] | None, trials: int | None, tune_seeds: str | None, budget: int | None, test_seeds: Sequence[int]
) -> SearchSpace | None:
    from kourkoutas.lab.planning import plan as planning
    from kourkoutas.lab.specs import search_space

    if not tune:
        for name, given in (("--trials", trials), ("--tune-seeds", tune_seeds), ("--tune-budget", budget)):
            if given is not None:
                raise ValueError(f"{name} {given} needs something to tune: add --tune lr=1e-4:1e-1, for example")
        return None
    return search_space.search_space(
        search_space.parse_tune(tune),
        trials=8 if trials is None else trials,
        seeds=planning.parse_seeds(tune_seeds or "100-102", "--tune-seeds"),
        test_seeds=test_seeds,
        budget=2 if budget is None else budget,
    )


def called_as() -> str:
    """This call, quoted for a shell."""
    name = Path(sys.argv[0]).name
    program = ["kbeta"] if name == "kbeta" else ["python", "-m", "kourkoutas"]
    return shlex.join([*program, *sys.argv[1:]])


@contextlib.contextmanager
def resumable(kept: bool) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        say(f"Stopped; finished runs are kept. To resume: {called_as()}" if kept else "Stopped.")
        raise typer.Exit(128 + signal.SIGINT) from None
