"""The effect plot: how much better or worse each treatment is, with its interval; a scale per endpoint.

Right of the line the treatment is better. The endpoint that decides has filled marks and stands first; all others have
open ones. An endpoint is drawn in percent; as ratios on a log scale where one of them is beyond a factor of 2, or where
ratios are compared and an interval ends beyond it, so that 149× and 24,344× are not both next to 100 %; and in its own
unit where percentages make no sense, as for values of both signs. Console and page show the same rows.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from kourkoutas.lab.judging.comparing import Comparison, Contrast
from kourkoutas.lab.judging.deciding import RANKS
from kourkoutas.lab.judging.headline import Estimate, effect_words, estimate_of, intervals_words, ratio
from kourkoutas.lab.optimizers.looks import name_of
from kourkoutas.lab.showing.drawing import (
    CHARACTER,
    TYPICAL,
    WIDTH,
    Drawing,
    Scale,
    element,
    interval,
    label,
    picture,
    tick_text,
    x_axis,
)

START, STOP = 12.0, WIDTH - 12  # of the scale
MOST_ROWS = 9  # of a first screen; beyond, it shows the deciding endpoint only
# An interval that ends beyond this and beyond every estimate is cut with an arrow.
FURTHEST = {"percent": 150.0, "ratio": 1.0, "difference": 150.0}

Unit = Literal["percent", "ratio", "difference"]


@dataclass(frozen=True)
class Row:
    """One contrast: its effect in its endpoint's unit, larger is better, and the same in words.

    A ratio is given as log10 of how many times better the treatment is.
    """

    contrast: Contrast
    estimate: Estimate | None
    words: str


def in_percent(endpoint: Comparison) -> bool:
    """Whether every effect that has a size has one in percent. Where too many runs were lost there is neither."""
    sized = [c for c in endpoint.contrasts if estimate_of(c, percent=False) is not None]
    return all(estimate_of(c, percent=True) is not None for c in sized)


def unit_of(endpoint: Comparison) -> Unit:
    """What the effects of an endpoint are drawn in."""
    if not in_percent(endpoint):
        return "difference"
    shown: list[float] = []
    for c in endpoint.contrasts:
        estimate = estimate_of(c, percent=True)
        if estimate is not None:
            shown += estimate if endpoint.log else [estimate.value]
    ratios = [ratio(x, endpoint.higher_is_better) for x in shown if math.isfinite(x)]
    beyond = any(times >= 2 or 0 < times <= 0.5 for times in ratios)
    return "ratio" if beyond and all(times > 0 for times in ratios) else "percent"


def rows_of(endpoint: Comparison) -> list[Row]:
    """The contrasts of one endpoint."""
    unit = unit_of(endpoint)
    return [_row(c, unit) for c in endpoint.contrasts]


def _row(c: Contrast, unit: Unit) -> Row:
    """Without a verdict there is no interval to look at."""
    if c.verdict == "unfinished":
        return Row(c, None, "no verdict: a run failed")
    percent = unit != "difference"
    estimate, words = estimate_of(c, percent), effect_words(c, percent) or "no finite effect"
    if c.verdict == "untested" and estimate is not None:
        estimate, words = estimate.without_interval(), f"{words.partition(' [')[0]}, no verdict"
    if unit == "ratio" and estimate is not None:
        estimate = Estimate(*(_decades_better(x, c.higher_is_better) for x in estimate))
    return Row(c, estimate, words)


def _decades_better(percent: float, higher_is_better: bool) -> float:
    """log10 of how many times better; infinite where the interval of a difference goes past 0.

    >>> round(_decades_better(99.0, False), 9), round(_decades_better(-900.0, False), 9), _decades_better(120.0, False)
    (2.0, -1.0, inf)
    """
    times = ratio(percent, higher_is_better)
    sign = 1 if higher_is_better else -1
    if times <= 0:
        return -sign * math.inf
    return sign * math.log10(times) if math.isfinite(times) else sign * math.inf


def plot(endpoints: Sequence[Comparison]) -> Drawing | None:
    """The plot of some endpoints, as many as a first screen has room for; None where nothing was compared."""
    compared = [one for one in endpoints if one.contrasts]
    if not compared:
        return None
    shown = _that_fit(compared)
    parts, y = _directions(compared), 18.0
    for endpoint in shown:
        marks, y = _strip(endpoint, y)
        parts += marks
    rows = list(itertools.chain.from_iterable(map(rows_of, shown)))
    told = "; ".join(f"{row.contrast.name}: {row.words}" for row in rows)
    said = intervals_words(max(row.contrast.family for row in rows))
    return picture(parts, WIDTH, y + 2, "", f"Effect plot, {unit_of(shown[0])}. {said} {told}")


def _that_fit(compared: Sequence[Comparison]) -> list[Comparison]:
    """The first endpoint and those that are in percent as it is; it alone where all would take too many rows."""
    first = compared[0]
    alike = [one for one in compared if in_percent(one)] if in_percent(first) else [first]
    return alike if sum(len(one.contrasts) for one in alike) <= MOST_ROWS else [first]


def _directions(compared: Sequence[Comparison]) -> list[Markup]:
    """Which side is better, and for whom where there is room to say so."""
    treatments = set(itertools.chain.from_iterable(one.treatments for one in compared))
    who = name_of(treatments.pop()) if len(treatments) == 1 else "the first named"
    left, right = f"← {who} worse", f"{who} better →"
    if TYPICAL * (len(left) + len(right) + 2) > STOP - START:
        left, right = "← worse", "better →"
    return [label(left, START, 12, class_="soft"), label(right, STOP, 12, text_anchor="end", class_="soft")]


def _strip(endpoint: Comparison, y: float) -> tuple[list[Markup], float]:
    """One endpoint from the height y on, on a scale of its own, and the height where it ends."""
    rows, unit = rows_of(endpoint), unit_of(endpoint)
    low, high = limits(rows, unit)
    edge = 0.06 * ((high - low) or 1.0)
    scale = Scale(low - edge, high + edge, START, STOP)
    parts: list[Markup] = []
    heading = f"{endpoint.title} ({endpoint.standing})"
    for line in textwrap.wrap(heading, int(WIDTH / CHARACTER)):
        parts.append(label(line, 0, y + 18, class_="strong" if endpoint.primary else "soft"))
        y += 18
    y += 8
    for row in rows:
        parts += _marks(row, endpoint.primary, scale, y)
        y += 36.0
    y += 6
    parts += _axis(scale, unit, endpoint.higher_is_better, y)
    return parts, y + 22


def limits(rows: Sequence[Row], unit: Unit) -> tuple[float, float]:
    """The ends of a scale for these rows, which has no difference on it."""
    furthest = FURTHEST[unit]
    estimates = [row.estimate for row in rows if row.estimate is not None]
    values = [0.0, *(one.value for one in estimates)]
    ends = [0.0, *filter(math.isfinite, itertools.chain.from_iterable(estimates))]
    low = max(min(ends), min(-furthest, 1.2 * min(values)))
    high = min(max(ends), max(furthest, 1.2 * max(values)))
    return low, high


def _axis(scale: Scale, unit: Unit, higher_is_better: bool, y: float) -> list[Markup]:
    """The axis of one endpoint; a ratio has ticks at round factors."""
    ticks = scale.ticks(4)
    if unit == "ratio":
        factors = Scale(10**scale.low, 10**scale.high, scale.start, scale.stop, log=True).ticks(4)
        ticks = [math.log10(factor) for factor in factors]
    return x_axis(scale, y, ticks=ticks, show=lambda tick: _tick(tick, unit, higher_is_better))


def _tick(tick: float, unit: Unit, higher_is_better: bool) -> str:
    """A tick as what it means for the value.

    >>> _tick(-20.0, "percent", False), _tick(20.0, "percent", False), _tick(0.0, "percent", True)
    ('20 % higher', '20 % lower', '0 %')
    >>> _tick(2.0, "ratio", False), _tick(-1.0, "ratio", False), _tick(0.0, "ratio", False)
    ('100× lower', '10× higher', '1×')
    >>> _tick(0.5, "difference", False)
    '+0.5'
    """
    if unit == "difference":
        sign = "" if tick == 0 else "−" if tick < 0 else "+"
        return f"{sign}{tick_text(abs(tick))}"
    number = f"{tick_text(abs(tick))} %" if unit == "percent" else f"{tick_text(round(10 ** abs(tick), 6))}×"
    side = "" if tick == 0 else " higher" if (tick > 0) == higher_is_better else " lower"
    return number + side


def _marks(row: Row, primary: bool, scale: Scale, y: float) -> list[Markup]:
    """Name and numbers above, the interval below."""
    middle, zero = y + 25, scale.at(0.0)
    kind = {"better": "good", "worse": "bad"}.get(row.contrast.verdict, "open")
    words = row.words + (", by ranks" if row.contrast.test == RANKS else "")
    room = WIDTH - TYPICAL * (len(words) + 1)
    name = row.contrast.name if TYPICAL * len(row.contrast.name) <= room else f"vs {name_of(row.contrast.baseline)}"
    fits = TYPICAL * len(name) <= room
    told = f"{row.contrast.name}: {words}"
    marks: list[Markup] = [element("title", told)]
    if row.estimate is not None:
        marks += interval(scale, row.estimate.low, row.estimate.high, middle)
        size, mark = (6, "dot") if primary else (4.5, "ring")
        marks.append(element("circle", cx=scale.at(row.estimate.value), cy=middle, r=size, class_=mark))
    return [
        label(name, 0, y + 12, room=None if fits else room),
        label(words, WIDTH, y + 12, text_anchor="end", class_=kind),
        element("line", x1=zero, x2=zero, y1=middle - 7, y2=middle + 9, class_="zero"),
        element("g", *marks, class_=f"effect {kind}", tabindex=0, role="img", aria_label=told),
    ]
