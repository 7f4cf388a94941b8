"""The figure of a tuning: endpoint against the tuned option, one line per optimizer. SVG text, for a page to hold.

Text and axes take the colour of the page around them (`currentColor`), so that the figure follows light and dark.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping

from kourkoutas.lab.judging.sensitivity import Sensitivity

# Okabe and Ito's colours, which differ for colour-blind readers and stand out on white and on black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999933", "#882255")
INK = "#010203"  # replaced by currentColor


def figure(found: Mapping[str, Sensitivity], title: str, *, log: bool = False) -> str:
    """SVG: the median of the tuning seeds against the option, a bar from best to worst seed, a ring at the choice.

    Diverged medians stand on the upper edge as crosses. `log` scales the endpoint.

    Raises:
      ValueError: nothing was tried.
    """
    if not found:
        raise ValueError("no values were tried, so there is nothing to draw: tune one option, --tune lr=LOW:HIGH")
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    option = next(iter(found.values())).option
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kbeta", "font.size": 11}):
        drawn = Figure(figsize=(6.4, 4.0), layout="constrained")
        FigureCanvasSVG(drawn)
        axes = drawn.add_subplot()
        for number, (arm, one) in enumerate(found.items()):
            _line(axes, arm, one, COLOURS[number % len(COLOURS)])
        if all(point.value > 0 for one in found.values() for point in one.points):
            axes.set_xscale("log")
        if log and all(point.low > 0 for one in found.values() for point in one.points):
            axes.set_yscale("log")
        axes.set_xlabel(option)
        axes.set_ylabel(title)
        axes.spines[["top", "right"]].set_visible(False)
        for text in (axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels(), *axes.get_yticklabels()):
            text.set_color(INK)
        axes.tick_params(which="both", colors=INK)
        for spine in axes.spines.values():
            spine.set_color(INK)
        legend = axes.legend(frameon=False)
        for text in legend.get_texts():
            text.set_color(INK)
        drawn.patch.set_visible(False)
        axes.patch.set_visible(False)
        stream = io.StringIO()
        drawn.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    svg = stream.getvalue()
    return svg[svg.index("<svg") :].replace(INK, "currentColor")


def _line(axes: object, arm: str, one: Sensitivity, colour: str) -> None:
    points = [point for point in one.points if math.isfinite(point.median)]
    values, medians = [point.value for point in points], [point.median for point in points]
    axes.plot(values, medians, "-o", color=colour, label=arm, markersize=4)  # type: ignore[attr-defined]
    for point in points:
        ends = [end for end in (point.low, point.high) if math.isfinite(end)]
        axes.plot([point.value] * len(ends), ends, color=colour, alpha=0.5)  # type: ignore[attr-defined]
        if point.value == one.best:
            ring = {"marker": "o", "markersize": 11, "markerfacecolor": "none", "color": colour}
            axes.plot([point.value], [point.median], **ring)  # type: ignore[attr-defined]
    lost = [point.value for point in one.points if not math.isfinite(point.median)]
    across = axes.get_xaxis_transform()  # type: ignore[attr-defined]
    axes.plot(lost, [1.0] * len(lost), "x", color=colour, transform=across, clip_on=False)  # type: ignore[attr-defined]
