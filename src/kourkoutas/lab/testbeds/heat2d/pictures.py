"""Pictures of final surrogates: a frame beside the truth, and errors over time.

`figures` takes the settings and the final parameters of some runs, by label. Every figure is made without pyplot. The
surrogates are evaluated in NumPy, so that no engine is needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kourkoutas.lab.engines import Array, Params
from kourkoutas.lab.engines.numpy import ENGINE
from kourkoutas.lab.optimizers.looks import looks
from kourkoutas.lab.testbeds.heat2d import evaluate
from kourkoutas.lab.testbeds.heat2d.data import cases
from kourkoutas.lab.testbeds.heat2d.settings import Settings

# The paper shows frame 6, the second that is not given.
FRAME = 6
MOST_RUNS = 4
CASES = 4


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def frame(settings: Settings, truth: Array, predicted: Mapping[str, Array], number: int) -> Figure:
    """One frame of one case: raw, contrast-equalised and as an error, the truth in the first column.

    Raw panels share the scale of the true frame. Equalised ones are rescaled linearly, each to the range of its own
    inner nodes, which shows structure that a shared scale hides. Errors share a symmetric scale.

    Args:
      truth: (frames, nodes).
      predicted: label → (frames, nodes).
    """
    n = settings.grid
    plates = {name: u[number].reshape(n, n) for name, u in {"truth": truth, **predicted}.items()}
    figure = _figure(2.3 * len(plates) + 0.9, 7.4)
    axes = figure.subplots(3, len(plates), squeeze=False)
    low, high = float(plates["truth"].min()), float(plates["truth"].max())
    largest = max(float(np.abs(u - plates["truth"]).max()) for u in plates.values()) or 1.0
    rows: list[Any] = [None, None, None]
    for column, (name, u) in zip(axes.T, plates.items(), strict=True):
        inner = u[1:-1, 1:-1]
        rows[0] = column[0].imshow(u, vmin=low, vmax=high, cmap="inferno")
        rows[1] = column[1].imshow(u, vmin=float(inner.min()), vmax=float(inner.max()), cmap="inferno")
        rows[2] = column[2].imshow(u - plates["truth"], vmin=-largest, vmax=largest, cmap="RdBu_r")
        rms = math.sqrt(float(np.mean((u - plates["truth"]) ** 2)))
        column[0].set_title(name if name == "truth" else f"{name}\nRMS error {rms:.2g}", fontsize=10)
        for panel in column:
            panel.set(xticks=[], yticks=[])
    for panel, text in zip(axes[:, 0], ("raw", "contrast-equalised", "error"), strict=True):
        panel.set_ylabel(text)
    figure.colorbar(rows[0], ax=list(axes[0]), label="temperature")
    # No numbers: each panel has a scale of its own.
    figure.colorbar(rows[1], ax=list(axes[1]), label="inner range", ticks=[])
    figure.colorbar(rows[2], ax=list(axes[2]), label="prediction − truth")
    return figure


def errors(settings: Settings, truth: Array, shot: Mapping[str, Array], rolled: Mapping[str, Array]) -> Figure:
    """RMS error of every frame, in one pass and rolled out. `shot` and `rolled`: label → (cases, frames, nodes)."""
    figure = _figure(10, 3.8)
    panels = figure.subplots(1, 2, sharey=True, sharex=True)
    for panel, title, found in zip(panels, ("one pass", "rolled out"), (shot, rolled), strict=True):
        for label, look in looks(list(found)).items():
            rms = np.sqrt(np.mean(np.square(found[label] - truth, dtype=np.float64), axis=(0, 2)))
            seen = np.flatnonzero(rms > 0)
            panel.plot(seen, rms[seen], label=label, lw=1.6, **look)
        panel.axvline(settings.known - 0.5, color="#666666", lw=0.8, ls=":")
        panel.set(title=title, xlabel="frame", yscale="log")
        panel.grid(color="#dddddd", lw=0.6)
    panels[0].set_ylabel(f"RMS error, {len(truth)} test cases\n(dotted: end of the given frames)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=MOST_RUNS, frameon=False)
    return figure


def figures(settings: Settings, runs: Mapping[str, Mapping[str, Array]]) -> list[tuple[Figure, str]]:
    """All pictures of at most `MOST_RUNS` runs, each with a description."""
    shown: list[tuple[str, Params]] = [(label, dict(p)) for label, p in list(runs.items())[:MOST_RUNS]]
    if not shown:
        return []
    data = cases(settings)
    train, validation, test = settings.split
    held = slice(train + validation, train + validation + min(CASES, test))
    truth, alpha = np.array(data.frames[held]), data.alpha[held]
    shot = {label: evaluate.one_shot(ENGINE, settings, p, truth, alpha) for label, p in shown}
    found = [
        (
            frame(settings, truth[0], {label: u[0] for label, u in shot.items()}, min(FRAME, settings.frames - 1)),
            f"Frame {FRAME} of a test case, truth first: raw, contrast-equalised, and error",
        )
    ]
    # A causal roll-out takes a pass per frame: too long for a picture.
    if settings.mask == "block":
        rolled = {label: evaluate.roll_out(ENGINE, settings, p, truth, alpha) for label, p in shown}
        found.append((errors(settings, truth, shot, rolled), "RMS error of each frame, in one pass and rolled out"))
    return found
