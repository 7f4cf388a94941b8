"""One HTML page about a study: the answer first, figures, and everything else folded below.

    build(study)                    report.html in the results folder
    render(page_of(study))          the page as text

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

from kourkoutas.lab.judging import confirming, stats, tables, tuned
from kourkoutas.lab.judging.analysis import Analysis, ArmSummary, Judged, analyse, verdicts_of
from kourkoutas.lab.judging.causes import Causes, examine, size_of
from kourkoutas.lab.judging.targets import Target
from kourkoutas.lab.judging.values import Seed
from kourkoutas.lab.results import export, files
from kourkoutas.lab.results.store import StoredRun, Study
from kourkoutas.lab.showing import (
    answer,
    commands,
    curves,
    distributions,
    effects,
    maps,
    memories,
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
class Told:
    """What a section of sentences, drawings and one table of (head, rows) shows."""

    notes: Sequence[str]
    drawings: Sequence[Drawing]
    table: tuple[Sequence[str], Sequence[Sequence[str]]]
    by_arm: bool = True  # whether the drawings are in the colours of arms


@dataclass(frozen=True)
class Page:
    """A study as the page shows it.

    Attributes:
      lead: the one sentence that answers.
      caveats: what a reader must know beside it, such as that the arms were not tuned.
      effects: the effect plot, for a wide page and for a phone.
      ranked: the arms, the best median first.
      by_ranks: whether ranks decide a contrast of the effect plot, because a run diverged.
      seeds: how many each arm is to be run on.
      live: for a page that follows the study.
    """

    title: str
    facts: Mapping[str, str]
    lead: str
    caveats: Sequence[str]
    effects: Sequence[Drawing]
    by_ranks: bool
    seeds: int
    analysis: Analysis
    ranked: Sequence[ArmSummary]
    looks: Mapping[str, looks.Look]
    failures: Sequence[Failure]
    downloads: Mapping[str, str]
    more: str | None
    sections: Sequence[Section]
    status: Status
    live: bool


def page_of(
    study: Study,
    endpoints: Sequence[str] = (),
    *,
    target: Target | None = None,
    live: bool = False,
    resamples: int = stats.RESAMPLES,
) -> Page:
    """What the page of a results folder shows.

    Args:
      study: a results folder.
      endpoints: metrics to judge by besides the primary endpoint, as in `analysis.analyse`.
      target: adds how soon each arm reached it.
      live: for a page that is served while the study goes on.
      resamples: of each bootstrap.
    """
    runs = study.runs()
    analysis = analyse(study, endpoints=endpoints, runs=runs, resamples=resamples)
    arms = looks.looks_of([arm.label for arm in study.record.arms])
    places = {arm: place for place, arm in enumerate(arms)}
    failed = failures(runs)
    status = status_of(study, runs)
    courses = recorded.courses(study, runs)
    return Page(
        title=f"Study: {study.record.testbed}",
        facts=_facts(study, runs),
        lead=_lead(analysis, status),
        caveats=[*analysis.fairness, *analysis.notes],
        effects=effects.plots(analysis.endpoints, places),
        by_ranks=any(f.diverged_treatment or f.diverged_baseline for j in analysis.endpoints for f in j.findings),
        seeds=len(study.record.seeds),
        analysis=analysis,
        ranked=_ranked(analysis),
        looks=arms,
        failures=failed,
        downloads={
            "runs.csv": _csv(export.rows(study)),
            "curves.csv": _csv(recorded.drawn(courses)),
        },
        more=commands.more_seeds(
            study.record.command, study.record.seeds, study.record.tuning.seeds if study.record.tuning else ()
        ),
        sections=_sections(study, runs, analysis, arms, courses, failed, target),
        status=status,
        live=live,
    )


def _lead(analysis: Analysis, status: Status) -> str:
    """The one sentence that answers, or why there is no answer (yet)."""
    first = analysis.primary
    if status.total and status.failed == status.total:
        return f"All {status.total} runs failed: there is nothing to compare."
    if status.tuning and not first.values and status.done < status.total:
        return f"The optimizers are being tuned, {status.tuned} of {status.tuning} runs so far; the comparison follows."
    text = answer.sentence(first.findings, first.missing)
    if status.done == status.total:
        return text
    so_far = f"So far, with {status.done} of {status.total} runs done"
    return f"{so_far}: {text}" if first.findings else f"{so_far}, {answer.NOTHING}."


def _facts(study: Study, runs: Sequence[StoredRun]) -> dict[str, str]:
    record = study.record
    every = [*runs, *study.tuning_runs()]
    seconds = sum(run.result.seconds for run in every if run.result)
    made = {} if record.code else {"preset": record.preset, "engine": record.engine}
    return made | {
        "seeds": commands.ranges(record.seeds),
        "begun": _whole(record.created.replace("T", " ")[:16]) + "\u00a0UTC",
        "compute": f"{duration(seconds)} in {len(every)} runs",
    }


def _ranked(analysis: Analysis) -> list[ArmSummary]:
    """The best median first, arms without one last."""
    sign = -1 if analysis.primary.maximize else 1
    return sorted(analysis.arms, key=lambda arm: (arm.median is None, sign * (arm.median or 0.0)))


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table as the address of a file to download."""
    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(out.getvalue().encode()).decode("ascii")


def _sections(
    study: Study,
    runs: Sequence[StoredRun],
    analysis: Analysis,
    arms: Mapping[str, looks.Look],
    courses: curves.Courses,
    failed: Sequence[Failure],
    target: Target | None,
) -> list[Section]:
    numbers = {(run.spec.optimizer, run.spec.seed): f"run-{k}" for k, run in enumerate(runs)}
    places = {arm: place for place, arm in enumerate(arms)}

    def anchor(arm: str, seed: Seed) -> str:
        return numbers.get((arm, int(seed)), "runs")

    drawn = curves.panels(courses, arms)
    rate = recorded.rate(runs)
    found = [Section("curves", "Learning curves", "curves", [*drawn, *([rate] if rate else [])], open=True)]
    ends = [one for j in analysis.endpoints if (one := distributions.violins(j, arms, anchor))]
    if ends:
        found.append(Section("ends", "Where the runs end", "ends", ends, open=True))
    for at, judged in enumerate(analysis.endpoints):
        found.append(_endpoint(at, judged, runs, analysis, places, anchor))
    causes = [
        (j, found_causes, [one.sentence for one in j.attribution])
        for j in analysis.endpoints
        if (found_causes := _causes(study, analysis, j)) or j.attribution
    ]
    if causes:
        title = "What does the work? Dynamics, mean β2 or hidden warmup"
        found.append(Section("causes", title, "causes", causes, short="What does the work?"))
    if analysis.sensitivity:
        found.append(_sensitivity(analysis, arms))
    if target is not None:
        found.append(_target(study, runs, target, arms))
    traces = {arm: maps.drawings(own, arm) for arm in arms if (own := recorded.traces(runs, arm))}
    if traces:
        found.append(Section("traces", "sun and β2 over training", "traces", traces, open=True))
    remembered = memories.of_arms(runs, list(arms))
    if remembered:
        drawn = [memories.draw(one, arm) for arm, one in remembered.items()]
        told = Told((memories.NOTE,), drawn, memories.table(remembered), by_arm=False)
        found.append(Section("memory", "Which memory predicts the norms?", "told", told, short="Memory"))
    pictures = [embed(figure, text) for figure, text in recorded.own_pictures(study, runs)]
    if pictures:
        found.append(Section("learnt", "What was learnt", "learnt", pictures, open=True))
    values = {j.title: j.values for j in analysis.endpoints}
    found.append(Section("runs", f"Every run ({len(runs)})", "runs", {"runs": runs, "values": values}))
    if failed:
        count = sum(len(one.runs) for one in failed)
        title = f"{count} run{'' if count == 1 else 's'} failed"
        found.append(Section("failures", title, "failures", failed))
    found.append(Section("settings", "Settings and commands", "settings", _settings(study, runs)))
    return found


def _causes(study: Study, analysis: Analysis, judged: Judged) -> Causes | None:
    """What the control arms support, by the same rule as the endpoint's own verdicts."""
    if not (judged.findings or judged.missing):
        return None

    def counted(comparison: stats.Comparison) -> stats.Comparison:
        lucky = analysis.tried and judged.primary
        return confirming.counted(comparison, analysis.tried, study.record.chosen) if lucky else comparison

    return examine(
        judged.values,
        log=judged.log,
        higher_is_better=judged.maximize,
        arms=[arm.label for arm in study.record.arms],
        verdicts=verdicts_of(judged.findings),
        counted=counted,
    )


def _sensitivity(analysis: Analysis, arms: Mapping[str, looks.Look]) -> Section:
    """How much each arm depends on the option that was tuned."""
    first = analysis.primary
    drawn = sensitivity.draw(analysis.sensitivity, arms, first.title, log=first.log, maximize=first.maximize)
    note = (
        f"Each optimizer on the tuning seeds, against {analysis.sensitivity[0].option}; a ring marks the chosen value. "
        "Sensitivity is what a value loses against the best one, as a mean over the values tried."
    )
    told = Told((note,), (drawn,), sensitivity.table(analysis.sensitivity))
    title = f"Sensitivity to {analysis.sensitivity[0].option}"
    return Section("sensitivity", title, "told", told, open=True)


def _target(study: Study, runs: Sequence[StoredRun], target: Target, arms: Mapping[str, looks.Look]) -> Section:
    """How soon each arm reached a target."""
    found, races = tuned.to_target(study, runs, target)
    told = Told(
        (*(race.sentence for race in races), reaching.NOTE),
        (reaching.draw(found, reaching.last_step(runs), arms, str(target)),) if found else (),
        reaching.table(found),
    )
    return Section("target", f"Time to {target}", "told", told, short="Time to target")


def _endpoint(
    at: int,
    judged: Judged,
    runs: Sequence[StoredRun],
    analysis: Analysis,
    places: Mapping[str, int],
    anchor: distributions.Anchor,
) -> Section:
    data = {
        "judged": judged,
        "runs": {(run.spec.optimizer, run.spec.seed): run for run in runs},
        "arms": [arm.label for arm in analysis.arms],
        "seeds": analysis.seeds,
        "pairs": distributions.pairs(judged, places, anchor),
        "effects": effects.plots([judged], places),
        "anchor": anchor,
    }
    title = f"{judged.title} ({tables.standing(judged)}): every seed, effects, tests"
    return Section(f"endpoint-{at}", title, "endpoint", data, short=judged.title)


def _settings(study: Study, runs: Sequence[StoredRun]) -> dict[str, Any]:
    record = study.record
    finished = {run.spec.optimizer: run.result.settings for run in runs if run.result and run.result.settings}
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


def policy(live: bool) -> str:
    """What the browser may do: show what is in the page, and run its one script."""
    parts = ["default-src 'none'", "img-src data:", f"style-src {_hash(style())}", f"script-src {_hash(script())}"]
    parts += ["connect-src 'self'"] if live else []
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
    return _environment().get_template("report.html.j2").render(page=page, policy=policy(page.live))


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
        show=tables.show,
        show_ci=tables.show_ci,
        show_effect=tables.show_effect,
        rows_of_tests=tables.rows_of_tests,
        antilog=stats.antilog,
        size_of=size_of,
        swatch=swatch,
        words=words,
        name_of=name_of,
        unbroken=unbroken,
        style=Markup(style()),
        script=Markup(script()),
    )
    return environment


def build(
    study: Study,
    out: str | Path | None = None,
    *,
    endpoints: Sequence[str] = (),
    target: Target | None = None,
) -> Path:
    """Write the page and return its path; report.html in the results folder unless `out` is given."""
    out = Path(out) if out is not None else study.path / "report.html"
    text = render(page_of(study, endpoints, target=target))
    files.make_folder(out.parent)
    files.write_text(out, text)
    return out
