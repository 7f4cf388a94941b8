"""The effect plot: how much better or worse each treatment is, in percent, with its interval; a scale per endpoint.

Right of the line the treatment is better. The endpoint that decides has filled marks and stands first; all others have
open ones. Where percentages make no sense, as for values of both signs, an endpoint is drawn in its own unit. Console
and page show the same rows.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kourkoutas.lab.judging.comparing import Comparison, Contrast
from kourkoutas.lab.judging.deciding import RANKS
from kourkoutas.lab.judging.headline import effect_words, ends_of, intervals_words
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
FURTHEST = 150.0  # percent; an interval that ends beyond it and beyond every estimate is cut with an arrow


@dataclass(frozen=True)
class Row:
    """One contrast: (low, estimate, high) in percent or in the endpoint's unit, and the same in words."""

    contrast: Contrast
    ends: tuple[float, float, float] | None
    words: str


def in_percent(endpoint: Comparison) -> bool:
    return all(c.percent is not None for c in endpoint.contrasts if c.effect is not None)


def rows_of(endpoint: Comparison) -> list[Row]:
    """The contrasts of one endpoint."""
    percent = in_percent(endpoint)
    return [_row(c, percent) for c in endpoint.contrasts]


def _row(c: Contrast, percent: bool) -> Row:
    """Without a verdict there is no interval to look at."""
    if c.verdict == "unfinished":
        return Row(c, None, "no verdict: a run failed")
    ends, words = ends_of(c, percent), effect_words(c, percent) or "no finite effect"
    if c.verdict == "untested" and ends is not None:
        estimate = ends[1]
        return Row(c, (estimate, estimate, estimate), f"{words.partition(' [')[0]}, no verdict")
    return Row(c, ends, words)


def plot(endpoints: Sequence[Comparison]) -> Drawing | None:
    """The plot of some endpoints, as many as a first screen has room for; None where nothing was compared."""
    found = [(one, rows_of(one)) for one in endpoints if one.contrasts]
    if not found:
        return None
    percent = in_percent(found[0][0])
    alike = [one for one in found if in_percent(one[0]) == percent] if percent else found[:1]
    if sum(len(rows) for _, rows in alike) > MOST_ROWS:
        alike = alike[:1]
    treatments = {c.treatment for one, _ in found for c in one.contrasts}
    who = name_of(treatments.pop()) if len(treatments) == 1 else "the first named"
    start, stop, unit = 12.0, WIDTH - 12, "percent" if percent else "difference"
    left, right = f"← {who} worse", f"{who} better →"
    if (stop - start) / TYPICAL < len(left) + len(right) + 2:
        left, right = "← worse", "better →"
    parts = [label(left, start, 12, class_="soft"), label(right, stop, 12, text_anchor="end", class_="soft")]
    y = 18.0
    for endpoint, rows in alike:
        low, high = limits(rows)
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
        parts += x_axis(scale, y, most=4, show=lambda tick: _tick(tick, percent))
        y += 22
    told = "; ".join(f"{row.contrast.name}: {row.words}" for _, rows in alike for row in rows)
    said = intervals_words(max(row.contrast.family for _, rows in alike for row in rows))
    return picture(parts, WIDTH, y + 2, "", f"Effect plot, {unit}. {said} {told}")


def limits(rows: Sequence[Row]) -> tuple[float, float]:
    """The ends of a scale for these rows, which has no difference on it."""
    values = [0.0, *(row.ends[1] for row in rows if row.ends)]
    ends = [0.0, *(x for row in rows for x in row.ends or () if math.isfinite(x))]
    low = max(min(ends), min(-FURTHEST, 1.2 * min(values)))
    high = min(max(ends), max(FURTHEST, 1.2 * max(values)))
    return low, high


def _tick(tick: float, percent: bool) -> str:
    """A tick with its sign.

    >>> _tick(-20.0, True), _tick(0.0, True), _tick(0.5, False)
    ('−20 %', '0 %', '+0.5')
    """
    sign = "" if tick == 0 else "−" if tick < 0 else "+"
    return f"{sign}{tick_text(abs(tick))}{' %' if percent else ''}"


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
