"""Tuned studies on synthetic endpoints, judged as real ones are: how often what they say is wrong.

A run ends at 100 + curvature·(log10 lr - best)² + its seed's effect, which arms and learning rates share, + noise of
its own of size 1. `Simulation` says what else happens; `counts` makes many studies and counts what they say.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kourkoutas.lab.judging import comparing
from kourkoutas.lab.judging.comparing import Judged, Question
from kourkoutas.lab.specs.spec import SearchSpace
from kourkoutas.lab.tuning import luck, search, trials
from kourkoutas.lab.tuning.trials import Tried

BEST = -2.4  # log10 of the best learning rate, between two values of the grid
CLEAR = ("better", "worse")


def space(budget: int) -> SearchSpace:
    axes = search.parse_tune(["lr=1e-4:1e-1"])
    return search.search_space(axes, trials=8, seeds=range(100, 103), test_seeds=range(10), budget=budget)


ASKED, AT_EDGE = space(2), space(0)


@dataclass(frozen=True)
class Simulation:
    """What happens in a study.

    Attributes:
      arms: the first is compared with the others.
      curvature: how much the loss depends on the learning rate: 2 little, 10 much.
      gap: by how much the first arm is better, on every endpoint.
      diverged: random runs of the test that diverge.
      failing: the probability that a run fails, in tuning and test.
      count_failed: whether such a run ranks as the worst.
      rounded: values are whole numbers, so that there are ties.
      beyond: the best learning rate lies far beyond the range.
      secondary: of each further endpoint, how much of its noise is that of the first: 1 is the same numbers.
      margin: percent within which a difference does not matter.
      lucky: whether the luck of the tuning is counted.
    """

    arms: int = 2
    curvature: float = 10.0
    gap: float = 0.0
    diverged: int = 0
    failing: float = 0.0
    count_failed: bool = False
    rounded: bool = False
    beyond: bool = False
    secondary: Sequence[float] = ()
    margin: float | None = None
    lucky: bool = True


KINDS: Mapping[str, Simulation] = {
    "plain": Simulation(),
    "one diverged": Simulation(diverged=1),
    "failures": Simulation(failing=0.02),
    "failures that count": Simulation(failing=0.1, count_failed=True),
    "ties": Simulation(rounded=True),
    "edge": Simulation(beyond=True),
    "three arms": Simulation(arms=3),
    "the same secondary": Simulation(secondary=(1.0,)),
    "two other secondaries": Simulation(secondary=(0.5, 0.0)),
    "three arms, secondaries": Simulation(arms=3, secondary=(1.0, 0.0)),
    "three arms, secondaries, one diverged": Simulation(arms=3, secondary=(1.0, 0.0), diverged=1),
    "margin": Simulation(margin=2.0),
}


class _Runs:
    """The runs of one study: every endpoint of a run, by arm, learning rate and seed."""

    def __init__(self, rng: np.random.Generator, of: Simulation) -> None:
        self.rng, self.of = rng, of
        self.shared: dict[int, list[float]] = {}
        self.best, self.slope = (-6.0, of.curvature / 10) if of.beyond else (BEST, of.curvature)

    def run(self, arm: int, lr: float, seed: int) -> tuple[list[float], bool]:
        """(the value of every endpoint, whether the run failed)."""
        parts = [1.0, *self.of.secondary]
        seeds = self.shared.setdefault(seed, (3 * self.rng.standard_normal(len(parts))).tolist())
        noise = self.rng.standard_normal(len(parts)).tolist()
        level = 100 + self.slope * (math.log10(lr) - self.best) ** 2 - (self.of.gap if arm == 0 else 0.0)
        values = []
        for own_seed, own_noise, part in zip(seeds, noise, parts, strict=True):
            rest = math.sqrt(1 - part**2)
            value = level + part * (seeds[0] + noise[0]) + rest * (own_seed + own_noise)
            values.append(float(round(value)) if self.of.rounded else value)
        if self.of.failing and self.rng.random() < self.of.failing:
            return [math.nan] * len(parts), True
        return values, False


def study(
    rng: np.random.Generator, of: Simulation, pairs: Sequence[tuple[str, str]] | None = None
) -> list[Judged] | None:
    """One study by all its endpoints; None where a tuning could choose nothing.

    `pairs` are compared, by default the first arm with each of the others; arms are "0", "1", …
    """
    runs, arms = _Runs(rng, of), [str(k) for k in range(of.arms)]
    asked = AT_EDGE if of.beyond else ASKED
    tried: dict[str, list[Tried]] = {arm: [] for arm in arms}
    scores: dict[str, list[list[list[float]]]] = {arm: [] for arm in arms}  # by value, seed and endpoint
    try:
        while requests := search.next_requests(asked, dict.fromkeys(arms, asked.axes), tried):
            for arm, values in requests:
                ended = [runs.run(int(arm), float(values["lr"]), seed) for seed in asked.seeds]
                own = [found for found, _ in ended]
                failed = 0 if of.count_failed else sum(fell for _, fell in ended)
                scores[arm].append(own)
                tried[arm].append(Tried(values, tuple(found[0] for found in own), failed=failed))
        chosen = trials.choose(tried)
    except ValueError:
        return None
    at = {arm: tried[arm].index(chosen[arm]) for arm in arms}
    ends = {arm: {s: runs.run(int(arm), float(chosen[arm].values["lr"]), s) for s in range(10)} for arm in arms}
    for _ in range(of.diverged):
        arm, seed = arms[rng.integers(of.arms)], int(rng.integers(10))
        ends[arm][seed] = ([math.nan] * (1 + len(of.secondary)), False)
    failed_seeds = {arm: [seed for seed, (_, fell) in own.items() if fell] for arm, own in ends.items()}
    questions = []
    for k in range(1 + len(of.secondary)):
        lost = {
            arm: luck.lost_by_tuning([[seed[k] for seed in value] for value in scores[arm]], at[arm]) for arm in arms
        }
        values_of = {arm: {seed: found[k] for seed, (found, _) in own.items()} for arm, own in ends.items()}
        questions.append(Question(values_of, lost=lost if of.lucky else {}, name=str(k), primary=k == 0))
    return comparing.judge(
        questions,
        [(arms[0], arm) for arm in arms[1:]] if pairs is None else pairs,
        margin=of.margin,
        failed=failed_seeds,
        count_failed=of.count_failed,
        resamples=0,
        leave_one_out=False,
    )


def counts(of: Simulation, studies: int, seed: int = 16) -> Counter[str]:
    """How many of so many studies say what: each verdict of the first contrast of the primary endpoint, "primary" if
    any of its contrasts is clear, and "any" if any contrast of any endpoint is."""
    rng, found = np.random.default_rng(seed), Counter[str]()
    for _ in range(studies):
        judged = study(rng, of)
        if judged is None:
            found["stopped"] += 1
            continue
        verdicts = [[ruling.verdict for ruling in one.rulings.values()] for one in judged]
        clear = [any(verdict in CLEAR for verdict in own) for own in verdicts]
        found[verdicts[0][0]] += 1
        found["primary"] += clear[0]
        found["any"] += any(clear)
    return found
