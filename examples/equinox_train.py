"""Equinox: Kourkoutas-β on the arrays of a module.

python examples/equinox_train.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp

from kourkoutas.optax import kourkoutas_beta

optimizer = kourkoutas_beta(1e-2, buckets="module")


@eqx.filter_value_and_grad
def loss_and_grad(model: eqx.nn.MLP, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


@eqx.filter_jit
def train_step(model: eqx.nn.MLP, state: tuple, x: jax.Array, y: jax.Array) -> tuple:
    loss, grads = loss_and_grad(model, x, y)
    updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), state, loss


def main(steps: int = 500) -> float:
    x = jnp.linspace(-3, 3, 256)[:, None]
    y = jnp.sin(2 * x)
    model = eqx.nn.MLP(1, 1, width_size=64, depth=1, activation=jnp.tanh, key=jax.random.key(0))
    state = optimizer.init(eqx.filter(model, eqx.is_array))
    for _ in range(steps):
        model, state, loss = train_step(model, state, x, y)
    print(f"loss {float(loss):.2e}")
    return float(loss)


if __name__ == "__main__":
    main()
