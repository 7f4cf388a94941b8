"""The front ends and routes as one thing: parameters and gradients in, parameters, state and trace out."""

from __future__ import annotations

import functools
import tempfile
from typing import Any, NamedTuple

import numpy as np

from kourkoutas import state
from kourkoutas.trace import Trace

SHAPES = {"a.bias": (3,), "a.weight": (2, 3), "b.gain": (1,)}
Arrays = dict[str, np.ndarray]


class Outcome(NamedTuple):
    params: list[Arrays]  # after each step
    states: list[Any]  # Portable, after each step, or after the last one only
    sun: np.ndarray  # (steps, buckets)
    beta2: np.ndarray


def params() -> Arrays:
    rng = np.random.default_rng(3)
    return {name: (0.5 * rng.normal(size=shape)).astype(np.float32) for name, shape in SHAPES.items()}


def portable(save, *of, **how) -> state.Portable:
    """The state by way of its file."""
    with tempfile.TemporaryDirectory() as folder:
        save(*of, f"{folder}/state", **how)
        return state.read(f"{folder}/state")


def torch_run(
    route: dict[str, Any], options, lr, grads, every_state=False, order=tuple(SHAPES), groups=False
) -> Outcome:
    import torch

    from kourkoutas.state.torch import save
    from kourkoutas.torch import KourkoutasBeta

    start = params()
    tensors = {name: torch.nn.Parameter(torch.from_numpy(start[name])) for name in order}
    given: Any = [{"params": [pair]} for pair in tensors.items()] if groups else list(tensors.items())
    optimizer = KourkoutasBeta(given, lr=lr, diagnostics=True, **options, **route)
    out = Outcome([], [], np.empty(0), np.empty(0))
    for t, g in enumerate(grads, start=1):
        for name, p in tensors.items():
            p.grad = torch.from_numpy(g[name].copy())
        optimizer.step()
        out.params.append({name: p.detach().numpy().copy() for name, p in tensors.items()})
        if every_state or t == len(grads):
            out.states.append(portable(save, optimizer))
    trace = Trace(optimizer.bucket_names)
    optimizer.pull(trace)
    return out._replace(sun=trace.sun, beta2=trace.beta2)


@functools.cache
def _solver(options: tuple, lr: float):
    import jax

    from kourkoutas.optax import kourkoutas_beta

    solver = kourkoutas_beta(lr, diagnostics=True, **dict(options))
    return solver, jax.jit(solver.update)


def optax_run(options, lr, grads, every_state=False) -> Outcome:
    import jax.numpy as jnp
    import optax

    from kourkoutas.optax import bucket_names, pull
    from kourkoutas.state.optax import save

    solver, update = _solver(tuple(options.items()), lr)
    tree = {name: jnp.asarray(x) for name, x in params().items()}
    opt_state = solver.init(tree)
    out = Outcome([], [], np.empty(0), np.empty(0))
    for t, g in enumerate(grads, start=1):
        updates, opt_state = update(g, opt_state, tree)
        tree = optax.apply_updates(tree, updates)
        out.params.append({name: np.asarray(x) for name, x in tree.items()})
        if every_state or t == len(grads):
            out.states.append(portable(save, opt_state, buckets=options.get("buckets", "parameter")))
    trace = Trace(bucket_names(tree, options.get("buckets", "parameter")))
    pull(trace, opt_state)
    return out._replace(sun=trace.sun, beta2=trace.beta2)


def mlx_run(options, lr, grads, every_state=False) -> Outcome:
    import mlx.core as mx

    from kourkoutas.mlx import KourkoutasBeta
    from kourkoutas.state.mlx import save

    optimizer = KourkoutasBeta(lr, diagnostics=True, **options)
    tree = {name: mx.array(x) for name, x in params().items()}
    out = Outcome([], [], np.empty(0), np.empty(0))
    for t, g in enumerate(grads, start=1):
        tree = optimizer.apply_gradients({name: mx.array(x) for name, x in g.items()}, tree)
        mx.eval(tree, optimizer.state)
        out.params.append({name: np.array(x) for name, x in tree.items()})
        if every_state or t == len(grads):
            out.states.append(portable(save, optimizer))
    trace = Trace(optimizer.bucket_names)
    optimizer.pull(trace)
    return out._replace(sun=trace.sun, beta2=trace.beta2)
