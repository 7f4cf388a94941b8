"""Small pictures as SVG text: elements, scales with round ticks, and a panel with axes.

A panel is drawn in CSS pixels at the width of a phone, `WIDTH`, and is shown there at its own size, so that its text is
as large as it says. Colours are classes that the page's style sheet gives a light and a dark meaning.

    c0 … c6          the colours of optimizers (`looks`)
    ink, soft, line  text, secondary text, grid

NOTE: every text and attribute is escaped here, and nowhere else is SVG put together from strings.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import ArrayLike, NDArray

from kourkoutas.lab.judging.values import Seed
from kourkoutas.lab.optimizers.looks import Look

Array = NDArray[np.float64]
Anchor = Callable[[str, Seed], str]  # where the page tells about a run

WIDTH = 356.0
CHARACTER = 7.4  # px, of a letter of 12 px, on the wide side: what margins are made for
TYPICAL = 6.5  # px, of a letter on average over a sentence


@dataclass(frozen=True)
class Drawing:
    """One picture with a short title above it and a description for those who cannot see it."""

    svg: Markup
    title: str
    description: str

    def _repr_svg_(self) -> str:
        return str(self.svg)


def element(tag: str, *children: str | Markup, **attributes: Any) -> Markup:
    """<tag attributes>children</tag>; `class_` is class, underscores are hyphens, None leaves an attribute out.

    >>> print(element("text", "a < b", x=1.26, class_="soft", text_anchor="end"))
    <text x="1.3" class="soft" text-anchor="end">a &lt; b</text>
    """
    text = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    inside = "".join(str(escape(child)) for child in children)
    return Markup(f"<{tag}{text}>" if tag == "img" else f"<{tag}{text}>{inside}</{tag}>")


def _number(value: Any) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def picture(parts: Sequence[Markup], width: float, height: float, title: str, description: str, **more: Any) -> Drawing:
    """The parts as one SVG. Its description is its accessible name; what can be hovered has a <title> of its own.

    NOTE: an image has no links or focus inside; a picture that has them is a group.
    """
    role = "group" if any("<a " in part or "tabindex" in part for part in parts) else "img"
    svg = element(
        "svg",
        *parts,
        viewBox=f"0 0 {_number(width)} {_number(height)}",
        width=width,
        height=height,
        role=role,
        aria_label=description,
        **more,
    )
    return Drawing(svg, title, description)


def label(text: str, x: float, y: float, *, room: float | None = None, **attributes: Any) -> Markup:
    """One line of text; shortened in its middle to `room` pixels, with the whole text to hover."""
    shown = text if room is None else shorten(text, max(3, int(room / CHARACTER)))
    hint = [] if shown == text else [element("title", text)]
    return element("text", shown, *hint, x=x, y=y, **attributes)


def shorten(text: str, most: int) -> str:
    """At most `most` characters, the middle left out.

    >>> shorten("blocks.3.attention.weight", 15)
    'blocks.….weight'
    """
    if len(text) <= most:
        return text
    head = most // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"


def line_path(x: ArrayLike, y: ArrayLike) -> str:
    """The d of a path through the points; it is interrupted where one is not finite."""
    parts, pen = [], "M"
    for a, b in zip(np.asarray(x, float), np.asarray(y, float), strict=True):
        if math.isfinite(a) and math.isfinite(b):
            parts.append(f"{pen}{_number(float(a))} {_number(float(b))}")
            pen = "L"
        else:
            pen = "M"
    return "".join(parts)


def band_path(x: Array, low: Array, high: Array) -> str:
    """The d of the area between two lines, over the points where both are finite."""
    fine = np.isfinite(x) & np.isfinite(low) & np.isfinite(high)
    if fine.sum() < 2:
        return ""
    there = line_path(x[fine], low[fine])
    back = line_path(x[fine][::-1], high[fine][::-1])
    return f"{there}L{back[1:]}Z"


@dataclass(frozen=True)
class Scale:
    """Values `low` … `high` on pixels `start` … `stop`, evenly or by logarithm."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: ArrayLike) -> Array:
        low, high = self.low, self.high
        # 0 on a log scale, and what else is beyond the range, stands at its end
        x: Array = np.clip(np.asarray(value, float), low, high)
        if self.log:
            x, low, high = np.log10(x), math.log10(low), math.log10(high)
        placed: Array = self.start + (x - low) / (high - low) * (self.stop - self.start)
        return placed

    def at(self, value: float) -> float:
        return float(self(value))

    def ticks(self, most: int = 5) -> list[float]:
        """Round values within the range."""
        return _log_ticks(self.low, self.high, most) if self.log else _even_ticks(self.low, self.high, most)


def scale_of(
    values: ArrayLike, start: float, stop: float, *, log: bool = False, edge: float = 0.05, top: float | None = None
) -> Scale:
    """A scale over the finite values, a little wider than they are; it ends at `top`, unless they end before."""
    x = np.asarray(values, float)
    x = x[np.isfinite(x) & (x > 0)] if log else x[np.isfinite(x)]
    if not x.size:
        return Scale(1.0, 10.0, start, stop, log) if log else Scale(0.0, 1.0, start, stop)
    low, high = float(x.min()), float(x.max())
    if top is not None and low < top < high:
        high = top
    if log:
        span = math.log10(high / low) or 0.2
        return Scale(low * 10 ** (-edge * span), high * 10 ** (edge * span), start, stop, True)
    span = (high - low) or abs(high) * 0.1 or 1.0
    return Scale(low - edge * span, high + edge * span, start, stop)


def below_explosions(values: ArrayLike, usual: float, *, log: bool) -> float | None:
    """Where an axis is cut, because what lies above the `usual` top would take more than half of it; None: nowhere.

    An axis is cut at its top only. Lower losses are better, so the best run is always on it.
    """
    x = np.asarray(values, float)
    x = x[np.isfinite(x) & (x > 0)] if log else x[np.isfinite(x)]
    if not x.size or (log and usual <= 0):
        return None
    low, middle, high = (math.log10(v) if log else v for v in (float(x.min()), usual, float(x.max())))
    span = middle - low
    if span <= 0 or high - middle <= span:
        return None
    top = middle + 0.25 * span
    return 10**top if log else top


def log_suits(values: ArrayLike) -> bool:
    """Whether a log axis shows these values better: none negative, at most a twentieth 0, and spanning a factor of 20,
    or of 3 with most of them in the lowest tenth of the range, as of a curve that falls fast and then stays."""
    x = np.asarray(values, float)
    x = x[np.isfinite(x)]
    if not x.size or x.min() < 0 or np.mean(x == 0) > 0.05:
        return False
    x = x[x > 0]
    ratio = x.max() / x.min()
    return bool(ratio > 20 or (ratio > 3 and np.quantile(x, 0.75) < x.min() + 0.1 * np.ptp(x)))


def _even_ticks(low: float, high: float, most: int) -> list[float]:
    if not math.isfinite(high - low) or high <= low:
        return [low]
    raw = (high - low) / most
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next((unit * k for k in (1, 2, 5, 10) if unit * k >= raw), 10 * unit)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for digits in ((1, 2, 3, 4, 5, 6, 7, 8, 9), (1, 2, 5), (1, 3), (1,)):
        round_values = [d * 10.0**k for k, d in itertools.product(range(first, last + 1), digits)]
        found = [tick for tick in round_values if low <= tick <= high]
        if len(found) <= most:
            break
    if len(found) < 2:
        return _even_ticks(low, high, most) if high / low < 10 else found
    # a tick every few decades of very many
    return found[:: math.ceil(len(found) / most)]


def tick_text(value: float) -> str:
    """A tick as people write it: 0.001, 20k, 1e-5.

    >>> [tick_text(x) for x in (0.0, 0.001, 1e-4, 20000, 1e8, 0.30000000000000004)]
    ['0', '0.001', '1e-4', '20k', '1e8', '0.3']
    """
    size = abs(value)
    if size >= 1e6 or 0 < size < 1e-3:
        digits, _, power = f"{value:.2e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    if size >= 10_000:
        return f"{value / 1000:.4g}k"
    return f"{value:.4g}"


def x_axis(
    scale: Scale,
    y: float,
    *,
    top: float | None = None,
    most: int = 5,
    ticks: Sequence[float] | None = None,
    title: str = "",
    show: Callable[[float], str] = tick_text,
) -> list[Markup]:
    """A horizontal axis at the height `y` with round ticks, grid lines up to `top` and a title below."""
    parts = [element("line", x1=scale.start, x2=scale.stop, y1=y, y2=y, class_="axis")]
    written = -math.inf  # how far to the right there are labels
    for tick in scale.ticks(most) if ticks is None else ticks:
        at = scale.at(tick)
        high, kind = (y, "axis") if top is None else (top, "grid")
        parts.append(element("line", x1=at, x2=at, y1=high, y2=y + 4, class_=kind))
        words = show(tick)
        wide = CHARACTER * len(words)
        end, left = "middle", at - wide / 2
        if left + wide > scale.stop + 12:
            end, left = "end", at - wide
        elif left < scale.start - 12:
            end, left = "start", at
        if left > written:  # else it would be written over the one before
            parts.append(label(words, at, y + 16, text_anchor=end, class_="soft"))
            written = left + wide
    if title:
        parts.append(label(title, (scale.start + scale.stop) / 2, y + 31, text_anchor="middle", class_="soft"))
    return parts


def series(look: Look, *parts: Markup, hint: str = "") -> Markup:
    """What belongs to one optimizer, in its colour."""
    title = [element("title", hint)] if hint else []
    return element("g", *title, *parts, class_=f"arm c{look.colour}")


def interval(scale: Scale, low: float, high: float, y: float) -> list[Markup]:
    """A confidence interval as a line with a bar at each end; where an end is beyond the scale, with an arrow."""
    left, right = scale.at(low), scale.at(high)
    marks = [element("line", x1=left, x2=right, y1=y, y2=y, class_="interval")]
    for end, beyond, tip in ((left, low < scale.low, -6), (right, high > scale.high, 6)):
        if beyond:
            marks.append(element("path", d=f"M{end + tip:.1f} {y:.1f}l{-tip} -5v10z", class_="arrow"))
        else:
            marks.append(element("line", x1=end, x2=end, y1=y - 4, y2=y + 4, class_="interval"))
    return marks


def cross(x: float, y: float) -> Markup:
    """The mark of a run that diverged."""
    return element("path", d=f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8", class_="cross")


@dataclass
class Panel:
    """A picture with axes. Margins fit the labels; `parts` are drawn in order, above the grid.

    Attributes:
      lines: the lines whose values the page's script shows under the pointer.
    """

    x: Scale
    y: Scale
    height: float
    parts: list[Markup] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def over(
        cls,
        xs: ArrayLike,
        ys: ArrayLike,
        *,
        log_x: bool = False,
        log_y: bool = False,
        height: float = 210.0,
        x_label: str = "step",
        edge: float = 0.0,
        top: float | None = None,
    ) -> Panel:
        """Axes around the values; `edge` is the room at the sides of x, as a part of its range.

        Above `top` the axis of y is cut, and the panel says how far the values go.
        """
        y = scale_of(ys, height - 36, 10 if top is None else 18, log=log_y, top=top)  # a line of text above the cut
        left = 10 + CHARACTER * max((len(tick_text(t)) for t in y.ticks()), default=1)
        x = scale_of(xs, left, WIDTH - 14, log=log_x, edge=edge)
        panel = cls(x, y, height)
        if top is not None:
            furthest = tick_text(float(f"{np.nanmax(np.asarray(ys, float)):.0e}"))
            panel.parts.append(label(f"↑ to {furthest}", x.stop, 8.0, text_anchor="end", class_="soft"))
        for tick in y.ticks():
            at = y.at(tick)
            panel.parts.append(element("line", x1=x.start, x2=x.stop, y1=at, y2=at, class_="grid"))
            panel.parts.append(label(tick_text(tick), left - 6, at + 4, text_anchor="end", class_="soft"))
        panel.parts += x_axis(x, y.start, title=x_label)
        return panel

    def path(self, xs: ArrayLike, ys: ArrayLike, look: Look | None = None, class_: str = "curve") -> Markup:
        """A line through values, with the dash of an optimizer."""
        dash = None if look is None else look.dasharray
        line = line_path(self.x(xs), self.y(ys))
        return element("path", d=line, class_=class_, fill="none", stroke_dasharray=dash)

    def line(self, look: Look, xs: ArrayLike, ys: ArrayLike, *, hint: str = "", band: Sequence[Array] = ()) -> None:
        """The line of one optimizer, above the band between its lowest and highest values."""
        area = band_path(self.x(xs), *(self.y(ends) for ends in band)) if band else ""
        parts = [element("path", d=area, class_="band")] if area else []
        self.parts.append(series(look, *parts, self.path(xs, ys, look), hint=hint))

    def tell(self, look: Look, xs: ArrayLike, ys: ArrayLike, unit: str = "") -> None:
        """Show the last of these values before the pointer."""
        rounded = [[float(f"{v:.4g}") if math.isfinite(v) else None for v in np.asarray(z, float)] for z in (xs, ys)]
        self.lines.append({"name": look.name, "x": rounded[0], "y": rounded[1], "unit": unit})

    def drawing(self, title: str, description: str) -> Drawing:
        told = {"x": [self.x.low, self.x.high, self.x.start, self.x.stop], "lines": self.lines}
        data = json.dumps(told, separators=(",", ":")) if self.lines else None
        return picture(self.parts, WIDTH, self.height, title, description, data_plot=data)
