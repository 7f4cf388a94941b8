"""Attribution by tests: which cause the control arms support."""

from __future__ import annotations

import math

import numpy as np

from kourkoutas.lab.judging import causes


def test_the_dynamics_are_a_cause_when_only_they_help() -> None:
    values = {"kbeta": 1.0, "adam95": 1.5, "kbeta-static": 1.5, "adam-mid": 1.5, "adam95-warm": 1.5, "kbeta-exact": 1.0}
    # noise that is different in each arm and sums to zero over the seeds
    data = {
        arm: {s: level * (1 + 0.01 * math.sin(1 + k + 2 * math.pi * (1 + k % 4) * s / 10)) for s in range(10)}
        for k, (arm, level) in enumerate(values.items())
    }
    found = causes.examine(data, log=True, higher_is_better=False)
    assert found is not None
    assert [cause.cause for cause in found.causes] == ["Dynamics", "Mean β2", "Hidden warmup"]
    assert "The data support as a cause: the dynamics of β2." in found.summaries[0]
    assert "Not supported as a cause: the mean value of β2, the hidden warmup." in found.summaries[0]
    assert "with the same warmup a difference remains (1.5" in found.summaries[0]
    assert found.causes[0].findings[0].sentence == "Supported: kbeta ends better than kbeta-static."


def test_control_arms_are_needed_and_missing_ones_are_named() -> None:
    both = {arm: {s: level + 0.01 * s for s in range(5)} for arm, level in (("kbeta", 1.0), ("adam95", 2.0))}
    assert causes.examine(both, log=False, higher_is_better=False) is None
    one = {
        **both,
        "adam95": {s: 2.0 + 0.1 * s for s in range(5)},
        "kbeta-static": {s: 1.5 + 0.02 * s for s in range(5)},
    }
    found = causes.examine(one, log=True, higher_is_better=False)
    assert found is not None
    assert "Not examined, for lack of the arm: the mean value of β2, the hidden warmup." in found.summaries[0]


def test_without_a_difference_there_is_nothing_to_attribute() -> None:
    rng = np.random.default_rng(0)
    data = {arm: {s: rng.normal(1, 0.1) for s in range(6)} for arm in ("kbeta", "adam95", "kbeta-static")}
    found = causes.examine(data, log=False, higher_is_better=False)
    assert found is not None
    assert "the data support no difference that needs a cause" in found.summaries[0]
