"""Where runs end: one row per optimizer with every seed on it, one panel per contrast with every seed's pair, and
the share of runs that end below every threshold, or have got there by every step.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from markupsafe import Markup

from kourkoutas.lab.judging.comparing import Comparison, Contrast
from kourkoutas.lab.judging.intervals import quantile
from kourkoutas.lab.judging.statistics import show
from kourkoutas.lab.judging.values import Seed
from kourkoutas.lab.optimizers.looks import Look, name_of
from kourkoutas.lab.showing.drawing import (
    CHARACTER,
    WIDTH,
    Anchor,
    Drawing,
    Panel,
    Scale,
    cross,
    element,
    label,
    log_suits,
    picture,
    scale_of,
    series,
    x_axis,
)

ROW = 46.0
MOST_PAIRS = 24  # contrasts with a panel of their own
EXPLODED = 1e9  # times the middle run's value, on a log axis; what is beyond stands at its end


def _is_log(judged: Comparison) -> bool:
    every = [x for x in judged.every if math.isfinite(x)]
    return bool(every) and min(every) > 0 and (judged.log or log_suits(every))


def _top(judged: Comparison) -> float | None:
    """Where an axis of these values is cut at its top; None where nothing exploded."""
    every = [x for x in judged.every if math.isfinite(x)]
    if judged.higher_is_better or not _is_log(judged):
        return None
    top = EXPLODED * quantile(np.array(every), 0.5)
    return top if max(every) > top else None


def _scale(judged: Comparison, start: float, stop: float) -> tuple[Scale, float]:
    """The values' scale, and where diverged runs stand: beyond it on the worse side."""
    every = np.array(judged.every, float)
    room = 0.0 if np.isfinite(every).all() else 0.16 * (stop - start)
    if judged.higher_is_better:
        return scale_of(every, start + room, stop, log=_is_log(judged)), start + 0.35 * room
    return scale_of(every, start, stop - room, log=_is_log(judged), top=_top(judged)), stop - 0.35 * room


def _axis(scale: Scale, lost: float, top: float, bottom: float) -> list[Markup]:
    """The axis of the values, and a line for those that have none."""
    parts = x_axis(scale, bottom, top=top, most=4, title="log scale" if scale.log else "")
    if lost not in (scale.start, scale.stop):
        parts.append(element("line", x1=lost, x2=lost, y1=top, y2=bottom, class_="lost"))
        side, shift = ("end", 8) if lost > scale.stop else ("start", -8)
        parts.append(label("no value", lost + shift, bottom + 31, text_anchor=side, class_="soft"))
    return parts


def _value(value: float, judged: Comparison, arm: str, seed: Seed) -> str:
    if math.isfinite(value):
        return f"{value:.4g}"
    return "failed" if seed in judged.failed.get(arm, ()) else judged.absent


def rows(judged: Comparison, looks: Mapping[str, Look], anchor: Anchor) -> Drawing | None:
    """One row per optimizer: every seed as a dot, the median as a bar."""
    arms = [arm for arm in looks if judged.values.get(arm)]
    if not arms:
        return None
    left = 8 + CHARACTER * min(17, max(len(looks[arm].name) for arm in arms))
    scale, lost = _scale(judged, left + 8, WIDTH - 12)
    bottom = 8 + ROW * len(arms)
    parts = _axis(scale, lost, 4.0, bottom)
    for at, arm in enumerate(arms):
        middle, name = 8 + ROW * (at + 0.5), looks[arm].name
        parts.append(label(name, left, middle + 4, text_anchor="end", room=left - 4))
        values = np.array(list(judged.values[arm].values()), float)
        worst = -math.inf if judged.higher_is_better else math.inf
        median = quantile(np.where(np.isfinite(values), values, worst), 0.5)
        x = scale.at(median) if math.isfinite(median) else lost
        bar = element("line", x1=x, x2=x, y1=middle - 15, y2=middle + 15, class_="median")
        told = show(median) if math.isfinite(median) else judged.absent
        marks = [element("g", element("title", f"{name}: median {told}"), bar)]
        # spread over the seeds in order instead of at random: the picture is the same each time
        offsets = np.linspace(-9, 9, len(values)) if len(values) > 1 else np.zeros(1)
        for (seed, value), offset in zip(judged.values[arm].items(), offsets, strict=True):
            y = middle + float(offset)
            finite = math.isfinite(value)
            dot = _dot(scale, value, y) if finite else cross(lost, y)
            hint = element("title", f"{name}, seed {seed}: {_value(value, judged, arm, seed)}")
            marks.append(element("a", hint, dot, href=f"#{anchor(arm, seed)}", tabindex=-1))
        parts.append(series(looks[arm], *marks))
    better = "right" if judged.higher_is_better else "left"
    told = f"{judged.title}: every run of {len(arms)} optimizers with its median; further {better} is better"
    return picture(parts, WIDTH, bottom + 38, f"{judged.title} ({better} is better)", told)


def _dot(scale: Scale, value: float, y: float) -> Markup:
    """A run; an arrow at the end of the axis where its value is beyond."""
    x = scale.at(value)
    if value > scale.high:
        return element("path", d=f"M{x + 4:.1f} {y:.1f}l-6 -4v8z", class_="point")
    return element("circle", cx=x, cy=y, r=3.2, class_="point")


def pairs(judged: Comparison, anchor: Anchor) -> list[Drawing]:
    """One panel per contrast: a line per seed from the baseline's value to the treatment's."""
    return [_pairs(c, judged, anchor) for c in judged.contrasts[:MOST_PAIRS]]


def _pairs(c: Contrast, judged: Comparison, anchor: Anchor) -> Drawing:
    scale, lost = _scale(judged, 20.0, WIDTH - 20)
    top, bottom = 22.0, 122.0
    treatment, baseline = name_of(c.treatment), name_of(c.baseline)
    parts = _axis(scale, lost, top, bottom + 18)
    parts.append(label(baseline, 4, top - 8, class_="soft", room=WIDTH - 8))
    parts.append(label(treatment, 4, bottom + 13, class_="soft", room=WIDTH - 8))
    for pair in c.pairs:
        a, b = (scale.at(x) if math.isfinite(x) else lost for x in (pair.baseline, pair.treatment))
        kind, word = ("good", "better") if pair.difference > 0 else ("bad", "worse")
        kind, word = (kind, word) if pair.difference else ("open", "equal")
        ends = ((c.baseline, pair.baseline), (c.treatment, pair.treatment))
        numbers = ", ".join(f"{name_of(arm)} {_value(value, judged, arm, pair.seed)}" for arm, value in ends)
        hint = f"seed {pair.seed}: {numbers}: {word}"
        parts.append(
            element(
                "a",
                element("title", hint),
                element("line", x1=a, x2=b, y1=top, y2=bottom, class_="pair"),
                element("circle", cx=a, cy=top, r=3.2, class_="point"),
                element("circle", cx=b, cy=bottom, r=3.2, class_="point"),
                href=f"#{anchor(c.treatment, pair.seed)}",
                tabindex=-1,
                class_=f"effect {kind}",
            )
        )
    title = f"{treatment} better on {c.wins} of {c.n} seeds"
    told = f"{judged.title}: each seed's pair, {baseline} above and {treatment} below; {title}"
    return picture(parts, WIDTH, bottom + 18 + 38, title, told)


def stairs(steps: Sequence[tuple[float, float]], first: float, last: float) -> tuple[list[float], list[float]]:
    """(xs, percent) of the corners of a line from nothing at `first`, up at every step, to `last`.

    >>> stairs([(10, 0.5), (30, 1.0)], 0, 40)
    ([0, 10, 10, 30, 30, 40], [0.0, 0.0, 50.0, 50.0, 100.0, 100.0])
    """
    xs, ys = [first], [0.0]
    for x, share in steps:
        xs += [x, x]
        ys += [ys[-1], 100 * share]
    return [*xs, last], [*ys, ys[-1]]


def profile(judged: Comparison, looks: Mapping[str, Look]) -> Drawing | None:
    """The share of each optimizer's runs that end at least as good as every threshold, or have got there by every step;
    lost runs never do."""
    ends: dict[str, list[float]] = {}
    for arm in looks:
        by_seed = judged.values.get(arm)
        if by_seed:
            ends[arm] = sorted(filter(math.isfinite, by_seed.values()), reverse=judged.higher_is_better)
    every = list(itertools.chain.from_iterable(ends.values()))
    if len(set(every)) < 2:
        return None
    log = _is_log(judged)
    across = f"{judged.title if judged.is_time else 'threshold'}{', log scale' if log else ''}"
    top = _top(judged)
    shown = every if top is None else [x for x in every if x <= top]
    panel = Panel.over(shown, [0.0, 100.0], log_x=log, x_label=across, edge=0.03)
    first, last = panel.x.low, panel.x.high
    for arm, own in ends.items():
        n = len(judged.values[arm])
        steps = [(x, (k + 1) / n) for k, x in enumerate(own)]
        xs, ys = stairs(steps, *((last, first) if judged.higher_is_better else (first, last)))
        panel.line(looks[arm], xs, ys, hint=f"{looks[arm].name}: {len(own)} of {n} runs have a value")
    if judged.is_time:
        title = "Percent of the runs that have got there"
        return panel.drawing(title, f"{title}, against {judged.title}")
    side = "above" if judged.higher_is_better else "below"
    title = f"Percent of the runs that end {side} a threshold"
    return panel.drawing(title, f"{title} of {judged.title}, for every threshold")


Figure = Callable[[Comparison, Mapping[str, Look], Anchor], Drawing | None]

# What "Where the runs end" shows of every endpoint, and what it folds: a new figure is its function and a line here.
FIGURES: Sequence[Figure] = (rows,)
FOLDED: Sequence[Figure] = (lambda one, looks, _: profile(one, looks) if one.primary or one.is_time else None,)


def figures(
    endpoints: Sequence[Comparison], looks: Mapping[str, Look], anchor: Anchor, chosen: Sequence[Figure] = FIGURES
) -> list[Drawing]:
    """What there is to see of some figures of this chapter, for every endpoint."""
    drawn: list[Drawing] = []
    for figure in chosen:
        drawn += filter(None, [figure(one, looks, anchor) for one in endpoints])
    return drawn
