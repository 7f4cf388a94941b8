"""What moves β2: the signals by their definitions, and what they promise. The conformance table has the front ends."""

import math

import numpy as np
import pytest

from kourkoutas import signals
from kourkoutas.oracle import Oracle
from kourkoutas.rule import Hyper, State, step


def rates(signal, norms, **options):
    """1-β2 of one bucket at each step, by the rule in NumPy."""
    hyper = Hyper(signal=signal, **options)
    kept = signals.MEMORY[signal]
    state, found = State(np.zeros(1), 0.0, memory=np.zeros((1, kept)) if kept else None), []
    with np.errstate(all="ignore"):
        for n in norms:
            new = step(hyper, 1.0, np.array([float(n)]), state, np)
            state = new.state
            found.append(1 - new.beta2[0])
    return np.array(found)


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_the_default_signal_is_the_papers_lines_to_the_bit(kind):
    """Sums, products and quotients are rounded alike everywhere; `release/same_bits.py` compares the front ends."""
    norms = np.exp(np.random.default_rng(2).normal(size=(100, 3))).astype(kind)
    a, tiny, low, high = 0.93, 1e-9, 0.88, 0.999
    state, r = State(np.zeros(3, kind), 0.0), np.zeros(3, kind)
    for n in norms:
        new = step(Hyper(), 1.0, n, state, np)
        state = new.state
        r = a * r + (1 - a) * n
        sun = n / (n + r + tiny)
        np.testing.assert_array_equal(state.ema, r, strict=True)
        np.testing.assert_array_equal(new.sun, sun, strict=True)
        np.testing.assert_array_equal(new.beta2, 1 - ((1 - high) + (high - low) * sun), strict=True)


def test_centred_is_calm_at_beta2_max_and_falling_norms_do_not_shorten_the_memory():
    still = rates("centred", np.ones(50))
    falling = rates("centred", 0.9 ** np.arange(50))
    np.testing.assert_allclose(still, 0.001, rtol=1e-9)
    np.testing.assert_allclose(falling, 0.001, rtol=1e-9)


def test_centred_answers_to_a_spike_by_its_size_over_the_mean_of_what_it_has_seen():
    # r̂ = (α·1 + (1-α)·9) / … with all weight gathered: after many ones, r̂ = 0.93 + 0.07·9
    mean = 0.93 * 1 + 0.07 * 9
    sun = (9 - mean) / (9 + mean)
    got = rates("centred", [*np.ones(2000), 9.0])[-1]
    assert got == pytest.approx(0.001 + (0.999 - 0.88) * sun, rel=1e-6)
    # tiny_spike stands beside the two in the denominator
    got = rates("centred", [*np.ones(2000), 9.0], tiny_spike=2.0)[-1]
    assert got == pytest.approx(0.001 + (0.999 - 0.88) * (9 - mean) / (9 + mean + 2), rel=1e-6)


def test_predictive_remembers_over_100_steps_of_noise_about_a_level_and_under_10_of_a_walk():
    rng = np.random.default_rng(0)
    still = rates("predictive", np.sqrt(rng.chisquare(8, 3000) / 8))
    walk = rates("predictive", np.exp(np.cumsum(0.3 * rng.normal(size=3000))))
    assert np.all(still[1000:] < 1 / 100)
    assert np.mean(walk[1000:] > 1 / 10) > 0.9


def forecasts(norms, c):
    """√(the weighted mean of n²) for each forgetting rate, with sums instead of recursions."""
    weights = [c_k * (1 - c_k) ** np.arange(len(norms) - 1, -1, -1) for c_k in c]
    return np.array([math.sqrt(np.sum(w * norms**2) / np.sum(w)) for w in weights]) + 1e-9


@pytest.mark.parametrize("spike", ["none", "past all forecasts", "just past all forecasts"])
def test_predictive_lies_where_weights_from_the_definition_put_it(spike):
    """Forecasts, losses and weights once more; n/√s counts up to 1,000, whatever it is."""
    norms = np.exp(np.random.default_rng(1).normal(size=30))
    place = np.arange(8) / 7
    c = 0.001 * 120**place
    if spike != "none":
        norms[20] = forecasts(norms[:20], c).max() * (1e5 if spike == "past all forecasts" else 1000.5)
    score = np.zeros(8)
    for t in range(1, 30):
        root = forecasts(norms[:t], c)
        score = 0.998 * score + 2 * np.log(root) + np.minimum(norms[t] / root, 1000) ** 2
    weight = np.exp(-(score - score.min()) / 2)
    sun = np.sum(weight * place) / np.sum(weight)
    assert 0.05 < sun < 0.95  # no single forecast has all the weight
    assert rates("predictive", norms)[-1] == pytest.approx(0.001 * 120**sun, rel=1e-8)


@pytest.mark.parametrize("signal", signals.SIGNALS[1:])
def test_a_lone_bucket_may_come_without_an_axis_of_buckets(signal):
    hyper, norms = Hyper(signal=signal), np.exp(np.random.default_rng(5).normal(size=(20, 3)))
    many = (np.zeros(3), np.zeros((3, signals.MEMORY[signal])))
    one = (np.zeros(()), np.zeros(signals.MEMORY[signal]))
    with np.errstate(all="ignore"):
        for n in norms:
            c2, _, *many = signals.forgetting(hyper, n, *many, np)
            c2_one, _, *one = signals.forgetting(hyper, n[1], *one, np)
            assert c2_one == pytest.approx(c2[1], rel=1e-12)


@pytest.mark.parametrize("signal", signals.SIGNALS)
@pytest.mark.parametrize("norm", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_shows_in_beta2(signal, norm):
    assert math.isnan(rates(signal, [1.0, 2.0, norm])[-1])


def test_a_bucket_keeps_as_many_numbers_as_the_portable_format_says():
    assert signals.MEMORY == {"sunspike": 0, "centred": 1, "predictive": 17}


@pytest.mark.parametrize("signal", signals.SIGNALS)
@pytest.mark.parametrize("betas", [(0.88, 0.999), (0.0, 0.9), (0.0, 0.0), (0.95, 0.95), (0.0, 0.99997)])
def test_beta2_stays_between_its_bounds_for_any_norms(signal, betas):
    rng = np.random.default_rng(2)
    norms = np.concatenate([np.zeros(5), 10.0 ** rng.uniform(-30, 30, 200), np.full(5, 1e-300), [1e30, 0, 1e30]])
    c2 = rates(signal, norms, beta2_min=betas[0], beta2_max=betas[1])
    assert np.all(c2 <= 1 - betas[0] + 1e-15)
    assert np.all(c2 >= 1 - betas[1] - 1e-15)


@pytest.mark.parametrize("signal", signals.SIGNALS)
def test_the_unit_of_the_gradient_does_not_matter(signal):
    norms = np.exp(np.random.default_rng(3).normal(size=200))
    np.testing.assert_allclose(
        rates(signal, 1e6 * norms, tiny_spike=1e-30), rates(signal, norms, tiny_spike=1e-30), rtol=1e-9
    )


@pytest.mark.parametrize("signal", signals.SIGNALS[1:])
def test_a_bucket_that_is_skipped_keeps_its_memory(signal):
    hyper = Hyper(signal=signal, nonfinite="skip")
    before = np.full((2, signals.MEMORY[signal]), 0.5)
    state = State(np.ones(2), np.ones(2), memory=before, skipped=np.zeros(2, int))
    with np.errstate(all="ignore"):
        new = step(hyper, 1.0, np.array([1.0, np.nan]), state, np).state
    np.testing.assert_array_equal(new.memory[1], 0.5)
    assert np.all(new.memory[0, :1] != 0.5)


def test_lr_warmup_multiplies_the_learning_rate_by_the_root_of_one_minus_beta2_max_to_the_t():
    hyper = Hyper(bias_correction="none", max_ratio=2.0, weight_decay=0.1, lr_warmup=True)
    state = State(np.zeros(1), 0.0)
    for t in range(1, 21):
        new = step(hyper, 1e-3, np.ones(1), state, np)
        state, factor = new.state, math.sqrt(1 - 0.999**t)
        assert new.k.rate == pytest.approx(1e-3 * factor, rel=1e-12)
        assert new.k.limit == pytest.approx(1e-3 * factor * 2, rel=1e-12)
        assert new.k.fade == pytest.approx(1e-3 * factor * 0.1, rel=1e-12)


def test_lr_warmup_of_the_oracle():
    rng = np.random.default_rng(4)
    grads = [{"w": rng.normal(size=3)} for _ in range(20)]
    plain = Oracle({"w": np.ones(3)}, Hyper(bias_correction="none", beta1=0.0, beta2_min=0.999, lr_warmup=True))
    by_hand = Oracle({"w": np.ones(3)}, Hyper(bias_correction="none", beta1=0.0, beta2_min=0.999))
    for t, g in enumerate(grads, 1):
        by_hand.lr = 1e-3 * math.sqrt(1 - 0.999**t)
        plain.step(g)
        by_hand.step(g)
    np.testing.assert_allclose(plain.params["w"], by_hand.params["w"], rtol=0, atol=1e-15)


def test_a_warmup_on_top_of_the_hidden_one_is_refused():
    with pytest.raises(ValueError, match="bias_correction='beta2max' has the same warmup"):
        Hyper(lr_warmup=True)


def test_an_unknown_signal_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match='must be one of "sunspike", "centred", "predictive"; got \'other\''):
        Hyper(signal="other")
