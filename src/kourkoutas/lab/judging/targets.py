"""Steps and seconds to a target: when a logged metric first was as good as asked for.

    parse_target("val_loss<=0.5")     parse_target("val_acc>=0.9")

A run that never reached the target is censored: it is counted, ranks behind all that did, and is in no mean. Steps are
those of the logged points, so that no run is told apart more finely than it was logged. Seconds are steps times the
run's own seconds per step: training alone, without set-up, compiling and evaluation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kourkoutas.lab.judging.endpoints import logged
from kourkoutas.lab.judging.hypothesis_tests import holm, wilcoxon
from kourkoutas.lab.judging.intervals import quantile
from kourkoutas.lab.optimizers.looks import name_of
from kourkoutas.lab.results.store import StoredRun
from kourkoutas.lab.specs.spec import RunResult


@dataclass(frozen=True)
class Target:
    """metric ≤ value, or ≥ where `above`."""

    metric: str
    value: float
    above: bool = False

    def __str__(self) -> str:
        return f"{self.metric}{'>=' if self.above else '<='}{self.value:g}"

    def step(self, run: StoredRun) -> float:
        """The first logged step at which the target is met; infinite when it never is."""
        for step, value in logged(run, self.metric):
            if math.isfinite(value) and (value >= self.value if self.above else value <= self.value):
                return step
        return math.inf


def parse_target(text: str) -> Target:
    """The target METRIC<=VALUE or METRIC>=VALUE.

    >>> parse_target("val_acc >= 0.9")
    Target(metric='val_acc', value=0.9, above=True)
    """
    metric, sign, value = (part.strip() for part in text.partition(">=" if ">=" in text else "<="))
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not (metric and sign and math.isfinite(number)):
        raise ValueError(f"--target must look like METRIC<=VALUE, for example 'val_loss<=0.5'; got {text!r}")
    return Target(metric, number, sign == ">=")


@dataclass(frozen=True)
class Reached:
    """One arm on its way to a target.

    Attributes:
      runs, reached: how many there are, and how many reached it.
      steps, seconds: {seed: until then}, infinite for a run that never did.
      median_steps, median_seconds: infinite when fewer than half of the runs reached it; seconds None where a run that
        reached it recorded none.
      share: (steps, share of the runs that had reached it by then), at every step where it grows.
    """

    runs: int
    reached: int
    steps: Mapping[int, float]
    seconds: Mapping[int, float | None]
    median_steps: float
    median_seconds: float | None
    share: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Race:
    """Who was first, seed by seed; the exact signed-rank test of the steps, in which two that never arrive tie."""

    treatment: str
    baseline: str
    wins: int
    ties: int
    losses: int
    p: float | None
    p_holm: float | None = None

    @property
    def sentence(self) -> str:
        """Who was first how often, in words, with the adjusted p."""
        others = ", ".join(f"{how} on {k}" for how, k in (("equal", self.ties), ("later", self.losses)) if k)
        p = "" if self.p_holm is None else f"Wilcoxon p = {self.p_holm:.3g} after Holm"
        aside = "; ".join(part for part in (others, p) if part)
        text = f"{name_of(self.treatment)} got there before {name_of(self.baseline)} on {self.wins} of "
        return f"{text}{self.wins + self.ties + self.losses} seeds{f' ({aside})' if aside else ''}."


@dataclass(frozen=True)
class ToTarget:
    """How soon each arm reached a target, and who was first."""

    target: str
    arms: Mapping[str, Reached]
    contrasts: tuple[Race, ...]


def to_target(runs: Sequence[StoredRun], target: Target, pairs: Sequence[tuple[str, str]], family: int) -> ToTarget:
    """The way of all arms to a target, compared by the planned pairs."""
    found = reached(runs, target)
    return ToTarget(str(target), found, tuple(races(found, pairs, family)))


def reached(runs: Sequence[StoredRun], target: Target) -> dict[str, Reached]:
    """{arm: its way to the target}, of runs that ended; a diverged one counts by what it logged before.

    Raises:
      ValueError: no run logged the metric.
    """
    ended: dict[str, dict[int, StoredRun]] = {}
    for run in runs:
        if run.result is not None and run.result.status != "failed":
            ended.setdefault(run.spec.optimizer, {})[run.spec.seed] = run
    if ended:
        check_logged(target, [run.result for own in ended.values() for run in own.values() if run.result is not None])
    return {arm: _reached(own, target) for arm, own in ended.items()}


def check_logged(target: Target, results: Iterable[RunResult]) -> None:
    """Raise where none of the results has the metric of the target."""
    names = sorted({name for result in results for name in result.curve} - {"step"})
    if target.metric not in names:
        raise ValueError(f"--target {target}: no run logged {target.metric!r}; logged: {', '.join(names) or 'none'}")


def _reached(runs: Mapping[int, StoredRun], target: Target) -> Reached:
    steps = {seed: target.step(run) for seed, run in runs.items()}
    paces = {seed: run.result.seconds_per_step for seed, run in runs.items() if run.result is not None}
    seconds = {
        seed: math.inf if math.isinf(step) else None if (pace := paces[seed]) is None else step * pace
        for seed, step in steps.items()
    }
    arrived = sorted(step for step in steps.values() if math.isfinite(step))
    known = [x for x in seconds.values() if x is not None]
    return Reached(
        runs=len(steps),
        reached=len(arrived),
        steps=steps,
        seconds=seconds,
        median_steps=quantile(np.array(list(steps.values())), 0.5),
        median_seconds=quantile(np.array(known), 0.5) if len(known) == len(seconds) else None,
        share=tuple((step, sum(x <= step for x in arrived) / len(steps)) for step in dict.fromkeys(arrived)),
    )


def until(value: float | None) -> str:
    """Median steps or seconds for people: "not reached" where fewer than half of the runs got there.

    >>> until(1250.0), until(math.inf), until(None)
    ('1250', 'not reached', '–')
    """
    return "–" if value is None else f"{value:.4g}" if math.isfinite(value) else "not reached"


def races(found: Mapping[str, Reached], pairs: Sequence[tuple[str, str]], family: int = 0) -> list[Race]:
    """The planned contrasts (treatment, baseline) of steps to the target, Holm-adjusted for all of them, those of arms
    without runs too, and for at least `family`."""
    out = []
    for a, b in pairs:
        if a not in found or b not in found:
            continue
        common = sorted(found[a].steps.keys() & found[b].steps.keys())
        x, y = (np.array([found[name].steps[seed] for seed in common]) for name in (a, b))
        with np.errstate(invalid="ignore"):
            d = np.where(x == y, 0.0, y - x)
        wins, losses = int(np.sum(d > 0)), int(np.sum(d < 0))
        out.append(Race(a, b, wins, len(common) - wins - losses, losses, wilcoxon(d, np.zeros(len(d))).p))
    adjusted = holm([race.p for race in out], max(family, len(pairs)))
    return [replace(race, p_holm=p) for race, p in zip(out, adjusted, strict=True)]
