"""The command that makes several studies, and answers them together."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kourkoutas.cli.arguments import AsJson, of_output, of_runs, option_of
from kourkoutas.cli.command import FAILED, app, err, out, print_json, say
from kourkoutas.cli.running import called_as, resumable
from kourkoutas.lab.specs.study_options import PLACE, WORDS

if TYPE_CHECKING:
    from kourkoutas.lab.suites import SuiteResult

EXAMPLE = (
    "Example: kbeta suite my_suite.toml --out results/mine\n\n"
    "It makes every study of the file, or goes on with them, and answers over all problems. The file has the arguments "
    "of `kbeta study`: optimizers = ['kbeta', 'adam999'], then a table [studies.NAME] for each problem."
)


def with_place_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of `kbeta study` that say where and how runs are made, given to it as `place`."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())
    names = [name for name, words in WORDS.items() if words.panel == PLACE]

    @functools.wraps(command)
    def parsed(**given: Any) -> None:
        place = {name: given.pop(name) for name in names}
        command(**given, place=place)

    parameters = [one for one in own if one.name != "place"]
    parameters[1:1] = [option_of(name, WORDS[name]) for name in names]
    parsed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    parsed.__annotations__ = {one.name: one.annotation for one in parameters}
    return parsed


@app.command(epilog=EXAMPLE)
@with_place_options
def suite(
    what: Annotated[
        list[str],
        typer.Argument(
            help="FILE.toml, or paper, field or smoke, to be made; or folders, of a suite or of several studies, to be "
            "answered as they are.",
        ),
    ],
    baseline: Annotated[
        str | None,
        of_runs(help="The optimizer that the others are compared with.", show_default="the suite's, else the second"),
    ] = None,
    margin: Annotated[
        str | None,
        of_output(metavar="PERCENT", help="Differences within it do not matter: 1%.", show_default="as declared"),
    ] = None,
    out_: Annotated[
        Path | None, of_output("--out", help="Folder of the suite.", show_default="results/NAME; suite.html: here")
    ] = None,
    markdown: Annotated[bool, of_output("--markdown", help="Print tables of Markdown, and nothing else.")] = False,
    no_report: Annotated[bool, of_output("--no-report", help="Write no pages.")] = False,
    as_json: AsJson = False,
    *,
    place: dict[str, Any],
) -> None:
    """Compare optimizers on several problems, with one answer; the same command again resumes after anything."""
    from kourkoutas.lab import suites
    from kourkoutas.lab.planning.plan import parse_margin

    within = None if margin is None else parse_margin(margin)
    folders = folders_to_answer(what)
    if folders:
        found = answered(folders, out_, baseline=baseline, margin=within)
    else:
        folder = make(what, out_, place, pages=not no_report)
        found = suites.load_suite(folder, baseline=baseline, margin=within)
    if as_json:
        print_json(found.to_json())
    elif markdown:
        typer.echo(found.markdown())
    else:
        from kourkoutas.lab.suites.showing import Answer

        out.print(Answer(found.analysis, None if no_report else found.path / "suite.html"))
    if not no_report:
        found.report()
    if not folders:
        exit_if_failed(found, retried=place["retry_failed"])


def folders_to_answer(what: list[str]) -> list[Path]:
    """The folders that were named; none where a suite is to be made."""
    folders = [Path(one) for one in what if Path(one).is_dir()]
    if folders and len(folders) < len(what):
        other = next(one for one in what if not Path(one).is_dir())
        raise ValueError(f"{other!r} is no folder, and {folders[0]} is one: name a suite to make, or folders to answer")
    return folders


def answered(folders: list[Path], out_: Path | None, **how: Any) -> SuiteResult:
    """The suite in a folder, or several studies as one."""
    from kourkoutas.lab import suites

    if len(folders) == 1 and (folders[0] / "suite.json").exists():
        return suites.load_suite(folders[0], **how)
    found = suites.load_suite(folders, **how)
    found.path = out_ or Path()
    return found


def exit_if_failed(found: SuiteResult, *, retried: bool) -> None:
    """Where runs failed, say how to try them again, and end with an error."""
    failed = 0
    for problem in found.analysis.problems:
        failed += sum(row.failed for row in problem.rows)
    if failed:
        again = called_as() if retried else f"{called_as()} --retry-failed"
        say(f"{failed} run{'' if failed == 1 else 's'} failed; to try again: {again}")
        raise typer.Exit(FAILED)


def make(what: list[str], out_: Path | None, place: dict[str, Any], *, pages: bool) -> Path:
    """Make the suite that was named; its folder."""
    from kourkoutas.lab import suites
    from kourkoutas.lab.suites import asking

    if len(what) > 1:
        raise ValueError(f"one suite is made at a time; got {', '.join(what)}")
    asked = asking.read(what[0])
    folder = out_ or Path("results") / asked.name
    for name, plan in asked.plans.items():
        for line in plan.doubts():
            say(f"{name}: {line}")
    with resumable():
        suites.run(asked, folder, console=err, command=called_as(), pages=pages, **place)
    return folder
