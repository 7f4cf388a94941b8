"""Arguments and options that several commands have, and how a shell completes them.

NOTE: completion and help must answer at once, so that names are looked up inside functions.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kourkoutas.lab.specs.study_options import DEFAULTS, OUTPUT, RUNS, WORDS, StudyOptions, Words

# Options by the panel of `--help` that they stand in.
of_runs = partial(typer.Option, rich_help_panel=RUNS)
of_output = partial(typer.Option, rich_help_panel=OUTPUT)


def _names_of(what: str) -> Iterable[str]:
    from kourkoutas.lab import engines, testbeds
    from kourkoutas.lab.optimizers import recipes

    return {
        "testbed": testbeds.every(),
        "engine": engines.NAMES,
        "preset": testbeds.PRESETS,
        "optimizer": recipes.LABELS,
    }[what]


def completing(what: str) -> Callable[[str], list[str]]:
    """Complete a name, or the last one of a list with commas."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [before + comma + name for name in _names_of(what) if name.startswith(last)]

    return complete


Target = Annotated[
    str,
    typer.Argument(
        help="A testbed (see `kbeta testbeds`), or your own function as FILE.py:FUNC.",
        autocompletion=completing("testbed"),
    ),
]
Text = Annotated[
    str | None, of_runs("--text", metavar="FILE", help="The text of char-lm: a UTF-8 file (.gz too), or enwik8.")
]
AsJson = Annotated[bool, of_output("--json", help="Print JSON, and nothing else, on standard output.")]
Folder = Annotated[Path, typer.Argument(help="A results folder.")]
Asked = Annotated[
    list[str] | None,
    of_output(
        "--endpoint",
        metavar="METRIC[:best|tail|until=VALUE][:max][:log]",
        help="Also judge by a logged metric: val_acc:max, val_loss:best; or by the steps until it is reached: "
        "val_loss:until=0.5, in seconds val_loss:seconds_until=0.5. Marked as secondary.",
    ),
]


def with_study_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command of a `StudyOptions` and options of its own, as the parser wants it: with an option for each field."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    target = inspect.Parameter("target", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Target)
    asked = [option_of(name, words) for name, words in WORDS.items()]

    @functools.wraps(command)
    def parsed(target: str, **given: Any) -> None:
        values = {name: given.pop(name) for name in WORDS}
        told = {name: value for name, value in values.items() if value is not None}
        command(StudyOptions(target, **told), **given)

    parameters = [target, *asked, *own]
    parsed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    parsed.__annotations__ = {one.name: one.annotation for one in parameters}
    return parsed


def option_of(name: str, words: Words) -> inspect.Parameter:
    """An option of the command line, named as the argument is unless it has a flag of its own."""
    told = typer.Option(
        words.flag or f"--{name.replace('_', '-')}",
        help=words.help,
        rich_help_panel=words.panel,
        metavar=words.metavar,
        show_default=words.show_default or True,
        min=words.minimum,
        autocompletion=completing(words.completes) if words.completes else None,
    )
    default = None if DEFAULTS[name] == () else DEFAULTS[name]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, default=default, annotation=Annotated[words.kind, told])
