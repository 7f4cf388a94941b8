"""The command itself: name, exit codes, and what it prints: results on standard output, words on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from typer.core import TyperCommand, TyperGroup

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


def _without_type(params: list[Any]) -> list[Any]:
    """The same options; a flag takes no value, so that the help names no type for it."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


class Command(TyperCommand):
    """A command whose help shows `--json`, and not `--json <bool>`."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_type(super().get_params(ctx))


class Commands(TyperGroup):
    """The same for `kbeta --help`."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_type(super().get_params(ctx))


class App(typer.Typer):
    """A typer whose commands are `Command`s."""

    def command(self, *names: Any, **more: Any) -> Callable[[Decorated], Decorated]:
        return super().command(*names, **{"cls": Command, **more})


app = App(
    name="kbeta",
    cls=Commands,
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
