"""MLX's state to and from the portable form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from kourkoutas.buckets import partition
from kourkoutas.mlx import KourkoutasBeta
from kourkoutas.mlx.trees import flat, natural
from kourkoutas.state.file import Portable, Rename, read, write
from kourkoutas.state.match import check, kinds_of


def save(optimizer: KourkoutasBeta, file: str | Path) -> None:
    """Write the optimizer's state to a file that PyTorch and Optax also read.

    Args:
      optimizer: after `init` or a step.
      file: where to; a kill leaves the old file or the new one.
    """
    write(portable(optimizer), file)


def load(file: str | Path, optimizer: KourkoutasBeta, parameters: Any, *, rename: Rename | None = None) -> None:
    """Put a saved state into an optimizer, in place; if it does not fit, ValueError, and nothing has changed.

    Args:
      file: written by `save` of any framework.
      optimizer: with the buckets and settings that the state was made with.
      parameters: the tree that it is to train, as for `optimizer.init`.
      rename: {name in the file: name here} for those that differ, or a function of the name in the file.

    Example:
      >>> import tempfile
      >>> params = {"w": mx.ones(3)}
      >>> optimizer = KourkoutasBeta(0.1)
      >>> params = optimizer.apply_gradients({"w": mx.ones(3)}, params)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save(optimizer, f"{folder}/state.safetensors")
      ...     load(f"{folder}/state.safetensors", KourkoutasBeta(0.1), params)
    """
    saved = read(file) if rename is None else read(file).renamed(rename)
    arrays = {path: p for path, p in flat(parameters).items() if isinstance(p, mx.array)}
    names = natural(arrays)
    parts = partition(optimizer.buckets, names, [arrays[name] for name in names])
    kinds = kinds_of(optimizer.hyper)
    shapes = {name: tuple(arrays[name].shape) for name in names}
    check(saved, shapes, dict(zip(names, parts.index, strict=True)), kinds)

    real = mx.float64 if any(p.dtype == mx.float64 for p in arrays.values()) else mx.float32
    first = [names[parts.index.index(b)] for b in range(len(parts.names))]  # a member of each bucket
    step = [min(int(saved.entry("step", name)), np.iinfo(np.int32).max) for name in names]
    new: dict[str, Any] = {name: optimizer.state[name] for name in ("learning_rate", "alpha")}
    new["step"] = mx.array(saved.count, optimizer.state["step"].dtype)
    for kind in ("m", "v", *(["v_max"] if "v_max" in kinds else [])):
        new[kind] = {name: _mlx(getattr(saved, kind)[name]).astype(arrays[name].dtype) for name in names}
    alike = len(set(step)) == 1 and "skipped" not in kinds
    new["t"] = mx.array(step[0] if alike else step, mx.int32)
    new["ema"] = mx.array([float(saved.entry("ema", name)) for name in first], real)
    skips = [int(saved.entry("skipped", name)) if "skipped" in kinds else 0 for name in first]
    new["skipped"] = mx.array(skips, mx.int32)
    if "log_beta2" in kinds:
        new["log_beta2"] = mx.array([float(saved.entry("log_beta2", name)) for name in names], real)
    optimizer.state = new
    optimizer.init(parameters)


def portable(optimizer: KourkoutasBeta) -> Portable:
    """The state apart from the framework."""
    state, kinds = optimizer.state, kinds_of(optimizer.hyper)
    if "m" not in state:
        raise ValueError("the optimizer has no state yet: call init(parameters) or take a step first")
    m = flat(state["m"])
    names = natural(m)
    parts = partition(optimizer.buckets, names, [m[name] for name in names])
    if state["ema"].shape != (len(parts.names),):
        raise ValueError(
            f"the state has {state['ema'].size} buckets and `buckets` {optimizer.buckets!r} give {len(parts.names)}: "
            "load a state that was saved with the same buckets"
        )

    def moments(kind: str) -> Any:
        return {name: _array(x) for name, x in flat(state[kind]).items()}

    return Portable(
        names=tuple(names),
        bucket_of=parts.index,
        bucket_names=parts.names,
        count=int(state["step"].item()),
        m=moments("m"),
        v=moments("v"),
        v_max=moments("v_max") if "v_max" in kinds else None,
        step=np.broadcast_to(np.array(state["t"]), len(names)).astype(np.int64),
        log_beta2=np.array(state["log_beta2"]).astype(np.float64) if "log_beta2" in kinds else None,
        ema=np.array(state["ema"]).astype(np.float64),
        skipped=np.array(state["skipped"]).astype(np.int64) if "skipped" in kinds else None,
    )


def _mlx(x: Any) -> mx.array:
    return mx.array(x, mx.float64 if x.dtype == np.float64 else mx.float32)  # which MLX would make float32 of float64


def _array(x: mx.array) -> Any:
    return np.array(x if x.dtype in (mx.float32, mx.float64) else x.astype(mx.float32))
