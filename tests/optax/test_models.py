"""Flax and Equinox models train."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from flax import linen

from kourkoutas.optax import bucket_names, kourkoutas_beta

X = jnp.linspace(-1, 1, 64)[:, None]
Y = jnp.sin(3 * X)
FULL = {"decay": 0.98, "max_ratio": 3.0, "adaptive_tiny": True, "weight_decay": 1e-4, "buckets": "module"}


class Mlp(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(linen.tanh(linen.Dense(32)(x)))


def test_a_flax_linen_model_trains():
    model = Mlp()
    params = model.init(jax.random.key(0), X)
    solver = kourkoutas_beta(1e-2, **FULL)

    def loss_fn(params):
        return jnp.mean((model.apply(params, X) - Y) ** 2)

    def step(carry, _):
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = solver.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), loss

    _, losses = jax.jit(lambda carry: jax.lax.scan(step, carry, length=300))((params, solver.init(params)))
    assert losses[-1] < losses[0] / 20
    assert bucket_names(params, "module") == ("params.Dense_0", "params.Dense_1")


def test_boxed_flax_parameters_are_named_without_their_box():
    plain = Mlp().init(jax.random.key(0), X)
    boxed = jax.tree.map(lambda x: linen.Partitioned(x, (None,) * x.ndim), plain)
    assert bucket_names(boxed) == bucket_names(plain)


def test_an_equinox_model_trains_with_a_frozen_layer():
    model = eqx.nn.MLP(1, 1, 32, 2, activation=jnp.tanh, key=jax.random.key(0))
    solver = kourkoutas_beta(1e-2, **FULL)
    state = solver.init(eqx.filter(model, eqx.is_inexact_array))
    trained = eqx.tree_at(lambda m: m.layers[0].bias, jax.tree.map(eqx.is_inexact_array, model), False)

    @eqx.filter_jit
    def step(model, state):
        free, frozen = eqx.partition(model, trained)
        loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean((jax.vmap(eqx.combine(m, frozen))(X) - Y) ** 2))(
            free
        )
        updates, state = solver.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates), state, loss

    start, losses = model, []
    for _ in range(200):
        model, state, loss = step(model, state)
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 20
    assert jnp.array_equal(model.layers[0].bias, start.layers[0].bias)
    assert not jnp.array_equal(model.layers[0].weight, start.layers[0].weight)
    assert bucket_names(eqx.filter(model, eqx.is_inexact_array), "module") == ("layers.0", "layers.1", "layers.2")
