"""A study on a terminal: the answer in about 25 lines, or every statistic. Views of one `Analysis`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from kourkoutas.lab.judging import headline
from kourkoutas.lab.judging.analysis import Analysis
from kourkoutas.lab.judging.comparing import Comparison, Contrast
from kourkoutas.lab.judging.headline import digits
from kourkoutas.lab.judging.statistics import OF_ARMS, show
from kourkoutas.lab.judging.values import Seed
from kourkoutas.lab.showing import reaching, sensitivity
from kourkoutas.lab.showing.drawing import shorten
from kourkoutas.lab.showing.failures import failures
from kourkoutas.lab.showing.fitting import Fitting
from kourkoutas.lab.specs.looks import label

MOST_ROWS = 200
MOST_COLUMNS = 30
MOST_LINES = 30  # of the answer
PLOT = 23  # characters of the effect plot, its middle at no difference
NAME = 18


class Answer:
    """What came out, for the end of a study: at most MOST_LINES lines, however many endpoints and optimizers it has."""

    def __init__(self, analysis: Analysis, report: Path | None = None) -> None:
        self.analysis, self.report = analysis, report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for endpoints, rows in ((3, 8), (3, 5), (2, 4), (1, 4), (1, 3), (1, 1)):
            found = self._at_most(endpoints, rows)
            if len(console.render_lines(found, options, pad=False)) <= MOST_LINES:
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
        parts.extend(target(analysis, most=rows))
        for failure in failures(analysis.snapshot.runs)[:2]:
            parts.append(Text(shorten(f"{len(failure.runs)} failed ({failure.who}): {failure.summary}", 158)))
        parts.extend(Text(line) for line in (*analysis.fairness, *analysis.notes))
        page = "" if self.report is None else f"Report: {self.report} · "
        parts.append(Text(f"{page}tables: kbeta stats {where}"))
        return Group(*parts)


def effects(endpoint: Comparison, *, heading: bool = True, most: int = 8) -> Text:
    """The effect plot of one endpoint, on a scale of its own.

    K-β against           worse ◂──0──▸ better        seeds won
    last-batch BCE (decides)
      Adam 0.95             ├─┼●──┤    +2.7 % [−5.8, +11]  5/10
    """
    lines = [f"{endpoint.title} ({endpoint.standing})"]
    treatments = {c.treatment for c in endpoint.contrasts}
    one = len(treatments) == 1
    if heading:
        who = f"{label(next(iter(treatments)))} against" if one else "against"
        lines.insert(0, f"\n{who:<{NAME + 2}} {'worse ◂──0──▸ better':^{PLOT}} {'':<24}seeds won")
    percent = all(c.percent is not None for c in endpoint.contrasts if c.effect is not None)
    ends = {c.name: _ends(c, percent) for c in endpoint.contrasts}
    widest = max((abs(x) for own in ends.values() for x in own or () if math.isfinite(x)), default=1.0) or 1.0
    for c in endpoint.contrasts[:most]:
        name = label(c.baseline) if one else f"{label(c.treatment)} – {label(c.baseline)}"
        numbers = _numbers(c, ends[c.name], percent)
        row = f"  {shorten(name, NAME):<{NAME}} {_bar(ends[c.name], widest)} {numbers:<26}"
        lines.append(f"{row} {f'{c.wins}/{c.n}':>6}")
    if len(endpoint.contrasts) > most:
        lines.append(f"  … and {len(endpoint.contrasts) - most} more")
    return Text("\n".join(lines))


def _ends(c: Contrast, percent: bool) -> tuple[float, float, float] | None:
    """(low, estimate, high) in percent, as a difference, or as a ratio less 1; infinite where there is no end."""
    of = c.percent if percent else c.effect
    if of is None or of.value is None or not math.isfinite(of.value):
        return None
    ends = (of.value, of.value) if of.interval is None else (of.interval.low, of.interval.high)
    found = (ends[0], of.value, ends[1])
    return found if percent or not c.log else (found[0] - 1, found[1] - 1, found[2] - 1)


def _bar(ends: tuple[float, float, float] | None, most: float) -> str:
    half = PLOT // 2
    cells = [" "] * PLOT
    cells[half] = "│"
    if ends is None:
        return "".join(cells)
    low, middle, high = (half + round(max(-1.0, min(1.0, x / most)) * half) for x in ends)
    for at in range(low, high + 1):
        cells[at] = "┼" if at == half else "─"
    if low < high:
        cells[low] = "├" if math.isfinite(ends[0]) else "◂"
        cells[high] = "┤" if math.isfinite(ends[2]) else "▸"
    cells[middle] = "●"
    return "".join(cells)


def _signed(value: float) -> str:
    return f"{'−' if value < 0 else '+'}{digits(value)}"


def _numbers(c: Contrast, ends: tuple[float, float, float] | None, percent: bool) -> str:
    if ends is None:
        return "no finite effect"
    low, value, high = ends
    if not percent:
        return f"{value:+.2g} [{low:+.2g}, {high:+.2g}]".replace("-", "−")
    text = headline.percent_text(value, c.higher_is_better)
    if text.endswith("%"):
        return f"{_signed(value)} % [{_signed(low)}, {_signed(high)}]"
    return f"{text} [{headline.times_between(low, high, c.higher_is_better)}]"


def optimizers(analysis: Analysis, most: int = MOST_ROWS) -> RenderableType:
    """One row per optimizer: the primary endpoint, how its runs ended, and what a step takes.

    Of more than `most`, controls go first: the line of causes tells what they say.
    """
    ends = ["ok", "diverged", "failed", *(["unfinished"] if any(arm.unfinished for arm in analysis.arms) else [])]
    tuned = list(dict.fromkeys(name for arm in analysis.arms for name in arm.chosen))
    rows = Fitting("", ["optimizer", *tuned, "median", *ends, "µs/step"])
    shown = [arm for arm in analysis.arms if arm.role != "control"] if len(analysis.arms) > most else analysis.arms
    for arm in shown[:most]:
        pace = None if arm.seconds_per_step is None else 1e6 * arm.seconds_per_step
        chosen = [show(arm.chosen.get(name)) for name in tuned]
        counts = [str(getattr(arm, end)) for end in ends]
        rows.add_row(label(arm.label), *chosen, show(arm.median), *counts, "–" if pace is None else f"{pace:.0f}")
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
        parts.append(table(title, *sensitivity.table(analysis.sensitivity)))
    parts.extend(target(analysis))
    parts.extend(Text(f"Note: {note}") for note in analysis.notes)
    return Group(*parts)


def target(analysis: Analysis, most: int = MOST_ROWS) -> list[RenderableType]:
    """How soon each optimizer reached the target; nothing where none was asked for, no table where room is short."""
    if analysis.target is None:
        return []
    races: list[RenderableType] = [Text(race.sentence) for race in analysis.target.contrasts[:most]]
    if most < len(analysis.target.arms):
        return races
    return [table(f"Until {analysis.target.target}", *reaching.table(analysis.target.arms)), *races]


def comparison(found: Comparison) -> RenderableType:
    """One endpoint in full: every seed, each optimizer, every statistic of each contrast, and notes.

    NOTE: a console is for reading. Of very many arms or contrasts the first are printed, and how many there are; JSON
    and `kbeta export` hold all.
    """
    parts: list[RenderableType] = [Text(f"\nEndpoint: {found.title} ({found.standing})", style="bold")]
    if not found.primary:
        parts.extend(Text(headline.answer(c)) for c in found.contrasts[:MOST_ROWS])
    parts.append(_every_seed(found))
    shown = [one for one in OF_ARMS if any(one.name in own for own in found.arms.values())]
    arms = Fitting("Each optimizer", ["", *(one.title for one in shown)])
    for arm, own in list(found.arms.items())[:MOST_ROWS]:
        arms.add_row(arm, *(one.show(own[one.name]) if one.name in own else "–" for one in shown))
    parts.append(arms)
    if found.contrasts:
        parts.append(Text(statistics_title(found)))
        for c in found.contrasts[:MOST_ROWS]:
            parts.append(table(c.name, ["statistic", "value", "p", "Holm p"], c.rows(), words=["value"]))
    parts.extend(Text(f"Note: {note}") for note in (*found.notes, *_left_out(found)))
    return Group(*parts)


def statistics_title(found: Comparison) -> str:
    """What the statistics of the contrasts are."""
    what = "Ratios above 1" if found.log else "Differences above 0"
    family = found.contrasts[0].family
    luck = " All but the first row ignore tuning luck." if any(c.tuned for c in found.contrasts) else ""
    across = f" Holm's adjustment is for the {family} planned contrasts." if family > 1 else ""
    return f"{what} speak for the first named.{luck}{across}"


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[str] = ()) -> RenderableType:
    made = Fitting(title, head, words)
    for row in rows:
        made.add_row(*row)
    return made


def _every_seed(found: Comparison) -> RenderableType:
    """One row per seed; of many seeds as plain lines, since a console table takes long to lay out."""
    arms = list(found.values)[:MOST_COLUMNS]
    rows = [[str(seed), *(_cell(found, arm, seed) for arm in arms)] for seed in found.seeds]
    if len(rows) > MOST_ROWS:
        return Text("\n".join("  ".join(row) for row in [["Every seed:", *arms], *rows]))
    return table("Every seed", ["seed", *arms], rows)


def _cell(found: Comparison, arm: str, seed: Seed) -> str:
    if seed in found.failed.get(arm, ()):
        return "failed"
    return show(found.values[arm][seed], 6) if seed in found.values[arm] else "missing"


def _left_out(found: Comparison) -> list[str]:
    """What was not printed because there is so much of it."""
    notes = []
    if len(found.values) > MOST_COLUMNS:
        notes.append(
            f"every seed of the first {MOST_COLUMNS} of {len(found.values)} optimizers is shown; --json has all"
        )
    if len(found.contrasts) > MOST_ROWS:
        notes.append(f"the first {MOST_ROWS} of {len(found.contrasts)} contrasts are shown; --json has all")
    return notes
