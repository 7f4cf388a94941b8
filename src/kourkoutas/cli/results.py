"""The commands that read a results folder."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from kourkoutas.cli.app import app, out
from kourkoutas.cli.arguments import Aimed, AsJson, Asked, Folder
from kourkoutas.cli.calling import aim_of, analyse_folder, write_report
from kourkoutas.cli.printing import print_json, print_table


@app.command()
def stats(
    source: Annotated[Path, typer.Argument(help="A results folder, or a CSV with the columns seed, optimizer, value.")],
    baseline: Annotated[
        str | None,
        typer.Option(
            help="The optimizer that the others are compared with. [default: adam95; of a folder, as planned]",
            show_default=False,
        ),
    ] = None,
    endpoint: Asked = None,
    log: Annotated[bool, typer.Option("--log", help="On log10: geometric-mean ratios.")] = False,
    higher_is_better: Annotated[bool, typer.Option("--higher-is-better", help="For accuracies and the like.")] = False,
    threshold: Annotated[
        float | None, typer.Option(help="A run that reaches it is a success: adds rates and McNemar's test.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Paired statistics of a results folder, or of anybody's table of results."""
    from kourkoutas.lab.judging import stats as lab
    from kourkoutas.lab.judging import tables

    if (source / "study.json").exists():
        given = {"--log": log, "--higher-is-better": higher_is_better, "--threshold": threshold is not None}
        for name, asked in given.items():
            if asked:
                raise ValueError(f"{name} is for a table; of a folder write --endpoint METRIC:max:log, for example")
        judged = analyse_folder(source, endpoint, baseline)
        if as_json:
            print_json(judged.to_dict())
        else:
            for line in judged.fairness:
                out.print(line, markup=False, highlight=False)
            out.print(tables.render_arms(judged))
            out.print(tables.render_analysis(judged))
        return
    if endpoint:
        raise ValueError(f"--endpoint {endpoint[0]} is for a results folder; {source} is none")
    if threshold is not None and not math.isfinite(threshold):
        raise ValueError(f"--threshold must be a finite number, for example 0.5; got {threshold}")
    found = lab.compare(
        tables.read_table(source),
        baseline=baseline or "adam95",
        log=log,
        higher_is_better=higher_is_better,
        threshold=threshold,
    )
    if as_json:
        print_json(found.to_dict())
    else:
        out.print(tables.render(found))


@app.command()
def power(
    folder: Folder,
    difference: Annotated[
        list[str] | None,
        typer.Option(help="A difference to find: 5%, or a size in the endpoint's units. [default: 1%, 2%, 5%, 10%]"),
    ] = None,
    probability: Annotated[float, typer.Option("--power", help="The probability of finding it.")] = 0.8,
    endpoint: Annotated[str | None, typer.Option(help="A logged metric, as in `kbeta stats`.")] = None,
    as_json: AsJson = False,
) -> None:
    """How many seeds a difference needs, and what the seeds of a study could have shown."""
    import dataclasses

    from kourkoutas.lab.judging import confirming, tables, verdicts
    from kourkoutas.lab.judging import power as lab

    if not 0 < probability < 1:
        raise ValueError(f"--power must be between 0 and 1, for example 0.8; got {probability}")
    judged = analyse_folder(folder, [endpoint] if endpoint else None).endpoints[-1 if endpoint else 0]
    scale: dict[str, Any] = {"log": judged.log, "higher_is_better": judged.maximize, "power": probability}
    texts = difference or ("1%", "2%", "5%", "10%")
    parted = [lab.has_percentages(finding.contrast, judged.log) for finding in judged.findings]
    rows: list[tuple[Any, Any, list[Any]]] = []
    lucky = False
    for finding, percents in zip(judged.findings, parted, strict=True):
        c = finding.contrast
        if c.test == confirming.TEST:  # the t test, whose power this is, does not decide alone
            lucky = True
            rows.append((finding, None, [None for _ in texts]))
            continue
        # a contrast without percentages has an empty cell, unless none has any and they were asked for
        skip = not percents and (difference is None or any(parted))
        found = [None if skip and text.strip().endswith("%") else lab.needed(c, text, **scale) for text in texts]
        rows.append((finding, lab.detectable(c, **scale), found))
    if as_json:
        print_json(
            [
                {
                    "treatment": finding.treatment,
                    "baseline": finding.baseline,
                    "detectable": None if shown is None else dataclasses.asdict(shown),
                    "needed": [dataclasses.asdict(one) for one in needed if one is not None],
                }
                for finding, shown, needed in rows
            ]
        )
        return
    out.print(tables.render_power(judged.title, rows, texts, probability))
    if lucky:
        out.print(f"Where the luck of the tuning counts, these numbers are not known. {verdicts.TUNED}")


@app.command()
def compare(
    first: Folder,
    second: Folder,
    endpoint: Annotated[str | None, typer.Option(help="A logged metric of both, as in `kbeta stats`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two studies arm by arm, paired by the seeds that both have."""
    from kourkoutas.lab.judging import across, tables
    from kourkoutas.lab.results.store import Study

    judged = across.compare_studies(Study.open(first), Study.open(second), endpoint)
    if as_json:
        print_json(judged.to_dict())
    else:
        for finding in judged.findings if judged.primary else ():
            out.print(f"{finding.answer}: {finding.sentence}", markup=False, highlight=False, soft_wrap=True)
        out.print(tables.render_judged(judged))


@app.command()
def export(
    folder: Folder,
    to: Annotated[
        Path | None, typer.Option(help="A name ending in .csv or .parquet. [default: OUT/runs.csv]", show_default=False)
    ] = None,
    curves: Annotated[bool, typer.Option("--curves", help="One row per recorded point instead of per run.")] = False,
) -> None:
    """Write the runs of a results folder, or their curves, as one CSV or Parquet table."""
    from kourkoutas.lab.results import export as lab
    from kourkoutas.lab.results.store import Study

    to = to or folder / ("curves.csv" if curves else "runs.csv")
    count = lab.write(Study.open(folder), to, "curves" if curves else "runs")
    out.print(f"{to}: {count} rows", markup=False, highlight=False, soft_wrap=True)


@app.command()
def norms(
    folder: Folder,
    optimizer: Annotated[str | None, typer.Option(help="One arm, bucket by bucket.", show_default=False)] = None,
    as_json: AsJson = False,
) -> None:
    """Which memory, which β2, would have predicted the recorded gradient norms best?"""
    from kourkoutas.lab.results.store import Study
    from kourkoutas.lab.showing import memories

    study = Study.open(folder)
    runs, arms = study.runs(), [arm.label for arm in study.record.arms]
    if optimizer is not None and optimizer not in arms:
        raise ValueError(f"`--optimizer` {optimizer!r} is not in {folder}; it has {', '.join(arms)}")
    chosen = arms if optimizer is None else [optimizer]
    found = memories.of_arms(runs, chosen)
    if not found:
        raise ValueError(
            f"{folder} has no recorded norms: they come from Kourkoutas-β arms (kbeta-fixed is Adam), made by this "
            "version or a later one"
        )
    if as_json:
        print_json({arm: one.to_json() for arm, one in found.items()})
        return
    for arm, one in found.items():
        head, rows = memories.table({arm: one})
        print_table(f"What each memory loses, in nats per step: {arm}", head[1:], [row[1:] for row in rows])
    if optimizer is not None:
        print_table(f"Best β of each bucket, {optimizer}", *memories.buckets(found[optimizer]))
    out.print(memories.NOTE, markup=False, highlight=False)


@app.command()
def report(folder: Folder, endpoint: Asked = None, target: Aimed = None) -> None:
    """Write report.html of a results folder again."""
    from kourkoutas.lab.results.store import Study

    page = write_report(Study.open(folder), endpoint or (), aim_of(target))
    out.print(str(page), markup=False, highlight=False, soft_wrap=True)


@app.command()
def watch(
    folder: Folder,
    port: Annotated[int, typer.Option(help="Of 127.0.0.1; 0 for any free one.")] = 0,
) -> None:
    """Serve the report on this machine while a study goes on, renewed as its runs progress; Ctrl-C ends it."""
    from kourkoutas.lab.showing import watch as lab

    def ready(address: str) -> None:
        out.print(f"{address} shows {folder}; Ctrl-C ends this, and not the study.", highlight=False, soft_wrap=True)

    with contextlib.suppress(KeyboardInterrupt):
        lab.serve(folder, port, ready=ready)


@app.command()
def status(folder: Folder, as_json: AsJson = False) -> None:
    """How far a study is: finished, diverged, failed, running and waiting runs, and the time left."""
    from kourkoutas.lab.results.store import Study
    from kourkoutas.lab.showing import progress
    from kourkoutas.lab.showing import status as lab

    found = lab.status_of(Study.open(folder))
    if as_json:
        print_json(found.to_dict())
    else:
        out.print(progress.render_status(found))
