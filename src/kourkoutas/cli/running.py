"""The commands that make runs."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kourkoutas.cli.arguments import (
    AsJson,
    Text,
    of_output,
    with_study_options,
)
from kourkoutas.cli.command import FAILED, app, err, out, print_json, say
from kourkoutas.lab.specs.study_options import StudyOptions

if TYPE_CHECKING:
    from kourkoutas.lab.results.snapshot import Snapshot

EXAMPLE = (
    "Example: kbeta study rare_trigger --preset laptop --engine jax --tune lr=1e-3:1e-1\n\n"
    "It tunes every optimizer on other seeds, then compares the best of each on ten seeds."
)


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
        resumable(),
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
    """`--set` with the text of `--text`, which is fetched if need be."""
    if text == "enwik8":
        fetch_enwik8()
    return [*(sets or ()), *([] if text is None else [f"text={text}"])]


def fetch_enwik8() -> None:
    """Fetch the text into the cache, unless it is there."""
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    from kourkoutas.lab.machine import cache_folder
    from kourkoutas.lab.testbeds.char_lm import corpus, enwik8

    if corpus.is_fetched():
        return
    say(f"Fetching enwik8 once, to {cache_folder()}.")
    with Progress(*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn(), console=err) as shown:
        task = shown.add_task("enwik8.zip", total=None)
        enwik8.fetch_enwik8(
            cache_folder(),
            enwik8.URLS,
            on_progress=lambda got, total: shown.update(task, completed=got, total=total or None),
        )


def called_as() -> str:
    """This call, quoted for a shell."""
    name = Path(sys.argv[0]).name
    program = ["kbeta"] if name == "kbeta" else ["python", "-m", "kourkoutas"]
    return shlex.join([*program, *sys.argv[1:]])


@contextlib.contextmanager
def resumable() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        say(f"Stopped; finished runs are kept. To resume: {called_as()}")
        raise typer.Exit(128 + signal.SIGINT) from None
