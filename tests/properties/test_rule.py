"""Properties of the rule for any norms and any hyper-parameters."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kourkoutas import rule
from kourkoutas.oracle import Oracle
from kourkoutas.rule import Hyper, State

ANY = st.sampled_from([0.0, 5e-324, 1e-310, 1e-30, 1e-9, 1.0, 1e30, 1e300]) | st.floats(0, 1e300)
HYPER = st.builds(
    Hyper,
    beta1=st.floats(0, 0.999),
    beta2_min=st.floats(0, 0.9),
    beta2_max=st.floats(0.9, 0.9999),
    alpha=st.floats(0.01, 0.99),
    tiny_spike=st.floats(1e-12, 1e-3),
    warmup_steps=st.integers(0, 3),
    bias_correction=st.sampled_from(rule.BIAS_CORRECTIONS),
)


def walk(hyper, norms, xp=np):
    """The steps of one bucket with these norms."""
    state = State(0.0, 0, 0.0 if hyper.bias_correction == "exact" else None)
    steps = []
    for n in norms:
        with np.errstate(all="ignore"):
            steps.append(rule.step(hyper, 1e-3, n, state, xp))
        state = steps[-1].state
    return steps


@given(HYPER, st.lists(ANY, min_size=1, max_size=12))
def test_sun_and_beta2_stay_in_their_ranges(hyper, norms):
    for step in walk(hyper, norms):
        assert 0 <= step.sun < 1
        # sun ≤ n / (n + (1-α)·n) = 1/(2-α)
        assert step.sun <= 1 / (2 - hyper.alpha) * (1 + 1e-12)
        assert hyper.beta2_min - 1e-15 <= step.beta2 <= hyper.beta2_max + 1e-15
        assert step.k.c2 == 1 - step.beta2 or math.isclose(step.k.c2, 1 - step.beta2, abs_tol=1e-15)
        assert step.state.ema >= 0


@given(HYPER, st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12), st.integers(-40, 40))
def test_sun_does_not_change_when_all_gradients_are_scaled(hyper, norms, power):
    scale = 2.0**power
    scaled = walk(dataclasses.replace(hyper, tiny_spike=hyper.tiny_spike * scale), [scale * n for n in norms])
    assert [a.sun for a in walk(hyper, norms)] == [b.sun for b in scaled]


@given(HYPER, st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=20))
def test_v_is_bounded_by_the_largest_square_and_by_the_lemma(hyper, gradients):
    v, bound, largest = 0.0, 0.0, 0.0
    for step, g in zip(walk(hyper, [abs(g) for g in gradients]), gradients, strict=True):
        v += step.k.c2 * (g * g - v)
        largest = max(largest, g * g)
        # the proof's inequality, the right way round
        assert step.k.c2 <= (1 - hyper.beta2_min) * (1 + 1e-12)
        # Σ β2_max^(t-i), one step further
        bound = hyper.beta2_max * bound + 1
        assert v <= largest * (1 + 1e-12)
        assert v <= (1 - hyper.beta2_min) * largest * bound * (1 + 1e-12)


def test_the_inequality_of_the_papers_proof_does_not_hold():
    """It has 1-β2 ≥ 1-β2_min; a calm bucket has β2 half-way up its range, and so 1-β2 below that."""
    calm = walk(Hyper(), [1.0] * 200)[-1]
    assert calm.k.c2 == pytest.approx(1 - (0.88 + 0.999) / 2, rel=1e-5)
    assert calm.k.c2 < 1 - Hyper.beta2_min


@given(HYPER, st.lists(ANY, min_size=1, max_size=12))
def test_bias_corrections_are_between_zero_and_one_and_do_not_fall(hyper, norms):
    before = 0.0
    for t, step in enumerate(walk(hyper, norms), start=1):
        a1, b2 = rule.bias_corrections(hyper, t, step.state.log_beta2, np)
        assert 0 < a1 <= 1
        assert 0 <= b2 <= 1
        assert b2 >= before
        before = b2


@given(HYPER, st.lists(ANY | st.sampled_from([math.inf, math.nan]), min_size=1, max_size=12))
def test_a_skipped_bucket_keeps_its_state_and_moves_nothing(hyper, norms):
    hyper = dataclasses.replace(hyper, nonfinite="skip")
    state = State(np.zeros(1), np.zeros(1), np.zeros(1) if hyper.bias_correction == "exact" else None, np.zeros(1, int))
    for n in norms:
        with np.errstate(all="ignore"):
            step = rule.step(hyper, 1e-3, np.array([n]), state, np)
        if math.isfinite(n):
            assert step.state.step[0] == state.step[0] + 1
            assert 0 <= step.sun[0] < 1
        else:
            assert step.state.skipped[0] == state.skipped[0] + 1
            assert (step.state.ema, step.state.step) == (state.ema, state.step)
            assert (step.k.c1[0], step.k.c2[0], step.k.rate[0], step.k.floor[0]) == (0, 0, 0, 1)
        state = step.state


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=8), st.sampled_from([1.0, 0.9]))
def test_the_oracle_keeps_v_max_from_falling_and_clips(gradients, decay):
    params = {"w": np.array([0.3, -2.0])}
    oracle = Oracle(params, Hyper(decay=decay, max_ratio=0.7), lr=0.1)
    before, theta = np.zeros(2), params["w"].copy()
    for g in gradients:
        oracle.step({"w": np.array([g, -g / 2])})
        v_max = oracle.v_max["w"]
        assert (v_max >= decay * before).all()
        assert (np.abs(oracle.params["w"] - theta) <= 0.1 * 0.7 * (1 + 1e-12) + 1e-15).all()
        before, theta = v_max.copy(), oracle.params["w"].copy()
