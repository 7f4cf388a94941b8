"""One HTML page about a study: the answer first, figures, and everything else folded below.

    write(analysis)                 report.html in the results folder
    render(page_of(analysis))       the page as text

The page is one file. It holds its style, its script and its pictures, its content policy forbids the browser to fetch
or run anything else, and it can be read with scripts off.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from kourkoutas.lab.judging import headline
from kourkoutas.lab.judging.analysis import Analysis, ArmSummary
from kourkoutas.lab.judging.statistics import OF_ARMS, show
from kourkoutas.lab.judging.targets import ToTarget
from kourkoutas.lab.judging.values import Seed, seed_ranges
from kourkoutas.lab.results import export, files
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.results.store import StoredRun
from kourkoutas.lab.showing import (
    console,
    curves,
    distributions,
    effects,
    maps,
    reaching,
    recorded,
    sensitivity,
)
from kourkoutas.lab.showing.drawing import Drawing, element
from kourkoutas.lab.showing.failures import Failure, failures
from kourkoutas.lab.showing.pictures import embed
from kourkoutas.lab.showing.status import Status, duration, name_of, status_of, words
from kourkoutas.lab.specs import looks


@dataclass(frozen=True)
class Section:
    """One foldable part of the page.

    Attributes:
      template: page/<template>.html.j2, which is given `data`.
      open: unfolded from the start: figures are, tables are not.
      short: the title in the table of contents; `title` itself unless given.
    """

    id: str
    title: str
    template: str
    data: Any
    open: bool = False
    short: str = ""


@dataclass(frozen=True)
class FigureSection:
    """What a section of sentences, drawings and one table of (head, rows) shows."""

    notes: Sequence[str]
    drawings: Sequence[Drawing]
    table: tuple[Sequence[str], Sequence[Sequence[str]]]
    by_arm: bool = True  # whether the drawings are in the colours of arms


@dataclass(frozen=True)
class Page:
    """A study as the page shows it.

    Attributes:
      caveats: what a reader must know beside the headline, such as that the arms were not tuned.
      effects: the effect plot, for a wide page and for a phone.
      ranked: the arms, the best median first.
      by_ranks: whether ranks decide a contrast of the effect plot, because a run diverged or failed.
      seeds: how many each arm is to be run on.
      live: reloads itself.
    """

    title: str
    facts: Mapping[str, str]
    caveats: Sequence[str]
    effects: Sequence[Drawing]
    by_ranks: bool
    seeds: int
    analysis: Analysis
    ranked: Sequence[ArmSummary]
    looks: Mapping[str, looks.Look]
    failures: Sequence[Failure]
    downloads: Mapping[str, str]
    sections: Sequence[Section]
    status: Status
    live: bool


def page_of(analysis: Analysis, *, live: bool = False) -> Page:
    """What the page of a study shows; a `live` one reloads itself."""
    snapshot = analysis.snapshot
    arms = looks.looks_of([arm.label for arm in snapshot.record.arms])
    places = {arm: place for place, arm in enumerate(arms)}
    courses = recorded.courses(snapshot)
    return Page(
        title=f"Study: {snapshot.record.testbed}",
        facts=_facts(snapshot),
        caveats=[*analysis.fairness, *analysis.notes],
        effects=effects.plots(analysis.endpoints, places),
        by_ranks=any(c.lost for one in analysis.endpoints for c in one.contrasts),
        seeds=len(snapshot.record.seeds),
        analysis=analysis,
        ranked=_ranked(analysis),
        looks=arms,
        failures=failures(snapshot.runs),
        downloads={"runs.csv": _csv(export.rows(snapshot)), "curves.csv": _csv(recorded.drawn(courses))},
        sections=_sections(analysis, arms, courses),
        status=status_of(snapshot),
        live=live,
    )


def _facts(snapshot: Snapshot) -> dict[str, str]:
    record = snapshot.record
    every = [*snapshot.runs, *snapshot.tuning_runs]
    seconds = sum(run.result.seconds for run in every if run.result)
    made = {} if record.code else {"preset": record.preset, "engine": record.engine}
    return made | {
        "seeds": seed_ranges(record.seeds),
        "begun": _whole(record.created.replace("T", " ")[:16]) + "\u00a0UTC",
        "compute": f"{duration(seconds)} in {len(every)} runs",
    }


def _ranked(analysis: Analysis) -> list[ArmSummary]:
    """The best median first, arms without one last."""
    sign = -1 if analysis.primary.higher_is_better else 1
    return sorted(analysis.arms, key=lambda arm: (arm.median is None, sign * (arm.median or 0.0)))


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table as the address of a file to download."""
    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(out.getvalue().encode()).decode("ascii")


def _sections(analysis: Analysis, arms: Mapping[str, looks.Look], courses: curves.Courses) -> list[Section]:
    snapshot, runs = analysis.snapshot, analysis.snapshot.runs
    numbers = {(run.spec.optimizer, run.spec.seed): f"run-{k}" for k, run in enumerate(runs)}
    places = {arm: place for place, arm in enumerate(arms)}

    def anchor(arm: str, seed: Seed) -> str:
        return numbers.get((arm, int(seed)), "runs")

    pairs = [(c.treatment, c.baseline) for c in analysis.primary.contrasts]
    drawn = [*curves.panels(courses, arms), curves.gaps(courses, pairs, arms), recorded.rate(runs)]
    found = [Section("curves", "Learning curves", "curves", [one for one in drawn if one is not None], open=True)]
    ends = [violins for one in analysis.endpoints if (violins := distributions.violins(one, arms, anchor))]
    ends += [one for one in [distributions.profile(analysis.primary, arms)] if one is not None]
    if ends:
        found.append(Section("ends", "Where the runs end", "ends", ends, open=True))
    by_run = {(run.spec.optimizer, run.spec.seed): run for run in runs}
    for at, one in enumerate(analysis.endpoints):
        data = {
            "endpoint": one,
            "runs": by_run,
            "arms": [arm.label for arm in analysis.arms],
            "pairs": distributions.pairs(one, places, anchor),
            "effects": [] if one.primary else effects.plots([one], places),
            "statistics": [s for s in OF_ARMS if any(s.name in own for own in one.arms.values())],
            "anchor": anchor,
        }
        title = f"{one.title} ({one.standing}): every seed and every statistic"
        found.append(Section(f"endpoint-{at}", title, "endpoint", data, short=one.title))
    causes = [(one.title, [a.sentence for a in one.attribution]) for one in analysis.endpoints if one.attribution]
    if causes:
        title = "What does the work? Dynamics, mean β2 or hidden warmup"
        found.append(Section("causes", title, "causes", causes, short="What does the work?"))
    if analysis.sensitivity:
        found.append(_sensitivity(analysis, arms))
    if analysis.target is not None:
        found.append(_target(analysis.target, runs, arms))
    traces = {arm: maps.drawings(own, arm) for arm in arms if (own := recorded.traces(runs, arm))}
    if traces:
        found.append(Section("traces", "sun and β2 over training", "traces", traces, open=True))
    pictures = [embed(figure, text) for figure, text in recorded.own_pictures(snapshot)]
    if pictures:
        found.append(Section("learnt", "What was learnt", "learnt", pictures, open=True))
    values = {j.title: j.values for j in analysis.endpoints}
    found.append(Section("runs", f"Every run ({len(runs)})", "runs", {"runs": runs, "values": values}))
    failed = failures(runs)
    if failed:
        count = sum(len(one.runs) for one in failed)
        title = f"{count} run{'' if count == 1 else 's'} failed"
        found.append(Section("failures", title, "failures", failed))
    found.append(Section("settings", "Settings and commands", "settings", _settings(snapshot)))
    return found


def _sensitivity(analysis: Analysis, arms: Mapping[str, looks.Look]) -> Section:
    """How much each arm depends on the option that was tuned."""
    first = analysis.primary
    side = first.higher_is_better
    drawn = [
        draw(analysis.sensitivity, arms, first.title, maximize=side)
        for draw in (sensitivity.draw, sensitivity.best_so_far)
    ]
    note = (
        f"Each optimizer on the tuning seeds, against {analysis.sensitivity[0].option}; a ring marks the chosen value. "
        "Sensitivity is what a value loses against the best one, as a mean over the values tried. Beside it: the best "
        "value that so many trials find, as a mean over all orders of the values."
    )
    figures = FigureSection((note,), drawn, sensitivity.table(analysis.sensitivity))
    title = f"Sensitivity to {analysis.sensitivity[0].option}"
    return Section("sensitivity", title, "figures", figures, open=True)


def _target(found: ToTarget, runs: Sequence[StoredRun], arms: Mapping[str, looks.Look]) -> Section:
    """How soon each arm reached a target."""
    figures = FigureSection(
        (*(race.sentence for race in found.contrasts), reaching.NOTE),
        (reaching.draw(found.arms, reaching.last_step(runs), arms, found.target),) if found.arms else (),
        reaching.table(found.arms),
    )
    return Section("target", f"Time to {found.target}", "figures", figures, short="Time to target")


def _settings(snapshot: Snapshot) -> dict[str, Any]:
    record = snapshot.record
    finished = {run.spec.optimizer: run.result.settings for run in snapshot.runs if run.result and run.result.settings}
    resolved = next(iter(finished.values()), record.settings)
    return {
        "commands": list(dict.fromkeys(call.command for call in record.calls)),
        "testbed": {name: value for name, value in resolved.items() if name != "optimizer"},
        "optimizers": {
            arm.label: finished[arm.label]["optimizer"]
            for arm in record.arms
            if finished.get(arm.label, {}).get("optimizer")
        },
        "machine": record.environment,
        "versions": record.versions,
    }


@cache
def _file(name: str) -> str:
    return (resources.files("kourkoutas.lab.showing") / "page" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii") + "'"


@cache
def style() -> str:
    """The style sheet, with the colours of arms."""

    def palette(colours: Sequence[str]) -> str:
        return " ".join(f"--c{k}: {colour};" for k, colour in enumerate(colours))

    classes = "\n".join(f".c{k} {{ --c: var(--c{k}); }}" for k in range(len(looks.LIGHT)))
    sheet = _file("report.css").replace("/* light */", palette(looks.LIGHT)).replace("/* dark */", palette(looks.DARK))
    return f"\n{sheet}{classes}\n"


@cache
def script() -> str:
    return f"\n{_file('report.js')}"


def policy() -> str:
    """What the browser may do: show what is in the page, and run its one script."""
    parts = ["default-src 'none'", "img-src data:", f"style-src {_hash(style())}", f"script-src {_hash(script())}"]
    return "; ".join([*parts, "base-uri 'none'", "form-action 'none'"])


def unbroken(text: str) -> str:
    """A sentence in which no line ends inside 1e-12 or before a percent sign."""
    percent = re.sub(r"(?<=\d) %", "\u00a0%", text)
    return re.sub(r"\b\d[\d.]*e-\d+", lambda number: _whole(number[0]), percent)


def _whole(text: str) -> str:
    """The same, joined where a browser would end a line after a hyphen."""
    return text.replace("-", "-\u2060")


def swatch(look: looks.Look) -> Markup:
    """A short line in an arm's colour and dash, for legends."""
    line = element("line", x1=1, x2=25, y1=6, y2=6, class_="curve", stroke_dasharray=look.dasharray)
    return element(
        "svg", line, viewBox="0 0 26 12", width=26, height=12, class_=f"swatch c{look.colour}", aria_hidden="true"
    )


def render(page: Page) -> str:
    """The page as text."""
    return _environment().get_template("report.html.j2").render(page=page, policy=policy())


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("kourkoutas.lab.showing", "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(
        show=show,
        answer=headline.answer,
        statistics_title=console.statistics_title,
        swatch=swatch,
        words=words,
        name_of=name_of,
        unbroken=unbroken,
        style=Markup(style()),
        script=Markup(script()),
    )
    return environment


def write(analysis: Analysis, out: str | Path | None = None, *, live: bool = False) -> Path:
    """Write the page and return its path; report.html in the results folder unless `out` is given."""
    out = Path(out) if out is not None else analysis.snapshot.path / "report.html"
    text = render(page_of(analysis, live=live))
    files.make_folder(out.parent)
    files.write_text(out, text)
    return out
