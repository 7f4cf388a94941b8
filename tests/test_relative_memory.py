"""The prototypes of a second moment in relative units, their screening, and the measures of spike recovery."""

import math

import numpy as np
import pytest

pytest.importorskip("torch")

pytest.importorskip("relative_memory", reason="benchmarks/ is not here")

import memory_screening as screening
import relative_memory
import spikes
import torch

Relative = relative_memory.Relative

RNG = np.random.default_rng(0)
GRADIENTS = [RNG.standard_normal((4, 3)) * (50 if k % 23 == 22 else 1) * math.exp(-k / 30) for k in range(80)]
CHOICES = [
    {},
    {"scale": "square"},
    {"signal": "off"},
    {"unit": "own"},
    {"memory": "noise"},
    {"scale": "off"},
    {"unit": "own", "memory": "noise", "warm": 0.0},
]


def _after(make, gradients=GRADIENTS, dtype=torch.float64):
    p = torch.zeros(4, 3, dtype=dtype)
    optimizer = make([p])
    for g in gradients:
        p.grad = torch.tensor(g, dtype=dtype)
        optimizer.step()
    return p.numpy(), optimizer.state[p]


def test_with_scale_and_signal_off_it_is_adam():
    ours, _ = _after(lambda ps: Relative(ps, 0.1, scale="off", signal="off", beta2_max=0.99, warm=0.0))
    adam, _ = _after(lambda ps: torch.optim.Adam(ps, 0.1, betas=(0.9, 0.99)))
    np.testing.assert_allclose(ours, adam, rtol=0, atol=1e-14)


@pytest.mark.parametrize("unit", ["scale", "own"])
def test_v_is_the_squared_scale_times_the_average_of_gradients_in_its_units(unit):
    _, state = _after(lambda ps: Relative(ps, 0.1, unit=unit))
    n = np.array([np.linalg.norm(g) for g in GRADIENTS])
    powers = 0.93 ** np.arange(len(n))
    r = np.array([(powers[: k + 1][::-1] * n[: k + 1]).sum() / powers[: k + 1].sum() for k in range(len(n))])
    c2 = 0.001 + 0.119 * np.maximum(0, (n - r) / (n + r))
    weights = np.array([c2[k] * np.prod(1 - c2[k + 1 :]) for k in range(len(n))])
    units = n if unit == "own" else r
    u = sum(w * (g / size) ** 2 for w, g, size in zip(weights, GRADIENTS, units, strict=True)) / weights.sum()
    np.testing.assert_allclose(state["v"].numpy() / -math.expm1(state["log_beta2"]), r[-1] ** 2 * u, rtol=1e-6)


@pytest.mark.parametrize("choice", CHOICES)
def test_the_optax_prototype_is_the_same_rule(choice):
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    with jax.enable_x64(True):
        tx = relative_memory.relative(0.1, **choice)
        p = jax.numpy.zeros((4, 3))
        state, update = tx.init(p), jax.jit(tx.update)
        for g in GRADIENTS:
            step, state = update(jax.numpy.asarray(g), state, p)
            p = optax.apply_updates(p, step)
        theirs = np.asarray(p)
    ours, _ = _after(lambda ps: Relative(ps, 0.1, **choice))
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("sizes", [(0, 0, 1), (1, 0, 1), (1e-30, 1, 1e-30), (1e-30, 1e10, 1), (1e-38, 1e15, 0)])
def test_parameters_stay_finite_whatever_the_scale_does(sizes, choice):
    gradients = [np.ones((4, 3)) * size for size in sizes for _ in range(20)]
    p, state = _after(lambda ps: Relative(ps, 0.1, **choice), gradients, torch.float32)
    assert np.isfinite(p).all()
    assert torch.isfinite(state["v"]).all()


def test_the_memory_is_long_for_noise_and_short_for_gradients_that_swing_or_keep_their_direction():
    noise = [RNG.standard_normal((4, 3)) for _ in range(400)]
    swing = [np.ones((4, 3)) * (-1) ** k for k in range(400)]
    steady = [np.ones((4, 3)) for _ in range(400)]

    def last_c2(gradients):
        make = lambda ps: Relative(ps, 0.1, signal="off", memory="noise")  # noqa: E731
        _, before = _after(make, gradients[:-1])
        _, after = _after(make, gradients)
        return -math.expm1(after["log_beta2"] - before["log_beta2"])

    assert last_c2(noise) < 0.01
    assert last_c2(swing) == pytest.approx(0.12)
    assert last_c2(steady) == pytest.approx(0.12)


def test_only_tuning_seeds_can_be_screened():
    (one, two) = screening.jobs("# a note\nD relative memory=noise,alpha=0.9 lr=4e-3 seeds=100,107\n")
    assert one == ("D", "relative", "alpha=0.9,memory=noise", 4e-3, 100)
    assert two.seed == 107
    with pytest.raises(ValueError, match="only seeds 100 to 107 may be screened; got '0'"):
        list(screening.jobs("D relative lr=4e-3 seeds=0"))


def test_recovery_counts_the_first_time_in_the_band_of_the_end():
    sizes = [1.0] * 10 + [5.0, 3.0, 1.05, 0.2, 0.5] + [1.0] * 35
    assert spikes.recovery(sizes, 10) == 2
    assert spikes.recovery([1.0] * 10 + [5.0] + [0.3] * 39, 10) == 1
    assert spikes.recovery([1.0] * 10 + [5.0] + [0.5, 1.5] * 20, 10) is None


def test_settled_counts_the_last_time_outside_the_band_of_the_calm_run():
    calm = np.linspace(1, 2, 50)
    sizes = calm.copy()
    assert spikes.settled(sizes, calm, 10) == 1
    sizes[[10, 11, 14]] = 9.0, 0.5, 3.0
    assert spikes.settled(sizes, calm, 10) == 5
    sizes[-1] = 0.0
    assert spikes.settled(sizes, calm, 10) is None
