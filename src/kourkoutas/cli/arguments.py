"""Arguments and options that several commands have, and how a shell completes them.

NOTE: completion and help must answer at once, so that names are looked up inside functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

# Options by the panel of `--help` that they stand in.
of_runs = partial(typer.Option, rich_help_panel="What to run")
of_tuning = partial(typer.Option, rich_help_panel="Tuning")
of_place = partial(typer.Option, rich_help_panel="Where and how it runs")
of_output = partial(typer.Option, rich_help_panel="Output")


def _names_of(what: str) -> Iterable[str]:
    from kourkoutas.lab import engines, testbeds
    from kourkoutas.lab.specs import optimizers

    return {
        "testbed": testbeds.every(),
        "engine": engines.NAMES,
        "preset": testbeds.PRESETS,
        "optimizer": optimizers.LABELS,
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
Engine = Annotated[
    str | None,
    of_runs(
        help="torch, jax or mlx.",
        show_default="torch; your own function brings its framework",
        autocompletion=completing("engine"),
    ),
]
Preset = Annotated[
    str | None,
    of_runs(
        help="smoke (seconds), laptop (minutes) or paper.", show_default="smoke", autocompletion=completing("preset")
    ),
]
Set = Annotated[
    list[str] | None,
    of_runs("--set", metavar="NAME=VALUE", help="A setting (steps=500) or an optimizer's option (kbeta.alpha=0.9)."),
]
Text = Annotated[
    str | None, of_runs("--text", metavar="FILE", help="The text of char-lm: a UTF-8 file (.gz too), or enwik8.")
]
EndpointName = Annotated[
    str | None,
    of_runs(
        "--endpoint",
        metavar="METRIC",
        help="The logged metric that decides.",
        show_default="what your function returns; a testbed's first endpoint",
    ),
]
Every = Annotated[
    int | None,
    of_place(
        "--checkpoint-every",
        min=0,
        help="Steps between checkpoints of a testbed run; 0 for none.",
        show_default="one a minute",
    ),
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
