"""A study on a terminal: the answer in about 25 lines, or every statistic. Views of one `Analysis`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from kourkoutas.lab.judging import headline
from kourkoutas.lab.judging.analysis import Analysis
from kourkoutas.lab.judging.comparing import Comparison
from kourkoutas.lab.judging.statistics import DIVERGED, OF_ARMS, Finding, OneArm, Statistic, show
from kourkoutas.lab.judging.values import Seed
from kourkoutas.lab.optimizers.looks import name_of
from kourkoutas.lab.results.export import names_in
from kourkoutas.lab.showing import tuning
from kourkoutas.lab.showing.drawing import shorten
from kourkoutas.lab.showing.effects import limits, rows_of, unit_of
from kourkoutas.lab.showing.fitting import Fitting

MOST_ROWS = 200
MOST_COLUMNS = 30
MOST_LINES, COLUMNS = 30, 80  # of the answer
PLOT = 23  # characters of the effect plot, its middle at no difference
NAME = 18


class Answer:
    """What came out, for the end of a study: at most MOST_LINES lines, however many endpoints and optimizers it has.

    What is left out is what 80 columns have no room for, so that the answer is the same at any width.
    """

    def __init__(self, analysis: Analysis, report: Path | None = None) -> None:
        self.analysis, self.report = analysis, report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        narrow = options.update(width=min(COLUMNS, options.max_width))
        for endpoints, rows in ((3, 8), (3, 5), (2, 4), (1, 4), (1, 3), (1, 1)):
            found = self._at_most(endpoints, rows)
            if len(console.render_lines(found, narrow, pad=False)) <= MOST_LINES:
                break
        yield found

    def _at_most(self, endpoints: int, rows: int) -> RenderableType:
        """The answer with so many endpoints, and so many rows for each of them and of optimizers."""
        analysis, where = self.analysis, self.analysis.snapshot.path
        parts: list[RenderableType] = [Text(f"\n{analysis.headline}", style="bold")]
        parts.extend(Text(line) for line in analysis.causes)
        plots = [one for one in analysis.endpoints if one.contrasts]
        parts.extend(effects(one, heading=k == 0, most=rows) for k, one in enumerate(plots[:endpoints]))
        if plots[endpoints:]:
            parts.append(Text(f"{headline.listed([one.title for one in plots[endpoints:]])}: kbeta stats {where}"))
        parts.append(optimizers(analysis, most=rows))
        parts.extend(Text(line) for line in (*analysis.failures, *analysis.fairness, *analysis.notes))
        if analysis.next_step and not analysis.failures:
            parts.append(Text(analysis.next_step))
        more = [*([] if self.report is None else [f"Report: {self.report}"]), f"tables: kbeta stats {where}"]
        line = " · ".join(more)
        parts.append(Text(line if len(line) <= COLUMNS else "\n".join(more)))
        return Group(*parts)


def effects(endpoint: Comparison, *, heading: bool = True, most: int = 8) -> Text:
    """The effect plot of one endpoint, on a scale of its own.

    K-β against           worse ◂──0──▸ better        seeds won
    last-batch BCE (decides)
      Adam 0.95             ├─┼●──┤    2.7 % lower [−11, +5.8]  5/10
    """
    lines = [f"{endpoint.title} ({endpoint.standing})"]
    one = len(endpoint.treatments) == 1
    if heading:
        who = f"{name_of(endpoint.treatments[0])} against" if one else "against"
        lines.insert(0, f"\n{who:<{NAME + 2}} {'worse ◂──0──▸ better':^{PLOT}} {'':<24}seeds won")
    rows = rows_of(endpoint)
    widest = max(map(abs, limits(rows, unit_of(endpoint)))) or 1.0
    for row in rows[:most]:
        c = row.contrast
        name = shorten(name_of(c.baseline) if one else c.name, NAME)
        lines.append(f"  {name:<{NAME}} {_bar(row.estimate, widest)} {row.words:<26} {f'{c.wins}/{c.n}':>6}")
    if len(rows) > most:
        lines.append(f"  … and {len(rows) - most} more")
    return Text("\n".join(lines))


def _bar(estimate: headline.Estimate | None, most: float) -> str:
    half = PLOT // 2
    cells = [" "] * PLOT
    cells[half] = "│"
    if estimate is None:
        return "".join(cells)
    low, middle, high = (half + round(max(-1.0, min(1.0, x / most)) * half) for x in estimate)
    for at in range(low, high + 1):
        cells[at] = "┼" if at == half else "─"
    if low < high:
        cells[low] = "├" if estimate.low >= -most else "◂"
        cells[high] = "┤" if estimate.high <= most else "▸"
    cells[middle] = "●"
    return "".join(cells)


def optimizers(analysis: Analysis, most: int = MOST_ROWS) -> RenderableType:
    """One row per optimizer: the primary endpoint, how its runs ended, and what a step takes.

    Of more than `most`, controls go first: the line of causes tells what they say.
    """
    ends = ["ok", "diverged", "failed", *(["unfinished"] if any(arm.unfinished for arm in analysis.arms) else [])]
    tuned = names_in(arm.chosen for arm in analysis.arms)
    rows = Fitting("", ["optimizer", *tuned, "median", *ends, "µs/step"])
    shown = [arm for arm in analysis.arms if arm.role != "control"] if len(analysis.arms) > most else analysis.arms
    for arm in shown[:most]:
        pace = None if arm.seconds_per_step is None else 1e6 * arm.seconds_per_step
        chosen = [show(arm.chosen.get(name)) for name in tuned]
        counts = [str(getattr(arm, end)) for end in ends]
        rows.add_row(name_of(arm.label), *chosen, show(arm.median), *counts, "–" if pace is None else f"{pace:.0f}")
    if rest := len(analysis.arms) - len(shown[:most]):
        controls = "control" if len(shown) <= most else "optimizer"
        rows.add_row(f"… {rest} {controls}{'' if rest == 1 else 's'}", *["" for _ in rows.head[1:]])
    return rows


def statistics(analysis: Analysis) -> RenderableType:
    """Everything: the answer with its numbers, then every endpoint in full."""
    parts: list[RenderableType] = [Text(line) for line in analysis.fairness]
    parts += [optimizers(analysis), Text(analysis.headline, style="bold")]
    parts.extend(Text(line) for line in (*analysis.answers[:MOST_ROWS], *analysis.causes))
    parts.append(Text(analysis.rule, style="dim"))
    parts.extend(comparison(one) for one in analysis.endpoints)
    if analysis.sensitivity:
        title = f"Sensitivity to {analysis.sensitivity[0].option}, on the tuning seeds"
        parts.append(Fitting(title, *tuning.table(analysis.sensitivity)))
    parts.extend(Text(f"Note: {note}") for note in (*analysis.failures, *analysis.notes))
    return Group(*parts)


def of_table(found: Comparison) -> RenderableType:
    """A table of results that is no study: the answers, and all of its one endpoint."""
    parts: list[RenderableType] = [Text(headline.answer(c, found.margin)) for c in found.contrasts[:MOST_ROWS]]
    if found.contrasts:
        parts.append(Text(headline.intervals_words(found.contrasts[0].family), style="dim"))
    return Group(*parts, comparison(found))


def comparison(found: Comparison) -> RenderableType:
    """One endpoint in full: every seed, each optimizer, every statistic of each contrast, and notes.

    NOTE: a console is for reading. Of very many arms or contrasts the first are printed, and how many there are; JSON
    and `kbeta export` hold all.
    """
    parts: list[RenderableType] = [Text(f"\nEndpoint: {found.title} ({found.standing})", style="bold")]
    if not found.primary:
        parts.extend(Text(headline.answer(c, found.margin)) for c in found.contrasts[:MOST_ROWS])
    parts.append(_every_seed(found))
    parts.append(Fitting("Each optimizer", *of_arms(found, MOST_ROWS)))
    if found.contrasts:
        parts.append(Text(statistics_title(found)))
        for c in found.contrasts[:MOST_ROWS]:
            parts.append(
                Fitting(c.name, ["statistic", "value", "p", "Holm p"], c.rows(found.standing), words=["value"])
            )
    parts.extend(Text(f"Note: {note}") for note in found.notes)
    counts = {"optimizers": (MOST_COLUMNS, len(found.values)), "contrasts": (MOST_ROWS, len(found.contrasts))}
    for what, (most, count) in counts.items():
        if count > most:
            parts.append(Text(f"Note: the first {most} of {count} {what} are shown; --json has all"))
    return Group(*parts)


def of_arms(found: Comparison, most: int | None = None) -> tuple[list[str], list[list[str]]]:
    """(head, rows): the statistics of each optimizer."""
    shown = [one for one in OF_ARMS if any(one.name in own for own in found.arms.values())]
    rows = [
        [name_of(arm), *(_statistic(found, one, own) for one in shown)] for arm, own in list(found.arms.items())[:most]
    ]
    return ["optimizer", *(one.title for one in shown)], rows


def _statistic(found: Comparison, one: Statistic[OneArm], own: Mapping[str, Finding]) -> str:
    return one.show(own[one.name]).replace(DIVERGED, found.absent) if one.name in own else "–"


def statistics_title(found: Comparison) -> str:
    """What the statistics of the contrasts are."""
    what = "Ratios above 1" if found.log else "Differences above 0"
    family = found.contrasts[0].family
    luck = " All but the first row ignore tuning luck." if any(c.tuned for c in found.contrasts) else ""
    across = f" Holm's adjustment is for {family}." if family > 1 else ""
    return f"{what} speak for the first named.{luck}{across}"


def _every_seed(found: Comparison) -> RenderableType:
    """One row per seed; of many seeds as plain lines, since a console table takes long to lay out."""
    arms = list(found.values)[:MOST_COLUMNS]
    head = [name_of(arm) for arm in arms]
    rows = [[str(seed), *(_cell(found, arm, seed) for arm in arms)] for seed in found.seeds]
    if len(rows) > MOST_ROWS:
        return Text("\n".join("  ".join(row) for row in [["Every seed:", *head], *rows]))
    return Fitting("Every seed", ["seed", *head], rows)


def _cell(found: Comparison, arm: str, seed: Seed) -> str:
    if seed in found.failed.get(arm, ()):
        return "failed"
    value = found.values[arm].get(seed)
    return "missing" if value is None else show(value, 6) if math.isfinite(value) else found.absent
