"""JAX's contestants: one jitted update each, buffers donated."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

from kourkoutas.bench.shapes import FULL, Shape
from kourkoutas.bench.timing import Contestant
from kourkoutas.optax import kourkoutas_beta

VERSION = jax.__version__


def _contestant(optimizer: Any, shapes: list[Shape], grads: dict[str, jax.Array], baseline: str) -> Contestant:
    key = jax.random.key(0)
    params = {f"p{i}": 0.1 * jax.random.normal(key, shape) for i, shape in enumerate(shapes)}
    state = optimizer.init(params)
    size = sum(x.nbytes for x in jax.tree.leaves(state))

    def update(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(update, donate_argnums=(0, 1))
    held = [jax.block_until_ready(step(params, state, grads))]

    def steps(k: int) -> float:
        params, state = held.pop()
        start = time.perf_counter()
        for _ in range(k):
            params, state = step(params, state, grads)
        jax.block_until_ready(params)
        elapsed = time.perf_counter() - start
        held.append((params, state))
        return elapsed

    return Contestant(steps, baseline, size)


def contestants(shapes: list[Shape], threads: int) -> dict[str, Contestant]:
    """JAX's contestants; `threads` has no effect here, since XLA takes all cores of the process."""
    grads = {f"p{i}": jnp.full(shape, 1e-3) for i, shape in enumerate(shapes)}
    base = "optax.adam"
    makers = {
        base: (optax.adam(1e-3), base),
        "optax.amsgrad": (optax.amsgrad(1e-3), base),
        "K-β": (kourkoutas_beta(1e-3), base),
        "K-β full": (kourkoutas_beta(1e-3, **FULL), base),
        "K-β traced": (kourkoutas_beta(1e-3, diagnostics=True), "K-β"),
    }
    return {name: _contestant(optimizer, shapes, grads, against) for name, (optimizer, against) in makers.items()}
