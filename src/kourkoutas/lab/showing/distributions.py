"""Where runs end: one violin per arm with every seed on it, and one panel per contrast with every seed's pair."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from markupsafe import Markup

from kourkoutas.lab.judging.comparing import Comparison, Contrast
from kourkoutas.lab.judging.intervals import quantile
from kourkoutas.lab.judging.values import Seed
from kourkoutas.lab.showing.drawing import (
    CHARACTER,
    WIDTH,
    Array,
    Drawing,
    Panel,
    Scale,
    element,
    label,
    line_path,
    log_suits,
    picture,
    scale_of,
    tick_text,
)
from kourkoutas.lab.specs.looks import Look

Anchor = Callable[[str, Seed], str]  # where the page tells about a run

ROW = 46.0
MOST_PAIRS = 24  # contrasts with a panel of their own


def _scale(judged: Comparison, start: float, stop: float) -> tuple[Scale, float | None]:
    """The values' scale, and where diverged runs stand: beyond it on the worse side; None when there are none."""
    every = np.array([x for by_seed in judged.values.values() for x in by_seed.values()], float)
    log = judged.log or (log_suits(every) and float(np.nanmin(every)) > 0)
    if np.isfinite(every).all():
        return scale_of(every, start, stop, log=log), None
    room = 0.16 * (stop - start)
    if judged.higher_is_better:
        return scale_of(every, start + room, stop, log=log), start + 0.35 * room
    return scale_of(every, start, stop - room, log=log), stop - 0.35 * room


def violins(judged: Comparison, looks: Mapping[str, Look], anchor: Anchor) -> Drawing | None:
    """One row per arm: the density of its values, every seed as a dot, the median as a bar."""
    arms = [arm for arm in looks if judged.values.get(arm)]
    if not arms:
        return None
    left = 8 + CHARACTER * min(16, max(len(arm) for arm in arms))
    scale, lost = _scale(judged, left + 8, WIDTH - 12)
    bottom = 8 + ROW * len(arms)
    parts = _axis(scale, lost, 4.0, bottom, "log scale" if scale.log else "")
    for at, arm in enumerate(arms):
        middle = 8 + ROW * (at + 0.5)
        parts.append(label(arm, left, middle + 4, text_anchor="end", room=left - 4))
        look, by_seed = looks[arm], judged.values[arm]
        parts.append(
            element(
                "g",
                *_violin(by_seed, scale, lost, middle, judged, arm, anchor),
                class_=f"arm c{look.colour}",
                data_arm=list(looks).index(arm),
            )
        )
    better = "right" if judged.higher_is_better else "left"
    told = f"{judged.title}: every run of {len(arms)} optimizers with its median; further {better} is better"
    return picture(parts, WIDTH, bottom + 38, f"{judged.title} ({better} is better)", told)


def _axis(scale: Scale, lost: float | None, top: float, bottom: float, text: str) -> list[Markup]:
    parts = [element("line", x1=scale.start, x2=scale.stop, y1=bottom, y2=bottom, class_="axis")]
    for tick in scale.ticks(4):
        at = scale.at(tick)
        parts.append(element("line", x1=at, x2=at, y1=top, y2=bottom + 4, class_="grid"))
        parts.append(label(tick_text(tick), at, bottom + 16, text_anchor="middle", class_="soft"))
    if lost is not None:
        parts.append(element("line", x1=lost, x2=lost, y1=top, y2=bottom, class_="lost"))
        side = "end" if lost > scale.stop else "start"
        shown = lost + 8 if side == "end" else lost - 8
        parts.append(label("diverged", shown, bottom + 31, text_anchor=side, class_="soft"))
    if text:
        parts.append(label(text, (scale.start + scale.stop) / 2, bottom + 31, text_anchor="middle", class_="soft"))
    return parts


def density(values: Array) -> tuple[Array, Array] | None:
    """(places, heights up to 1) of a Gaussian kernel density with Silverman's width, from the least to the greatest
    value; None without a spread.

    width = 0.9·min(sd, IQR/1.34)·n^(-1/5)
    """
    x = values
    if len(x) < 3 or float(np.ptp(x)) == 0:
        return None
    q1, q3 = np.quantile(x, [0.25, 0.75])
    spread = min(s for s in (float(x.std(ddof=1)), float(q3 - q1) / 1.34) if s > 0)
    width = 0.9 * spread * len(x) ** -0.2
    places = np.linspace(x.min(), x.max(), 60)
    heights = np.exp(-0.5 * ((places[:, None] - x) / width) ** 2).sum(axis=1)
    return places, heights / heights.max()


def _violin(
    by_seed: Mapping[Seed, float],
    scale: Scale,
    lost: float | None,
    middle: float,
    judged: Comparison,
    arm: str,
    anchor: Anchor,
) -> list[Markup]:
    numbers = np.array(list(by_seed.values()), float)
    fine = numbers[np.isfinite(numbers)]
    parts = []
    shape = density(np.log10(fine) if scale.log else fine)
    if shape is not None:
        places, heights = shape
        x = scale(10**places if scale.log else places)
        half = 17 * heights
        d = line_path([*x, *x[::-1]], [*(middle - half), *(middle + half[::-1])])
        parts.append(element("path", d=d + "Z", class_="violin"))
    ranked = np.where(np.isfinite(numbers), numbers, -math.inf if judged.higher_is_better else math.inf)
    median = quantile(ranked, 0.5)
    at = scale.at(median) if math.isfinite(median) else lost
    if at is not None:
        told = f"{median:.4g}" if math.isfinite(median) else "diverged"
        bar = element("line", x1=at, x2=at, y1=middle - 15, y2=middle + 15, class_="median")
        parts.append(element("g", element("title", f"{arm}: median {told}"), bar))
    n = len(numbers)
    # spread over the seeds in order instead of at random: the picture is the same each time
    offsets = np.linspace(-9, 9, n) if n > 1 else np.zeros(n)
    for (seed, value), offset in zip(by_seed.items(), offsets, strict=True):
        finite = math.isfinite(value)
        hint = element("title", f"{arm}, seed {seed}: {f'{value:.4g}' if finite else 'diverged'}")
        y = middle + float(offset)
        if finite:
            mark = element("circle", cx=scale.at(value), cy=y, r=3.2, class_="point")
        else:
            x0 = scale.stop if lost is None else lost
            mark = element("path", d=f"M{x0 - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8", class_="cross")
        parts.append(element("a", hint, mark, href=f"#{anchor(arm, seed)}", tabindex=-1))
    return parts


def pairs(judged: Comparison, places: Mapping[str, int], anchor: Anchor) -> list[Drawing]:
    """One panel per contrast: a line per seed from the baseline's value to the treatment's."""
    return [_pairs(c, judged, places, anchor) for c in judged.contrasts[:MOST_PAIRS]]


def _pairs(c: Contrast, judged: Comparison, places: Mapping[str, int], anchor: Anchor) -> Drawing:
    scale, lost = _scale(judged, 20.0, WIDTH - 20)
    top, bottom = 22.0, 122.0
    parts = _axis(scale, lost, top, bottom + 18, "log scale" if scale.log else "")
    parts.append(label(c.baseline, 4, top - 8, class_="soft", room=WIDTH - 8))
    parts.append(label(c.treatment, 4, bottom + 13, class_="soft", room=WIDTH - 8))
    for pair in c.pairs:
        ends = [scale.at(x) if math.isfinite(x) else (lost or scale.stop) for x in (pair.baseline, pair.treatment)]
        kind = "good" if pair.difference > 0 else "bad" if pair.difference < 0 else "open"
        told = {"good": "better", "bad": "worse", "open": "equal"}[kind]
        numbers = [f"{x:.4g}" if math.isfinite(x) else "diverged" for x in (pair.baseline, pair.treatment)]
        hint = f"seed {pair.seed}: {c.baseline} {numbers[0]}, {c.treatment} {numbers[1]}: {told}"
        parts.append(
            element(
                "a",
                element("title", hint),
                element("line", x1=ends[0], x2=ends[1], y1=top, y2=bottom, class_="pair"),
                element("circle", cx=ends[0], cy=top, r=3.2, class_="point"),
                element("circle", cx=ends[1], cy=bottom, r=3.2, class_="point"),
                href=f"#{anchor(c.treatment, pair.seed)}",
                tabindex=-1,
                class_=f"effect {kind}",
            )
        )
    told = f"better on {c.wins} of {c.n} seeds"
    title = f"{c.treatment} {told}"
    group = element("g", *parts, data_arm=places.get(c.baseline, 0))
    words = f"{judged.title}: each seed's pair, {c.baseline} above and {c.treatment} below; {c.treatment} {told}"
    return picture([group], WIDTH, bottom + 18 + 38, title, words)


def profile(judged: Comparison, looks: Mapping[str, Look]) -> Drawing | None:
    """The share of each arm's runs that end at least as good as every threshold; lost runs never do."""
    arms = [arm for arm in looks if judged.values.get(arm)]
    fine = [x for arm in arms for x in judged.values[arm].values() if math.isfinite(x)]
    if len(set(fine)) < 2:
        return None
    log = min(fine) > 0 and (judged.log or log_suits(fine))
    panel = Panel.over(fine, [0.0, 100.0], log_x=log, x_label=f"threshold{', log scale' if log else ''}", edge=0.03)
    for arm in arms:
        ends = sorted((x for x in judged.values[arm].values() if math.isfinite(x)), reverse=judged.higher_is_better)
        n, look = len(judged.values[arm]), looks[arm]
        first, last = (panel.x.high, panel.x.low) if judged.higher_is_better else (panel.x.low, panel.x.high)
        xs = [first, *(x for end in ends for x in (end, end)), last]
        ys = [100 * ((k + 1) // 2) / n for k in range(len(ends) * 2)]
        line = line_path(panel.x(xs), panel.y([0.0, *ys, 100 * len(ends) / n]))
        hint = element("title", f"{arm}: {len(ends)} of {n} runs have a value")
        path = element("path", d=line, class_="curve", fill="none", stroke_dasharray=look.dasharray)
        panel.add("g", hint, path, class_=f"arm c{look.colour}", data_arm=list(looks).index(arm))
    side = "above" if judged.higher_is_better else "below"
    title = f"Percent of the runs that end {side} a threshold"
    return panel.drawing(title, f"{title} of {judged.title}, for every threshold")
