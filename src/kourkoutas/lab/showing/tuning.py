"""The figure of a tuning: the endpoint against the tuned option.

A point is the mean of the tuning seeds, its bar goes from their best to their worst, and a ring marks the value that
was chosen. Where the mean run diverged a cross stands at the edge on the worse side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from markupsafe import Markup

from kourkoutas.lab.errors import argument
from kourkoutas.lab.judging.statistics import show
from kourkoutas.lab.optimizers.looks import Look, name_of
from kourkoutas.lab.showing.drawing import Drawing, Panel, below_explosions, cross, element, series
from kourkoutas.lab.tuning.sensitivity import Point, Sensitivity

HEIGHT = 260.0


def draw(found: Sequence[Sensitivity], looks: Mapping[str, Look], title: str, *, maximize: bool = False) -> Drawing:
    """One panel for all optimizers, on a log scale where the values allow it.

    Raises:
      ValueError: nothing was tried.
    """
    if not found:
        raise ValueError(
            f"no values were tried, so there is nothing to draw: tune one option, {argument('tune', 'lr=LOW:HIGH')}"
        )
    option = found[0].option
    points = list(itertools.chain.from_iterable(one.points for one in found))
    values = [float(point.value) for point in points]
    ends: list[float] = []
    for point in points:
        ends += filter(math.isfinite, (point.mean, point.low, point.high))
    log_y = _positive(ends)
    top = None if maximize else below_explosions(ends, _usual_top(points), log=log_y)
    panel = Panel.over(
        values, ends, log_x=min(values) > 0, log_y=log_y, height=HEIGHT, x_label=option, edge=0.06, top=top
    )
    for one in found:
        look = looks[one.arm]
        fine = [point for point in one.points if math.isfinite(point.mean)]
        line = panel.path([p.value for p in fine], [p.mean for p in fine], look)
        marks = [_mark(panel, point, one, look, maximize) for point in one.points]
        panel.parts.append(series(look, line, *marks))
    words = "; ".join(f"{looks[one.arm].name} best at {one.best:g}" for one in found)
    return panel.drawing(
        f"{title}{', log scale' if log_y else ''}, against {option}",
        f"{title} against {option} on the tuning seeds: {words}",
    )


def _mark(panel: Panel, point: Point, of: Sensitivity, look: Look, maximize: bool) -> Markup:
    x = panel.x.at(float(point.value))
    told = f"{look.name}, {of.option} {point.value:g}: mean {show(point.mean, 3)} of {point.runs} runs"
    marks = [element("title", told + (f", {point.diverged} diverged" if point.diverged else ""))]
    if not math.isfinite(point.mean):
        return element("g", *marks, cross(x, panel.y.start if maximize else panel.y.stop))
    y = panel.y.at(point.mean)
    low, high = (panel.y.at(end) if math.isfinite(end) else y for end in (point.low, point.high))
    marks.append(element("line", x1=x, x2=x, y1=low, y2=high, class_="bar"))
    marks.append(element("circle", cx=x, cy=y, r=3.5, class_="point"))
    if point.value == of.best:
        marks.append(element("circle", cx=x, cy=y, r=7, class_="chosen"))
    return element("g", *marks)


def _usual_top(points: Sequence[Point]) -> float:
    """The highest mean that a reader wants to tell from others: that of the middle one of all."""
    means = sorted(point.mean for point in points if math.isfinite(point.mean))
    return means[len(means) // 2] if means else math.nan


def _positive(values: Sequence[float]) -> bool:
    """Whether a log scale can hold the values: a tuned loss that is exactly 0 stands at its lower end."""
    return bool(values) and min(values) >= 0 < max(values)


def table(found: Sequence[Sensitivity]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(head, rows): how wide the range of good values is, and what a wrong one costs."""
    option, margin = found[0].option, found[0].margin
    head = ("optimizer", f"best {option}", f"within {100 * margin:g} % of the best", "as a ratio", "sensitivity")
    rows: list[tuple[str, ...]] = []
    for one in found:
        low = f"{'below ' if one.open_below else ''}{show(one.low, 3)}"
        high = f"{show(one.high, 3)}{' and above' if one.open_above else ''}"
        numbers = show(one.best, 4), f"{low} to {high}", show(one.ratio, 3), show(one.sensitivity, 3)
        rows.append((name_of(one.arm), *numbers))
    return head, rows
