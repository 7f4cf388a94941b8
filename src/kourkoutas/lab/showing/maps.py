"""sun and β2 over training: bucket by step, so that one sees which layer spikes.

A cell of a bucket's map is the largest sun, or the smallest β2, of its stretch of steps, averaged over the runs: a
spike of one step is not averaged away.
"""

from __future__ import annotations

import base64
import contextlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from markupsafe import Markup
from numpy.typing import ArrayLike, NDArray

from kourkoutas.lab.optimizers.looks import Look
from kourkoutas.lab.results.store import StoredRun, StoreError
from kourkoutas.lab.showing.drawing import (
    CHARACTER,
    WIDTH,
    Array,
    Drawing,
    Scale,
    element,
    label,
    picture,
    x_axis,
)

COLUMNS = 80
MOST_BUCKETS = 40
# Ten colours of matplotlib's cividis, which those who confuse red and green see as others do.
CIVIDIS = "00224e 123570 3b496c 575d6d 707173 8a8678 a59c74 c3b369 e1cc55 fee838"


@dataclass(frozen=True)
class Quantity:
    """What a map shows.

    Attributes:
      key: its name in a trace.
      title: for people.
      spikes_up: whether it is at its largest when the gradient spikes; else at its smallest.
    """

    key: str
    title: str
    spikes_up: bool

    @property
    def extreme(self) -> str:
        return "largest" if self.spikes_up else "smallest"


SUN, BETA2 = Quantity("sun", "sun", spikes_up=True), Quantity("beta2", "β2", spikes_up=False)
QUANTITIES = (SUN, BETA2)


@dataclass(frozen=True)
class TraceData:
    """sun and β2 of one run as `kourkoutas.trace` saves them: (steps, buckets), NaN where there was no gradient."""

    steps: ArrayLike
    sun: ArrayLike
    beta2: ArrayLike
    names: Sequence[str] = ()
    limits: tuple[float, float] | None = None  # β2_min and β2_max


def recorded(runs: Sequence[StoredRun], arm: str) -> list[TraceData]:
    """sun and β2 of the runs of one arm that recorded them."""
    found = []
    for run in runs:
        trace = None
        if run.spec.optimizer == arm:
            with contextlib.suppress(StoreError):  # a damaged trace costs its own part of the picture, not the page
                trace = run.trace()
        if trace is not None and len(trace["steps"]):
            names = [str(name) for name in trace["names"]]
            found.append(TraceData(trace["steps"], trace["sun"], trace["beta2"], names, _limits(run)))
    return found


def _limits(run: StoredRun) -> tuple[float, float] | None:
    """β2_min and β2_max of a run that has said which it used."""
    options = None if run.result is None else run.result.settings.get("optimizer")
    if not isinstance(options, dict) or not {"beta2_min", "beta2_max"} <= options.keys():
        return None
    return float(options["beta2_min"]), float(options["beta2_max"])


def drawings(traces: Sequence[TraceData], look: Look) -> list[Drawing]:
    """A map of sun and one of β2 of one optimizer; none where nothing was recorded."""
    drawn = [buckets(traces, quantity, look.name) for quantity in QUANTITIES]
    return [one for one in drawn if one is not None]


@dataclass(frozen=True)
class Grid:
    """The cells of a map.

    Attributes:
      names: of the buckets.
      edges: the ends of the stretches of steps.
      cells: [bucket, stretch]; NaN where no run has a value.
    """

    names: Sequence[str]
    edges: Array
    cells: Array


def _edges(traces: Sequence[TraceData]) -> Array:
    """The ends of the stretches of steps; as many stretches as there are steps, up to COLUMNS."""
    steps = np.unique(np.concatenate([np.asarray(t.steps, float) for t in traces]))
    return np.linspace(steps[0] - 0.5, steps[-1] + 0.5, min(COLUMNS, len(steps)) + 1)


def grid_of(traces: Sequence[TraceData], quantity: Quantity) -> Grid:
    """The mean over the runs whose buckets are those of the first."""
    edges, names = _edges(traces), list(traces[0].names)
    found = []
    for trace in traces:
        values = np.asarray(getattr(trace, quantity.key), float)
        if list(trace.names) == names and values.ndim == 2 and len(values):
            found.append(_extremes(np.asarray(trace.steps, float), values, edges, quantity))
    if not found:
        return Grid(names, edges, np.zeros((0, len(edges) - 1)))
    stack = np.array(found)
    count = np.isfinite(stack).sum(axis=0)
    total = np.where(np.isfinite(stack), stack, 0).sum(axis=0)
    return Grid(names, edges, np.where(count, total / np.maximum(count, 1), math.nan))


def _extremes(steps: Array, values: Array, edges: Array, quantity: Quantity) -> Array:
    """The extreme value of each bucket in each stretch of one run; NaN where there is none."""
    at = np.clip(np.searchsorted(edges, steps) - 1, 0, len(edges) - 2)
    extreme, none_yet = (np.fmax, -math.inf) if quantity.spikes_up else (np.fmin, math.inf)
    held = np.full((len(edges) - 1, values.shape[1]), none_yet)
    # ufunc.at takes the extreme of each stretch; NaN, a step without a gradient, is passed over
    extreme.at(held, at, values)
    return np.where(np.isfinite(held), held, math.nan).T


def _that_spike_most(grid: Grid, quantity: Quantity) -> Grid:
    """The MOST_BUCKETS buckets that spike most, in their order."""
    if quantity.spikes_up:
        extreme = np.nan_to_num(grid.cells, nan=0.5).max(axis=1)
    else:
        extreme = -np.nan_to_num(grid.cells, nan=9).min(axis=1)
    kept = np.sort(np.argsort(-extreme, kind="stable")[:MOST_BUCKETS])
    return Grid([grid.names[k] for k in kept], grid.edges, grid.cells[kept])


def buckets(traces: Sequence[TraceData], quantity: Quantity, arm: str) -> Drawing | None:
    """A row per bucket, a column per stretch of steps; None where nothing was recorded."""
    if not traces or not traces[0].names:
        return None
    grid, left_out = grid_of(traces, quantity), ""
    if not np.isfinite(grid.cells).any():
        return None
    if len(grid.names) > MOST_BUCKETS:
        left_out = f", the {MOST_BUCKETS} of {len(grid.names)} buckets that spike most"
        grid = _that_spike_most(grid, quantity)
    low, high = _range(quantity, traces, grid.cells)
    parts, height = _map(grid, low, high, f"{quantity.extreme} {quantity.title}")
    runs = f"{len(traces)} run{'' if len(traces) == 1 else 's'}"
    of = f"the {quantity.extreme} of each stretch, mean of {runs}"
    told = f"{quantity.title} of each bucket against step, {arm}: {of}{left_out}"
    return picture(parts, WIDTH, height, f"{arm}: {quantity.title} by bucket{left_out}", told)


def _map(grid: Grid, low: float, high: float, colours: str) -> tuple[list[Markup], float]:
    """The cells coloured from `low` to `high`, the names beside them and the axes below, and how high all of it is."""
    rows = len(grid.names)
    room = max(34.0, CHARACTER * min(17, max(len(name) for name in grid.names)))
    height = max(13.0, min(26.0, 150 / rows))
    x = Scale(grid.edges[0], grid.edges[-1], room + 8, WIDTH - 14)
    bottom = 4 + height * rows
    parts = [_raster((grid.cells - low) / (high - low), x.start, 4.0, x.stop - x.start, height * rows)]
    for k, name in enumerate(grid.names):
        parts.append(label(name, room + 2, 8 + height * (k + 0.5), text_anchor="end", room=17 * CHARACTER))
    parts += _foot(x, bottom, low, high, colours)
    return parts, bottom + 62


def _range(quantity: Quantity, traces: Sequence[TraceData], values: Array) -> tuple[float, float]:
    """[0, 1] for sun, [β2_min, β2_max] for β2 where they are known, else its own range."""
    if quantity is SUN:
        return 0.0, 1.0
    known = [trace.limits for trace in traces if trace.limits is not None and trace.limits[0] < trace.limits[1]]
    low, high = known[0] if known else (float(np.nanmin(values)), float(np.nanmax(values)))
    return (low, high) if high > low else (low - 0.005, high + 0.005)


def _foot(x: Scale, bottom: float, low: float, high: float, word: str) -> list[Markup]:
    """The step axis, and the colour bar below it."""
    return [
        *x_axis(x, bottom, most=4),
        label("step", x.start - 6, bottom + 16, text_anchor="end", class_="soft"),
        _raster(np.linspace(0, 1, 64)[None, :], x.start, bottom + 26, x.stop - x.start, 10),
        label(f"{low:.3g}", x.start, bottom + 51, class_="soft"),
        label(f"{high:.3g}", x.stop, bottom + 51, text_anchor="end", class_="soft"),
        label(word, (x.start + x.stop) / 2, bottom + 51, text_anchor="middle", class_="soft"),
    ]


@cache
def _colours() -> NDArray[np.uint8]:
    """256 colours between those of CIVIDIS, opaque."""
    stops = np.array([[int(code[k : k + 2], 16) for k in (0, 2, 4)] for code in CIVIDIS.split()], float)
    places = np.linspace(0, len(stops) - 1, 256)
    channels = [np.interp(places, np.arange(len(stops)), stops[:, k]) for k in range(3)]
    return np.stack([*channels, np.full(256, 255.0)], axis=1).round().astype(np.uint8)


def _raster(share: Array, x: float, y: float, width: float, height: float) -> Markup:
    """Values from 0 to 1 as an image of one pixel each, clear where there is none, stretched without smoothing."""
    from PIL import Image

    index = np.round(np.clip(np.nan_to_num(share), 0, 1) * 255).astype(int)
    pixels = _colours()[index].copy()
    pixels[..., 3] = np.where(np.isfinite(share), 255, 0)
    out = io.BytesIO()
    Image.fromarray(pixels, "RGBA").save(out, "PNG", optimize=True)
    encoded = base64.b64encode(out.getvalue()).decode("ascii")
    return element(
        "image",
        href=f"data:image/png;base64,{encoded}",
        x=x,
        y=y,
        width=width,
        height=height,
        preserveAspectRatio="none",
        class_="raster",
    )
