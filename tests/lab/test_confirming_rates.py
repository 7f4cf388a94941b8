"""The error rate of the whole procedure: tune two arms on synthetic endpoints, confirm, and count wrong verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from kourkoutas.lab.judging import stats, tuning
from kourkoutas.lab.judging.confirming import counted
from kourkoutas.lab.specs import search_space as asking

STUDIES = 200
BEST = {"a": -2.4, "b": -2.4}  # log10 of the best learning rate, between two values of the grid
QUESTION = asking.search_space(
    asking.parse_tune(["lr=1e-4:1e-1"]), trials=8, seeds=range(100, 103), test_seeds=range(10), budget=2
)


def synthetic(rng: np.random.Generator, curvature: float, gap: float = 0.0) -> tuple[stats.Contrast, stats.Contrast]:
    """One tuned study of two arms. A run ends at 100 + curvature·(log10 lr - best)² + its seed's effect, which arms and
    learning rates share, + noise of its own of size 1; `gap` is by how much arm a is better."""
    seeds: dict[int, float] = {}

    def run(arm: str, lr: float, seed: int) -> float:
        shared = seeds.setdefault(seed, 3 * rng.standard_normal())
        away = math.log10(lr) - BEST[arm]
        return float(100 + curvature * away**2 + shared + rng.standard_normal() - (gap if arm == "a" else 0))

    def measure(requests: Sequence[tuple[str, Any]]) -> list[tuple[float, ...]]:
        return [tuple(run(arm, values["lr"], seed) for seed in QUESTION.seeds) for arm, values in requests]

    tried = tuning.tune(QUESTION, {"a": QUESTION.axes, "b": QUESTION.axes}, measure)
    chosen = {arm: tuning.best(own).values for arm, own in tried.items()}
    values = {arm: {seed: run(arm, chosen[arm]["lr"], seed) for seed in range(10)} for arm in tried}
    comparison = stats.compare_pairs(values, [("a", "b")], resamples=10)
    (found,) = counted(comparison, tried, chosen).contrasts
    return comparison.contrasts[0], found


@pytest.mark.parametrize("curvature", [2.0, 10.0])
def test_two_equal_arms_are_called_different_in_at_most_five_percent_of_studies(curvature: float) -> None:
    rng = np.random.default_rng(16)
    found = [synthetic(rng, curvature) for _ in range(STUDIES)]
    called = sum(confirmed.verdict in ("better", "worse") for _, confirmed in found)
    assert called <= 0.05 * STUDIES
    # Without the luck of the tuning counted it would be more: the reason for `counted`.
    assert sum(contrast.t.p < 0.05 for contrast, _ in found if contrast.t.p is not None) > 0.05 * STUDIES


def test_a_planted_difference_is_found() -> None:
    rng = np.random.default_rng(16)
    found = [synthetic(rng, curvature=10.0, gap=3.0)[1].verdict for _ in range(50)]
    assert found.count("better") >= 45
    assert found.count("worse") == 0
