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
    ("basis", "svd"),
    ("basis_every", 0),
    ("basis_every", 2.5),
    ("basis_memory", 1.0),
    ("basis_limit", -1),
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
        "lr_warmup": False,
        "basis": None,
        "basis_every": 10,
        "basis_memory": 0.95,
        "basis_limit": 1024,
    }


@pytest.mark.parametrize(
    ("decay", "max_ratio", "leak"),
    [(None, None, None), (None, 3, 1.0), (0, None, None), (0, 3, None), (0.98, None, 0.98), (1, 3, 1), (0.5, 3, 0.5)],
)
def test_a_v_max_is_kept_as_the_paper_says_and_never_for_decay_zero(decay, max_ratio, leak):
    assert Hyper(decay=decay, max_ratio=max_ratio).leak == leak


norms = st.floats(0, 1e30)


def lone(hyper, norm, ema=0.0, step=0, xp=np, **options):
    return rule.step(hyper, 0.5, norm, rule.State(ema, step, **options), xp)


@given(norm=norms, ema=norms, step=st.integers(0, 99), warmup=st.integers(0, 50))
def test_beta2_stays_between_its_bounds(norm, ema, step, warmup):
    hyper = Hyper(warmup_steps=warmup)
    new = lone(hyper, norm, ema, step)
    assert 0 <= new.sun <= 1
    assert hyper.beta2_min - 1e-12 <= new.beta2 <= hyper.beta2_max + 1e-12
    if step < warmup:
        assert new.sun == 0
        assert new.beta2 == pytest.approx(0.9395, abs=1e-15)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_beta2_is_that_of_the_papers_lines_to_the_bit(kind):
    """Sums, products and quotients are rounded alike everywhere; `release/same_bits.py` compares the front ends."""
    norms = np.exp(np.random.default_rng(2).normal(size=(100, 3))).astype(kind)
    a, tiny, low, high = 0.93, 1e-9, 0.88, 0.999
    state, r = rule.State(np.zeros(3, kind), 0.0), np.zeros(3, kind)
    for n in norms:
        new = rule.step(Hyper(), 1.0, n, state, np)
        state = new.state
        r = a * r + (1 - a) * n
        sun = n / (n + r + tiny)
        np.testing.assert_array_equal(state.ema, r, strict=True)
        np.testing.assert_array_equal(new.sun, sun, strict=True)
        np.testing.assert_array_equal(new.beta2, 1 - ((1 - high) + (high - low) * sun), strict=True)


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_shows_in_beta2(norm):
    assert math.isnan(lone(Hyper(), norm, ema=1.0).beta2)


@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_fixed_beta2_stays_whatever_the_norm(norm):
    assert lone(Hyper(beta2_min=0.95, beta2_max=0.95), norm, ema=1.0).beta2 == pytest.approx(0.95, rel=1e-15)


@given(st.floats(1e-6, 1e6))
def test_a_norm_at_its_average_gives_the_middle(norm):
    assert lone(Hyper(tiny_spike=1e-300), norm, norm).sun == pytest.approx(0.5)


OPTIONS = [
    {},
    {"warmup_steps": 3},
    {"bias_correction": "none", "weight_decay": 0.1},
    {"bias_correction": "exact", "decay": 0.98, "max_ratio": 3.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_parameter_alone_has_the_scalars_that_it_has_among_others(options):
    hyper = Hyper(**options)
    exact = hyper.bias_correction == "exact"
    state = rule.State(np.array([2.0, 0.5]), np.array([2.0, 7.0]), np.array([-0.1, -0.3]) if exact else None)
    norm, mean_abs = np.array([3.0, 0.1]), np.array([0.5, 4.0])
    both = rule.step(hyper, 0.5, norm, state, np, mean_abs=mean_abs)
    for i in range(2):
        one = rule.State(*(None if x is None else float(x[i]) for x in state))
        alone = rule.step(hyper, 0.5, float(norm[i]), one, np, mean_abs=float(mean_abs[i]))
        for got, want in zip(both[:2], alone[:2], strict=True):
            for name, x in want._asdict().items():
                y = getattr(got, name)
                assert (x is None) == (y is None), name
                assert x is None or x == pytest.approx(np.broadcast_to(y, 2)[i], rel=1e-14), name


class Pair:
    """Three parameters in two buckets."""

    def spread(self, x):
        return x[[0, 0, 1]]

    def largest(self, x):
        return np.array([max(x[0], x[1]), x[2]])


def test_a_bucket_that_does_not_go_on_keeps_its_state_and_has_coefficients_that_change_nothing():
    hyper = Hyper(nonfinite="skip", bias_correction="exact", decay=0.98, weight_decay=0.1, eps=0.0)
    state = rule.State(np.array([2.0, 0.5]), np.array([2.0, 7.0, 1.0]), np.array([-0.1, -0.3, -0.2]), np.array([0, 4]))
    with np.errstate(invalid="ignore"):  # inf/inf of the bucket that does not go on
        new = rule.step(hyper, 0.5, np.array([3.0, np.inf]), state, np, members=Pair())
    assert new.updated.tolist() == [True, False]
    assert new.updated_each.tolist() == [True, True, False]
    assert new.state.step.tolist() == [3, 8, 1]
    assert new.state.skipped.tolist() == [0, 5]
    assert new.state.ema[1] == 0.5
    assert new.state.log_beta2[2] == -0.2
    assert np.isnan(new.beta2[1])
    assert np.isnan(new.sun[1])
    k = [None if x is None else np.broadcast_to(x, 3)[2] for x in new.k]
    assert k == [0, 0, 0, 1, None, 0, 1]


def test_a_bucket_without_a_gradient_stays_as_it_is():
    state = rule.State(np.array([2.0, 0.5]), np.array([2.0, 7.0, 1.0]))
    has_grad = np.array([True, False])
    new = rule.step(Hyper(), 0.5, np.array([3.0, 0.0]), state, np, members=Pair(), has_grad=has_grad)
    assert new.state.step.tolist() == [3, 8, 1]
    assert new.state.ema.tolist() == pytest.approx([0.93 * 2 + 0.07 * 3, 0.5], rel=1e-15)
    assert new.updated_each.tolist() == [True, True, False]


def test_sun_beta2_and_norm_of_a_bucket_without_a_gradient_are_nan():
    state, norm = rule.State(np.array([2.0, 0.5]), np.array([2.0, 7.0])), np.array([3.0, 4.0])
    new = rule.step(Hyper(), 0.5, norm, state, np, has_grad=np.array([True, False]))
    both = rule.step(Hyper(), 0.5, norm, state, np)
    for got, want in ((new.sun, both.sun), (new.beta2, both.beta2), (new.norm, norm)):
        assert got[0] == want[0]
        assert np.isnan(got[1])


def test_the_warmup_of_a_bucket_ends_with_the_largest_count_of_its_members():
    state = rule.State(np.zeros(2), np.array([2.0, 7.0, 1.0]))
    new = rule.step(Hyper(warmup_steps=5), 0.5, np.ones(2), state, np, members=Pair())
    assert new.sun[0] > 0
    assert new.sun[1] == 0


@given(norm=st.floats(1e-3, 1e3), ema=st.floats(1e-3, 1e3), step=st.integers(0, 10**4))
def test_the_folded_update_is_the_papers(norm, ema, step):
    # γ/a1 · m / (√(v/b2) + ε) at m = 0.3, v = 0.2
    hyper = Hyper(eps=0.1)
    k = lone(hyper, norm, ema, step).k
    a1, b2 = 1 - 0.9 ** (step + 1), 1 - 0.999 ** (step + 1)
    want = 0.5 / a1 * 0.3 / (math.sqrt(0.2 / b2) + 0.1)
    assert k.rate * 0.3 / (math.sqrt(0.2) + k.floor) == pytest.approx(want, rel=1e-9)


@given(step=st.integers(1, 10**6))
def test_bias_corrections_keep_their_digits_in_float32(step):
    a1, b2 = rule.bias_corrections(Hyper(), np.float32(step), None, np)
    assert float(a1) == pytest.approx(-math.expm1(step * math.log(0.9)), rel=1e-6)
    assert float(b2) == pytest.approx(-math.expm1(step * math.log(0.999)), rel=1e-5)


def test_the_ends_of_each_range_that_belong_to_it_are_taken():
    rule.check_learning_rate(0)
    least = ("beta1", "beta2_min", "decay", "eps", "tiny_denom", "weight_decay", "warmup_steps")
    for options in (*({name: 0} for name in least), {"beta2_min": 0, "beta2_max": 0}, {"decay": 1}):
        hyper = Hyper(**options)
        assert all(getattr(hyper, name) == value for name, value in options.items())


def test_the_ends_of_each_range_that_do_not_belong_to_it_are_refused():
    for options in ({"beta1": 1}, {"beta2_max": 1}, {"beta2_min": 1, "beta2_max": 1}, {"alpha": 1}, {"alpha": 0}):
        with pytest.raises(ValueError, match="must"):
            Hyper(**options)


def test_pick_takes_hyper_parameters_and_leaves_the_rest():
    assert Hyper.pick({"beta1": 0.5, "lr": 3, "buckets": "global"}) == Hyper(beta1=0.5)


def test_beta2_is_fixed_only_if_both_bounds_are_the_same_number():
    assert Hyper(beta2_min=0.95, beta2_max=0.95).fixed
    assert not Hyper().fixed
    assert not Hyper(beta2_min=np.array([0.95]), beta2_max=np.array([0.95])).fixed
    assert not Hyper(beta2_min=0.95, beta2_max=np.array([0.95])).fixed


def test_the_coefficients_are_the_papers_with_every_option():
    hyper = Hyper(
        alpha=0.8, beta1=0.7, beta2_min=0.5, beta2_max=0.9, eps=0.01, tiny_denom=0.1, tiny_spike=0.5, weight_decay=0.2,
        max_ratio=3, decay=0.6, adaptive_tiny=True,
    )  # fmt: skip
    before = rule.State(np.full(3, 2.0), np.full(3, 4))
    step = rule.step(hyper, 0.1, np.full(3, 3.0), before, np, mean_abs=np.array([0.4, 1.5, 5.0]))
    r = 0.8 * 2 + 0.2 * 3
    raw = 3 / (r + 0.5)
    sun = raw / (1 + raw)
    a1, b2 = 1 - 0.7**5, 1 - 0.9**5
    tiny = 0.1 * np.array([1.0, 1.5, 5.0])
    close = {"rel": 1e-12}
    assert step.state.ema == pytest.approx(r, **close)
    assert step.state.step.tolist() == [5, 5, 5]
    assert step.sun == pytest.approx(sun, **close)
    assert step.beta2 == pytest.approx(0.9 - 0.4 * sun, **close)
    assert step.k.c1 == pytest.approx(0.3, **close)
    assert step.k.c2 == pytest.approx(1 - (0.9 - 0.4 * sun), **close)
    assert step.k.rate == pytest.approx(0.1 * math.sqrt(b2) / a1, **close)
    assert step.k.floor == pytest.approx((0.01 + tiny) * math.sqrt(b2), **close)
    assert (step.k.limit, step.k.fade, step.k.leak) == (pytest.approx(0.3), pytest.approx(0.02), 0.6)
    assert (step.updated, step.updated_each) == (None, None)


@pytest.mark.parametrize("warmup", [1, 3])
def test_beta2_stays_in_the_middle_up_to_and_with_the_last_step_of_the_warmup(warmup):
    hyper = Hyper(warmup_steps=warmup, beta2_min=0.5, beta2_max=0.9)
    one = np.ones(1)
    last = rule.step(hyper, 0.1, 2 * one, rule.State(one, (warmup - 1) * one), np)
    assert (last.beta2, last.sun) == (pytest.approx(0.7), 0)
    after = rule.step(hyper, 0.1, 2 * one, rule.State(one, warmup * one), np)
    assert after.sun == pytest.approx(2 / (2 + 0.93 + 0.07 * 2 + 1e-9))
    assert after.beta2 == pytest.approx(0.9 - 0.4 * after.sun)


def test_what_goes_on_beside_a_skipped_bucket_has_the_plain_coefficients():
    plain, skip = Hyper(weight_decay=0.1, decay=0.9), Hyper(weight_decay=0.1, decay=0.9, nonfinite="skip")
    state = rule.State(np.ones(2), np.full(2, 3))
    with np.errstate(invalid="ignore"):
        a = rule.step(plain, 0.1, np.array([2.0, 2.0]), state, np)
        b = rule.step(skip, 0.1, np.array([2.0, math.nan]), state, np)
    assert (b.sun[0], b.beta2[0]) == (a.sun[0], a.beta2[0])
    assert np.isnan([b.sun[1], b.beta2[1]]).all()
    assert b.updated.tolist() == b.updated_each.tolist() == [True, False]
    assert b.state.step.tolist() == [4, 3]
    for name in ("c1", "c2", "rate", "floor", "fade", "leak"):
        got, want = getattr(b.k, name), np.broadcast_to(getattr(a.k, name), 2)
        assert got[0] == want[0]
        assert got[1] == {"floor": 1, "leak": 1}.get(name, 0)


def test_a_numpy_count_beside_plain_floats_is_a_count():
    step = rule.step(Hyper(), 0.1, 2.0, rule.State(1.0, np.int64(3)), np)
    assert step == rule.step(Hyper(), 0.1, 2.0, rule.State(1.0, 3), np)


def test_betas_as_arrays_give_the_bias_corrections_of_numbers():
    hyper = Hyper(beta1=np.array(0.8), beta2_min=np.array(0.5), beta2_max=np.array(0.95))
    a1, b2 = rule.bias_corrections(hyper, np.array([1.0, 7.0]), None, np)
    assert a1 == pytest.approx([0.2, 1 - 0.8**7])
    assert b2 == pytest.approx([0.05, 1 - 0.95**7])


def test_sum_of_log_beta2_of_an_adam_state_is_zero_before_the_first_step_whatever_beta2():
    steps = np.array([0, 1, 50])
    assert rule.adam_log_beta2(0.95, steps, np) == pytest.approx(steps * math.log(0.95))
    assert rule.adam_log_beta2(0.0, steps, np).tolist() == [0, -math.inf, -math.inf]
    assert rule.adam_log_beta2(np.array([0.5, 0.5, 0.9]), steps, np) == pytest.approx(
        [0, math.log(0.5), 50 * math.log(0.9)]
    )


def test_a_basis_brings_its_own_defaults_and_what_is_given_stays():
    with_basis = Hyper(basis="eigen")
    assert (with_basis.beta1, with_basis.bias_correction) == (0.95, "exact")
    given = Hyper(basis="eigen", beta1=0.9, bias_correction="none")
    assert (given.beta1, given.bias_correction) == (0.9, "none")
    assert (Hyper().beta1, Hyper().bias_correction) == (0.9, "beta2max")
