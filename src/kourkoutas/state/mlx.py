"""MLX's state to and from the portable form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from kourkoutas.buckets import partition
from kourkoutas.mlx import KourkoutasBeta
from kourkoutas.mlx.layout import flat, natural, precision
from kourkoutas.state.file import MOMENTS, Parameter, kinds_of, made, read, write


def save(optimizer: KourkoutasBeta, file: str | Path) -> None:
    """Write the optimizer's state, after `init` or a step, to a file that PyTorch and Optax also read.

    A kill leaves the old file or the new one.
    """
    state, kinds = optimizer.state, kinds_of(optimizer.hyper)
    if "m" not in state:
        raise ValueError("the optimizer has no state yet: call init(parameters) or take a step first")
    here = _parameters(optimizer, state["m"])

    def moments(kind: str) -> Any:
        if kind not in {"m", "v", *kinds}:
            return None
        arrays = flat(state[kind])
        return [np.array(arrays[name].astype(precision([arrays[name]]))) for name in here]

    def scalars(kind: str) -> Any:
        return np.array(state[kind]) if kind in {"ema", *kinds} else None

    kept = made(
        here,
        int(state["step"].item()),
        {kind: moments(kind) for kind in MOMENTS},
        step=np.broadcast_to(np.array(state["t"]), len(here)),
        log_beta2=scalars("log_beta2"),
        ema=scalars("ema"),
        skipped=scalars("skipped"),
    )
    write(kept, file)


def load(file: str | Path, optimizer: KourkoutasBeta, parameters: Any) -> None:
    """Put a state saved from any framework into an optimizer, in place; if it does not fit, ValueError and no change.

    The optimizer has the buckets and settings that the state was made with; `parameters` is the tree that it trains.
    """
    arrays, here = flat(parameters), _parameters(optimizer, parameters)
    saved = read(file).arranged(here, kinds_of(optimizer.hyper))

    real = precision(arrays[name] for name in here)
    new: dict[str, Any] = {name: optimizer.state[name] for name in ("learning_rate", "alpha")}
    new["step"] = mx.array(saved.count, optimizer.state["step"].dtype)
    for kind, moments in saved.moments.items():
        new[kind] = {name: _array(moments[name]).astype(arrays[name].dtype) for name in here}
    new["skipped"] = mx.zeros(len(saved.scalars["ema"]), mx.int32)
    for kind, x in saved.scalars.items():
        if kind != "step":
            new[kind] = mx.array(x.tolist(), mx.int32 if kind == "skipped" else real)
    step = np.minimum(saved.scalars["step"], np.iinfo(np.int32).max).tolist()
    alike = len(set(step)) == 1 and "skipped" not in saved.scalars
    new["t"] = mx.array(step[0] if alike else step, mx.int32)
    optimizer.state = new
    optimizer.init(parameters)


def _array(x: np.ndarray) -> mx.array:
    """x with its dtype; MLX by itself would make float32 of float64."""
    return mx.array(x, mx.float64 if x.dtype == np.float64 else mx.float32)


def _parameters(optimizer: KourkoutasBeta, tree: Any) -> dict[str, Parameter]:
    arrays = {path: x for path, x in flat(tree).items() if isinstance(x, mx.array)}
    names = natural(arrays)
    parts = partition(optimizer.buckets, names, [arrays[name] for name in names])
    return {name: Parameter(arrays[name].shape, b) for name, b in zip(names, parts.bucket_of, strict=True)}
