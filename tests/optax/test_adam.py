"""With a fixed β2 and no extras the front end is Adam, whatever the buckets."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kourkoutas.optax import kourkoutas_beta

PARAMS = {"enc": {"w": np.linspace(-1, 1, 12).reshape(4, 3), "b": np.ones(4)}, "gain": np.asarray(0.5)}
BUCKETS = ["parameter", "module", "shape", "global", lambda name, array: len(name) + array.ndim]


def train(solver, dtype, steps):
    """`steps` noisy steps, with a gradient 100 times larger every 50th."""
    rng = np.random.default_rng(3)
    noise = jax.tree.map(lambda p: rng.normal(size=(steps, *p.shape)).astype("float32"), PARAMS)
    for x in jax.tree.leaves(noise):
        x[49::50] *= 100

    def step(carry, x):
        params, state = carry
        updates, state = solver.update(jax.tree.map(lambda p, x: p + x.astype(p.dtype), params, x), state, params)
        return (optax.apply_updates(params, updates), state), None

    params = jax.tree.map(lambda p: jnp.asarray(p, dtype), PARAMS)
    (params, _), _ = jax.lax.scan(step, (params, solver.init(params)), noise)
    return params


def assert_close(got, want, atol):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=0, atol=atol)


@pytest.mark.parametrize("buckets", BUCKETS)
def test_fixed_beta2_equals_optax_adam_in_float64(buckets):
    with jax.enable_x64(True):
        ours = kourkoutas_beta(1e-2, beta2_min=0.999, beta2_max=0.999, buckets=buckets)
        assert_close(train(ours, "float64", 1000), train(optax.adam(1e-2), "float64", 1000), 1e-12)


@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_fixed_beta2_equals_optax_adam_in_float32(beta2):
    ours = kourkoutas_beta(1e-3, beta2_min=beta2, beta2_max=beta2, buckets="global")
    assert_close(train(ours, "float32", 1000), train(optax.adam(1e-3, b2=beta2), "float32", 1000), 1e-6)


def test_fixed_beta2_with_weight_decay_equals_optax_adamw():
    mask = {"enc": {"w": True, "b": False}, "gain": False}
    with jax.enable_x64(True):
        ours = kourkoutas_beta(1e-2, beta2_min=0.99, beta2_max=0.99, weight_decay=0.1, mask=mask)
        adamw = optax.adamw(1e-2, b2=0.99, weight_decay=0.1, mask=mask)
        assert_close(train(ours, "float64", 200), train(adamw, "float64", 200), 1e-12)


@pytest.mark.parametrize("mask", [None, {"enc": {"w": True, "b": False}, "gain": False}])
def test_weight_decay_takes_a_schedule_as_that_of_optax_adamw_does(mask):
    rate, decay = optax.cosine_decay_schedule(1e-2, 100), optax.linear_schedule(0.5, 0.0, 60)
    with jax.enable_x64(True):
        ours = kourkoutas_beta(rate, beta2_min=0.99, beta2_max=0.99, weight_decay=decay, mask=mask)
        adamw = optax.inject_hyperparams(optax.adamw, static_args=("mask",))  # adamw itself since Optax 0.2.6
        theirs = adamw(rate, b2=0.99, weight_decay=decay, mask=mask)
        assert_close(train(ours, "float64", 100), train(theirs, "float64", 100), 1e-12)


def test_fixed_beta2_with_a_schedule_equals_optax_adam():
    schedule = optax.cosine_decay_schedule(1e-2, 100)
    with jax.enable_x64(True):
        ours = kourkoutas_beta(schedule, beta2_min=0.99, beta2_max=0.99)
        assert_close(train(ours, "float64", 100), train(optax.adam(schedule, b2=0.99), "float64", 100), 1e-12)


def test_fixed_beta2_with_decay_one_is_amsgrad():
    # Written out here, as optax.amsgrad takes the maximum after the bias correction and not before it.
    def amsgrad(b1, b2):
        def update(g, state, params=None):
            m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state[0], g)
            v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state[1], g)
            top = jax.tree.map(jnp.maximum, state[2], v)
            return jax.tree.map(lambda m, v: -1e-2 * m / (jnp.sqrt(v) + 1e-8), m, top), (m, v, top)

        return optax.GradientTransformation(lambda p: (jax.tree.map(jnp.zeros_like, p),) * 3, update)

    with jax.enable_x64(True):
        ours = kourkoutas_beta(1e-2, beta2_min=0.99, beta2_max=0.99, decay=1, bias_correction="none")
        assert_close(train(ours, "float64", 200), train(amsgrad(0.9, 0.99), "float64", 200), 1e-12)
