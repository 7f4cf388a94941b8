"""`count`, as users of Optax expect it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kourkoutas.optax import kourkoutas_beta, scale_by_kourkoutas_beta
from kourkoutas.oracle import Oracle

PARAMS = {"b": jnp.array([1.0, -2.0]), "w": jnp.array([[0.5, 3.0]])}
GRADS = {"b": jnp.array([0.3, -0.1]), "w": jnp.array([[1.0, 2.0]])}


@pytest.mark.parametrize("options", [{}, {"nonfinite": "skip", "bias_correction": "exact", "diagnostics": True}])
def test_it_is_one_number_that_counts_the_calls_of_update(options):
    solver = kourkoutas_beta(1e-2, **options)
    state = solver.init(PARAMS)
    for t in range(3):
        assert optax.tree.get(state, "count") == t
        assert optax.tree.get(state, "count").shape == ()
        _, state = jax.jit(solver.update)(GRADS, state, PARAMS)


@pytest.mark.parametrize("bias_correction", ["none", "beta2max"])
def test_setting_it_is_what_having_taken_that_many_steps_does_to_the_bias_corrections(bias_correction):
    solver = kourkoutas_beta(1e-2, bias_correction=bias_correction)
    updates, _ = jax.jit(solver.update)(GRADS, optax.tree.set(solver.init(PARAMS), count=1000), PARAMS)
    # From zero moments: m = 0.1·g and v = c2·g², with β2 = 0.999 - 0.119·n/(n + 0.07·n + 1e-9); a1 and b2 at t = 1001.
    a1, b2 = (1 - 0.9**1001, 1 - 0.999**1001) if bias_correction == "beta2max" else (1, 1)
    for name, g in GRADS.items():
        g = np.asarray(g, np.float64)
        n = np.linalg.norm(g)
        c2 = 0.001 + 0.119 * n / (1.07 * n + 1e-9)
        want = -1e-2 * (0.1 * g / a1) / (np.sqrt(c2 * g * g / b2) + 1e-8)
        np.testing.assert_allclose(updates[name], want, rtol=1e-5)


def test_it_can_be_set_under_jit_and_inside_a_scan():
    solver = kourkoutas_beta(1e-2)

    def body(carry, t):
        params, state = carry
        state = optax.tree.set(state, count=10 * t)
        updates, state = solver.update(GRADS, state, params)
        return (optax.apply_updates(params, updates), state), optax.tree.get(state, "count")

    scanned, counts = jax.jit(lambda carry: jax.lax.scan(body, carry, jnp.arange(4)))((PARAMS, solver.init(PARAMS)))
    assert counts.tolist() == [1, 11, 21, 31]
    params, state, update = PARAMS, solver.init(PARAMS), jax.jit(solver.update)
    for t in range(4):
        updates, state = update(GRADS, optax.tree.set(state, count=jnp.int32(10 * t)), params)
        params = optax.apply_updates(params, updates)
    for name in params:
        np.testing.assert_allclose(scanned[0][name], params[name], rtol=1e-6)


def test_setting_it_does_not_compile_the_step_again():
    solver = kourkoutas_beta(1e-2)
    update = jax.jit(solver.update)
    _, state = update(GRADS, solver.init(PARAMS), PARAMS)
    _, state = update(GRADS, optax.tree.set(state, count=jnp.int32(0)), PARAMS)
    assert update._cache_size() == 1
    assert state[0].count == 1


def test_parameters_keep_their_own_time_when_gradients_come_and_go():
    with jax.enable_x64(True):
        params = {name: np.asarray(p, np.float64) for name, p in PARAMS.items()}
        solver, oracle = kourkoutas_beta(1e-2), Oracle(params, lr=1e-2)
        theta = {name: jnp.asarray(p) for name, p in params.items()}
        state = solver.init(theta)
        update = jax.jit(solver.update)
        for without in ((), ("b",), (), ("b", "w"), ("w",), ()):
            g = {name: None if name in without else np.asarray(x, np.float64) for name, x in GRADS.items()}
            updates, state = update(g, state, theta)
            theta = optax.apply_updates(theta, updates)
            oracle.step(g)
        assert state[0].count == 6
        assert state[0].missed.tolist() == [2, 2]
        for name, p in oracle.params.items():
            np.testing.assert_allclose(theta[name], p, rtol=0, atol=1e-13)


def test_it_stops_at_the_largest_integer():
    solver = scale_by_kourkoutas_beta()
    last = np.iinfo(np.int32).max
    update = jax.jit(solver.update)
    for start in (last - 1, last):
        updates, state = update(GRADS, solver.init(PARAMS)._replace(count=jnp.int32(start)), PARAMS)
        assert state.count == last
        assert np.all(np.isfinite(updates["w"]))
