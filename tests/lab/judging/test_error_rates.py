"""The error rate of the whole procedure: tune arms on synthetic endpoints, compare them, and count what is said.

benchmarks/error_rates.py makes the table of docs/reading-the-answer.md from the same simulations.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kourkoutas.lab.judging import comparing
from tests.lab.simulated_study import CLEAR, KINDS, Simulation, counts, study

AT_MARGIN = 2.01  # a little more than 2 % of the baseline's loss at its best learning rate


@pytest.mark.parametrize("kind", KINDS)
def test_a_study_of_equal_arms_seldom_says_that_they_differ(kind: str) -> None:
    assert counts(KINDS[kind], 60)["any"] <= 6


def test_without_the_luck_of_the_tuning_a_divergence_would_make_a_verdict_easier() -> None:
    found = counts(replace(KINDS["one diverged"], lucky=False), 150)
    assert found["primary"] > 0.06 * 150


def test_without_the_luck_of_the_tuning_secondary_endpoints_would_be_clear_too_often() -> None:
    found = counts(replace(KINDS["two other secondaries"], lucky=False), 150)
    assert found["any"] > 0.06 * 150


@pytest.mark.parametrize("kind", ["plain", "the same secondary", "two other secondaries", "three arms"])
def test_a_planted_difference_is_found(kind: str) -> None:
    found = counts(replace(KINDS[kind], gap=3.0), 40)
    assert found["better"] >= 0.75 * 40
    assert found["worse"] == 0


def test_what_a_crash_leaves_is_no_verdict() -> None:
    rng, seen = np.random.default_rng(5), 0
    for _ in range(40):
        judged = study(rng, Simulation(failing=0.1, gap=-1.0))
        for one in judged or ():
            for pair, ruling in one.rulings.items():
                if any(one.failed[arm] for arm in pair):
                    seen += 1
                    assert ruling.verdict == "unfinished"
    assert seen > 10


def test_equal_arms_are_called_equal_and_those_that_differ_by_the_margin_are_not() -> None:
    of = KINDS["margin"]
    assert counts(replace(of, margin=4.0), 40)["equal"] >= 36
    assert counts(replace(of, gap=AT_MARGIN), 60)["equal"] <= 4


@pytest.mark.slow
@pytest.mark.parametrize("curvature", [2.0, 10.0])
@pytest.mark.parametrize("kind", KINDS)
def test_at_most_six_percent_of_a_thousand_studies_of_equal_arms_say_that_they_differ(
    kind: str, curvature: float
) -> None:
    found = counts(replace(KINDS[kind], curvature=curvature), 1000)
    assert found["primary"] <= found["any"] <= 60


@pytest.mark.slow
@pytest.mark.parametrize("curvature", [2.0, 10.0])
@pytest.mark.parametrize("kind", KINDS)
def test_at_most_five_percent_of_a_thousand_studies_call_arms_equal_that_differ_by_the_margin(
    kind: str, curvature: float
) -> None:
    found = counts(replace(KINDS[kind], curvature=curvature, gap=AT_MARGIN, margin=2.0), 1000)
    assert found["equal"] <= 50


@pytest.mark.parametrize("kind", ["plain", "one diverged", "failures that count", "ties", "edge"])
def test_of_one_statement_an_interval_holds_no_difference_exactly_where_none_is_clear(kind: str) -> None:
    rng = np.random.default_rng(3)
    for gap in np.linspace(0, 4, 15):
        (one,) = study(rng, replace(KINDS[kind], gap=float(gap))) or ()
        c = comparing.comparison(one).contrasts[0]
        assert c.effect is not None
        assert c.effect.interval is not None
        assert c.effect.interval.holds(0.0) == (c.verdict == "unclear")
        if c.percent is not None and c.percent.interval is not None:
            assert c.percent.interval.holds(0.0) == (c.verdict == "unclear")


def test_of_several_statements_an_interval_without_no_difference_is_a_clear_one() -> None:
    rng = np.random.default_rng(3)
    for gap in np.linspace(0, 4, 10):
        judged = study(rng, replace(KINDS["three arms, secondaries"], gap=float(gap))) or ()
        for one in judged:
            found = comparing.comparison(one)
            assert found.confidence == pytest.approx(1 - 0.05 / 6)
            for c in found.contrasts:
                assert c.effect is not None
                assert c.effect.interval is not None
                assert c.effect.interval.holds(0.0) or c.verdict in CLEAR
