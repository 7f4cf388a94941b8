"""Learning curves: all arms in one panel, its end enlarged, and one panel per arm with every seed.

The line of an arm is the median over its seeds and the band their middle half, a diverged run counting as the worst
from where it diverged. A run that has not finished is drawn as far as it has come, and is no part of the median while
others have finished.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from kourkoutas.lab.judging.values import Seed
from kourkoutas.lab.showing.drawing import Array, Drawing, Panel, band_path, element, line_path, log_suits
from kourkoutas.lab.specs.looks import Look

MOST_POINTS = 160  # per drawn curve; longer ones are averaged in blocks
MOST_PANELS = 24  # arms with a panel of their own
MOST_GAPS = 6  # pairs in the picture of the paired gap
END = 0.8  # where the enlarged part begins


@dataclass(frozen=True)
class Course:
    """The loss of one run, by rising steps.

    Attributes:
      diverged: its loss or a parameter stopped being finite after the last point.
      going: it has not finished.
      anchor: where the page tells about the run.
    """

    steps: Array
    losses: Array
    diverged: bool = False
    going: bool = False
    anchor: str = ""


@dataclass(frozen=True)
class Summary:
    """Median and middle half over the seeds, NaN where a diverged run leaves none."""

    steps: Array
    median: Array
    low: Array
    high: Array


Courses = Mapping[str, Mapping[Seed, Course]]


def thinned(course: Course) -> Course:
    """At most MOST_POINTS points, each the mean of neighbours, so that thinning neither picks nor hides spikes."""
    fine = np.isfinite(
        course.losses
    )  # a gap is a step at which no loss was logged; that a run diverged, its status says
    steps, losses = course.steps[fine], course.losses[fine]
    k = math.ceil(len(steps) / MOST_POINTS)
    if k > 1:
        starts = np.arange(0, len(steps), k)
        size = np.diff([*starts, len(steps)])
        steps, losses = steps[starts + size - 1], np.add.reduceat(losses, starts) / size
    return Course(steps, losses, course.diverged, course.going, course.anchor)


def summarise(courses: Sequence[Course]) -> Summary | None:
    """Over the finished runs, or, before one has finished, over those that are going, as far as all have come."""
    done = [c for c in courses if not c.going and (len(c.steps) or c.diverged)] or [c for c in courses if len(c.steps)]
    lengths = [c.steps[-1] for c in done if len(c.steps) and not c.diverged]
    if not lengths and not any(len(c.steps) for c in done):
        return None
    end = min(lengths) if lengths else max(c.steps[-1] for c in done if len(c.steps))
    grid = np.unique(np.concatenate([c.steps[c.steps <= end] for c in done if len(c.steps)]))
    grid = grid[grid >= max((c.steps[0] for c in done if len(c.steps)), default=0)]
    if not len(grid):
        return None
    grid = grid[:: math.ceil(len(grid) / MOST_POINTS)] if len(grid) > 2 * MOST_POINTS else grid
    rows = []
    for c in done:
        if len(c.steps):
            row = np.interp(grid, c.steps, c.losses)
            rows.append(np.where(grid > c.steps[-1], math.inf, row) if c.diverged else row)
        else:
            rows.append(np.full(len(grid), math.inf))
    ranked = np.sort(np.array(rows), axis=0)
    low, median, high = (_quantile(ranked, q) for q in (0.25, 0.5, 0.75))
    return Summary(grid, median, low, high)


def _quantile(ranked: Array, q: float) -> Array:
    """Between two neighbours by proportion, as `numpy.quantile`, but infinite beside an infinite one; then NaN."""
    at = q * (len(ranked) - 1)
    below, part = math.floor(at), at - math.floor(at)
    a, b = ranked[below], ranked[min(below + 1, len(ranked) - 1)]
    with np.errstate(invalid="ignore"):
        found = a if part == 0 else np.where(np.isfinite(b), a + part * (b - a), math.inf)
    return np.where(np.isfinite(found), found, math.nan)


def panels(courses: Courses, looks: Mapping[str, Look], *, label: str = "training loss") -> list[Drawing]:
    """Every panel, in order; none where nothing was recorded."""
    thin = {arm: {seed: thinned(c) for seed, c in by_seed.items()} for arm, by_seed in courses.items()}
    every = [c.losses for by_seed in thin.values() for c in by_seed.values() if len(c.losses)]
    if not every:
        return []
    losses = np.concatenate(every)
    steps = np.concatenate([c.steps for by_seed in thin.values() for c in by_seed.values()])
    log = log_suits(losses)
    summaries = {arm: found for arm, by_seed in thin.items() if (found := summarise(list(by_seed.values())))}
    scale = f"{label}{', log scale' if log else ''}"
    drawn = []
    if summaries:
        drawn.append(_together(summaries, looks, log, f"All optimizers: {scale}"))
        end = _end(summaries, looks, log, scale)
        drawn += [] if end is None else [end]
    for arm in list(thin)[:MOST_PANELS]:
        panel = Panel.over(steps, losses, log_y=log)
        panel.parts += _own(panel, arm, thin, summaries, looks)
        count = len(thin[arm])
        runs = f"{count} run{'' if count == 1 else 's'}"
        lost = sum(c.diverged for c in thin[arm].values())
        told = runs + (f", {lost} diverged ×" if lost else "")
        drawn.append(
            panel.drawing(f"{arm}: {told}", f"{scale} of {arm} against step, every seed, median in bold: {told}")
        )
    return drawn


def gaps(courses: Courses, pairs: Sequence[tuple[str, str]], looks: Mapping[str, Look]) -> Drawing | None:
    """The paired gap along training: treatment/baseline of each seed, median and middle half, on a log scale."""
    found: dict[tuple[str, str], Summary] = {}
    for a, b in pairs[:MOST_GAPS]:
        rows = []
        for seed in [s for s in courses.get(a, {}) if s in courses.get(b, {})]:
            x, y = thinned(courses[a][seed]), thinned(courses[b][seed])
            ended = not (x.going or y.going or x.diverged or y.diverged)
            if ended and len(x.steps) > 1 and np.array_equal(x.steps, y.steps):
                with np.errstate(all="ignore"):
                    ratio = x.losses / y.losses
                rows.append((x.steps, np.where(np.isfinite(ratio) & (ratio > 0), ratio, math.nan)))
        if len(rows) > 1 and len({len(steps) for steps, _ in rows}) == 1:
            with warnings.catch_warnings():  # a step at which no seed has a ratio is a gap in the line
                warnings.simplefilter("ignore", RuntimeWarning)
                low, median, high = np.nanquantile([ratio for _, ratio in rows], (0.25, 0.5, 0.75), axis=0)
            found[a, b] = Summary(rows[0][0], median, low, high)
    if not found:
        return None
    ends = np.concatenate([[1.0], *(y for s in found.values() for y in (s.low, s.high))])
    panel = Panel.over(np.concatenate([s.steps for s in found.values()]), ends, log_y=True)
    zero = panel.y.at(1.0)
    panel.add("line", x1=panel.x.start, x2=panel.x.stop, y1=zero, y2=zero, class_="zero")
    for (a, b), s in found.items():
        # one treatment: the colours of its baselines; else those of the treatments
        of = b if len({pair[0] for pair in found}) == 1 else a
        inside = [element("title", f"{a} against {b}: factor {s.median[-1]:.3g} at the end")]
        inside.append(element("path", d=_band(panel, s), class_="band"))
        inside.append(_line(panel, s.steps, s.median, class_="curve", stroke_dasharray=looks[of].dasharray))
        panel.add("g", *inside, class_=f"arm c{looks[of].colour}", data_arm=list(looks).index(of))
    treatments = list(dict.fromkeys(a for a, _ in found))
    who = f"{treatments[0]}'s loss, by seed, as a multiple of the others'"
    if len(treatments) > 1:
        who = "Each loss, by seed, as a multiple of its baseline's"
    title = f"{who}: below 1 is ahead"
    return panel.drawing(title, f"{title}; median over the seeds and their middle half, against step")


def rate_panel(steps: Array, rates: Array) -> Drawing | None:
    """The learning rate against step, unless it is constant."""
    fine = np.isfinite(rates)
    if not fine.any() or rates[fine].min() == rates[fine].max():
        return None
    panel = Panel.over(steps, rates, log_y=log_suits(rates))
    panel.line(steps, rates, class_="curve soft-line")
    return panel.drawing("Learning rate", "Learning rate against step")


def _series(panel: Panel, summaries: Mapping[str, Summary], looks: Mapping[str, Look]) -> None:
    for place, (arm, look) in enumerate(looks.items()):
        if arm not in summaries:
            continue
        s = summaries[arm]
        inside = [element("path", d=shape, class_="band") for shape in [_band(panel, s)] if shape]
        inside.append(_line(panel, s.steps, s.median, class_="curve", stroke_dasharray=look.dasharray))
        panel.add("g", *inside, class_=f"arm c{look.colour}", data_arm=place)


def _band(panel: Panel, s: Summary) -> str:
    return band_path(panel.x(s.steps), panel.y(s.low), panel.y(s.high))


def _line(panel: Panel, steps: Array, losses: Array, **attributes: str | None) -> Markup:
    return element("path", d=line_path(panel.x(steps), panel.y(losses)), fill="none", **attributes)


def _plot(panel: Panel, summaries: Mapping[str, Summary], looks: Mapping[str, Look]) -> dict[str, object]:
    """What the script needs to show values: the x axis in pixels and values, and the lines."""
    return {
        "x": [panel.x.low, panel.x.high, panel.x.start, panel.x.stop],
        "lines": [
            {"arm": list(looks).index(arm), "name": arm, "x": _short(s.steps), "y": _short(s.median)}
            for arm, s in summaries.items()
        ],
    }


def _short(values: Array) -> list[float | None]:
    return [float(f"{x:.4g}") if math.isfinite(x) else None for x in values]


def _together(summaries: Mapping[str, Summary], looks: Mapping[str, Look], log: bool, title: str) -> Drawing:
    steps = np.concatenate([s.steps for s in summaries.values()])
    losses = np.concatenate([y for s in summaries.values() for y in (s.low, s.median, s.high)])
    panel = Panel.over(steps, losses, log_y=log)
    _series(panel, summaries, looks)
    told = f"{title} against step: median over the seeds and their middle half"
    return panel.drawing(title, told, plot=_plot(panel, summaries, looks))


def _end(summaries: Mapping[str, Summary], looks: Mapping[str, Look], log: bool, scale: str) -> Drawing | None:
    last = max(s.steps[-1] for s in summaries.values())
    ends = {
        arm: Summary(s.steps[keep], s.median[keep], s.low[keep], s.high[keep])
        for arm, s in summaries.items()
        if (keep := s.steps >= END * last).sum() > 1
    }
    losses = np.concatenate([y for s in ends.values() for y in (s.low, s.median, s.high)]) if ends else np.zeros(0)
    if not np.isfinite(losses).any():
        return None
    panel = Panel.over(np.concatenate([s.steps for s in ends.values()]), losses, log_y=log and log_suits(losses))
    _series(panel, ends, looks)
    told = f"The last fifth, enlarged: {scale.removesuffix(', log scale')}"
    return panel.drawing(told, f"{told}: median over the seeds and their middle half", plot=_plot(panel, ends, looks))


def _own(
    panel: Panel, arm: str, courses: Courses, summaries: Mapping[str, Summary], looks: Mapping[str, Look]
) -> list[Markup]:
    """Other arms' medians in grey, then the seeds of this one, then its median."""
    out = [_line(panel, s.steps, s.median, class_="curve other") for other, s in summaries.items() if other != arm]
    place, look = list(looks).index(arm), looks[arm]
    inside = []
    for seed, c in courses[arm].items():
        end = "diverged" if c.diverged else "still running" if c.going else "finished"
        hint = element("title", f"{arm}, seed {seed}: {end}")
        drawn = [hint, _line(panel, c.steps, c.losses, class_="seed")]
        if c.diverged and len(c.steps):
            x, y = panel.x.at(c.steps[-1]), panel.y.at(c.losses[-1])
            drawn.append(element("path", d=f"M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10", class_="cross"))
        inside.append(element("a", *drawn, href=f"#{c.anchor}", tabindex=-1) if c.anchor else element("g", *drawn))
    if arm in summaries:
        s = summaries[arm]
        inside.append(_line(panel, s.steps, s.median, class_="curve", stroke_dasharray=look.dasharray))
    out.append(element("g", *inside, class_=f"arm c{look.colour}", data_arm=place))
    return out
