"""What can be studied, the paper's scripts, and what works on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from kourkoutas.cli.arguments import AsJson
from kourkoutas.cli.command import answer, app, print_json, print_table


@app.command("testbeds")
def list_testbeds(as_json: AsJson = False) -> None:
    """List what can be studied."""
    import dataclasses

    from kourkoutas.lab import testbeds

    every = testbeds.every()
    if as_json:
        print_json(
            {
                name: {
                    "title": bed.title,
                    "endpoints": [dataclasses.asdict(endpoint) for endpoint in bed.endpoints],
                    "optimizers": list(bed.arms),
                    "kbeta": dict(bed.kbeta),
                    "presets": {preset: dataclasses.asdict(settings) for preset, settings in bed.presets.items()},
                }
                for name, bed in every.items()
            }
        )
        return
    rows = [(name, bed.title, ", ".join(bed.arms)) for name, bed in every.items()]
    print_table(["testbed", "what", "optimizers"], rows, words=["what", "optimizers"])
    answer("Endpoints, and the settings of each preset: kbeta testbeds --json")


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
    from kourkoutas.lab.doctor import main

    main(["--json"] if as_json else [])
