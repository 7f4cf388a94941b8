"""One small deterministic problem, trained by any framework for some steps from given parameters and state.

The gradient of parameter p at step t is C_p (p - target_p) + noise_t, with a spike now and then, worked out in NumPy in
float64 and rounded once: what differs between frameworks is the optimizer alone.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from kourkoutas.state.file import PER_BUCKET, Portable

LR = 1e-3
SHAPES = {"dec.bias": (3,), "dec.weight": (4, 3), "enc.bias": (4,), "enc.weight": (4, 3), "gain": (1,)}
Params = dict[str, np.ndarray]


def start() -> Params:
    rng = np.random.default_rng(5)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def gradients(params: Params, t: int, nan_at: tuple[int, ...] = ()) -> Params:
    """The gradients of step t; at the steps `nan_at` one entry of enc.bias is NaN."""
    rng = np.random.default_rng([6, t])
    scale = 50.0 if t % 37 == 20 else 1.0
    out = {}
    for name, p in params.items():
        g = 0.5 * (p.astype(np.float64) - 0.1) + scale * rng.normal(size=p.shape)
        out[name] = g.astype(np.float32)
    if t in nan_at:
        out["enc.bias"][1] = np.nan
    return out


def entry(state: Portable, kind: str, name: str) -> Any:
    """The scalar of this kind that is the parameter's own, or its bucket's."""
    at = state.names.index(name)
    return state.scalars[kind][state.bucket_of[at] if kind in PER_BUCKET else at]


class Torch:
    """A run in PyTorch; `begin` is None or the state file to go on from."""

    def __init__(self, params: Params, options: dict[str, Any], begin: Path | None = None) -> None:
        import torch

        from kourkoutas.state.torch import load
        from kourkoutas.torch import KourkoutasBeta

        self.torch = torch
        self.tensors = {name: torch.nn.Parameter(torch.from_numpy(x.copy())) for name, x in params.items()}
        self.optimizer = KourkoutasBeta(self.tensors.items(), lr=LR, **options)
        if begin is not None:
            load(begin, self.optimizer)

    def step(self, grads: Params) -> None:
        for name, p in self.tensors.items():
            p.grad = self.torch.from_numpy(grads[name])
        self.optimizer.step()

    @property
    def params(self) -> Params:
        return {name: p.detach().numpy().copy() for name, p in self.tensors.items()}

    def save(self, file: Path) -> None:
        from kourkoutas.state.torch import save

        save(self.optimizer, file)


@functools.cache
def _compiled(lr: float, options: tuple[tuple[str, Any], ...]) -> tuple[Any, Any]:
    """A solver, which holds no state, and its compiled step."""
    import jax
    import optax

    from kourkoutas.optax import kourkoutas_beta

    solver = kourkoutas_beta(lr, **dict(options))

    @jax.jit
    def update(grads, state, tree):
        updates, state = solver.update(grads, state, tree)
        return optax.apply_updates(tree, updates), state

    return solver, update


class Optax:
    """A run in JAX."""

    def __init__(self, params: Params, options: dict[str, Any], begin: Path | None = None) -> None:
        import jax.numpy as jnp

        from kourkoutas.state.optax import load

        self.buckets = options.get("buckets", "parameter")
        solver, self.update = _compiled(LR, tuple(options.items()))
        self.tree = {name: jnp.asarray(x) for name, x in params.items()}
        self.state = solver.init(self.tree)
        if begin is not None:
            self.state = load(begin, self.state, buckets=self.buckets)

    def step(self, grads: Params) -> None:
        self.tree, self.state = self.update(grads, self.state, self.tree)

    @property
    def params(self) -> Params:
        return {name: np.asarray(x) for name, x in self.tree.items()}

    def save(self, file: Path) -> None:
        from kourkoutas.state.optax import save

        save(self.state, file, buckets=self.buckets)


class Mlx:
    """A run in MLX."""

    def __init__(self, params: Params, options: dict[str, Any], begin: Path | None = None) -> None:
        import mlx.core as mx

        from kourkoutas.mlx import KourkoutasBeta
        from kourkoutas.state.mlx import load

        self.mx = mx
        self.optimizer = KourkoutasBeta(LR, **options)
        self.tree = {name: mx.array(x) for name, x in params.items()}
        if begin is not None:
            load(begin, self.optimizer, self.tree)

    def step(self, grads: Params) -> None:
        self.tree = self.optimizer.apply_gradients({n: self.mx.array(g) for n, g in grads.items()}, self.tree)
        self.mx.eval(self.tree, self.optimizer.state)

    @property
    def params(self) -> Params:
        return {name: np.array(x) for name, x in self.tree.items()}

    def save(self, file: Path) -> None:
        from kourkoutas.state.mlx import save

        save(self.optimizer, file)


FRAMEWORKS: dict[str, type[Torch] | type[Optax] | type[Mlx]] = {"torch": Torch, "optax": Optax, "mlx": Mlx}
