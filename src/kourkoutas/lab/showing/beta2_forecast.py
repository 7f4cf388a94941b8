"""The figure of the instrument: how well each memory would have predicted the recorded norms.

A line per stretch of training: what a memory of 1/(1-β) steps loses against the best one, with every bucket counted
alike, on a logarithmic scale that ends at FLOOR. The dot of a line is the memory that predicts best there.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence

import numpy as np

from kourkoutas.lab.judging import beta2_forecast as forecast
from kourkoutas.lab.judging.beta2_forecast import Forecasts
from kourkoutas.lab.results.store import StoredRun, StoreError
from kourkoutas.lab.showing.drawing import Drawing, Panel, element, line_path

NOTE = (
    "Adam's second moment is a forecast of the next squared gradient, and β2 says how much of the past it counts. From "
    "the recorded norms: which β would have forecast them best? The loss is QLIKE, in nats per step; 0 is the best "
    "memory of a stretch. A norm of more than ten times its forecast counts as ten times. It says what predicts the "
    "norms, and not which β2 trains best."
)


FLOOR = 1e-3  # nats per step, below which a loss does not matter


def recorded(runs: Sequence[StoredRun], arm: str) -> list[Forecasts]:
    """What the norms of each run of one arm say; none for runs that have no norms."""
    found = []
    for run in runs:
        trace = None
        if run.spec.optimizer == arm:
            with contextlib.suppress(StoreError):  # a damaged trace costs its own part of the picture, not the page
                trace = run.trace()
        if trace is not None and len(trace.get("every_step", ())) > forecast.STRETCHES:
            names = [str(name) for name in trace["names"]]
            found.append(forecast.examine(names, trace["every_step"], trace["every_norm"]))
    return found


def of_arm(runs: Sequence[StoredRun], arm: str) -> Forecasts | None:
    """The mean over an arm's runs of the same length; None if none has norms."""
    found = recorded(runs, arm)
    longest = max((one.edges for one in found), key=lambda edges: edges[-1], default=())
    alike = [one for one in found if one.edges == longest and one.names == found[0].names]
    return forecast.over_runs(alike) if alike else None


def of_arms(runs: Sequence[StoredRun], arms: Sequence[str]) -> dict[str, Forecasts]:
    """`of_arm` of those arms that have norms."""
    return {arm: one for arm in arms if (one := of_arm(runs, arm)) is not None}


def draw(found: Forecasts, arm: str) -> Drawing:
    """One panel: excess loss against memory, a line per stretch."""
    length = 1 / (1 - np.asarray(found.betas))
    worst = float(np.nanmax(found.pooled, initial=10 * FLOOR))
    panel = Panel.over(
        length.tolist(), [FLOOR, worst], log_x=True, log_y=True, x_label="memory 1/(1-β), steps", edge=0.06
    )
    for k, (name, excess) in enumerate(zip(stretches(found), found.pooled, strict=True)):
        if not np.isfinite(excess).any():
            continue
        best = int(np.nanargmin(excess))
        told = f"{name}: best β {found.betas[best]:g}"
        x, y = panel.x(length), panel.y(np.maximum(excess, FLOOR))
        panel.add(
            "g",
            element("title", told),
            element("path", d=line_path(x, y), class_="curve", fill="none"),
            element("circle", cx=float(x[best]), cy=float(y[best]), r=4.5, class_="point"),
            opacity=f"{0.4 + 0.6 * (k + 1) / len(found.pooled):.2f}",
        )
    words = "; ".join(f"{n} β {b:g}" for n, b in zip(stretches(found), found.pooled_best, strict=True))
    return panel.drawing(
        f"{arm}: nats per step that a memory loses; light to dark: first to last quarter",
        f"Excess loss of each memory over the best for {arm}; best: {words}",
    )


def stretches(found: Forecasts) -> list[str]:
    """The names of the stretches: "steps 1 to 500"."""
    return [f"steps {low} to {high - 1}" for low, high in itertools.pairwise(found.edges)]


def table(by_arm: dict[str, Forecasts]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(head, rows): of each arm and stretch, the best memory and what the others lose."""
    betas = next(iter(by_arm.values())).betas
    head = ("optimizer", "stretch", "best β", *(f"β {beta:g}" for beta in betas))
    return head, [
        (arm, name, f"{best:g}", *(f"{x:.3g}" for x in excess))
        for arm, found in by_arm.items()
        for name, best, excess in zip(stretches(found), found.pooled_best, found.pooled, strict=True)
    ]


def buckets(found: Forecasts) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(head, rows): the best β of each bucket, by stretch."""
    head = ("bucket", *stretches(found))
    rows = [(name, *(f"{b:g}" for b in found.best[:, k])) for k, name in enumerate(found.names)]
    return head, rows
