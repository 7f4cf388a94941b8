"""Tuned studies of two arms on synthetic endpoints, judged as real ones are."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from kourkoutas.lab.judging import comparing
from kourkoutas.lab.judging.deciding import lost_by_tuning
from kourkoutas.lab.planning import search
from kourkoutas.lab.planning.search import Tried
from kourkoutas.lab.specs import search_space
from kourkoutas.lab.specs.search_space import SearchSpace

KINDS = ("plain", "one diverged", "failures", "ties", "edge")
BEST = -2.4  # log10 of the best learning rate, between two values of the grid


def space(budget: int) -> SearchSpace:
    axes = search_space.parse_tune(["lr=1e-4:1e-1"])
    return search_space.search_space(axes, trials=8, seeds=range(100, 103), test_seeds=range(10), budget=budget)


ASKED, AT_EDGE = space(2), space(0)


def judged(
    rng: np.random.Generator, kind: str, *, curvature: float = 10.0, gap: float = 0.0, tuned: bool = True
) -> comparing.Contrast:
    """One study. A run ends at 100 + curvature·(log10 lr - best)² + its seed's effect, which arms and learning rates
    share, + noise of its own of size 1; `gap` is by how much arm a is better.

    Args:
      kind: "one diverged": one random run of the twenty; "failures": each run of tuning and test with probability 0.1;
        "ties": values are rounded to whole numbers; "edge": the best learning rate lies far beyond the range.
      tuned: whether the luck of the tuning is counted.
    """
    seeds: dict[int, float] = {}
    asked, best = (AT_EDGE, -6.0) if kind == "edge" else (ASKED, BEST)

    def run(arm: str, lr: float, seed: int) -> float:
        shared = seeds.setdefault(seed, 3 * rng.standard_normal())
        slope = curvature / 10 if kind == "edge" else curvature
        value = 100 + slope * (math.log10(lr) - best) ** 2 + shared + rng.standard_normal() - (gap if arm == "a" else 0)
        if kind == "failures" and rng.random() < 0.1:
            return math.nan
        return float(round(value)) if kind == "ties" else float(value)

    tried: dict[str, list[Tried]] = {"a": [], "b": []}
    axes = dict.fromkeys(tried, asked.axes)
    while requests := search.next_requests(asked, axes, tried):
        for arm, values in requests:
            tried[arm].append(Tried(values, tuple(run(arm, float(values["lr"]), seed) for seed in asked.seeds)))
    chosen = {arm: search.best(own) for arm, own in tried.items()}
    values = {arm: {seed: run(arm, float(one.values["lr"]), seed) for seed in range(10)} for arm, one in chosen.items()}
    if kind == "one diverged":
        values["ab"[rng.integers(2)]][int(rng.integers(10))] = math.nan
    lost = {arm: lost_by_tuning([one.scores for one in own], own.index(chosen[arm])) for arm, own in tried.items()}
    return comparing.compare_pairs(values, [("a", "b")], resamples=0, lost=lost if tuned else None).contrasts[0]


def rates(kind: str, studies: int, seed: int = 16, **how: float) -> Mapping[str, float]:
    """The share of each verdict in so many studies."""
    rng = np.random.default_rng(seed)
    found = [judged(rng, kind, **how).verdict for _ in range(studies)]
    return {verdict: found.count(verdict) / studies for verdict in ("better", "worse", "unclear")}
