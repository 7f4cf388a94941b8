"""Train on a mesh of devices twice: XLA parts the work under `jit`, then by hand in `shard_map`, to the same loss.

On a machine without accelerators, with eight devices made of its CPU:

XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/jax_mesh.py
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from kourkoutas.optax import kourkoutas_beta

P = PartitionSpec
# A layer of 64 units, parted over the axis "model": columns of the first matrix, rows of the second.
SPECS = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model", None), "b2": P()}
BATCH = P("data")


def start() -> dict[str, jax.Array]:
    k1, k2 = jax.random.split(jax.random.key(0))
    w1, w2 = jax.random.normal(k1, (1, 64)), jax.random.normal(k2, (64, 1)) / 8
    return {"w1": w1, "b1": jnp.zeros(64), "w2": w2, "b2": jnp.zeros(1)}


def part(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """What the units that `params` has add to the output."""
    return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"]


def train(
    solver: optax.GradientTransformation, loss_fn: Any, around: Any, mesh: jax.sharding.Mesh, steps: int
) -> float:
    params = jax.device_put(start(), {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()})
    state = jax.jit(solver.init)(params)  # the moments are sharded as their parameters are
    x = jnp.linspace(-3, 3, 256)[:, None]
    batch = jax.device_put((x, jnp.sin(2 * x)), NamedSharding(mesh, BATCH))

    def step(params: Any, state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
        updates, state = solver.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    step = jax.jit(around(step), donate_argnums=(0, 1))
    for _ in range(steps):
        # Steps that queue up on devices made of one CPU can block each other for ever; accelerators need no waiting.
        params, state, loss = jax.block_until_ready(step(params, state, batch))
    return float(loss)


def main(steps: int = 200) -> tuple[float, float]:
    rows = max(jax.device_count() // 2, 1)
    mesh = jax.make_mesh((rows, jax.device_count() // rows), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((part(params, x) + params["b2"] - y) ** 2)

    by_xla = train(kourkoutas_beta(1e-2), loss, lambda step: step, mesh, steps)

    def local_loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        out = jax.lax.psum(part(params, x), "model") + params["b2"]
        return jax.lax.pmean(jnp.mean((out - y) ** 2), "data")

    # The specs tell which parameters are parted over which axes; "data" is not among them.
    solver = kourkoutas_beta(1e-2, axis_name=SPECS)
    state = optax.tree.map_params(
        solver, lambda _, spec: spec, jax.eval_shape(solver.init, start()), SPECS, transform_non_params=lambda _: P()
    )
    around = partial(jax.shard_map, mesh=mesh, in_specs=(SPECS, state, BATCH), out_specs=(SPECS, state, P()))
    by_hand = train(solver, local_loss, around, mesh, steps)

    print(f"{jax.device_count()} devices, loss after {steps} steps: {by_xla:.4e} under jit, {by_hand:.4e} in shard_map")
    return by_xla, by_hand


if __name__ == "__main__":
    main()
