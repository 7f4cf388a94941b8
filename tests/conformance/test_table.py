"""The table itself: what it covers, and that its oracle answers are what the paper's equations give by hand."""

import itertools

import numpy as np
import pytest

from kourkoutas.oracle import Oracle
from kourkoutas.rule import Hyper
from tests.conformance.table import BUCKETS, CASES, CORE, DTYPES, EXTRA, OPTIONS


def test_every_pair_of_option_values_and_buckets_meets_in_some_case():
    axes = {**OPTIONS, "buckets": BUCKETS, "dtype": DTYPES}
    seen = set()
    for case in CASES:
        values = {**case.options, "buckets": case.buckets, "dtype": case.dtype}
        if set(values) == set(axes):
            seen |= {(a, values[a], b, values[b]) for a, b in itertools.combinations(axes, 2)}
    wanted = {(a, x, b, y) for a, b in itertools.combinations(axes, 2) for x, y in itertools.product(axes[a], axes[b])}
    assert wanted <= seen


def test_every_three_option_values_meet_in_some_case_of_the_core_and_every_value_meets_every_kind_of_bucket():
    core = [case for case in CASES if case.id in CORE and set(case.options) == set(OPTIONS)]
    for dtype in DTYPES:
        own = [case for case in core if case.dtype == dtype]
        for names in itertools.combinations(OPTIONS, 3):
            seen = {tuple(case.options[name] for name in names) for case in own}
            assert seen == set(itertools.product(*(OPTIONS[name] for name in names))), names
        for name, values in OPTIONS.items():
            assert {(case.options[name], case.buckets) for case in own} == set(itertools.product(values, BUCKETS))
    assert len(core) < len(CASES) / 2
    assert {case.id for case in CASES if set(case.options) != set(OPTIONS)} <= CORE


def test_extra_cases_are_in_the_table():
    want = {f"{name}-{dtype}" for name in EXTRA for dtype in DTYPES}
    assert want == {case.id for case in CASES if case.id.rsplit("-", 1)[0] in EXTRA}


def test_the_sequences_hold_spikes_zeros_and_missing_gradients():
    grads = CASES[0].grads()
    norms = [np.sqrt(sum(float(np.sum(x**2)) for x in g.values() if x is not None)) for g in grads]
    assert max(norms) > 100 * np.median(norms)
    assert 0.0 in norms
    assert any(x is None for g in grads for x in g.values())
    assert any(all(x is None for x in g.values()) for g in grads)


def test_oracle_agrees_with_two_steps_worked_out_by_hand():
    # One scalar parameter, lr 1, β1 = ½, β2 in [½, ¾], α = ½, ε = 0, no bias correction, tiny_spike small.
    hyper = Hyper(
        beta1=0.5, beta2_min=0.5, beta2_max=0.75, alpha=0.5, eps=0.0, tiny_spike=1e-300, bias_correction="none"
    )
    oracle = Oracle({"w": 0.0}, hyper, lr=1.0)
    # t = 1: g = 3, r = 3/2, raw = 2, sun = 2/3, β2 = 3/4 - 1/6 = 7/12, m = 3/2, v = 5/12·9 = 15/4
    oracle.step({"w": 3.0})
    assert np.isclose(oracle.sun["w"], 2 / 3, rtol=1e-15)
    assert np.isclose(oracle.beta2["w"], 7 / 12, rtol=1e-15)
    assert np.isclose(oracle.params["w"], -1.5 / np.sqrt(3.75), rtol=1e-15)
    # t = 2: g = -1, r = 5/4, raw = 4/5, sun = 4/9, β2 = 3/4 - 1/9 = 23/36, m = 1/4, v = 23/36·15/4 + 13/36
    oracle.step({"w": -1.0})
    assert np.isclose(oracle.beta2["w"], 23 / 36, rtol=1e-15)
    v = 23 / 36 * 15 / 4 + 13 / 36
    assert np.isclose(oracle.params["w"], -1.5 / np.sqrt(3.75) - 0.25 / np.sqrt(v), rtol=1e-15)


def test_calm_norms_settle_at_the_middle_of_the_beta2_range():
    oracle = Oracle({"w": np.zeros(3)}, Hyper(), lr=0.0)
    for _ in range(400):
        oracle.step({"w": np.ones(3)})
    assert np.isclose(oracle.beta2["w"], 0.9395, atol=1e-8)


def test_the_oracle_takes_complex_parameters_as_pairs_only():
    with pytest.raises(TypeError, match="complex128"):
        Oracle({"z": np.ones(2, complex)})
