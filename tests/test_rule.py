import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kourkoutas import rule
from kourkoutas.rule import Hyper

BAD = [
    ("beta1", 1.0),
    ("beta1", -0.1),
    ("beta2_min", -0.1),
    ("beta2_min", 1.5),
    ("beta2_max", 1.0),
    ("alpha", 0.0),
    ("alpha", 1.0),
    ("eps", -1e-8),
    ("eps", math.nan),
    ("tiny_spike", 0.0),
    ("tiny_denom", -1.0),
    ("decay", 1.5),
    ("decay", -0.1),
    ("max_ratio", 0.0),
    ("max_ratio", math.inf),
    ("warmup_steps", -1),
    ("warmup_steps", 2.5),
    ("weight_decay", -0.1),
    ("bias_correction", "Beta2Max"),
    ("nonfinite", "ignore"),
    ("beta1", "0.9"),
    ("adaptive_tiny", 1),
    ("alpha", True),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_refused_with_its_name_and_itself(name, value):
    with pytest.raises((ValueError, TypeError)) as caught:
        Hyper(**{name: value})
    assert f"`{name}`" in str(caught.value)
    assert repr(value) in str(caught.value)


def test_beta2_min_above_beta2_max_names_both():
    with pytest.raises(ValueError, match=r"beta2_min=0\.9995.*beta2_max=0\.999"):
        Hyper(beta2_min=0.9995)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_a_bad_learning_rate_is_refused(value):
    with pytest.raises(ValueError, match="`lr`"):
        rule.check_learning_rate(value)


def test_the_defaults_are_the_documented_ones():
    assert dataclasses.asdict(Hyper()) == {
        "beta1": 0.9,
        "beta2_min": 0.88,
        "beta2_max": 0.999,
        "alpha": 0.93,
        "eps": 1e-8,
        "tiny_spike": 1e-9,
        "tiny_denom": 1e-8,
        "decay": None,
        "max_ratio": None,
        "adaptive_tiny": False,
        "bias_correction": "beta2max",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "nonfinite": "propagate",
    }


@pytest.mark.parametrize(
    ("decay", "max_ratio", "leak"),
    [(None, None, None), (None, 3, 1.0), (0, None, None), (0, 3, None), (0.98, None, 0.98), (1, 3, 1), (0.5, 3, 0.5)],
)
def test_a_v_max_is_kept_as_the_paper_says_and_never_for_decay_zero(decay, max_ratio, leak):
    assert Hyper(decay=decay, max_ratio=max_ratio).leak == leak


norms = st.floats(0, 1e30)


@given(norm=norms, ema=norms, step=st.integers(1, 100), warmup=st.integers(0, 50))
def test_beta2_stays_between_its_bounds(norm, ema, step, warmup):
    hyper = Hyper(warmup_steps=warmup)
    sun = rule.sunspike(hyper, np.float64(ema), np.float64(norm), step, np)
    beta2 = 1 - rule.forgetting(hyper, sun, step, np)
    assert 0 <= sun <= 1
    assert hyper.beta2_min - 1e-12 <= beta2 <= hyper.beta2_max + 1e-12
    if step <= warmup:
        assert sun == 0
        assert beta2 == pytest.approx(0.9395, abs=1e-15)


@given(st.floats(1e-6, 1e6))
def test_a_norm_at_its_average_gives_the_middle(norm):
    hyper = Hyper(tiny_spike=1e-300)
    assert rule.sunspike(hyper, norm, norm, 1, np) == pytest.approx(0.5)


@given(step=st.integers(1, 10**6))
def test_bias_corrections_keep_their_digits_in_float32(step):
    a1, b2 = rule.bias_corrections(Hyper(), np.float32(step), None, np)
    assert float(a1) == pytest.approx(-math.expm1(step * math.log(0.9)), rel=1e-6)
    assert float(b2) == pytest.approx(-math.expm1(step * math.log(0.999)), rel=1e-5)
