"""The figure of a target: the share of each optimizer's runs that have reached it, against step.

A run that never reached it keeps its arm's line below 100 %; a diverged one counts by what it logged before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kourkoutas.lab.judging.targets import Reached, until
from kourkoutas.lab.results.store import StoredRun
from kourkoutas.lab.showing.drawing import Drawing, Panel, element, line_path
from kourkoutas.lab.specs.looks import Look

NOTE = (
    "Steps are those that were logged. A run that never got there counts behind all that did, and two that never did "
    "are equal. Seconds are training alone, without set-up, compiling and evaluation."
)
HINTS = 160  # steps at which the script can show values


def last_step(runs: Sequence[StoredRun]) -> float:
    """The last step that any run logged, where the picture ends."""
    return max((max(run.result.curve.get("step", ()), default=0.0) for run in runs if run.result), default=0.0)


def stairs(share: Sequence[tuple[float, float]], end: float) -> tuple[list[float], list[float]]:
    """(steps, percent) of the corners of a line from nothing at step 0, up at every run that arrives, to `end`.

    >>> stairs([(10, 0.5), (30, 1.0)], 40)
    ([0.0, 10, 10, 30, 30, 40], [0.0, 0.0, 50.0, 50.0, 100.0, 100.0])
    """
    xs, ys = [0.0], [0.0]
    for step, part in share:
        xs += [step, step]
        ys += [ys[-1], 100 * part]
    return [*xs, end], [*ys, ys[-1]]


def draw(found: Mapping[str, Reached], end: float, looks: Mapping[str, Look], target: str) -> Drawing:
    """One panel for all arms."""
    panel = Panel.over([0.0, end], [0.0, 100.0])
    steps, lines = sorted({float(round(end * k / HINTS)) for k in range(HINTS + 1)}), []
    for place, (arm, look) in enumerate(looks.items()):
        if arm in found:
            xs, ys = stairs(found[arm].share, end)
            hint = element("title", f"{arm}: {found[arm].reached} of {found[arm].runs} runs reached {target}")
            line = line_path(panel.x(xs), panel.y(ys))
            path = element("path", d=line, class_="curve", fill="none", stroke_dasharray=look.dasharray)
            panel.add("g", hint, path, class_=f"arm c{look.colour}", data_arm=place)
            lines.append({"arm": place, "name": f"{arm}, %", "x": steps, "y": [_by(found[arm], x) for x in steps]})
    told = "; ".join(f"{arm} {one.reached} of {one.runs}" for arm, one in found.items())
    return panel.drawing(
        f"Percent of the runs that have reached {target}",
        f"Percent of each optimizer's runs that have reached {target}, against step; in the end {told}",
        plot={"x": [panel.x.low, panel.x.high, panel.x.start, panel.x.stop], "lines": lines},
    )


def _by(one: Reached, step: float) -> float:
    """Percent of the runs that had reached the target by `step`."""
    return round(100 * max((part for at, part in one.share if at <= step), default=0.0), 1)


def table(found: Mapping[str, Reached]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """(head, rows): how many got there, and how soon."""
    head = ("optimizer", "reached", "median steps", "median seconds")
    return head, [
        (arm, f"{one.reached} of {one.runs}", until(one.median_steps), until(one.median_seconds))
        for arm, one in found.items()
    ]
