"""Train a small Flax network with Kourkoutas-β and look at each layer's β2.

python examples/jax_flax.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from kourkoutas.optax import bucket_names, kourkoutas_beta, pull
from kourkoutas.trace import Trace


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(1, 64, rngs=rngs)
        self.out = nnx.Linear(64, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.tanh(self.hidden(x)))


def loss_fn(net: Net, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((net(x) - y) ** 2)


@nnx.jit
def train_step(net: Net, optimizer: nnx.Optimizer, x: jax.Array, y: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(loss_fn)(net, x, y)
    optimizer.update(net, grads)
    return loss


def main(steps: int = 1000) -> float:
    net = Net(nnx.Rngs(0))
    schedule = optax.cosine_decay_schedule(1e-2, steps)
    solver = kourkoutas_beta(schedule, buckets="module", diagnostics=True)
    optimizer = nnx.Optimizer(net, solver, wrt=nnx.Param)
    trace = Trace(bucket_names(nnx.state(net, nnx.Param), "module"))

    x = jnp.linspace(-3, 3, 256)[:, None]
    y = jnp.sin(2 * x)
    for step in range(1, steps + 1):
        loss = train_step(net, optimizer, x, y)
        if step % 200 == 0:
            pull(trace, optimizer.opt_state)
            beta2 = "  ".join(f"{name} {row['beta2']:.4f}" for name, row in trace.snapshot().items())
            print(f"step {step:5d}  loss {float(loss):.2e}  β2: {beta2}")
    return float(loss)


if __name__ == "__main__":
    main()
