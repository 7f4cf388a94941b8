"""The effect plot: how much better or worse each treatment is, in percent, with its interval; a scale per endpoint.

Right of the line the treatment is better. The endpoint that decides has filled marks and stands first; all others have
open ones. Where percentages make no sense, as for values of both signs, an endpoint is drawn in its own unit.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from kourkoutas.lab.judging.comparing import Comparison, Contrast
from kourkoutas.lab.judging.headline import digits, percent_text, times_between
from kourkoutas.lab.showing.drawing import CHARACTER, TYPICAL, WIDTH, Drawing, Scale, element, label, picture, tick_text
from kourkoutas.lab.specs.looks import label as label_of

WIDE = 580.0
MOST_ROWS = 9  # of a first screen; beyond, it shows the deciding endpoint only
FURTHEST = 150.0  # percent; an interval that ends beyond it and beyond every estimate is cut with an arrow


@dataclass(frozen=True)
class Row:
    """One contrast: estimate and interval in percent, or in the endpoint's unit; None where there is none."""

    name: str
    baseline: str
    value: float | None
    low: float | None
    high: float | None
    words: str
    verdict: str
    primary: bool
    arm: int


def percent_words(value: float | None, low: float | None, high: float | None, higher_is_better: bool = False) -> str:
    """An effect without signs to decode.

    >>> percent_words(9.26, 4.3, 13.4), percent_words(-0.8, -3.1, 1.6), percent_words(-743, -800, -650)
    ('9.3 % better (4.3 to 13)', '0.80 % worse (3.1 worse to 1.6 better)', '8.4× higher (7.5× to 9.0×)')
    """
    if value is None or not math.isfinite(value):
        return "no finite pair"
    text, word = percent_text(value, higher_is_better), "better" if value > 0 else "worse"
    if not text.endswith("%"):
        ends = None if low is None or high is None else times_between(low, high, higher_is_better)
        return text if ends is None else f"{text} ({ends.replace(', ', ' to ')})"
    side = "equal" if value == 0 else f"{text} {word}"
    if low is None or high is None:
        return side
    if low < 0 < high:
        return f"{side} ({digits(low)} worse to {digits(high)} better)"
    near, far = sorted((abs(low), abs(high)))
    return f"{side} ({digits(near)} to {digits(far)})"


def own_words(value: float | None, low: float | None, high: float | None, log: bool) -> str:
    """The same in the endpoint's unit, or as a factor."""
    if value is None:
        return "no finite pair"
    between = "" if low is None or high is None else f" ({low:.3g} to {high:.3g})"
    return f"{'factor ' if log else ''}{value:.3g}{between}"


def rows_of(endpoint: Comparison, places: Mapping[str, int]) -> tuple[list[Row], bool]:
    """The contrasts of one endpoint, and whether they are in percent."""
    percent = all(c.percent is not None for c in endpoint.contrasts if c.effect is not None)
    return [_row(c, endpoint.primary, places, percent) for c in endpoint.contrasts], percent


def _row(c: Contrast, primary: bool, places: Mapping[str, int], percent: bool) -> Row:
    of = c.percent if percent else c.effect
    ends = None if of is None else of.interval
    value = None if of is None else of.value
    low, high = (None, None) if ends is None else (ends.low, ends.high)
    words = percent_words(value, low, high, c.higher_is_better) if percent else own_words(value, low, high, c.log)
    if c.lost:
        words += ", by ranks"
    return Row(c.name, c.baseline, value, low, high, words, c.verdict, primary, places.get(c.baseline, 0))


def plots(endpoints: Sequence[Comparison], places: Mapping[str, int]) -> list[Drawing]:
    """The plot of some endpoints, drawn for a wide page and for a phone; nothing where nothing was compared."""
    found = [(one, *rows_of(one, places)) for one in endpoints if one.contrasts]
    if not found:
        return []
    first, rows, percent = found[0]
    others = [one for one in found[1:] if one[2] == percent and percent]
    if len(rows) + sum(len(more) for _, more, _ in others) > MOST_ROWS:
        others = []
    groups = [(first.title, first.primary, rows)] + [(one.title, one.primary, more) for one, more, _ in others]
    treatments = {c.treatment for one, *_ in found for c in one.contrasts}
    who = label_of(treatments.pop()) if len(treatments) == 1 else "the first named"
    unit = "percent" if percent else "factor" if first.log else "difference"
    return [_draw(groups, who, unit, WIDE), _draw(groups, who, unit, WIDTH)]


def _limits(rows: Sequence[Row], neutral: float) -> tuple[float, float]:
    ends = [x for r in rows for x in (r.value, r.low, r.high) if x is not None and math.isfinite(x)]
    values = [r.value for r in rows if r.value is not None and math.isfinite(r.value)]
    low, high = min([neutral, *ends]), max([neutral, *ends])
    low = max(low, min(-FURTHEST, 1.2 * min([neutral, *values])))
    high = min(high, max(FURTHEST, 1.2 * max([neutral, *values])))
    span = (high - low) or 1.0
    return low - 0.06 * span, high + 0.06 * span


def _draw(groups: Sequence[tuple[str, bool, list[Row]]], who: str, unit: str, width: float) -> Drawing:
    wide = width > WIDTH
    every = [row for *_, rows in groups for row in rows]
    neutral = 1.0 if unit == "factor" else 0.0
    words_room, name_room = (238.0, 124.0) if wide else (0.0, 0.0)
    start, stop = name_room + 12, width - words_room - 12
    left, right = f"← {who} worse", f"{who} better →"
    if (stop - start) / TYPICAL < len(left) + len(right) + 2:
        left, right = "← worse", "better →"
    parts = [label(left, start, 12, class_="soft"), label(right, stop, 12, text_anchor="end", class_="soft")]
    y = 18.0
    for title, primary, rows in groups:
        scale = Scale(*_limits(rows, neutral), start, stop)
        heading = f"{title} {'(decides)' if primary else '(secondary)'}"
        for line in textwrap.wrap(heading, int(width / CHARACTER)):
            parts.append(label(line, 0, y + 18, class_="strong" if primary else "soft"))
            y += 18
        y += 8
        for row in rows:
            parts += _marks(row, scale, y, wide, width, name_room, scale.at(neutral))
            y += 26.0 if wide else 36.0
        y += 6
        parts.append(element("line", x1=start, x2=stop, y1=y, y2=y, class_="axis"))
        for tick in scale.ticks(5 if wide else 4):
            at = scale.at(tick)
            parts.append(element("line", x1=at, x2=at, y1=y, y2=y + 4, class_="axis"))
            parts.append(label(_tick(tick, unit), at, y + 17, text_anchor="middle", class_="soft"))
        y += 22
    told = "; ".join(f"{row.name}: {row.words}" for row in every)
    return picture(
        parts,
        width,
        y + 2,
        "",
        f"Effect plot, {unit}, with 95 % intervals. {told}",
        class_="wide-only" if wide else "narrow-only",
    )


def _tick(tick: float, unit: str) -> str:
    """A tick with its sign; a factor has none.

    >>> _tick(-20.0, "percent"), _tick(0.0, "percent"), _tick(0.5, "difference"), _tick(2.0, "factor")
    ('−20 %', '0 %', '+0.5', '2')
    """
    sign = "" if unit == "factor" or tick == 0 else "−" if tick < 0 else "+"
    return f"{sign}{tick_text(abs(tick))}{' %' if unit == 'percent' else ''}"


def _marks(row: Row, scale: Scale, y: float, wide: bool, width: float, name_room: float, zero: float) -> list[Markup]:
    middle = y + 8 if wide else y + 25
    kind = {"better": "good", "worse": "bad"}.get(row.verdict, "open")
    # on a phone the name gives way to the numbers
    room = name_room if wide else width - TYPICAL * (len(row.words) + 1)
    name = row.name if wide or TYPICAL * len(row.name) <= room else f"vs {row.baseline}"
    fits = TYPICAL * len(name) <= room
    out = [
        label(name, 0, y + 12, room=None if fits else room),
        label(row.words, width, y + 12, text_anchor="end", class_=kind),
    ]
    out.append(
        element(
            "line", x1=zero, x2=zero, y1=middle - (10 if wide else 7), y2=middle + (16 if wide else 9), class_="zero"
        )
    )
    told = f"{row.name}: {row.words}"
    marks: list[Markup] = [element("title", told)]
    low_end, high_end = min(scale.start, scale.stop), max(scale.start, scale.stop)
    if row.low is not None and row.high is not None:
        a, b = (min(max(scale.at(x), low_end), high_end) for x in (row.low, row.high))
        marks.append(element("line", x1=a, x2=b, y1=middle, y2=middle, class_="interval"))
        for end, cut in ((a, row.low < scale.low), (b, row.high > scale.high)):
            if cut:
                tip = -6 if end == a else 6
                d = f"M{end + tip:.1f} {middle:.1f}l{-tip} -5v10z"
                marks.append(element("path", d=d, class_="arrow"))
            else:
                marks.append(element("line", x1=end, x2=end, y1=middle - 4, y2=middle + 4, class_="interval"))
    if row.value is not None and math.isfinite(row.value):
        at = min(max(scale.at(row.value), low_end), high_end)
        marks.append(
            element("circle", cx=at, cy=middle, r=6 if row.primary else 4.5, class_="dot" if row.primary else "ring")
        )
    out.append(element("g", *marks, class_=f"effect {kind}", data_arm=row.arm, tabindex=0, role="img", aria_label=told))
    return out
