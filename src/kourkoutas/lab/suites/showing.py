"""A suite on a terminal, in at most 30 lines, and as tables of Markdown for a paper or a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from kourkoutas.lab.judging.headline import digits, percent_words, ratio
from kourkoutas.lab.judging.statistics import show
from kourkoutas.lab.optimizers.looks import name_of
from kourkoutas.lab.results.export import names_in
from kourkoutas.lab.suites.analysis import Problem, Row, SuiteAnalysis, problems_words, ratio_words

MOST_LINES, COLUMNS = 30, 80
CLEAR = "*"  # marks what is clear within the suite
LEGEND = (
    "ratio: geometric mean over the problems, below 1 is better. div.: problems with a diverged run. its end: problems "
    "where the median run gets to {baseline}'s end, after which part of the steps. {clear}: clear among {family} "
    "statements."
)


class Answer:
    """What came out, for the end of a suite; what is left out is what 30 lines of 80 columns have no room for."""

    def __init__(self, found: SuiteAnalysis, page: Path | None = None) -> None:
        self.found, self.page = found, page

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        narrow = options.update(width=min(COLUMNS, options.max_width))
        for rows in (12, 10, 8, 7, 6, 5, 4, 3, 2, 1):
            shown = self._at_most(rows)
            if len(console.render_lines(shown, narrow, pad=False)) <= MOST_LINES:
                break
        yield shown

    def _problems(self, rows: int) -> list[RenderableType]:
        """The table of problems if it fits into the width, else where it is."""
        table = aligned(*on_each(self.found, rows))
        if max(map(len, table.plain.splitlines())) <= COLUMNS:
            return [table]
        return [Text(f"{len(self.found.problems)} problems: each has a table in the report")]

    def _at_most(self, rows: int) -> RenderableType:
        found = self.found
        parts: list[RenderableType] = [Text(f"\n{found.headline}", style="bold")]
        if found.standings:
            parts += [aligned(*_narrowed(*over_all(found, rows))), *self._problems(rows)]
            if len(found.standings) > rows:
                parts.append(Text(f"… and {len(found.standings) - rows} more optimizers"))
            parts.append(Text(LEGEND.format(clear=CLEAR, family=found.family, baseline=name_of(found.baseline))))
        parts += [Text(line) for line in found.notes]
        if self.page is not None:
            parts.append(Text(f"Report: {self.page}"))
        return Group(*parts)


def aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Text:
    """A table as plain lines, which takes less room than one with rules."""
    every = [head, *rows]
    widths = [max(len(row[at]) for row in every) for at in range(len(head))]
    lines = []
    for first, *rest in every:
        cells = [f"{cell:>{width}}" for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([f"{first:<{widths[0]}}", *cells]).rstrip())
    return Text("\n".join(["", *lines]))


def _narrowed(head: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """The table without p where it has a column for "equal" too: the mark tells what is clear."""
    left_out = head.index("p") if "equal" in head else len(head)
    kept = [at for at in range(len(head)) if at != left_out]
    return [head[at] for at in kept], [[row[at] for at in kept] for row in rows]


def over_all(found: SuiteAnalysis, most: int | None = None) -> tuple[list[str], list[list[str]]]:
    """(head, rows): each optimizer's ratio over all problems, on how many it is ahead, equal, behind and diverging, and
    on how many it gets to the baseline's end, after which part of the steps."""
    counts = ["ahead", *(["equal"] if found.margin is not None else []), "behind", "div."]
    head = [f"against {name_of(found.baseline)}", "ratio", "p", *counts, "its end"]
    rows = []
    for one in found.standings[:most]:
        numbers = {
            "ahead": one.count("better"),
            "equal": one.count("equal"),
            "behind": one.count("worse"),
            "div.": len(one.diverged),
        }
        cells = [str(numbers[name]) for name in counts]
        times = ratio_words(one) + (CLEAR if one.verdict in ("better", "worse") else "")
        rows.append([name_of(one.optimizer), times, show(one.p_holm, 2), *cells, _arrives(found, one.optimizer)])
    return head, rows


def _arrives(found: SuiteAnalysis, optimizer: str) -> str:
    """On how many problems it gets to the baseline's end, and after which part of the steps: "3/4 45%"."""
    shares = [problem.row(optimizer).share for problem in found.problems]
    known = [share for share in shares if share is not None]
    if not known:
        return "–"
    there = [share for share in known if math.isfinite(share)]
    count = f"{len(there)}/{len(known)}"
    if not there:
        return count
    mean = math.exp(sum(map(math.log, there)) / len(there))
    return f"{count} {100 * mean:.0f}%"


def on_each(found: SuiteAnalysis, most: int | None = None) -> tuple[list[str], list[list[str]]]:
    """(head, rows): one row per optimizer, one column per problem: how much better than the baseline."""
    rows = []
    for one in found.standings[:most]:
        rows.append([name_of(one.optimizer), *(better_by(problem, one.optimizer) for problem in found.problems)])
    return ["better by", *(problem.name for problem in found.problems)], rows


def better_by(problem: Problem, optimizer: str) -> str:
    """How much better than the baseline on a problem, beyond a factor of 2 as a factor; marked where that is clear in
    the suite.

    A study in which a run diverged decides by ranks; its percentage is that of the ranks' estimate.
    """
    row = problem.row(optimizer)
    clear = CLEAR if row.verdict in ("better", "worse") else ""
    if row.verdict in ("unfinished", "untested", "identical"):
        return {"unfinished": "failed", "untested": "no verdict", "identical": "the same"}[row.verdict]
    if row.better is None or row.better.value is None or not math.isfinite(row.better.value):
        return f"{'diverged' if row.diverged else '–'}{clear}"
    percent = row.better.value
    times = ratio(percent, problem.higher_is_better)
    if times >= 2 or 0 < times <= 0.5:
        return f"{digits(max(times, 1 / times))}× {'better' if percent > 0 else 'worse'}{clear}"
    return f"{'−' if percent < 0 else '+'}{digits(percent)} %{clear}"


# Markdown


def markdown(found: SuiteAnalysis) -> str:
    """The table over all problems, then one table per problem."""
    parts = [_over_all_table(found)] if found.standings else []
    return "\n".join([*parts, *(problem_table(found, problem) for problem in found.problems)])


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"### {title}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows), ""])


def _over_all_table(found: SuiteAnalysis) -> str:
    head, rows = over_all(found)
    last = f"gets to {name_of(found.baseline)}'s end, after which part of the steps"
    return _table(f"Over {problems_words(len(found.problems))}", ["", *head[1:-1], last], rows)


def problem_table(found: SuiteAnalysis, problem: Problem) -> str:
    """One problem: every optimizer beside the baseline, the best median first; p is that of the study."""
    head, rows = problem_rows(found, problem)
    return _table(problem.name, head, rows)


def problem_rows(found: SuiteAnalysis, problem: Problem) -> tuple[list[str], list[list[str]]]:
    """(head, rows) of one problem's table."""
    base = name_of(found.baseline)
    options = names_in(row.chosen for row in problem.rows)
    timed = any(row.reached is not None for row in problem.rows)
    head = ["", *(f"best {name}" for name in options), "median [quartiles]", f"against {base}", "seeds won", "p"]
    head += ["µs/step", *(["reach its end", "median steps until then"] if timed else [])]
    rows = []
    for row in problem.rows:
        cells = [name_of(row.optimizer), *(f"{row.chosen[name]:.2g}" if name in row.chosen else "" for name in options)]
        cells.append(f"{show(row.median, 3)} [{show(row.q1, 3)}, {show(row.q3, 3)}]")
        won = "" if row.wins is None else f"{row.wins}/{row.seeds}"
        cells += [_effect(problem, row), won, "" if row.wins is None else show(row.p_study, 2)]
        cells.append("–" if row.seconds_per_step is None else f"{1e6 * row.seconds_per_step:.0f}")
        if timed:
            steps = "–" if row.steps is None or not math.isfinite(row.steps) else f"{row.steps:.0f}"
            cells += [f"{row.reached}/{row.runs}" if row.runs else "–", steps]
        rows.append(cells)
    return head, rows


def _effect(problem: Problem, row: Row) -> str:
    """The effect with its interval, as the study says it."""
    if row.wins is None:
        return ""
    if row.better is None or row.better.value is None or row.better.interval is None:
        return "–"
    interval = row.better.interval
    return percent_words(interval.low, row.better.value, interval.high, problem.higher_is_better)
