"""The command itself: its name, where it prints, its exit codes."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    name="kbeta",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console(soft_wrap=False)
err = Console(stderr=True)

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
