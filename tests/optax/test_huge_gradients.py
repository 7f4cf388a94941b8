"""Finite gradients whose sum of squares overflows float32: the norm is right, and training goes on as Adam's does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kourkoutas.optax import kourkoutas_beta, scale_by_kourkoutas_beta

MILLION = 1_000_000


@pytest.fixture(params=["cpu", "accelerator"])
def backend(request, monkeypatch):
    """The form for CPUs, with a branch, and that for accelerators, without: the device is the same here."""
    if request.param == "accelerator":
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_a_million_entries_of_1e18_have_the_norm_1e21(wrap):
    params = {"big": jnp.ones(MILLION), "calm": jnp.ones(4)}
    grads = {"big": jnp.full(MILLION, 1e18), "calm": jnp.ones(4)}
    solver = kourkoutas_beta(1e-2, alpha=0.5, nonfinite="skip")
    updates, state = wrap(solver.update)(grads, solver.init(params), params)
    np.testing.assert_allclose(state[0].ema, [5e20, 1.0], rtol=1e-6)
    assert not np.any(state[0].skipped)
    # The first step of Adam is the learning rate, here with b2 = 0.001 and 1-β2 = 0.001 + 0.119·n/(n + n/2).
    want = -1e-2 * np.sqrt(0.001 / (0.001 + 0.119 / 1.5))
    for u in updates.values():
        np.testing.assert_allclose(u, want, rtol=1e-5)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("entries", "norm"),
    [
        ([3e38, 0.0, 1e-3], 3e38),
        ([2e38, -2e38], np.hypot(2e38, 2e38)),
        ([3e19, 4e19], 5e19),
        ([3.0, 4.0], 5.0),
        ([3e-15, 4e-15], 5e-15),
        ([0.0, 0.0], 0.0),
    ],
    ids=str,
)
def test_norms_are_right_as_far_as_float32_reaches(entries, norm):
    grads = {"w": jnp.array(entries, jnp.float32)}
    solver = scale_by_kourkoutas_beta(alpha=0.5)
    _, state = jax.jit(solver.update)(grads, solver.init(grads))
    np.testing.assert_allclose(state.ema, [norm / 2], rtol=1e-6)


@pytest.mark.usefixtures("backend")
def test_a_gradient_in_float32_beside_one_in_float64_may_overflow():
    with jax.enable_x64(True):
        grads = {"single": jnp.array([3e19, 4e19], jnp.float32), "wide": jnp.array([3.0, 4.0], jnp.float64)}
        solver = scale_by_kourkoutas_beta(alpha=0.5)
        _, state = jax.jit(solver.update)(grads, solver.init(grads))
        np.testing.assert_allclose(state.ema, [2.5e19, 2.5], rtol=1e-6)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_still_seen(bad):
    params = {"bad": jnp.ones(3), "good": jnp.ones(3)}
    solver = scale_by_kourkoutas_beta(nonfinite="skip")
    grads = {"bad": jnp.array([1.0, bad, 1e30]), "good": jnp.full(3, 1e30)}
    _, state = jax.jit(solver.update)(grads, solver.init(params))
    assert state.skipped.tolist() == [1, 0]


@pytest.mark.usefixtures("backend")
def test_one_of_many_runs_under_vmap_may_overflow_alone():
    solver = scale_by_kourkoutas_beta(alpha=0.5)
    grads = jnp.array([[3e19, 4e19], [3.0, 4.0]])
    _, state = jax.jit(jax.vmap(solver.update))(grads, jax.vmap(solver.init)(grads))
    np.testing.assert_allclose(state.ema, [[2.5e19], [2.5]], rtol=1e-6)


@pytest.mark.usefixtures("backend")
def test_the_derivative_of_the_norm_is_finite():
    solver = scale_by_kourkoutas_beta()

    def f(x):
        return jnp.sum(solver.update({"w": x}, solver.init({"w": x}))[0]["w"])

    assert np.all(np.isfinite(jax.jit(jax.grad(f))(jnp.array([1e-3, 2.0]))))
