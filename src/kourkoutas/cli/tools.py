"""What can be studied, the text that one testbed needs, and commands about the optimizer and this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kourkoutas.cli.arguments import AsJson
from kourkoutas.cli.command import answer, app, err, print_json, print_table


@app.command()
def data(
    name: Annotated[str, typer.Argument(help="enwik8: its first 30 MB, checked.")],
    to: Annotated[Path | None, typer.Option(help="Folder.", show_default="the cache")] = None,
    url: Annotated[str | None, typer.Option(help="Another address of enwik8.zip.")] = None,
) -> None:
    """Fetch the text of char-lm; then `--text enwik8`, or the path that is printed."""
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    from kourkoutas.lab.errors import unknown
    from kourkoutas.lab.machine import cache_folder
    from kourkoutas.lab.testbeds.char_lm import enwik8

    if name != "enwik8":
        raise unknown("data", name, ("enwik8",))
    with Progress(*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn(), console=err) as shown:
        task = shown.add_task("enwik8.zip", total=None)
        path = enwik8.fetch_enwik8(
            to or cache_folder(),
            (url,) if url else enwik8.URLS,
            on_progress=lambda got, total: shown.update(task, completed=got, total=total or None),
        )
    answer(str(path))


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
    from kourkoutas.lab import doctor as lab

    lab.main(["--json"] if as_json else [])
