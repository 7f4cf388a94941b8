"""The error rate of the whole procedure: tune two arms on synthetic endpoints, compare them, and count verdicts."""

from __future__ import annotations

import numpy as np
import pytest

from tests.lab.simulated_study import KINDS, judged, rates


@pytest.mark.parametrize("kind", KINDS)
def test_two_equal_arms_are_seldom_called_different(kind: str) -> None:
    found = rates(kind, 60)
    assert found["better"] + found["worse"] <= 0.1


def test_without_the_luck_of_the_tuning_a_divergence_would_make_a_verdict_easier() -> None:
    rng = np.random.default_rng(16)
    called = sum(judged(rng, "one diverged", tuned=False).verdict != "unclear" for _ in range(150))
    assert called > 0.06 * 150


def test_a_planted_difference_is_found() -> None:
    found = rates("plain", 40, gap=3.0)
    assert found["better"] >= 0.85
    assert found["worse"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("curvature", [2.0, 10.0])
@pytest.mark.parametrize("kind", KINDS)
def test_at_most_six_percent_of_a_thousand_studies_of_equal_arms_are_wrong(kind: str, curvature: float) -> None:
    found = rates(kind, 1000, curvature=curvature)
    assert round(1000 * (found["better"] + found["worse"])) <= 60


@pytest.mark.parametrize("kind", KINDS)
def test_an_interval_holds_no_difference_exactly_where_none_is_clear(kind: str) -> None:
    rng = np.random.default_rng(3)
    for gap in np.linspace(0, 4, 25):
        c = judged(rng, kind, gap=float(gap))
        assert c.effect is not None
        assert c.effect.interval is not None
        assert c.effect.interval.holds(0.0) == (c.verdict == "unclear")
        if c.percent is not None and c.percent.interval is not None:
            assert c.percent.interval.holds(0.0) == (c.verdict == "unclear")
