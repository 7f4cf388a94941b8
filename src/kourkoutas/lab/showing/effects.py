"""The effect plot: how much better or worse each treatment is, with its interval; a scale per endpoint.

Right of the line the treatment is better. The endpoint that decides has filled marks and stands first; all others have
open ones. An endpoint is drawn in percent; as ratios on a log scale where one of them is beyond a factor of 2, or where
ratios are compared and an interval ends beyond it, so that 149× and 24,344× are not both next to 100 %; and in its own
unit where percentages make no sense, as for values of both signs. Console and page show the same rows.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup

from kourkoutas.lab.judging.comparing import Comparison, Contrast
from kourkoutas.lab.judging.deciding import RANKS
from kourkoutas.lab.judging.headline import effect_words, ends_of, intervals_words, ratio
from kourkoutas.lab.optimizers.looks import name_of
from kourkoutas.lab.showing.drawing import (
    CHARACTER,
    TYPICAL,
    WIDTH,
    Drawing,
    Scale,
    element,
    label,
    picture,
    tick_text,
    x_axis,
)

MOST_ROWS = 9  # of a first screen; beyond, it shows the deciding endpoint only
# An interval that ends beyond this and beyond every estimate is cut with an arrow.
FURTHEST = {"percent": 150.0, "ratio": 1.0, "difference": 150.0}

Unit = Literal["percent", "ratio", "difference"]


@dataclass(frozen=True)
class Row:
    """One contrast: (low, estimate, high) in its endpoint's unit, larger is better, and the same in words.

    A ratio is given as log10 of how many times better the treatment is.
    """

    contrast: Contrast
    ends: tuple[float, float, float] | None
    words: str


def in_percent(endpoint: Comparison) -> bool:
    """Whether every effect that has a size has one in percent. Where too many runs were lost there is neither."""
    sized = [c for c in endpoint.contrasts if ends_of(c, percent=False) is not None]
    return all(ends_of(c, percent=True) is not None for c in sized)


def unit_of(endpoint: Comparison) -> Unit:
    """What the effects of an endpoint are drawn in."""
    if not in_percent(endpoint):
        return "difference"
    found = [ends for c in endpoint.contrasts if (ends := ends_of(c, percent=True)) is not None]
    shown = [end for ends in found for end in (ends if endpoint.log else ends[1:2])]
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
    ends, words = ends_of(c, percent), effect_words(c, percent) or "no finite effect"
    if c.verdict == "untested" and ends is not None:
        estimate = ends[1]
        ends, words = (estimate, estimate, estimate), f"{words.partition(' [')[0]}, no verdict"
    if unit == "ratio" and ends is not None:
        low, estimate, high = (_decades_better(x, c.higher_is_better) for x in ends)
        ends = (low, estimate, high)
    return Row(c, ends, words)


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
    found = [(one, rows_of(one)) for one in endpoints if one.contrasts]
    if not found:
        return None
    alike = [one for one in found if in_percent(one[0])] if in_percent(found[0][0]) else found[:1]
    if sum(len(rows) for _, rows in alike) > MOST_ROWS:
        alike = alike[:1]
    treatments = {c.treatment for one, _ in found for c in one.contrasts}
    who = name_of(treatments.pop()) if len(treatments) == 1 else "the first named"
    start, stop = 12.0, WIDTH - 12
    left, right = f"← {who} worse", f"{who} better →"
    if (stop - start) / TYPICAL < len(left) + len(right) + 2:
        left, right = "← worse", "better →"
    parts = [label(left, start, 12, class_="soft"), label(right, stop, 12, text_anchor="end", class_="soft")]
    y = 18.0
    for endpoint, rows in alike:
        unit = unit_of(endpoint)
        low, high = limits(rows, unit)
        edge = 0.06 * ((high - low) or 1.0)
        scale = Scale(low - edge, high + edge, start, stop)
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
        y += 22
    told = "; ".join(f"{row.contrast.name}: {row.words}" for _, rows in alike for row in rows)
    said = intervals_words(max(row.contrast.family for _, rows in alike for row in rows))
    return picture(parts, WIDTH, y + 2, "", f"Effect plot, {unit_of(alike[0][0])}. {said} {told}")


def limits(rows: Sequence[Row], unit: Unit) -> tuple[float, float]:
    """The ends of a scale for these rows, which has no difference on it."""
    furthest = FURTHEST[unit]
    values = [0.0, *(row.ends[1] for row in rows if row.ends)]
    ends = [0.0, *(x for row in rows for x in row.ends or () if math.isfinite(x))]
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
    if row.ends is not None:
        low, value, high = (min(max(scale.at(x), scale.start), scale.stop) for x in row.ends)
        marks.append(element("line", x1=low, x2=high, y1=middle, y2=middle, class_="interval"))
        for end, cut, tip in ((low, row.ends[0] < scale.low, -6), (high, row.ends[2] > scale.high, 6)):
            if cut:
                marks.append(element("path", d=f"M{end + tip:.1f} {middle:.1f}l{-tip} -5v10z", class_="arrow"))
            else:
                marks.append(element("line", x1=end, x2=end, y1=middle - 4, y2=middle + 4, class_="interval"))
        size, mark = (6, "dot") if primary else (4.5, "ring")
        marks.append(element("circle", cx=value, cy=middle, r=size, class_=mark))
    return [
        label(name, 0, y + 12, room=None if fits else room),
        label(words, WIDTH, y + 12, text_anchor="end", class_=kind),
        element("line", x1=zero, x2=zero, y1=middle - 7, y2=middle + 9, class_="zero"),
        element("g", *marks, class_=f"effect {kind}", tabindex=0, role="img", aria_label=told),
    ]
