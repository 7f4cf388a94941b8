"""Pictures of final networks: slices, scatter, residual and temperatures below zero, beside the reference solution.

`figures` takes the settings and the final parameters of some runs, by label. Every figure is made without pyplot. The
networks are evaluated in NumPy, in float64, so that no engine is needed.

NOTE: negative temperatures are not an error in themselves. The conditions of the paper's case fix a heat flux through
the outer wall, and the reference solution itself falls below zero in the lobes, in about 1.5 % of the volume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray

from kourkoutas.lab.engines.numpy import ENGINE
from kourkoutas.lab.testbeds.heat3d import geometry, network, reference
from kourkoutas.lab.testbeds.heat3d.geometry import LENGTH

if TYPE_CHECKING:
    from kourkoutas.lab.testbeds.heat3d import Settings

Array = NDArray[np.float64]
Runs = Mapping[str, Mapping[str, NDArray[Any]]]
Fields = Mapping[str, Array]

REFERENCE = "reference"
HEIGHTS = (2.5, 5.0, 7.5, 10.0)
MOST_RUNS = 4


def _pieces(nodes: Array, size: int = 16_384) -> list[Array]:
    flat = nodes.reshape(-1, 3)
    return [flat[i : i + size] for i in range(0, len(flat), size)]


def temperature(params: Mapping[str, NDArray[Any]], nodes: Array) -> Array:
    """T at the points (r, θ, z) in the last axis of `nodes`."""
    exact = {name: p.astype(np.float64) for name, p in params.items()}
    found = [network.temperature(ENGINE, exact, x) for x in _pieces(nodes)]
    return np.concatenate(found).reshape(nodes.shape[:-1])


def laplacian(params: Mapping[str, NDArray[Any]], nodes: Array) -> Array:
    """ΔT at the points (r, θ, z) in the last axis of `nodes`."""
    exact = {name: p.astype(np.float64) for name, p in params.items()}
    found = []
    for x in _pieces(nodes):
        n = len(x)
        y = network.channels(ENGINE, exact, geometry.rows_of_interior(x), geometry.Points(n, 0, 0))
        found.append(y[-n:])
    return np.concatenate(found).reshape(nodes.shape[:-1])


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _sections(
    nodes: Array,
    fields: Mapping[str, Array],
    label: str,
    cmap: str,
    limits: tuple[float, float],
    heights: Sequence[float],
) -> Figure:
    """Cross-sections (x, y) at some heights: a row for each field."""
    figure = _figure(2.6 * len(heights) + 1.2, 2.4 * len(fields) + 0.4)
    axes = figure.subplots(len(fields), len(heights), squeeze=False, sharex=True, sharey=True)
    z = nodes[0, 0, :, 2]
    mesh = None
    for row, (name, field) in zip(axes, fields.items(), strict=True):
        for ax, height in zip(row, heights, strict=True):
            k = int(np.abs(z - height).argmin())
            r, theta = nodes[:, :, k, 0], nodes[:, :, k, 1]
            mesh = ax.pcolormesh(
                r * np.cos(theta),
                r * np.sin(theta),
                field[:, :, k],
                shading="gouraud",
                cmap=cmap,
                vmin=limits[0],
                vmax=limits[1],
                rasterized=True,
            )
            ax.set_aspect("equal")
            if ax in axes[0]:
                ax.set_title(f"z = {z[k]:g}")
        row[0].set_ylabel(name)
    if mesh is not None:
        figure.colorbar(mesh, ax=axes, label=label, shrink=0.8)
    return figure


def slices(truth: reference.Solution, fields: Fields, heights: Sequence[float] = HEIGHTS) -> Figure:
    """T over the cross-section at several heights; one row for the reference and one for each field at its nodes."""
    both = {REFERENCE: truth.T, **fields}
    return _sections(truth.nodes, both, "T", "inferno", (float(truth.T.min()), float(truth.T.max())), heights)


def errors(truth: reference.Solution, fields: Fields, heights: Sequence[float] = HEIGHTS) -> Figure:
    """T - T_reference over the cross-section at several heights, on one symmetric scale."""
    misses = {label: T - truth.T for label, T in fields.items()}
    most = max((float(np.abs(miss).max()) for miss in misses.values()), default=1.0)
    return _sections(truth.nodes, misses, "T − T reference", "RdBu_r", (-most, most), heights)


def residuals(truth: reference.Solution, runs: Runs, heights: Sequence[float] = HEIGHTS) -> Figure:
    """log10 |ΔT| over the cross-section at several heights; ΔT is zero for the solution."""
    # Only the planes that are drawn.
    nodes = truth.nodes[:, :, sorted({int(np.abs(truth.nodes[0, 0, :, 2] - h).argmin()) for h in heights})]
    fields = {label: np.log10(np.abs(laplacian(p, nodes)) + 1e-12) for label, p in runs.items()}
    values = np.concatenate([f.ravel() for f in fields.values()]) if fields else np.array([-1.0, 0.0])
    limits = (float(np.quantile(values, 0.02)), float(values.max()))
    return _sections(nodes, fields, "log10 |ΔT|", "viridis", limits, heights)


def scatter(truth: reference.Solution, runs: Runs, points: Array) -> Figure:
    """T in space: at some nodes of the reference, and at `points` for each run."""
    sparse = truth.nodes[::4, ::4, ::4].reshape(-1, 3)
    panels = {REFERENCE: (sparse, truth.T[::4, ::4, ::4].ravel())}
    panels.update({label: (points, temperature(p, points)) for label, p in runs.items()})
    figure = _figure(3.4 * len(panels) + 0.8, 4.6)
    axes = figure.subplots(1, len(panels), squeeze=False, subplot_kw={"projection": "3d"})[0]
    for ax, (label, (x, T)) in zip(axes, panels.items(), strict=True):
        r, theta, z = x.T
        drawn: Any = ax.scatter(
            r * np.cos(theta),
            r * np.sin(theta),
            z,
            c=T,
            s=3,
            cmap="inferno",
            vmin=float(truth.T.min()),
            vmax=float(truth.T.max()),
            rasterized=True,
        )
        ax.set_box_aspect((1, 1, 2))
        ax.set(title=f"{label}\nT from {T.min():.3f} to {T.max():.3f}", xlabel="x", ylabel="y", zlabel="z")
        ax.set_zlim(0, LENGTH)
    figure.colorbar(drawn, ax=axes, label="T", shrink=0.7)
    return figure


def below_zero(truth: reference.Solution, fields: Fields, bins: int = 40) -> Figure:
    """Histogram of T < 0 by volume, with the share of the volume and the lowest temperature of each field."""
    both = {REFERENCE: truth.T, **fields}
    lowest = min(-1e-3, *(float(T.min()) for T in both.values()))
    edges = np.linspace(lowest, 0, bins + 1)
    figure = _figure(8, 3.6)
    ax = figure.subplots()
    for label, T in both.items():
        share = 100 * truth.mean((T < 0).astype(float))
        heights, _ = np.histogram(T, edges, weights=100 * truth.volume)
        text = f"{label}: {share:.2f} % of the volume, lowest {T.min():.3f}"
        if label == REFERENCE:
            ax.stairs(heights, edges, fill=True, color="#cccccc", label=text)
        else:
            ax.stairs(heights, edges, label=text, linewidth=1.5)
    ax.set_yscale("log")
    ax.set(xlabel="T", ylabel="share of the volume (%)", title="Temperatures below zero")
    ax.legend(frameon=False, fontsize=9)
    return figure


def figures(settings: Settings, runs: Runs) -> list[tuple[Figure, str]]:
    """All pictures of at most `MOST_RUNS` runs, each with a description."""
    shown = dict(list(runs.items())[:MOST_RUNS])
    if not shown:
        return []
    known = "known" if settings.case == "harmonic" else "finite-element"
    truth = reference.solve(settings.case)
    fields = {label: temperature(p, truth.nodes) for label, p in shown.items()}
    points = geometry.constants(settings.points, settings.case, "float64")["x"][: settings.interior]
    return [
        (slices(truth, fields), f"Temperature in cross-sections, {known} reference first"),
        (errors(truth, fields), f"Error of the temperature against the {known} reference"),
        (residuals(truth, shown), "Residual of Laplace's equation in cross-sections"),
        (scatter(truth, shown, points), "Temperature at the collocation points"),
        (below_zero(truth, fields), "Temperatures below zero, which the reference of the paper's case has too"),
    ]
