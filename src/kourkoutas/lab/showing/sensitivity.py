"""The figure of a tuning: the endpoint against the tuned option, one line per optimizer.

A point is the mean of the tuning seeds, its bar goes from their best to their worst, and a ring marks the value that
was chosen. Where the mean run diverged a cross stands at the edge on the worse side.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from kourkoutas.lab.judging.sensitivity import Sensitivity
from kourkoutas.lab.judging.statistics import show
from kourkoutas.lab.showing.drawing import Drawing, Panel, element, line_path
from kourkoutas.lab.specs.looks import Look


def draw(found: Sequence[Sensitivity], looks: Mapping[str, Look], title: str, *, maximize: bool = False) -> Drawing:
    """One panel for all arms, on a log scale where the values allow it.

    Raises:
      ValueError: nothing was tried.
    """
    if not found:
        raise ValueError("no values were tried, so there is nothing to draw: tune one option, --tune lr=LOW:HIGH")
    option = found[0].option
    values = [float(point.value) for one in found for point in one.points]
    ends = [x for one in found for p in one.points for x in (p.mean, p.low, p.high) if math.isfinite(x)]
    panel = Panel.over(
        values,
        ends,
        log_x=min(values) > 0,
        log_y=_positive(ends),
        height=260.0,
        x_label=option,
        edge=0.06,
    )
    worst = panel.y.start if maximize else panel.y.stop
    for one in found:
        look = looks[one.arm]
        fine = [point for point in one.points if math.isfinite(point.mean)]
        line = line_path(panel.x([p.value for p in fine]), panel.y([p.mean for p in fine]))
        parts = [element("path", d=line, class_="curve", fill="none", stroke_dasharray=look.dasharray)]
        for point in one.points:
            x = panel.x.at(float(point.value))
            told = f"{one.arm}, {option} {point.value:g}: mean {show(point.mean, 3)} of {point.runs} runs"
            told += f", {point.diverged} diverged" if point.diverged else ""
            marks = [element("title", told)]
            if math.isfinite(point.mean):
                ys = panel.y(np.array([y if math.isfinite(y) else point.mean for y in (point.low, point.high)]))
                marks.append(element("line", x1=x, x2=x, y1=float(ys[0]), y2=float(ys[1]), class_="bar"))
                marks.append(element("circle", cx=x, cy=panel.y.at(point.mean), r=3.5, class_="point"))
                if point.value == one.best:
                    marks.append(element("circle", cx=x, cy=panel.y.at(point.mean), r=7, class_="chosen"))
            else:
                marks.append(element("path", d=f"M{x - 4:.1f} {worst - 4:.1f}l8 8m0 -8l-8 8", class_="cross"))
            parts.append(element("g", *marks))
        panel.add("g", *parts, class_=f"arm c{look.colour}", data_arm=list(looks).index(one.arm))
    log_words = ", log scale" if panel.y.log else ""
    words = "; ".join(f"{one.arm} best at {one.best:g}" for one in found)
    return panel.drawing(
        f"{title}{log_words}, against {option}", f"{title} against {option} on the tuning seeds: {words}"
    )


def _positive(values: Sequence[float]) -> bool:
    """Whether a log scale can hold the values: a tuned loss that is exactly 0 stands at its lower end."""
    return bool(values) and min(values) >= 0 < max(values)


def best_so_far(found: Sequence[Sensitivity], looks: Mapping[str, Look], title: str, *, maximize: bool) -> Drawing:
    """The best mean that a tuning finds against its number of trials, over all orders of the values.

    Of n values with losses ℓ(1) ≤ … ≤ ℓ(n), k drawn without replacement have the best one ℓ(i) with probability

        C(n - i, k - 1)/C(n, k)        so that E[best of k] = Σ ℓ(i)·C(n - i, k - 1)/C(n, k)

    A value at which a run diverged counts as the worst finite mean of all optimizers.
    """
    finite = [point.mean for one in found for point in one.points if math.isfinite(point.mean)]
    worst = (min if maximize else max)(finite, default=math.nan)
    lines = {}
    for one in found:
        means = sorted((p.mean if math.isfinite(p.mean) else worst for p in one.points), reverse=maximize)
        n = len(means)
        lines[one.arm] = [
            sum(x * math.comb(n - i, k - 1) for i, x in enumerate(means, 1)) / math.comb(n, k) for k in range(1, n + 1)
        ]
    ends = [x for own in lines.values() for x in own]
    most = max(map(len, lines.values()))
    log_y = _positive(ends)
    panel = Panel.over([1, most], ends, log_y=log_y, height=260.0, x_label="trials", edge=0.03)
    for arm, own in lines.items():
        steps = list(range(1, len(own) + 1))
        look = looks[arm]
        path = line_path(panel.x(steps), panel.y(own))
        hint = element("title", f"{arm}: {own[0]:.3g} with one trial, {own[-1]:.3g} with {len(own)}")
        line = element("path", d=path, class_="curve", fill="none", stroke_dasharray=look.dasharray)
        panel.add("g", hint, line, class_=f"arm c{look.colour}", data_arm=list(looks).index(arm))
    told = f"Best {title} against number of trials{', log scale' if log_y else ''}"
    return panel.drawing(told, f"{told}, as a mean over all orders of the values tried")


def table(found: Sequence[Sensitivity]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(head, rows): how wide the range of good values is, and what a wrong one costs."""
    option, margin = found[0].option, found[0].margin
    head = ("optimizer", f"best {option}", f"within {100 * margin:g} % of the best", "as a ratio", "sensitivity")
    rows: list[tuple[str, ...]] = []
    for one in found:
        low = f"{'below ' if one.open_below else ''}{show(one.low, 3)}"
        high = f"{show(one.high, 3)}{' and above' if one.open_above else ''}"
        rows.append((one.arm, show(one.best, 4), f"{low} to {high}", show(one.ratio, 3), show(one.sensitivity, 3)))
    return head, rows
