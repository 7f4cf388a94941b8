"""MLX's contestants, eager and compiled."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import mlx.optimizers
from mlx.utils import tree_flatten

from kourkoutas.bench.shapes import FULL, Shape
from kourkoutas.bench.timing import Contestant
from kourkoutas.mlx import KourkoutasBeta

VERSION = version("mlx")


def _contestant(optimizer: Any, compiled: bool, grads: Any, baseline: str) -> Contestant:
    params = {name: mx.full(g.shape, 0.1) for name, g in grads.items()}
    optimizer.init(params)
    update: Callable[..., Any] = optimizer.apply_gradients
    if compiled:
        state = [optimizer.state]
        update = mx.compile(update, inputs=state, outputs=state)
    held = [params]

    def steps(k: int) -> float:
        params = held.pop()
        start = time.perf_counter()
        for _ in range(k):
            params = update(grads, params)
            mx.eval(params, optimizer.state)
        elapsed = time.perf_counter() - start
        held.append(params)
        return elapsed

    steps(1)
    leaves: Any = tree_flatten(optimizer.state)
    size = sum(x.nbytes for _, x in leaves)
    return Contestant(steps, baseline, size)


def contestants(shapes: list[Shape], threads: int) -> dict[str, Contestant]:
    """`threads` is MLX's choice."""
    grads = {f"p{i}": mx.full(shape, 1e-3) for i, shape in enumerate(shapes)}
    out = {}
    for mode, compiled in (("eager", False), ("compiled", True)):
        base = f"Adam {mode}"
        out[base] = _contestant(mlx.optimizers.Adam(1e-3), compiled, grads, base)
        out[f"K-β {mode}"] = _contestant(KourkoutasBeta(1e-3), compiled, grads, base)
        out[f"K-β full {mode}"] = _contestant(KourkoutasBeta(1e-3, **FULL), compiled, grads, base)
        traced = KourkoutasBeta(1e-3, diagnostics=True)
        out[f"K-β traced {mode}"] = _contestant(traced, compiled, grads, f"K-β {mode}")
    return out
