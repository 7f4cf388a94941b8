"""suite.html: the answer over all problems, then each of them, with a link to the page of its study.

The page is made as a study's is (`kourkoutas.lab.showing.report`): same skeleton, style and script.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from markupsafe import Markup

from kourkoutas.lab.judging.values import seed_ranges
from kourkoutas.lab.optimizers import looks
from kourkoutas.lab.optimizers.looks import name_of
from kourkoutas.lab.results import files
from kourkoutas.lab.showing import report
from kourkoutas.lab.showing.distributions import stairs
from kourkoutas.lab.showing.drawing import (
    TYPICAL,
    WIDTH,
    Drawing,
    Panel,
    Scale,
    element,
    interval,
    label,
    picture,
    tick_text,
    x_axis,
)
from kourkoutas.lab.showing.report import Section
from kourkoutas.lab.showing.status import duration
from kourkoutas.lab.suites import showing
from kourkoutas.lab.suites.analysis import Problem, SuiteAnalysis, problems_words, ratio_words
from kourkoutas.lab.suites.judging import Standing

FURTHEST = 8.0  # a factor; an interval that ends beyond it is cut with an arrow
PROFILE = (
    "An optimizer is within a factor of the best on so many percent of the problems; further up and to the left is "
    "better. Its end on a problem is the median over the seeds; one most of whose runs diverged is within no factor. "
    "(Dolan and Moré's performance profile.)"
)
TIMES = (
    "Steps until a run is as good as the median end of {baseline}: how many of the runs get there, and after which "
    "part of {baseline}'s steps the median run does. Steps are those that were logged."
)
EACH = (
    "p is after Holm's adjustment within the study, for every optimizer against {baseline} on the study's endpoints; "
    "the marks {clear} are for the whole suite, which has more statements to answer for."
)


def write(found: SuiteAnalysis, out: Path) -> Path:
    """Write suite.html into the folder of the suite, and return its path."""
    file = out / "suite.html"
    files.write_text(file, render(found, out))
    return file


def render(found: SuiteAnalysis, out: Path) -> str:
    """The page as text, to stand in the folder `out`."""
    template = (resources.files("kourkoutas.lab.suites") / "first_screen.html.j2").read_text(encoding="utf-8")
    return report.page(
        template,
        title=f"Suite: {found.name}",
        facts=_facts(found),
        sections=[section for section in _sections(found, out) if section.content],
        found=found,
        baseline=name_of(found.baseline),
        count=problems_words(len(found.problems)),
        ratios=ratios(found) if found.standings else None,
        table=_answer_table(found),
        csv=report.as_csv(rows(found)),
    )


def _facts(found: SuiteAnalysis) -> dict[str, str]:
    runs, seconds = 0, 0.0
    for study in found.studies.values():
        every = [*study.snapshot.runs, *study.snapshot.tuning_runs]
        runs += len(every)
        seconds += sum(run.result.seconds for run in every if run.result is not None)
    seeds = dict.fromkeys(seed_ranges(study.snapshot.record.seeds) for study in found.studies.values())
    return {
        "problems": str(len(found.problems)),
        "optimizers": str(len(found.optimizers)),
        "seeds": " and ".join(seeds),
        "compute": f"{duration(seconds)} in {runs} runs",
    }


def _answer_table(found: SuiteAnalysis) -> Markup:
    """One row per optimizer; before all studies have ended, one per study."""
    if not found.standings:
        rows = [[one.name, one.state] for one in found.problems]
        return report.table("Studies", ["study", "state"], rows, words=(1,))
    head, rows = showing.over_all(found)
    return report.table(f"Over {problems_words(len(found.problems))}", head, rows)


def _sections(found: SuiteAnalysis, out: Path) -> list[Section]:
    arms = looks.looks_of(found.optimizers)
    if not found.standings:
        return [_each(found, out, one, k) for k, one in enumerate(found.problems)]
    return [
        _problems(found),
        _profile(found, arms),
        _times(found),
        Section("answers", "Every optimizer in words", [report.text(line) for line in found.answers]),
        *(_each(found, out, one, k) for k, one in enumerate(found.problems)),
        Section("rule", "How it is judged", [report.text(found.rule)]),
    ]


def _problems(found: SuiteAnalysis) -> Section:
    """How much better than the baseline: one row per optimizer, one column per problem, which leads to its section."""
    links = [element("a", one.name, href=f"#problem-{k}") for k, one in enumerate(found.problems)]
    cells = []
    for one in found.standings:
        row: list[str | Markup] = [name_of(one.optimizer)]
        for problem in found.problems:
            own = problem.row(one.optimizer)
            kind = {"better": "better", "worse": "worse"}.get(own.verdict or "")
            text = showing.better_by(problem, one.optimizer) + (f" ({own.diverged} diverged)" if own.diverged else "")
            row.append(element("span", text, class_=kind))
        cells.append(row)
    said = report.note(
        f"How much better than {name_of(found.baseline)}; {showing.CLEAR} clear among the {found.family} statements of "
        "the suite. A problem's name leads to its numbers."
    )
    table = report.table("Every problem", [f"against {name_of(found.baseline)}", *links], cells)
    return Section("problems", "On which problems?", [said, table], open=True)


def _profile(found: SuiteAnalysis, arms: Mapping[str, looks.Look]) -> Section:
    drawn = profile(found, arms)
    shown = [] if drawn is None else [report.note(PROFILE), report.legend(arms), report.panels([drawn], "two")]
    return Section("profile", "How far from the best?", shown, open=True)


def _times(found: SuiteAnalysis) -> Section:
    """How soon each optimizer gets to the baseline's end, on every problem that logged it."""
    timed = [one for one in found.problems if any(row.reached is not None for row in one.rows)]
    if not timed:
        return Section("times", "", [])
    cells = []
    for arm in (one.optimizer for one in found.standings):
        row = [name_of(arm)]
        for problem in timed:
            own = problem.row(arm)
            at = "" if own.share is None or not math.isfinite(own.share) else f", {100 * own.share:.0f} %"
            row.append(f"{own.reached}/{own.runs}{at}")
        cells.append(row)
    base = name_of(found.baseline)
    head = [f"to {base}'s end", *(one.name for one in timed)]
    shown = [report.note(TIMES.format(baseline=base)), report.table("Time to the baseline's end", head, cells)]
    return Section("times", f"How soon do they get to {base}'s end?", shown, open=True, short="How soon?")


def _each(found: SuiteAnalysis, out: Path, problem: Problem, number: int) -> Section:
    """One problem: its table, and the page of its study."""
    head, cells = showing.problem_rows(found, problem)
    head[0] = "optimizer"
    page, here = (Path(problem.folder) / "report.html").resolve(), out.resolve()
    link = []
    if page.is_relative_to(here):
        link = [element("p", element("a", "The page of this study", href=page.relative_to(here).as_posix()))]
    shown = [
        report.note(f"{problem.title}, {'higher' if problem.higher_is_better else 'lower'} is better. "),
        report.note(EACH.format(baseline=name_of(found.baseline), clear=showing.CLEAR)),
        report.table(problem.name, head, cells),
        *(report.note(line) for line in problem.fairness),
        *link,
    ]
    return Section(f"problem-{number}", f"{problem.name}: every optimizer", shown, short=problem.name)


def ratios(found: SuiteAnalysis) -> Drawing:
    """Every optimizer's ratio to the baseline with its interval, on a log scale; left of 1 is better."""
    start, stop = 12.0, WIDTH - 12
    ends = [1.0]
    for one in found.standings:
        inside = [] if one.interval is None else [one.interval.low, one.interval.high]
        ends += [min(max(x, 1 / FURTHEST), FURTHEST) for x in inside]
        ends += [one.ratio] if one.ratio is not None else []
    edge = (max(ends) / min(ends)) ** 0.05
    scale = Scale(min(ends) / edge, max(ends) * edge, start, stop, log=True)
    parts = [label("← better", start, 12, class_="soft"), label("worse →", stop, 12, text_anchor="end", class_="soft")]
    y = 22.0
    for one in found.standings:
        parts += _marks(one, scale, y)
        y += 36.0
    y += 6
    parts += x_axis(scale, y, most=5, show=lambda tick: f"{tick_text(tick)}×")
    told = "; ".join(f"{name_of(one.optimizer)}: {ratio_words(one)}" for one in found.standings)
    title = f"Ratio to {name_of(found.baseline)} over {problems_words(len(found.problems))}"
    return picture(parts, WIDTH, y + 24, "", f"{title}, below 1 is better: {told}")


def _marks(one: Standing, scale: Scale, y: float) -> list[Markup]:
    """Name and numbers above, the interval below."""
    middle, equal = y + 25, scale.at(1.0)
    kind = {"better": "good", "worse": "bad"}.get(one.verdict, "open")
    words = ratio_words(one)
    if one.verdict in ("untested", "unfinished"):
        words = "no verdict"
    told = f"{name_of(one.optimizer)}: {words}"
    marks: list[Markup] = [element("title", told)]
    if one.ratio is not None and one.verdict not in ("untested", "unfinished"):
        low, high = (one.ratio, one.ratio) if one.interval is None else (one.interval.low, one.interval.high)
        marks += interval(scale, low, high, middle)
        marks.append(element("circle", cx=scale.at(one.ratio), cy=middle, r=6, class_="dot"))
    return [
        label(name_of(one.optimizer), 0, y + 12, room=WIDTH - TYPICAL * (len(words) + 1)),
        label(words, WIDTH, y + 12, text_anchor="end", class_=kind),
        element("line", x1=equal, x2=equal, y1=middle - 7, y2=middle + 9, class_="zero"),
        element("g", *marks, class_=f"effect {kind}", tabindex=0, role="img", aria_label=told),
    ]


def profile(found: SuiteAnalysis, arms: Mapping[str, looks.Look]) -> Drawing | None:
    """The share of problems on which each optimizer is within a factor of the best."""
    factors = itertools.chain.from_iterable(found.profile.values())
    furthest = max(filter(math.isfinite, factors), default=None)
    if furthest is None:
        return None
    last = max(1.1, 1.05 * furthest)
    panel = Panel.over([1.0, last], [0.0, 100.0], log_x=True, x_label="within this factor of the best, log scale")
    for arm, own in found.profile.items():
        steps = [(factor, (k + 1) / len(own)) for k, factor in enumerate(own) if math.isfinite(factor)]
        xs, ys = stairs(steps, 1.0, last)
        best = sum(factor == 1.0 for factor in own)
        panel.line(arms[arm], xs, ys, hint=f"{arms[arm].name}: the best on {best} of {len(own)} problems")
        panel.tell(arms[arm], xs, ys, " %")
    title = "Percent of the problems within a factor of the best"
    return panel.drawing(title, f"{title}, for every optimizer")


def rows(found: SuiteAnalysis) -> list[dict[str, Any]]:
    """One row per optimizer and problem, for tables."""
    out: list[dict[str, Any]] = []
    options: dict[str, None] = {}
    for problem in found.problems:
        for row in problem.rows:
            options |= dict.fromkeys(row.chosen)
    for problem in found.problems:
        for row in problem.rows:
            interval = None if row.better is None else row.better.interval
            out.append(
                {
                    "problem": problem.name,
                    "endpoint": problem.title,
                    "optimizer": row.optimizer,
                    **{f"chosen_{name}": row.chosen.get(name) for name in options},
                    "median": row.median,
                    "q1": row.q1,
                    "q3": row.q3,
                    "percent": None if row.better is None else row.better.value,
                    "percent_low": None if interval is None else interval.low,
                    "percent_high": None if interval is None else interval.high,
                    "ratio": row.ratio,
                    "wins": row.wins,
                    "seeds": row.seeds,
                    "p_study": row.p_study,
                    "verdict": row.verdict,
                    "p_holm": row.p_holm,
                    "diverged": row.diverged,
                    "failed": row.failed,
                    "seconds_per_step": row.seconds_per_step,
                    "reached": row.reached,
                    "steps": row.steps,
                    "share_of_steps": row.share,
                }
            )
    return out


def standing_rows(standings: Sequence[Standing]) -> list[dict[str, Any]]:
    """One row per optimizer, for tables."""
    out: list[dict[str, Any]] = []
    for one in standings:
        interval = one.interval
        out.append(
            {
                "optimizer": one.optimizer,
                "verdict": one.verdict,
                "ratio": one.ratio,
                "ratio_low": None if interval is None else interval.low,
                "ratio_high": None if interval is None else interval.high,
                "p": one.p,
                "p_holm": one.p_holm,
                "ahead": one.count("better"),
                "equal": one.count("equal"),
                "behind": one.count("worse"),
                "diverging": len(one.diverged),
                "why": one.why,
            }
        )
    return out
