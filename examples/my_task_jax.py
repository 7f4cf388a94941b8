"""Your own JAX task: kbeta study examples/my_task_jax.py:train --seeds 0-9 --optimizers kbeta,adam95,adam999"""

import jax
import jax.numpy as jnp
import optax


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) @ params["out"] - y) ** 2)


def train(trial):
    k1, k2, k3 = jax.random.split(jax.random.key(trial.seed), 3)
    x = jax.random.normal(k1, (256, 8))
    y = jnp.sin(x.sum(1))
    params = {"w": jax.random.normal(k2, (8, 32)) / 3, "b": jnp.zeros(32), "out": jax.random.normal(k3, (32,)) / 6}
    optimizer = trial.optimizer(params, lr=1e-2)

    @jax.jit
    def update(params, state):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state = optimizer.init(params)
    for step in range(1, int(trial.settings.get("steps", 300)) + 1):
        params, state, value = update(params, state)
        if step % 10 == 0:
            trial.log(step, loss=value)
    return value
