"""Arguments and options that several commands have, and how a shell completes them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer


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
    from kourkoutas.lab.specs import optimizers

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
    typer.Option(
        "--endpoint",
        help="The logged metric that decides, instead of what your function returns or a testbed's first endpoint.",
    ),
]
Folder = Annotated[Path, typer.Argument(help="A results folder.")]
Asked = Annotated[
    list[str] | None,
    typer.Option(
        "--endpoint",
        metavar="METRIC[:best|tail][:max][:log]",
        help="Also judge by a logged metric: val_acc:max, val_loss:best. Marked as secondary.",
    ),
]
Aimed = Annotated[
    str | None,
    typer.Option("--target", metavar="METRIC<=VALUE", help="Also compare steps to a target: 'val_loss<=0.5'."),
]
Every = Annotated[
    int | None,
    typer.Option(
        "--checkpoint-every",
        min=0,
        help="Steps between checkpoints of a testbed run; 0 for none. [default: one a minute]",
    ),
]
