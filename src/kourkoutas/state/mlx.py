"""MLX's state to and from the portable form."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from kourkoutas.buckets import partition
from kourkoutas.eigenbasis import factored_axes
from kourkoutas.mlx import KourkoutasBeta
from kourkoutas.mlx.layout import basis_age, flat, moment_dtype, natural, precision
from kourkoutas.mlx.layout import kinds_of as shapes_of
from kourkoutas.rule import Hyper
from kourkoutas.state.file import MOMENTS, Parameter, Portable, kinds_of, made, read, write


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

    bases = _bases(optimizer.hyper, state, here) if optimizer.hyper.basis else {}
    scale = bases.pop("factor_scale", {})
    kept = made(
        here,
        int(state["step"].item()),
        {kind: moments(kind) for kind in MOMENTS},
        bases,
        step=np.broadcast_to(np.array(state["t"]), len(here)),
        log_beta2=scalars("log_beta2"),
        ema=scalars("ema"),
        skipped=scalars("skipped"),
        seen=scalars("seen"),
        factor_scale=[scale.get(name, 0.0) for name in here] if optimizer.hyper.basis else None,
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
        new[kind] = {name: _array(moments[name]).astype(moment_dtype(optimizer.hyper, arrays[name])) for name in here}
    new["skipped"] = mx.zeros(len(saved.scalars["ema"]), mx.int32)
    for kind, x in saved.scalars.items():
        if kind in ("seen", "skipped"):
            new[kind] = mx.array(_as_int32(x), mx.int32)
        elif kind in ("ema", "log_beta2"):
            new[kind] = mx.array(x.tolist(), real)
    step = _as_int32(saved.scalars["step"])
    alike = len(set(step)) == 1 and "skipped" not in saved.scalars
    new["t"] = mx.array(step[0] if alike else step, mx.int32)
    if optimizer.hyper.basis:
        new.update(_stacks(optimizer.hyper, saved, new["m"]))
    optimizer.state = new
    optimizer.init(parameters)


def _bases(hyper: Hyper, state: dict[str, Any], names: Iterable[str]) -> dict[str, dict[str, np.ndarray]]:
    """The stacks of the state, parted: kind → name → what is that parameter's own."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for kind in shapes_of(flat(state["m"]), names, hyper.basis_limit).values():
        for what in kind.start(mx.float32):
            found.setdefault(what, {}).update(zip(kind.paths, np.array(state[what][kind.shape]), strict=True))
    return found


def _stacks(hyper: Hyper, saved: Portable, moments: dict[str, mx.array]) -> dict[str, dict[str, mx.array]]:
    """The other way round: stacks by their shapes, and the ages of the bases."""
    seen = dict(zip(saved.names, saved.scalars["seen"].tolist(), strict=True))
    scale = dict(zip(saved.names, saved.scalars["factor_scale"], strict=True))
    kept = {**saved.bases, "factor_scale": scale}
    found: dict[str, dict[str, mx.array]] = {}
    for kind in shapes_of(moments, saved.names, hyper.basis_limit).values():
        dtype = precision(moments[path] for path in kind.paths)
        for what in kind.start(dtype):
            stack = np.stack([kept[what][path] for path in kind.paths])
            found.setdefault(what, {})[kind.shape] = _array(stack).astype(dtype)
    # The basis turns when `seen` is a multiple of `basis_every`; its age was 1 after the first gradient.
    ages = {name: (n - 1) % hyper.basis_every + 1 if n else 0 for name, n in seen.items()}
    found["basis_age"] = {name: basis_age(age) for name, age in ages.items()}
    return found


def _as_int32(counts: np.ndarray) -> Any:
    return np.minimum(counts, np.iinfo(np.int32).max).tolist()


def _array(x: np.ndarray) -> mx.array:
    """x with its dtype; MLX by itself would make float32 of float64."""
    return mx.array(x, mx.float64 if x.dtype == np.float64 else mx.float32)


def _parameters(optimizer: KourkoutasBeta, tree: Any) -> dict[str, Parameter]:
    arrays = {path: x for path, x in flat(tree).items() if isinstance(x, mx.array)}
    names = natural(arrays)
    parts = partition(optimizer.buckets, names, [arrays[name] for name in names])
    found = {}
    for name, bucket in zip(names, parts.bucket_of, strict=True):
        shape = arrays[name].shape
        axes = factored_axes(shape, optimizer.hyper.basis_limit) if optimizer.hyper.basis else ()
        found[name] = Parameter(shape, bucket, axes=axes)
    return found
