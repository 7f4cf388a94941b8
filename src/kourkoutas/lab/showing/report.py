"""One HTML page about a study: the answer first, figures, and everything else folded below.

    write(analysis)      report.html in the results folder
    render(analysis)     the page as text
    follow(path)         the page of a study that goes on, again and again

The page is one file. It holds its style, its script and its pictures, its content policy forbids the browser to fetch
or run anything else, and it can be read with scripts off. The template has the first screen; what is folded below it
is made here, a function per section.
"""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import io
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from kourkoutas.lab.judging import headline
from kourkoutas.lab.judging.analysis import Analysis, ArmSummary, analyse
from kourkoutas.lab.judging.comparing import Comparison
from kourkoutas.lab.judging.deciding import RANKS
from kourkoutas.lab.judging.failures import failures, repeat
from kourkoutas.lab.judging.statistics import show
from kourkoutas.lab.judging.values import Seed, seed_ranges
from kourkoutas.lab.optimizers import looks
from kourkoutas.lab.results import export, files
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.results.store import StoredRun, StoreError
from kourkoutas.lab.showing import console, curves, distributions, effects, maps, pictures, tuning
from kourkoutas.lab.showing.drawing import Anchor, Drawing, element
from kourkoutas.lab.showing.status import duration, status_of

CURVES = (
    "Line: median over the seeds; band: their middle half. In an optimizer's own panel thin lines are its seeds, grey "
    "ones the medians of the others, and a cross marks where a run diverged."
)
CONTROLS = (
    "Between Adam and K-β stand controls, each of which changes one thing: Adam mid β2 has K-β's mean β2, a warmed "
    "optimizer its hidden warmup, K-β static a β2 that does not move, K-β exact no hidden warmup. Along such a path "
    "the differences add up to the whole; a share is the part of one step, negative where it acts the other way."
)
TUNING = (
    "Each optimizer on the tuning seeds, against {}; a ring marks the chosen value. Sensitivity is what a value loses "
    "against the best one, as a mean over the values tried."
)
TRACES = (
    "A bucket is a group of parameters with one β2 of its own, such as a layer. Its sun, from 0 to 1, tells how large "
    "its gradient is beside its moving average: ½ when both are equal, near 1 in a spike. The larger the sun, the "
    "smaller β2, down to β2_min. Each column of a map is a stretch of steps; a cell shows the largest sun, or the "
    "smallest β2, of its bucket there, averaged over the runs."
)
SECONDS_BETWEEN_PAGES = 4.0  # of a study that is followed
NOT_ON_THE_PAGE = "mean [BCa]"  # `kbeta stats` has the bootstrap

Looks = Mapping[str, looks.Look]


@dataclass(frozen=True)
class Section:
    """One foldable part of the page: `short` is its title in the table of contents, unless that is `title` itself."""

    id: str
    title: str
    content: Sequence[Markup]
    open: bool = False
    short: str = ""


def write(analysis: Analysis, *, live: bool = False) -> Path:
    """Write report.html into the results folder and return its path."""
    out = analysis.snapshot.path / "report.html"
    files.write_text(out, render(analysis, live=live))
    return out


def follow(path: Path, **how: Any) -> None:
    """Write the page of the folder at `path` again and again, as one that reloads itself, until the study has ended.

    `how` are arguments of `analyse`.

    Raises:
      StoreError: there is no study to begin with.
    """
    going = _follow_once(path, **how)
    while going:
        time.sleep(SECONDS_BETWEEN_PAGES)
        # A file may be half there for a moment: the last good page stays, and the next look tries again.
        with contextlib.suppress(StoreError, OSError):
            going = _follow_once(path, **how)


def _follow_once(path: Path, **how: Any) -> bool:
    """Write the page; whether the study still goes on."""
    analysis = analyse(Snapshot.read(path), resamples=0, **how)
    write(analysis, live=not analysis.finished)
    return not analysis.finished


def render(analysis: Analysis, *, live: bool = False) -> str:
    """The page as text; a `live` one reloads itself."""
    snapshot = analysis.snapshot
    arms = looks.looks_of([arm.label for arm in snapshot.record.arms])
    return page(
        _file("report.html.j2"),
        title=f"Study: {snapshot.record.testbed}",
        analysis=analysis,
        live=live,
        facts=_facts(snapshot),
        effects=effects.plot(analysis.endpoints),
        by_ranks=_by_ranks(analysis.endpoints),
        intervals=headline.intervals_words(max((c.family for c in analysis.primary.contrasts), default=1)),
        ranked=_ranked(analysis),
        looks=arms,
        failures=failures(snapshot.runs),
        repeat=repeat(snapshot.record),
        runs_csv=as_csv(export.rows(snapshot)),
        sections=_sections(analysis, arms),
        status=status_of(snapshot),
    )


def _by_ranks(endpoints: Sequence[Comparison]) -> str:
    """What the runs did that made ranks decide: "diverged", "never got there", or both; empty where none do."""
    did: dict[str, None] = {}
    for one in endpoints:
        did |= dict.fromkeys(c.absent for c in one.contrasts if c.test == RANKS)
    return " or ".join(did)


def effect_plot(analysis: Analysis) -> Drawing:
    """The effect plot as a picture of its own, which holds its style.

    Raises:
      ValueError: nothing is compared.
    """
    drawn = effects.plot(analysis.endpoints)
    if drawn is None:
        raise ValueError(f"there is nothing to plot: {analysis.headline}")
    own = "svg { background: var(--paper); font: 12px system-ui, sans-serif; }"
    head, inside = str(drawn.svg).split(">", 1)
    svg = f'{head} xmlns="http://www.w3.org/2000/svg"><style>{_style()}{own}</style>{inside}'
    return replace(drawn, svg=Markup(svg))


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


def _typical(arm: ArmSummary, value: float | None) -> str:
    """A median or a quartile; where it is that of a lost run, how that ended."""
    return show(value, 3) if arm.diverged else show(value, 3).replace("diverged", "failed")


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table as the address of a file to download."""
    out = io.StringIO()
    if rows:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(out.getvalue().encode()).decode("ascii")


def _sections(analysis: Analysis, arms: Looks) -> list[Section]:
    snapshot, runs = analysis.snapshot, analysis.snapshot.runs
    numbers = {(run.spec.optimizer, run.spec.seed): f"run-{k}" for k, run in enumerate(runs)}

    def anchor(arm: str, seed: Seed) -> str:
        return numbers.get((arm, int(seed)), "runs")

    found = [_curves(analysis, arms, anchor), _ends(analysis, arms, anchor)]
    found += [_endpoint(k, one, analysis, arms, anchor) for k, one in enumerate(analysis.endpoints)]
    found += [_causes(analysis), _sensitivity(analysis, arms)]
    found += [_traces(runs, arms), _learnt(snapshot), _runs(analysis), _failures(runs)]
    found += [_further(analysis), _settings(snapshot)]
    return [section for section in found if section.content]


def _curves(analysis: Analysis, arms: Looks, anchor: Anchor) -> Section:
    drawn = curves.figures(
        curves.Subject(
            courses=curves.courses(analysis.snapshot),
            pairs=[(c.treatment, c.baseline) for c in analysis.primary.contrasts],
            runs=Counter(run.spec.optimizer for run in analysis.snapshot.runs),
            looks=arms,
            anchor=anchor,
        )
    )
    shown = [note(CURVES), legend(arms), panels(drawn)] if drawn else [text("No run has logged a loss.")]
    return Section("curves", "Learning curves", shown, open=True)


def _ends(analysis: Analysis, arms: Looks, anchor: Anchor) -> Section:
    drawn = distributions.figures(analysis.endpoints, arms, anchor)
    if not drawn:
        return Section("ends", "Where the runs end", [])
    shown = [note("Every dot is a run and leads to it; the bar is the median."), legend(arms), panels(drawn)]
    folded = distributions.figures(analysis.endpoints, arms, anchor, distributions.FOLDED)
    if folded:
        summary = element("summary", "How many runs reach which value")
        shown.append(element("details", summary, panels(folded), id="profiles"))
    return Section("ends", "Where the runs end", shown, open=True)


def _endpoint(number: int, one: Comparison, analysis: Analysis, arms: Looks, anchor: Anchor) -> Section:
    """Every seed and every statistic of one endpoint."""
    side = ("Higher" if one.higher_is_better else "Lower") + " is better" + (", analysed as log10" if one.log else "")
    if one.threshold is not None:
        side += f"; success: {'at least' if one.higher_is_better else 'at most'} {show(one.threshold)}"
    shown = [note(f"{side}. {analysis.rule if one.primary else ''}")]
    shown += [text(headline.answer(c, one.margin), c.verdict) for c in one.contrasts]
    if not one.primary and (plot := effects.plot([one])) is not None:
        shown.append(element("figure", plot.svg, class_="effects"))
    if one.notes:
        shown.append(element("ul", *(element("li", line) for line in one.notes), class_="soft"))
    runs = {(run.spec.optimizer, run.spec.seed): run for run in analysis.snapshot.runs}
    shown.append(heading("Every seed"))
    cells = [[str(seed), *(_seed(runs.get((arm, int(seed))), one, anchor) for arm in arms)] for seed in analysis.seeds]
    shown.append(table(f"Every seed, {one.title}", ["seed", *(look.name for look in arms.values())], cells))
    if one.arms:
        shown += [heading("Each optimizer"), table(f"Each optimizer, {one.title}", *console.of_arms(one))]
    if one.contrasts:
        shown += [heading("Each comparison"), panels(distributions.pairs(one, anchor))]
        shown.append(note(console.statistics_title(one)))
        rows = []
        for c in one.contrasts:
            own = [row for row in c.rows(one.standing) if row[0] != NOT_ON_THE_PAGE]
            names = [c.name, *[""] * (len(own) - 1)]
            rows += [[name, *row] for name, row in zip(names, own, strict=True)]
        head = ["comparison", "statistic", "value", "p", "p, Holm"]
        shown.append(table(f"Statistics, {one.title}", head, rows, words=(1, 2)))
    title = f"{one.title} ({one.standing}): every seed and every statistic"
    return Section(f"endpoint-{number}", title, shown, short=one.title)


def _seed(run: StoredRun | None, one: Comparison, anchor: Anchor) -> Markup:
    """The cell of one run, which leads to it."""
    if run is None:
        return element("span", "no run", class_="missing")
    arm, seed, value = run.spec.optimizer, run.spec.seed, one.values.get(run.spec.optimizer, {}).get(run.spec.seed)
    end = run.result.status if run.result else "unfinished"
    shown: str = end
    if end in ("ok", "diverged"):
        shown = "no value" if value is None else show(value, 6) if math.isfinite(value) else one.absent
    return element("a", shown, href=f"#{anchor(arm, seed)}", class_=None if end == "ok" else "bad")


def _causes(analysis: Analysis) -> Section:
    shown = []
    for one in analysis.endpoints:
        if shares := analysis.attribution[one.name]:
            shown += [heading(one.title), *(text(each.sentence) for each in shares)]
    title = "What does the work? Dynamics, mean β2 or hidden warmup"
    return Section("causes", title, [*shown, note(CONTROLS)] if shown else [], short="What does the work?")


def _sensitivity(analysis: Analysis, arms: Looks) -> Section:
    """How much each optimizer depends on the option that was tuned."""
    found, first = analysis.sensitivity, analysis.primary
    if not found:
        return Section("sensitivity", "", [])
    drawn = [tuning.draw(found, arms, first.title, maximize=first.higher_is_better)]
    title = f"Sensitivity to {found[0].option}"
    shown = [note(TUNING.format(found[0].option)), legend(arms), panels(drawn), table(title, *tuning.table(found))]
    return Section("sensitivity", title, shown, open=True)


def _traces(runs: Sequence[StoredRun], arms: Looks) -> Section:
    """sun and β2; all optimizers but the first are folded once more."""
    shown: list[Markup] = []
    for number, (arm, look) in enumerate(arms.items()):
        if recorded := maps.recorded(runs, arm):
            drawn = panels(maps.drawings(recorded, look), "two")
            fold = element("details", element("summary", look.name), drawn, id=f"traces-{number}")
            shown.append(fold if shown else drawn)
    return Section("traces", "sun and β2 over training", [note(TRACES), *shown] if shown else [])


def _learnt(snapshot: Snapshot) -> Section:
    shown = []
    for figure, told in pictures.own(snapshot):
        image = element("img", src=pictures.embed(figure), alt=told, width=round(96 * figure.get_figwidth()))
        shown.append(element("figure", scroll(told, image), element("figcaption", told)))
    return Section("learnt", "What was learnt", shown, open=True)


def _runs(analysis: Analysis) -> Section:
    runs, rows = analysis.snapshot.runs, []
    for run in runs:
        end = run.result.status if run.result else "unfinished"
        arm, seed = run.spec.optimizer, run.spec.seed
        values = [_value(run, one) for one in analysis.endpoints]
        ended: str | Markup = end if end == "ok" else element("span", end, class_="bad")
        seconds = show(run.result.seconds if run.result else None, 3)
        rows.append([looks.name_of(arm), str(seed), ended, *values, seconds, f"runs/{run.id}"])
    head = ["optimizer", "seed", "end", *(one.title for one in analysis.endpoints), "seconds", "folder"]
    shown = table("Every run", head, rows, words=(len(head) - 1,), ids="run")
    return Section("runs", f"Every run ({len(runs)})", [shown])


def _value(run: StoredRun, one: Comparison) -> str:
    """The value of a run; where it has none because it diverged or failed, that stands beside it."""
    value = one.values.get(run.spec.optimizer, {}).get(run.spec.seed)
    if value is None or math.isfinite(value):
        return show(value, 6)
    return one.absent if run.result is not None and run.result.status == "ok" else "–"


def _failures(runs: Sequence[StoredRun]) -> Section:
    shown, count = [], 0
    for failure in failures(runs):
        n = len(failure.runs)
        count += n
        shown.append(heading(f"{n} run{'' if n == 1 else 's'}: {failure.who}"))
        shown.append(element("pre", failure.error, tabindex=0))
    said = note(
        "A comparison with a failed run has no verdict, unless the study was started with --count-failed, which ranks "
        "it as the worst. The study's command with --retry-failed makes failed runs again."
    )
    return Section("failures", f"{count} run{'' if count == 1 else 's'} failed", [said, *shown] if shown else [])


def _further(analysis: Analysis) -> Section:
    """What to write and what to do with a result."""
    if not analysis.for_a_paper:
        return Section("further", "", [])
    path = analysis.snapshot.path
    shown = [
        element("pre", analysis.for_a_paper, tabindex=0),
        heading("Compare two studies"),
        note(
            "Two studies are compared by seed, so they need the same seeds and the same endpoint. Write one table with "
            "the columns seed, optimizer and value, from runs.csv of both, with a name of its own for each optimizer:"
        ),
        element("pre", f"kbeta export {path.name} --to one.csv\nkbeta stats both.csv --baseline NAME", tabindex=0),
    ]
    return Section("further", "For a paper, and how to compare two studies", shown, short="For a paper")


def _settings(snapshot: Snapshot) -> Section:
    record = snapshot.record
    finished = {run.spec.optimizer: run.result.settings for run in snapshot.runs if run.result and run.result.settings}
    resolved = next(iter(finished.values()), record.settings)
    commands = list(dict.fromkeys(call.command for call in record.calls))
    options = {}
    for arm in record.arms:
        own = finished.get(arm.label, {}).get("optimizer")
        if own:
            told = ", ".join(f"{name} = {value}" for name, value in own.items())
            options[f"{looks.name_of(arm.label)} ({arm.label})"] = told
    shown = [heading("Command" if len(commands) == 1 else "Commands")]
    shown += [element("pre", command, tabindex=0) for command in commands]
    for title, facts in (
        ("Testbed", {name: value for name, value in resolved.items() if name != "optimizer"}),
        ("Optimizers", options),
        ("Machine", record.environment),
        ("Versions", record.versions),
    ):
        if facts:
            rows = [element("tr", element("th", k, scope="row"), element("td", str(v))) for k, v in facts.items()]
            shown += [heading(title), element("table", *rows, class_="facts")]
    return Section("settings", "Settings and commands", shown)


def text(words: str, kind: str | None = None) -> Markup:
    return element("p", unbroken(words), class_=kind)


def note(words: str) -> Markup:
    return text(words, "soft")


def heading(words: str) -> Markup:
    return element("h3", words)


def panels(drawings: Iterable[Drawing | None], kind: str = "") -> Markup:
    """Pictures beside and below each other."""
    shown = [
        element("figure", *([element("figcaption", one.title)] if one.title else []), one.svg, class_="panel")
        for one in drawings
        if one is not None
    ]
    return element("div", *shown, class_=f"panels {kind}".strip())


def legend(arms: Looks) -> Markup:
    items = (element("li", swatch(look), look.name) for look in arms.values())
    return element("ul", *items, class_="legend", aria_label="Optimizers")


def swatch(look: looks.Look) -> Markup:
    """A short line in an optimizer's colour and dash, for legends."""
    line = element("line", x1=1, x2=25, y1=6, y2=6, class_="curve", stroke_dasharray=look.dasharray)
    size = {"viewBox": "0 0 26 12", "width": 26, "height": 12}
    return element("svg", line, **size, class_=f"swatch c{look.colour}", aria_hidden="true")


def scroll(name: str, *content: Markup) -> Markup:
    """What may be wider than a phone."""
    return element("div", *content, class_="scroll", role="region", aria_label=name, tabindex=0)


def table(
    name: str, head: Sequence[str], rows: Iterable[Sequence[str | Markup]], words: Sequence[int] = (), ids: str = ""
) -> Markup:
    """Names to the left and numbers to the right; the columns at `words` hold text. Rows are `ids`-0, `ids`-1, …"""
    kinds = ["name" if at in words else None for at in range(len(head))]
    top = element("tr", *(element("th", cell, scope="col", class_=k) for cell, k in zip(head, kinds, strict=True)))
    body = []
    for number, (first, *rest) in enumerate(rows):
        cells = [element("td", cell, class_=kind) for cell, kind in zip(rest, kinds[1:], strict=True)]
        place = {"id": f"{ids}-{number}", "tabindex": -1} if ids else {}
        body.append(element("tr", element("th", first, scope="row"), *cells, **place))
    return scroll(name, element("table", element("thead", top), element("tbody", *body)))


def unbroken(words: str) -> str:
    """A sentence in which no line ends inside 1e-12 or before a percent sign."""
    percent = re.sub(r"(?<=\d) %", "\u00a0%", words)
    return re.sub(r"\b\d[\d.]*e-\d+", lambda number: _whole(number[0]), percent)


def _whole(words: str) -> str:
    """The same, joined where a browser would end a line after a hyphen."""
    return words.replace("-", "-\u2060")


@cache
def _file(name: str) -> str:
    return (resources.files("kourkoutas.lab.showing") / "page" / name).read_text(encoding="utf-8")


@cache
def _style() -> str:
    """The style sheet with the colours of the optimizers, light and dark."""
    light, dark = (" ".join(f"--c{k}: {c};" for k, c in enumerate(own)) for own in (looks.LIGHT, looks.DARK))
    sheet = _file("report.css").replace("/* light */", light).replace("/* dark */", dark)
    return sheet + "\n".join(f".c{k} {{ --c: var(--c{k}); }}" for k in range(len(looks.LIGHT)))


def page(first: str, *, title: str, facts: Mapping[str, str], sections: Sequence[Section], **more: Any) -> str:
    """A page as text: the template of its first screen, which extends the skeleton, and foldable sections below."""
    template = _environment().from_string(first)
    return template.render(title=title, facts=facts, sections=sections, **{"live": False, **more})


@cache
def _environment() -> jinja2.Environment:
    """Templates with the style, the script and the policy that allows no other."""

    def digest(of: str) -> str:
        return "'sha256-" + base64.b64encode(hashlib.sha256(of.encode("utf-8")).digest()).decode("ascii") + "'"

    style, script = _style(), _file("report.js")
    policy = (
        f"default-src 'none'; img-src data:; style-src {digest(style)}; script-src {digest(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_file),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals.update(show=show, typical=_typical, swatch=swatch, unbroken=unbroken, policy=policy)
    environment.globals.update(style=Markup(style), script=Markup(script))
    return environment
