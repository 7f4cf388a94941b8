"""The commands that read a results folder."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kourkoutas.cli.arguments import AsJson, Asked, Folder, of_output
from kourkoutas.cli.command import answer, app, out, print_json, print_table, say

if TYPE_CHECKING:
    from kourkoutas.lab.judging.analysis import Analysis
    from kourkoutas.lab.results.snapshot import Snapshot


@app.command()
def stats(
    source: Annotated[Path, typer.Argument(help="A results folder, or a CSV with the columns seed, optimizer, value.")],
    baseline: Annotated[
        str | None,
        typer.Option(
            help="The optimizer that the others are compared with.", show_default="adam95; of a folder, as planned"
        ),
    ] = None,
    endpoint: Asked = None,
    log: Annotated[bool, typer.Option("--log", help="On log10: geometric-mean ratios.")] = False,
    higher_is_better: Annotated[bool, typer.Option("--higher-is-better", help="For accuracies and the like.")] = False,
    margin: Annotated[
        str | None,
        typer.Option(metavar="PERCENT", help="Differences within it do not matter: 1%.", show_default="as declared"),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="A run that reaches it is a success: adds rates and McNemar's test.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Paired statistics of a results folder, or of anybody's table of results."""
    from kourkoutas.lab.planning.plan import parse_margin

    within = None if margin is None else parse_margin(margin)
    if (source / "study.json").exists():
        for_tables = {"--log": log, "--higher-is-better": higher_is_better, "--threshold": threshold is not None}
        for name, given in for_tables.items():
            if given:
                raise ValueError(f"{name} is for a table; of a folder write --endpoint METRIC:max:log, for example")
        stats_of_folder(source, endpoint, as_json=as_json, baseline=baseline, margin=within)
        return
    if endpoint:
        raise ValueError(f"--endpoint {endpoint[0]} is for a results folder; {source} is none")
    if threshold is not None and not math.isfinite(threshold):
        raise ValueError(f"--threshold must be a finite number, for example 0.5; got {threshold}")
    stats_of_table(
        source,
        as_json=as_json,
        baseline=baseline or "adam95",
        log=log,
        higher_is_better=higher_is_better,
        threshold=threshold,
        margin=within,
    )


def stats_of_folder(folder: Path, endpoints: Sequence[str] | None, *, as_json: bool, **how: Any) -> None:
    from kourkoutas.lab.judging.values import to_json
    from kourkoutas.lab.showing import console

    judged = analyse_folder(folder, endpoints, **how)
    if as_json:
        print_json(to_json(judged))
    else:
        out.print(console.statistics(judged))


def stats_of_table(table: Path, *, as_json: bool, **how: Any) -> None:
    from kourkoutas.lab.judging import comparing, table_file
    from kourkoutas.lab.judging.values import to_json
    from kourkoutas.lab.showing import console

    found = comparing.compare(table_file.read_table(table), **how)
    if as_json:
        print_json(to_json(found))
    else:
        out.print(console.of_table(found))


@app.command()
def export(
    folder: Folder,
    to: Annotated[
        Path | None, typer.Option(help="A name ending in .csv or .parquet.", show_default="OUT/runs.csv")
    ] = None,
    curves: Annotated[bool, typer.Option("--curves", help="One row per recorded point instead of per run.")] = False,
) -> None:
    """Write the runs of a results folder, or their curves, as one CSV or Parquet table."""
    from kourkoutas.lab.results.export import write
    from kourkoutas.lab.results.snapshot import Snapshot

    to = to or folder / ("curves.csv" if curves else "runs.csv")
    count = write(Snapshot.read(folder), to, "curves" if curves else "runs")
    answer(f"{to}: {count} rows")


@app.command()
def report(
    folder: Annotated[
        Path | None, typer.Argument(help="A results folder.", show_default="list those in results/")
    ] = None,
    endpoint: Asked = None,
    follow: Annotated[
        bool,
        of_output("--follow", help="Write it again and again while the study runs, as a page that reloads itself."),
    ] = False,
) -> None:
    """Write report.html of a results folder again, and say how far the study is."""
    if folder is None:
        list_studies()
        return
    from kourkoutas.lab.showing import report as page

    analysis = analyse_folder(folder, endpoint, resamples=0)
    answer(str(page.write(analysis, live=follow and not analysis.finished)))
    say_how_far(analysis.snapshot)
    if follow and not analysis.finished:
        say("The page follows the study; Ctrl-C ends this, and not the study.")
        with contextlib.suppress(KeyboardInterrupt):
            page.follow(folder, endpoints=endpoint or ())


def list_studies() -> None:
    """One line for every study in results/."""
    from kourkoutas.lab.results.snapshot import Snapshot
    from kourkoutas.lab.showing.status import status_of

    found = {
        path.parent: status_of(Snapshot.read(path.parent)) for path in sorted(Path("results").glob("*/study.json"))
    }
    if not found:
        answer("No studies in results/. To make one: kbeta study rare_trigger")
        return
    rows = [(str(path), f"{one.done}/{one.count()}", one.state) for path, one in found.items()]
    print_table(["study", "runs", "state"], rows, words=["state"])


def say_how_far(snapshot: Snapshot) -> None:
    """Of a study that has not ended: how many runs each optimizer has in which state, and the time left."""
    from kourkoutas.lab.optimizers.looks import name_of
    from kourkoutas.lab.showing.status import STATES, status_of

    found = status_of(snapshot)
    if found.state == "finished":
        return
    answer(str(found))
    rows = []
    for arm, counts in found.arms.items():
        rows.append((name_of(arm), *(str(counts[state]) for state in STATES)))
    print_table(["optimizer", *STATES], rows)


def analyse_folder(folder: Path, endpoints: Sequence[str] | None = None, **more: Any) -> Analysis:
    from kourkoutas.lab.judging.analysis import analyse
    from kourkoutas.lab.results.snapshot import Snapshot

    return analyse(Snapshot.read(folder), endpoints=endpoints or (), **more)
