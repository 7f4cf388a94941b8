"""The commands about the optimizer and this machine, which need no laboratory: benchmark, scripts, doctor."""

from __future__ import annotations

from typing import Annotated

import typer

from kourkoutas.cli.app import app
from kourkoutas.cli.arguments import AsJson


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def bench(context: typer.Context) -> None:
    """Measure step time and memory against each framework's Adam; `kbeta bench --help` lists its options."""
    from kourkoutas import bench as benchmark

    raise typer.Exit(benchmark.main(context.args))


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def script(
    file: Annotated[str, typer.Argument(help="A Python script that imports kbeta.optim, as the paper's listings do.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="The script's own.")] = None,
) -> None:
    """Run a script of the paper as `python FILE` would, with kbeta.optim being kourkoutas.paper."""
    from kourkoutas import paper

    paper.script(file, arguments or ())


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """Show what is installed and works here: frameworks, devices, threads, front ends, C kernels."""
    from kourkoutas.lab import doctor as lab

    lab.main(["--json"] if as_json else [])
