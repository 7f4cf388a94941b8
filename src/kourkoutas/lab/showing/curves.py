"""Learning curves: all optimizers in one panel, and one panel for each with every seed.

A line is the median over the seeds and the band their middle half, a diverged run counting as the worst from where it
diverged. A run that has not finished is drawn as far as it has come, and is no part of the median while others have
finished.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from kourkoutas.lab.judging.endpoints import logged
from kourkoutas.lab.judging.intervals import quantile
from kourkoutas.lab.judging.values import Seed
from kourkoutas.lab.optimizers.looks import Look
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.showing.drawing import (
    Anchor,
    Array,
    Drawing,
    Panel,
    below_explosions,
    cross,
    element,
    log_suits,
    series,
)

MOST_POINTS = 160  # per drawn curve; longer ones are averaged in blocks
MOST_PANELS = 24  # optimizers with a panel of their own
MOST_GAPS = 6  # pairs in the picture of the paired gap


@dataclass(frozen=True)
class Course:
    """The loss of one run, by rising steps.

    Attributes:
      diverged: its loss or a parameter stopped being finite after the last point.
      going: it has not finished.
    """

    steps: Array
    losses: Array
    diverged: bool = False
    going: bool = False


@dataclass(frozen=True)
class Summary:
    """Median and middle half over the seeds, NaN where a diverged run leaves none."""

    steps: Array
    median: Array
    low: Array
    high: Array

    @property
    def band(self) -> tuple[Array, Array]:
        return self.low, self.high


Courses = Mapping[str, Mapping[Seed, Course]]


def courses(snapshot: Snapshot) -> dict[str, dict[Seed, Course]]:
    """{arm: {seed: its training loss}}, of the runs that have recorded one.

    NOTE: a testbed's curve holds means of blocks of steps, but for its last entry, the last batch's own loss, which is
    an endpoint and no part of the curve. What a user's function logs is drawn as it is, by rising steps, where it has
    logged a finite loss: a row may hold other metrics alone. That a run diverged is told by its status, not by a gap.
    """
    found: dict[str, dict[Seed, Course]] = {arm.label: {} for arm in snapshot.record.arms}
    own = snapshot.record.code is not None
    for run in snapshot.runs:
        curve = {} if run.result is None else run.result.curve
        steps, losses = curve.get("step", []), curve.get("loss", [])
        if not own and run.result is not None and run.result.status == "ok" and len(steps) > 2:
            steps, losses = steps[:-1], losses[:-1]
        if run.result is None or (own and not np.isfinite(losses).all()):
            points = [point for point in logged(run, "loss") if math.isfinite(point[1])]
            steps, losses = [list(column) for column in zip(*points, strict=True)] or (steps, losses)
        if steps and len(steps) == len(losses):
            x, y = np.asarray(steps, float), np.asarray(losses, float)
            order = np.argsort(x, kind="stable")
            found.setdefault(run.spec.optimizer, {})[run.spec.seed] = Course(
                x[order],
                y[order],
                diverged=run.result is not None and run.result.status == "diverged",
                going=run.result is None,
            )
    return {arm: by_seed for arm, by_seed in found.items() if by_seed}


def thinned(course: Course) -> Course:
    """At most MOST_POINTS points, each the mean of neighbours, so that thinning neither picks nor hides spikes."""
    # a gap is a step at which no loss was logged; that a run diverged, its status says
    fine = np.isfinite(course.losses)
    steps, losses = course.steps[fine], course.losses[fine]
    k = math.ceil(len(steps) / MOST_POINTS)
    if k > 1:
        starts = np.arange(0, len(steps), k)
        size = np.diff([*starts, len(steps)])
        steps, losses = steps[starts + size - 1], np.add.reduceat(losses, starts) / size
    return Course(steps, losses, course.diverged, course.going)


def summarise(courses: Sequence[Course]) -> Summary | None:
    """Over the finished runs, or, before one has finished, over those that are going, as far as all have come."""
    ended = [c for c in courses if not c.going and (len(c.steps) or c.diverged)]
    told_by = ended or [c for c in courses if len(c.steps)]
    with_points = [c for c in told_by if len(c.steps)]
    if not with_points:
        return None
    grid = _common_steps(with_points)
    if not len(grid):
        return None
    rows = np.array([_on(grid, c) for c in told_by])
    low, median, high = (np.apply_along_axis(quantile, 0, rows, q) for q in (0.25, 0.5, 0.75))
    return Summary(grid, _or_gap(median), _or_gap(low), _or_gap(high))


def _common_steps(courses: Sequence[Course]) -> Array:
    """The steps from where all have begun to where the first that did not diverge ends, thinned."""
    ends = [c.steps[-1] for c in courses if not c.diverged]
    end = min(ends) if ends else max(c.steps[-1] for c in courses)
    grid: Array = np.unique(np.concatenate([c.steps[c.steps <= end] for c in courses]))
    grid = grid[grid >= max(c.steps[0] for c in courses)]
    return grid[:: math.ceil(len(grid) / MOST_POINTS)] if len(grid) > 2 * MOST_POINTS else grid


def _on(grid: Array, course: Course) -> Array:
    """The losses of a run at these steps, infinite from where it diverged."""
    if not len(course.steps):
        return np.full(len(grid), math.inf)
    losses = np.interp(grid, course.steps, course.losses)
    return np.where(grid > course.steps[-1], math.inf, losses) if course.diverged else losses


def _or_gap(values: Array) -> Array:
    return np.where(np.isfinite(values), values, math.nan)


def panels(
    courses: Courses, looks: Mapping[str, Look], anchor: Anchor, runs: Mapping[str, int] | None = None
) -> list[Drawing]:
    """Every panel, in order; none where nothing was recorded. `runs` counts those without a curve, too."""
    thin = {arm: {seed: thinned(c) for seed, c in by_seed.items()} for arm, by_seed in courses.items()}
    every: list[Course] = []
    for by_seed in thin.values():
        every += [c for c in by_seed.values() if len(c.losses)]
    if not every:
        return []
    steps, losses = np.concatenate([c.steps for c in every]), np.concatenate([c.losses for c in every])
    log = log_suits(losses)
    if log:
        losses = above_dips(losses, [c.losses[-1] for c in every])
    top = below_explosions(losses, _usual_top(every), log=log)
    summaries = {arm: found for arm, by_seed in thin.items() if (found := summarise(list(by_seed.values())))}
    scale = f"training loss{', log scale' if log else ''}"
    drawn = [_medians(summaries, looks, log, top, f"All optimizers: {scale}")]
    for arm in list(thin)[:MOST_PANELS]:
        panel = Panel.over(steps, losses, log_y=log, top=top)
        panel.parts += [panel.path(s.steps, s.median, class_="curve other") for o, s in summaries.items() if o != arm]
        panel.parts.append(_seeds(panel, arm, thin[arm], summaries.get(arm), looks[arm], anchor))
        count, lost = len(thin[arm]), sum(c.diverged for c in thin[arm].values())
        planned = max(count, (runs or {}).get(arm, 0))
        shown = f"{count} of {planned} runs" if count < planned else f"{count} run{'' if count == 1 else 's'}"
        shown += f", {lost} diverged ×" if lost else ""
        told = f"{scale} of {looks[arm].name} against step, every seed, median in bold: {shown}"
        drawn.append(panel.drawing(f"{looks[arm].name}: {shown}", told))
    return [one for one in drawn if one is not None]


def _usual_top(courses: Sequence[Course]) -> float:
    """The highest loss that a reader wants to tell from others: where the runs begin, or where the middle one ends.

    The half that begins lower tells where runs begin: one that explodes may do so before it has logged a loss.
    """
    firsts = np.sort([c.losses[0] for c in courses])
    lasts = np.sort([math.inf if c.diverged else c.losses[-1] for c in courses])
    middle = len(courses) // 2
    ends = float(lasts[middle])
    return max(float(firsts[middle]), ends if math.isfinite(ends) else -math.inf)


def above_dips(values: Array, lasts: Sequence[float]) -> Array:
    """The values for a log axis, raised to where it ends: a few steps of a loss next to 0 would flatten all others.

    What the lines end at is always on it.
    """
    fine = values[np.isfinite(values) & (values > 0)]
    least = float(np.quantile(fine, 0.1)) / 100 if len(fine) else 0.0
    return np.maximum(values, min([least, *(x for x in lasts if x > 0)]))


def _medians(
    summaries: Mapping[str, Summary], looks: Mapping[str, Look], log: bool, top: float | None, title: str
) -> Drawing | None:
    """The medians and bands of all optimizers in one panel; None where there is nothing to see."""
    lines = [np.zeros(0)]
    for s in summaries.values():
        lines += [s.low, s.median, s.high]
    losses = np.concatenate(lines)
    if not np.isfinite(losses).any():
        return None
    losses = above_dips(losses, [s.median[-1] for s in summaries.values()]) if log else losses
    if top is not None and not np.nanmax(losses) > top:
        top = None
    panel = Panel.over(np.concatenate([s.steps for s in summaries.values()]), losses, log_y=log, top=top)
    for arm, s in summaries.items():
        panel.line(looks[arm], s.steps, s.median, band=s.band)
        panel.tell(looks[arm], s.steps, s.median)
    return panel.drawing(title, f"{title} against step: median over the seeds and their middle half")


def _seeds(
    panel: Panel, arm: str, courses: Mapping[Seed, Course], summary: Summary | None, look: Look, anchor: Anchor
) -> Markup:
    """Every seed of one optimizer, then its median."""
    inside = []
    for seed, c in courses.items():
        end = "diverged" if c.diverged else "still running" if c.going else "finished"
        drawn = [element("title", f"{look.name}, seed {seed}: {end}"), panel.path(c.steps, c.losses, class_="seed")]
        if c.diverged and len(c.steps):
            drawn.append(cross(panel.x.at(c.steps[-1]), panel.y.at(c.losses[-1])))
        inside.append(element("a", *drawn, href=f"#{anchor(arm, seed)}", tabindex=-1))
    if summary is not None:
        inside.append(panel.path(summary.steps, summary.median, look))
    return series(look, *inside)


def gaps(courses: Courses, pairs: Sequence[tuple[str, str]], looks: Mapping[str, Look]) -> Drawing | None:
    """The paired gap along training: treatment/baseline of each seed, median and middle half, on a log scale."""
    found = {(a, b): gap for a, b in pairs[:MOST_GAPS] if (gap := _gap(courses.get(a, {}), courses.get(b, {})))}
    if not found:
        return None
    ends = np.concatenate([np.concatenate(s.band) for s in found.values()])
    lasts = [s.median[-1] for s in found.values()]
    ends = 1 / above_dips(1 / above_dips(ends, lasts), [1 / x for x in lasts])
    panel = Panel.over(np.concatenate([s.steps for s in found.values()]), [1.0, *ends], log_y=True)
    zero = panel.y.at(1.0)
    panel.parts.append(element("line", x1=panel.x.start, x2=panel.x.stop, y1=zero, y2=zero, class_="zero"))
    treatments = list(dict.fromkeys(a for a, _ in found))
    for (a, b), s in found.items():
        # one treatment: the colours of its baselines; else those of the treatments
        look = looks[b if len(treatments) == 1 else a]
        hint = f"{looks[a].name} against {looks[b].name}: factor {s.median[-1]:.3g} at the end"
        panel.line(look, s.steps, s.median, hint=hint, band=s.band)
    who = f"{looks[treatments[0]].name}'s loss, by seed, as a multiple of the others'"
    if len(treatments) > 1:
        who = "Each loss, by seed, as a multiple of its baseline's"
    title = f"{who}: below 1 is ahead"
    return panel.drawing(title, f"{title}; median over the seeds and their middle half, against step")


def _gap(ours: Mapping[Seed, Course], theirs: Mapping[Seed, Course]) -> Summary | None:
    """Over the seeds of which both runs have finished with a loss at the same steps; None for fewer than two."""
    rows, steps = list[Array](), np.zeros(0)
    for seed in [seed for seed in ours if seed in theirs]:
        x, y = thinned(ours[seed]), thinned(theirs[seed])
        ended = not (x.going or y.going or x.diverged or y.diverged)
        steps = steps if rows else x.steps
        if ended and len(steps) > 1 and np.array_equal(x.steps, y.steps) and len(x.steps) == len(steps):
            with np.errstate(all="ignore"):
                ratio = x.losses / y.losses
            rows.append(np.where(np.isfinite(ratio) & (ratio > 0), ratio, math.nan))
    if len(rows) < 2:
        return None
    with warnings.catch_warnings():  # a step at which no seed has a ratio is a gap in the line
        warnings.simplefilter("ignore", RuntimeWarning)
        low, median, high = np.nanquantile(rows, (0.25, 0.5, 0.75), axis=0)
    return Summary(steps, median, low, high)


@dataclass(frozen=True)
class Subject:
    """What the figures of this chapter are drawn of.

    Attributes:
      pairs: (treatment, baseline) of each planned contrast.
      runs: how many each optimizer has, those without a curve included.
    """

    courses: Courses
    pairs: Sequence[tuple[str, str]]
    runs: Mapping[str, int]
    looks: Mapping[str, Look]
    anchor: Anchor


Figure = Callable[[Subject], Sequence[Drawing | None]]

# Everything that "Learning curves" shows, in order: a new figure is its function and a line here.
FIGURES: Sequence[Figure] = (
    lambda of: panels(of.courses, of.looks, of.anchor, of.runs),
    lambda of: [gaps(of.courses, of.pairs, of.looks)],
)


def figures(of: Subject) -> list[Drawing]:
    """What there is to see of this chapter."""
    drawn: list[Drawing] = []
    for figure in FIGURES:
        drawn += filter(None, figure(of))
    return drawn
