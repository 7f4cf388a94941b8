"""Flax linen: Kourkoutas-β in a TrainState, with a schedule and a bound on the step.

python examples/flax_linen.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from kourkoutas.optax import kourkoutas_beta


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(1)(nn.tanh(nn.Dense(64)(x)))


@jax.jit
def train_step(state: TrainState, x: jax.Array, y: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss_fn(params: dict) -> jax.Array:
        return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def main(steps: int = 500) -> float:
    x = jnp.linspace(-3, 3, 256)[:, None]
    y = jnp.sin(2 * x)
    net = Net()
    schedule = optax.cosine_decay_schedule(1e-2, steps)
    # Instead of optax.clip_by_global_norm, which hides spikes from β2: no entry of a step exceeds 3 learning rates.
    solver = kourkoutas_beta(schedule, buckets="module", decay=0, max_ratio=3)
    state = TrainState.create(apply_fn=net.apply, params=net.init(jax.random.key(0), x)["params"], tx=solver)
    for _ in range(steps):
        state, loss = train_step(state, x, y)
    print(f"loss {float(loss):.2e}")
    return float(loss)


if __name__ == "__main__":
    main()
