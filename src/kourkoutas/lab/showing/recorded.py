"""What runs have recorded, as figures need it: curves, learning rates, traces, and a testbed's own pictures."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kourkoutas.lab import testbeds
from kourkoutas.lab.judging.values import Seed
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.results.store import StoredRun, StoreError
from kourkoutas.lab.showing.curves import Course, Courses, rate_panel, summarise, thinned
from kourkoutas.lab.showing.drawing import Drawing
from kourkoutas.lab.showing.maps import TraceData

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def courses(snapshot: Snapshot) -> dict[str, dict[Seed, Course]]:
    """{arm: {seed: its training loss}}, of the runs that have recorded one.

    NOTE: a testbed's curve holds means of blocks of steps, but for its last entry, the last batch's own loss, which is
    an endpoint and no part of the curve. What a user's function logs is drawn as it is, by rising steps, where it has
    logged a finite loss: a row may hold other metrics alone. That a run diverged is told by its status, not by a gap.
    """
    found: dict[str, dict[Seed, Course]] = {arm.label: {} for arm in snapshot.record.arms}
    own = snapshot.record.code is not None
    for number, run in enumerate(snapshot.runs):
        if run.result is not None:
            steps, losses = run.result.curve.get("step", []), run.result.curve.get("loss", [])
            if not own and run.result.status == "ok" and len(steps) > 2:
                steps, losses = steps[:-1], losses[:-1]
            if own and not np.isfinite(losses).all():
                logged = _so_far(run)
                steps, losses = logged if logged[0] else (steps, losses)
        else:
            steps, losses = _so_far(run)
        if steps and len(steps) == len(losses):
            x, y = np.asarray(steps, float), np.asarray(losses, float)
            order = np.argsort(x, kind="stable")
            found.setdefault(run.spec.optimizer, {})[run.spec.seed] = Course(
                x[order],
                y[order],
                diverged=run.result is not None and run.result.status == "diverged",
                going=run.result is None,
                anchor=f"run-{number}",
            )
    return {arm: by_seed for arm, by_seed in found.items() if by_seed}


def _so_far(run: StoredRun) -> tuple[list[float], list[float]]:
    try:
        rows = [row for row in run.metrics() if "step" in row and isinstance(row.get("loss"), int | float)]
    except StoreError:
        return [], []
    return [float(row["step"]) for row in rows], [float(row["loss"]) for row in rows]


def drawn(found: Courses) -> list[dict[str, Any]]:
    """The lines of the learning curves as rows of a table."""
    rows: list[dict[str, Any]] = []
    for arm, by_seed in found.items():
        s = summarise([thinned(course) for course in by_seed.values()])
        if s is not None:
            for step, median, low, high in zip(s.steps, s.median, s.low, s.high, strict=True):
                row = {"optimizer": arm, "step": step, "median": median, "lower_quartile": low, "upper_quartile": high}
                rows.append({key: x if isinstance(x, str) else float(f"{x:.6g}") for key, x in row.items()})
    return rows


def rate(runs: Sequence[StoredRun]) -> Drawing | None:
    """The learning rate's schedule: the one that all arms share, not the one that a -warm arm makes of it."""
    for run in runs:
        warm = run.spec.optimizer.partition("[")[0].endswith("-warm")
        if run.result is not None and run.result.curve.get("lr") and not warm:
            steps, rates = (np.asarray(run.result.curve[name], float) for name in ("step", "lr"))
            logged = np.isfinite(rates)
            return rate_panel(steps[logged], rates[logged])
    return None


def traces(runs: Sequence[StoredRun], arm: str) -> list[TraceData]:
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


def own_pictures(snapshot: Snapshot) -> list[tuple[Figure, str]]:
    """What the testbed draws of final parameters: those of the first seed that most arms finished, by arm."""
    record, runs = snapshot.record, snapshot.runs
    draw = None if record.code else getattr(testbeds.get(record.testbed), "figures", None)
    done = [run for run in runs if run.result and run.result.status == "ok" and (run.folder / "params.npz").exists()]
    if draw is None or not done:
        return []
    seeds = [run.spec.seed for run in done]
    chosen = [run for run in done if run.spec.seed == max(record.seeds, key=seeds.count)]
    # One picture shows one model: arms whose settings differ, as in a grid over settings, are left out.
    shared = chosen[0].spec.settings
    params = {}
    for run in chosen:
        if run.spec.settings == shared:
            params[run.spec.optimizer] = run.params() or {}
    settings = testbeds.settings_of(testbeds.get(record.testbed), record.preset, shared)
    title = f"seed {chosen[0].spec.seed}"
    return [(figure, f"{description} ({title})") for figure, description in draw(settings, params)]
