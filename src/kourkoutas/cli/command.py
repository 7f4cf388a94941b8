"""The command itself: name, exit codes, and what it prints: results on standard output, words on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.console import Console

app = typer.Typer(
    name="kbeta",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class ForPeople(Console):
    """Standard error. If nobody reads it any more, the command goes on and answers on standard output.

    NOTE: rich would end the command there, and send standard output nowhere.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True


out = Console(soft_wrap=False)
err = ForPeople(stderr=True)

FAILED, BAD_INPUT = 1, 2


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


def say(text: str) -> None:
    err.print(text, markup=False, highlight=False, soft_wrap=True)


def answer(text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1, allow_nan=False) + "\n")


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[str] = ()) -> None:
    from kourkoutas.lab.showing.fitting import Fitting

    out.print(Fitting("", head, rows, words))
