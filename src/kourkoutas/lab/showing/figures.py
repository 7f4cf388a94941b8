"""Figures of a study: curves, pairs, endpoints, ratios, and sun and β2 over training.

Each function returns a `matplotlib.figure.Figure` of its own, made without pyplot, so that nothing global is touched or
left open; `svg` and `png` turn one into bytes. Data that is not there gives a figure that says so in words.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from textwrap import fill
from typing import Any, ParamSpec

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullFormatter
from numpy.typing import ArrayLike, NDArray

from kourkoutas.lab.judging.stats import Comparison, Contrast, Seed, Values, quantile
from kourkoutas.lab.judging.tables import effect_name, show_ci

Array = NDArray[np.float64]
Curve = tuple[ArrayLike, ArrayLike]
P = ParamSpec("P")

# Okabe and Ito's colours, told apart with every common kind of colour blindness
BLUE, ORANGE, GREEN, VERMILLION, PURPLE, SKY, GREY = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#D55E00",
    "#CC79A7",
    "#56B4E9",
    "#666666",
)
KNOWN = {"kbeta": BLUE, "adam95": ORANGE, "adam999": GREEN}
OTHERS = (VERMILLION, PURPLE, SKY, GREY)
DASHES = ("-", "--", ":", "-.")
MOST_POINTS = 400  # per drawn curve; longer ones are averaged in blocks

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "kbeta",
    "figure.facecolor": "white",
}


@dataclass(frozen=True)
class TraceData:
    """sun and β2 of one run as `kourkoutas.trace` saves them: (steps, buckets), NaN where there was no gradient."""

    steps: ArrayLike
    sun: ArrayLike
    beta2: ArrayLike


@contextmanager
def _style() -> Iterator[None]:
    with mpl.rc_context(STYLE):
        yield


def _styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    @wraps(draw)
    def inside(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with _style():
            return draw(*args, **kwargs)

    return inside


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)  # type: ignore[union-attr, call-arg]
    return figure


def svg(figure: Figure) -> bytes:
    """The figure as SVG, the same bytes for the same figure."""
    return _bytes(figure, format="svg", metadata={"Date": None})


def png(figure: Figure, dpi: int = 150) -> bytes:
    return _bytes(figure, format="png", dpi=dpi)


def _bytes(figure: Figure, **options: Any) -> bytes:
    out = io.BytesIO()
    with _style():
        figure.savefig(out, **options)
    return out.getvalue()


@_styled
def note(text: str) -> Figure:
    """A figure that says why there is no picture."""
    figure = _figure(8, 1.2)
    figure.text(0.5, 0.5, text, ha="center", va="center", color=GREY, wrap=True)
    return figure


def looks(optimizers: Sequence[str]) -> dict[str, dict[str, str]]:
    """Colour and line style per optimizer; the paper's three keep theirs in every figure."""
    out, spare = {}, 0
    for name in optimizers:
        if name in KNOWN:
            out[name] = {"color": KNOWN[name], "linestyle": "-"}
        else:
            # a new dash with each new colour too: the line tells the arm in print and in grey
            out[name] = {
                "color": OTHERS[spare % len(OTHERS)],
                "linestyle": DASHES[(1 + spare + spare // len(OTHERS)) % len(DASHES)],
            }
            spare += 1
    return out


def log_suits(values: ArrayLike) -> bool:
    """Whether a log axis shows these values better: all positive, spanning more than a factor of 20."""
    x = np.asarray(values, float)
    x = x[np.isfinite(x)]
    return bool(x.size and x.min() > 0 and x.max() / x.min() > 20)


def _blocks(steps: Array, losses: Array) -> tuple[Array, Array, int]:
    """At most MOST_POINTS points, each the mean of `k` neighbours, so that thinning neither picks nor hides spikes."""
    k = math.ceil(len(steps) / MOST_POINTS)
    if k <= 1:
        return steps, losses, 1
    starts = np.arange(0, len(steps), k)
    size = np.diff([*starts, len(steps)])
    return steps[starts + size - 1], np.add.reduceat(losses, starts) / size, k


@_styled
def loss_curves(
    curves: Mapping[str, Mapping[Seed, Curve]],
    *,
    log: bool | None = None,
    label: str = "training loss",
    lr: Curve | None = None,
) -> Figure:
    """Loss against step: every seed on the left, mean ± sd over seeds on the right.

    On a log axis mean and sd are those of log10(loss). A run that turns non-finite ends in a cross; the mean is of the
    runs that do not, and the legend says how many those are.

    Args:
      curves: optimizer → seed → (steps, losses).
      log: a log axis; None decides by the spread of the losses.
      label: of the loss axis.
      lr: (steps, learning rates), drawn dashed on an axis of its own unless the rate is constant.
    """
    drawn: dict[str, list[tuple[Array, Array, bool]]] = {}
    block = 1
    for name, by_seed in curves.items():
        for steps, losses in by_seed.values():
            x, y = np.asarray(steps, float), np.asarray(losses, float)
            bad = np.flatnonzero(~np.isfinite(y))
            end = int(bad[0]) if bad.size else len(y)
            x, y, k = _blocks(x[:end], y[:end])
            block = max(block, k)
            drawn.setdefault(name, []).append((x, y, bool(bad.size)))
    shown = [y for runs in drawn.values() for _, y, _ in runs if len(y)]
    if not shown:
        return note("No loss curves were recorded.")
    together = np.concatenate(shown)
    log = log_suits(together) if log is None else log and bool((together > 0).all())
    figure = _figure(10, 4.4)
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    look = looks(list(curves))
    handles = []
    for name, runs in drawn.items():
        for x, y, diverged in runs:
            left.plot(x, y, lw=0.9, alpha=0.65, **look[name])
            if diverged and len(y):
                left.plot(x[-1:], y[-1:], "x", color=look[name]["color"], ms=9, mew=2.4, zorder=5)
        whole = [(x, y) for x, y, diverged in runs if not diverged and len(y)]
        text = name if len(whole) == len(runs) else f"{name} ({len(runs) - len(whole)} of {len(runs)} diverged ×)"
        (line,) = right.plot([], [], lw=1.8, label=text, **look[name])
        handles.append(line)
        if not whole:
            continue
        grid = whole[0][0]
        same = all(np.array_equal(x, grid) for x, _ in whole)
        stack = np.array([y if same else np.interp(grid, x, y, right=np.nan) for x, y in whole])
        keep = np.isfinite(stack).all(axis=0)
        stack, grid = (np.log10(stack) if log else stack)[:, keep], grid[keep]
        mean, sd = stack.mean(axis=0), stack.std(axis=0, ddof=1) if len(stack) > 1 else np.zeros(stack.shape[1])
        low, high = mean - sd, mean + sd
        if log:
            mean, low, high = 10**mean, 10**low, 10**high
        right.plot(grid, mean, lw=1.8, **look[name])
        right.fill_between(grid, low, high, color=look[name]["color"], alpha=0.18, lw=0)
    if log:
        left.set_yscale("log")
    left.set_title("every seed")
    right.set_title("mean ± sd over seeds" + (" (of log10 loss)" if log else ""))
    left.set_ylabel(fill(label, 34) + (f"\n(points: means of up to {block} records)" if block > 1 else ""))
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.margins(x=0.02)
    rates = np.asarray(lr[1], float) if lr is not None else np.zeros(0)
    if lr is not None and rates.size and rates.min() < rates.max():
        scale = "log" if log_suits(rates) else "linear"
        for axes in (left, right):
            twin = axes.twinx()
            (line,) = twin.plot(lr[0], rates, color=GREY, ls="--", lw=1, drawstyle="steps-pre", label="learning rate")
            twin.set_yscale(scale)
            twin.grid(visible=False)
            twin.spines["right"].set_visible(True)
            twin.tick_params(axis="y", colors=GREY)
            if axes is right:
                twin.set_ylabel("learning rate", color=GREY)
            else:
                twin.yaxis.set_major_formatter(NullFormatter())
        handles.append(line)
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4))
    return figure


def _place(
    axes: Any, values: Array, log: bool, higher_is_better: bool, labelled: bool = True
) -> Callable[[float], float]:
    """Limit the y axis to the finite `values` with a band on the worse side for diverged runs; returns value → y."""
    finite = values[np.isfinite(values)]
    if log:
        axes.set_yscale("log")
    to, back = (np.log10, lambda y: 10**y) if log else (lambda y: y, lambda y: y)
    low, high = (float(to(finite.min())), float(to(finite.max()))) if finite.size else (0.0, 1.0)
    span = (high - low) or abs(high) * 0.1 or 1.0
    low, high = low - 0.06 * span, high + 0.06 * span
    band = low - 0.1 * span if higher_is_better else high + 0.1 * span
    if finite.size < values.size:
        axes.axhline(back(band), color=GREY, lw=0.8, ls=":")
        axes.text(
            1.01,
            back(band),
            "diverged" if labelled else "",
            transform=axes.get_yaxis_transform(),
            ha="left",
            va="center",
            fontsize=8,
            color=GREY,
        )
        low, high = min(low, band - 0.08 * span), max(high, band + 0.12 * span)
    axes.set_ylim(back(low), back(high))
    return lambda value: value if math.isfinite(value) else float(back(band))


@_styled
def endpoints(values: Values, *, log: bool = False, higher_is_better: bool = False, label: str = "endpoint") -> Figure:
    """Every run's final value as a dot, by optimizer, with the median as a bar."""
    if not any(values.values()):
        return note("No run has reached its endpoint.")
    figure = _figure(min(10.0, max(5.0, 1.4 * len(values) + 1.5)), 4)
    axes = figure.subplots()
    every = np.array([v for by_seed in values.values() for v in by_seed.values()], float)
    place = _place(axes, every, log and not (every <= 0).any(), higher_is_better)
    look = looks(list(values))
    worst = -math.inf if higher_is_better else math.inf
    for at, (name, by_seed) in enumerate(values.items()):
        n = len(by_seed)
        # spread over the seeds in order instead of at random: the picture is the same each time
        offsets = np.linspace(-0.22, 0.22, n) if n > 1 else np.zeros(n)
        ends = np.array(list(by_seed.values()), float)
        heights = np.array([place(value) for value in ends])
        for marker, chosen in (("o", np.isfinite(ends)), ("x", ~np.isfinite(ends))):
            axes.plot(at + offsets[chosen], heights[chosen], marker, color=look[name]["color"], ms=6, alpha=0.85)
        if n:
            middle = quantile(np.where(np.isfinite(ends), ends, worst), 0.5)
            axes.hlines(place(middle), at - 0.32, at + 0.32, color="black", lw=1.6)
    axes.set_xticks(range(len(values)), list(values), rotation=0 if len(values) < 5 else 30)
    axes.set_xlim(-0.6, len(values) - 0.4)
    axes.grid(visible=False, axis="x")
    axes.set_ylabel(fill(label, 34))
    axes.set_title("every run; bar: median")
    return figure


@_styled
def pairs(
    contrasts: Sequence[Contrast], *, log: bool = False, higher_is_better: bool = False, label: str = "endpoint"
) -> Figure:
    """One line per seed from the baseline's value to the treatment's, one panel per contrast."""
    if not contrasts:
        return note("No two optimizers share a seed: there are no pairs to draw.")
    columns = min(4, len(contrasts))
    rows = math.ceil(len(contrasts) / columns)
    figure = _figure(max(4.5, 2.6 * columns + 1), 3.9 * rows + 0.4)
    grid = np.atleast_1d(figure.subplots(rows, columns, sharey=True, squeeze=False)).ravel()
    every = np.array([v for c in contrasts for p in c.pairs for v in (p.treatment, p.baseline)])
    log = log and not (every <= 0).any()
    for at, (axes, c) in enumerate(zip(grid, contrasts, strict=False)):
        ends_row = at % columns == columns - 1 or at == len(contrasts) - 1
        place = _place(axes, every, log, higher_is_better, labelled=ends_row)
        for color, dash, chosen in (
            (BLUE, "-", [p for p in c.pairs if p.difference > 0]),
            (VERMILLION, "--", [p for p in c.pairs if p.difference < 0]),
            (GREY, "-", [p for p in c.pairs if p.difference == 0]),
        ):
            # one artist for all seeds of a colour, the lines parted by NaN
            ends = np.array([(place(p.baseline), place(p.treatment), np.nan) for p in chosen]).ravel()
            sides = np.array([(0, 1, np.nan)] * len(chosen)).ravel()
            fine = np.array([(math.isfinite(p.baseline), math.isfinite(p.treatment), False) for p in chosen], bool)
            axes.plot(sides, ends, color=color, lw=1.2, alpha=0.8, ls=dash, zorder=2)
            for marker, kept in (("o", fine.ravel()), ("x", ~fine.ravel())):
                axes.plot(sides[kept], ends[kept], marker, color=color, ms=5, zorder=3)
        axes.set_xticks([0, 1], [c.baseline, c.treatment])
        axes.set_xlim(-0.35, 1.35)
        axes.grid(visible=False, axis="x")
        axes.set_title(f"better on {c.wins} of {c.n} seeds", fontsize=10)
    for axes in grid[len(contrasts) :]:
        axes.set_visible(False)
    for axes in grid[::columns]:
        axes.set_ylabel(fill(label, 34))
    keys = [
        Line2D([], [], color=BLUE, label="second better"),
        Line2D([], [], color=VERMILLION, ls="--", label="second worse"),
    ]
    figure.legend(handles=keys, loc="outside lower center", ncols=2)
    return figure


@_styled
def forest(comparison: Comparison) -> Figure:
    """Each contrast's ratio or difference with its interval, and the line of no effect."""
    if not comparison.contrasts:
        return note("No two optimizers share a seed: there is nothing to compare.")
    log, n = comparison.log, len(comparison.contrasts)
    figure = _figure(9, 0.48 * n + 1.5)
    axes = figure.subplots()
    neutral = 1.0 if log else 0.0
    axes.axvline(neutral, color="black", lw=1)
    if log:
        axes.set_xscale("log")
    for at, c in enumerate(comparison.contrasts):
        size = c.ratio if log else c.difference
        y = n - 1 - at
        color = {"better": BLUE, "worse": VERMILLION}.get(c.verdict, GREY)
        if size is None:
            text = "no pair of finite runs"
        else:
            if size.ci:
                axes.hlines(y, size.ci.low, size.ci.high, color=color, lw=2)
            axes.plot(size.value, y, "o", ms=7, color=color, mfc=color if size.ci else "white")
            text = show_ci(size.value, size.ci, 4) + ("" if size.ci else ", no interval")
        if c.t.left_out:
            text += f" ({c.t.left_out} diverged left out)"
        axes.annotate(text, (1.02, y), xycoords=axes.get_yaxis_transform(), va="center", fontsize=9)
    axes.set_yticks(range(n), [f"{c.treatment} vs {c.baseline}" for c in reversed(comparison.contrasts)])
    axes.set_ylim(-0.6, n - 0.4)
    axes.grid(visible=False, axis="y")
    low, high = axes.get_xlim()
    if log:
        # a window around 1 even when all ratios are close to it, with plain numbers at the ticks
        axes.set_xlim(min(low, 0.9), max(high, 1.1))
        low, high = axes.get_xlim()
        if high / low < 30:
            near, far = (0.5, 0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2), (0.1, 0.2, 0.5, 1, 1.5, 2, 3, 5, 10, 20)
            ticks = [t for t in (near if high / low < 2.5 else far) if low <= t <= high]
            axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_xlim(min(low, neutral), max(high, neutral))
        axes.xaxis.set_major_locator(MaxNLocator(5))
    side = f"right of {neutral:g}: the first named is better"
    axes.set_xlabel(f"{effect_name(comparison)}, {100 * comparison.confidence:g} % interval\n({side})")
    return figure


QUANTITIES = (("sun", "sun"), ("beta2", "β2"))


def _pooled(traces: Sequence[TraceData], key: str) -> tuple[Array, Array]:
    """(step, value) of all rows, buckets and runs, without the entries that hold no value."""
    steps, values = [np.zeros(0)], [np.zeros(0)]
    for trace in traces:
        rows = np.asarray(getattr(trace, key), float)
        at = np.repeat(np.asarray(trace.steps, float), rows.shape[1] if rows.ndim == 2 else 1)
        keep = np.isfinite(rows.ravel())
        steps.append(at[keep])
        values.append(rows.ravel()[keep])
    return np.concatenate(steps), np.concatenate(values)


def _range(key: str, values: Array) -> tuple[float, float]:
    """[0, 1] for sun, its own range for β2, both widened a little."""
    low, high = (0.0, 1.0) if key == "sun" else (float(values.min()), float(values.max()))
    edge = 0.03 * (high - low) or 0.005
    return low - edge, high + edge


@_styled
def violins(traces: Sequence[TraceData], *, windows: int = 8, title: str = "") -> Figure:
    """How sun and β2 are spread over buckets and runs, in equal windows of training; bars: quartiles and median."""
    found = [(key, label, *_pooled(traces, key)) for key, label in QUANTITIES]
    if not all(values.size for *_, values in found):
        return note("No trace of sun and β2 was recorded.")
    figure = _figure(10, 3.9)
    for axes, (key, label, steps, values) in zip(figure.subplots(1, 2), found, strict=True):
        edges = np.linspace(steps.min(), steps.max() + 1, windows + 1)
        for k in range(windows):
            inside = values[(steps >= edges[k]) & (steps < edges[k + 1])]
            if not inside.size:
                continue
            # 2,000 evenly chosen points draw the same outline as a million
            inside = np.sort(inside)[np.linspace(0, inside.size - 1, min(inside.size, 2000)).astype(int)]
            if np.ptp(inside) > 1e-9:
                body = axes.violinplot([inside], [k], widths=0.85, showextrema=False)
                for part in body["bodies"]:
                    part.set(facecolor=SKY, edgecolor=BLUE, alpha=0.55)
            else:
                axes.hlines(inside[0], k - 0.4, k + 0.4, color=BLUE, lw=2)
            q1, median, q3 = np.quantile(inside, [0.25, 0.5, 0.75])
            axes.vlines(k, q1, q3, color=BLUE, lw=4)
            axes.plot(k, median, "o", color="white", mec=BLUE, ms=5)
        axes.set_xticks(range(windows), [_thousands(edge) for edge in edges[:-1]])
        axes.set_xlim(-0.6, windows - 0.4)
        axes.set_ylim(*_range(key, values))
        axes.set_xlabel("step at which the window opens")
        axes.set_ylabel(label)
        axes.set_title(f"{label}{f', {title}' if title else ''}")
    return figure


def _thousands(step: float) -> str:
    return f"{step / 1000:.3g}k" if step >= 1000 else f"{step:.0f}"


@_styled
def densities(traces: Sequence[TraceData], *, columns: int = 100, rows: int = 60, title: str = "") -> Figure:
    """Density heat maps of sun and β2: for each stretch of steps, the share of buckets and runs in each band."""
    found = [(key, label, *_pooled(traces, key)) for key, label in QUANTITIES]
    if not all(values.size for *_, values in found):
        return note("No trace of sun and β2 was recorded.")
    figure = _figure(10, 3.9)
    for axes, (key, label, steps, values) in zip(figure.subplots(1, 2), found, strict=True):
        across = min(columns, len(np.unique(steps)))
        edges = np.linspace(steps.min() - 0.5, steps.max() + 0.5, across + 1)
        bands = np.linspace(*_range(key, values), rows + 1)
        counts, _, _ = np.histogram2d(steps, values, bins=(edges, bands))
        total = counts.sum(axis=1, keepdims=True)
        share = np.divide(counts, total, out=np.zeros_like(counts), where=total > 0)
        # a square-root colour scale keeps the thin bands of rare spikes visible
        norm = PowerNorm(0.5, vmin=0, vmax=share.max())
        mesh = axes.pcolormesh(edges, bands, share.T, cmap="cividis", norm=norm, rasterized=True)
        axes.grid(visible=False)
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.set_title(f"{label}{f', {title}' if title else ''}")
        figure.colorbar(mesh, ax=axes, label="share of buckets and runs")
    return figure
