"""The commands that make runs."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kourkoutas.cli.arguments import (
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
    of_runs,
    with_study_options,
)
from kourkoutas.cli.command import FAILED, answer, app, err, out, print_json, print_table, say
from kourkoutas.lab.specs.study_options import StudyOptions

if TYPE_CHECKING:
    from kourkoutas.lab.results.snapshot import Snapshot

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
    from kourkoutas.lab.optimizers.looks import name_of
    from kourkoutas.lab.planning.plan import parse_assignments, plan_study
    from kourkoutas.lab.showing import progress
    from kourkoutas.lab.showing.status import outcome

    plan = plan_study(
        target,
        optimizers=[optimizer],
        seeds=[seed],
        options=parse_assignments("settings", with_text(set_, text)),
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
        answer(f"{spec.testbed} {name_of(optimizer)} seed {seed}: {outcome(result)} ({result.seconds:.1f} s)")
        if result.metrics:
            print_table(["metric", "value"], [(name, f"{value:.6g}") for name, value in result.metrics.items()])
    if result.status == "failed":
        say(result.error or "")
        raise typer.Exit(FAILED)


@app.command(epilog=EXAMPLE)
@with_study_options
def study(
    options: StudyOptions,
    text: Text = None,
    no_report: Annotated[bool, of_output("--no-report", help="Do not write report.html.")] = False,
    as_json: AsJson = False,
) -> None:
    """Compare optimizers over matched seeds; the same command again resumes after anything."""
    from kourkoutas.lab import api

    options = replace(options, settings=with_text(options.settings, text))
    with (
        resumable(True),
        contextlib.redirect_stdout(sys.stderr),  # where Ray tells of nodes it has lost
    ):
        done = api.conduct(options, command=called_as(), console=err, say=say)
    failed = show_answer(done, page=not no_report, as_json=as_json)
    if failed:
        again = called_as() if options.retry_failed else f"{called_as()} --retry-failed"
        say(f"{failed} run{'' if failed == 1 else 's'} failed; to try again: {again}")
        raise typer.Exit(FAILED)


def show_answer(done: Snapshot, *, page: bool, as_json: bool) -> int:
    """Print what a study shows, and write its page; the number of runs that failed.

    The answer comes first: whatever happens to the page, it has been printed.
    """
    from kourkoutas.lab.judging import analysis  # scipy takes a second, which the workers need not wait for
    from kourkoutas.lab.showing import console, report

    judged = analysis.analyse(done)
    file = done.path / "report.html" if page else None
    if as_json:
        print_json(analysis.as_json(judged) | {"report": None if file is None else str(file)})
    else:
        out.print(console.Answer(judged, file))
    if page:
        report.write(judged)
    every = [*done.tuning_runs, *done.runs]
    return sum(stored.result is not None and stored.result.status == "failed" for stored in every)


def with_text(sets: Any, text: str | None) -> list[str]:
    """`--set` with the text of `--text`, named by its content too, so that a changed file is another configuration."""
    if text is None:
        return list(sets or ())
    from kourkoutas.lab.testbeds.char_lm import corpus

    return [*(sets or ()), *(f"{name}={value}" for name, value in corpus.pin(text).items())]


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
