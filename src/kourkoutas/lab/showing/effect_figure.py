"""The effect plot as a matplotlib figure, for notebooks and papers; the page draws its own (`effects`)."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

from kourkoutas.lab.judging.analysis import Analysis
from kourkoutas.lab.judging.comparing import Comparison
from kourkoutas.lab.specs.looks import label, looks

if TYPE_CHECKING:  # matplotlib takes a second to import
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def figure(analysis: Analysis) -> Figure:
    """One row per contrast, one panel per endpoint with a scale of its own, the deciding endpoint first.

    Right of the line the treatment is better. Only the deciding endpoint has filled marks.

    Raises:
      ValueError: nothing is compared.
    """
    from matplotlib import pyplot

    shown = [endpoint for endpoint in analysis.endpoints if endpoint.contrasts]
    if not shown:
        raise ValueError(f"there is nothing to plot: {analysis.headline}")
    rows = [len(endpoint.contrasts) for endpoint in shown]
    size = (6.4, sum(0.8 + 0.3 * count for count in rows))
    made, grid = pyplot.subplots(len(shown), squeeze=False, height_ratios=rows, figsize=size, layout="constrained")
    pyplot.close(made)  # a notebook shows what a cell returns, and would show an open figure once more
    for axes, endpoint in zip(grid[:, 0], shown, strict=True):
        _panel(axes, endpoint)
    return made


def _panel(axes: Axes, endpoint: Comparison) -> None:
    percent = all(c.percent is not None for c in endpoint.contrasts if c.effect is not None)
    none = 1.0 if endpoint.log and not percent else 0.0
    shown = [c.percent if percent else c.effect for c in endpoint.contrasts]
    ends = [() if of is None or of.interval is None else (of.interval.low, of.interval.high) for of in shown]
    numbers = [none, *(of.value for of in shown if of and of.value is not None), *(x for own in ends for x in own)]
    finite = [x for x in numbers if math.isfinite(x)]
    space = 0.06 * (max(finite) - min(finite) or 1.0)
    left, right = min(finite) - space, max(finite) + space
    axes.set_xlim(left, right)
    styles = looks([c.treatment for c in endpoint.contrasts])
    for y, (c, of, own) in enumerate(zip(endpoint.contrasts, shown, ends, strict=True)):
        if of is None or of.value is None or not math.isfinite(of.value):
            continue
        colour = styles[c.treatment]["color"]
        bar = [min(max(x, left), right) for x in own]
        axes.plot(bar, [y] * len(bar), color=colour)
        axes.plot([of.value], [y], "o", color=colour, markerfacecolor=colour if endpoint.primary else "white")
        for x, mark in zip(bar, "<>", strict=False):  # an interval without an end leaves the picture with an arrow
            if x in (left, right):
                axes.plot([x], [y], mark, color=colour, clip_on=False)
    axes.axvline(none, color="0.6", linewidth=0.8)
    names = [f"{label(c.treatment)} – {label(c.baseline)}" for c in endpoint.contrasts]
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    unit = "%" if percent else "ratio" if endpoint.log else "difference"
    axes.set_xlabel(f"worse  ◂  {unit}  ▸  better")
    axes.set_title(f"{endpoint.title} ({endpoint.standing})", fontsize="medium", loc="left")


def png(analysis: Analysis) -> bytes:
    """The same as a picture."""
    held = io.BytesIO()
    figure(analysis).savefig(held, format="png", dpi=110)
    return held.getvalue()
