"""Optax's state to and from the portable form."""

# Annotations stay objects here (no `from __future__ import annotations`): Optax's own checks read them.
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kourkoutas.buckets import partition
from kourkoutas.optax.state import KourkoutasBetaState
from kourkoutas.optax.trees import leaf_names
from kourkoutas.rule import Buckets
from kourkoutas.state.file import Portable, Rename, read, write
from kourkoutas.state.match import check

_SCHEDULES = (
    "KourkoutasBetaState",
    "ScaleByScheduleState",
    "WrappedScheduleState",
    "InjectHyperparamsState",
    "InjectStatefulHyperparamsState",
)


def save(state: optax.OptState, file: str | Path, *, buckets: Buckets = "parameter") -> None:
    """Write the state of a solver to a file that PyTorch and MLX also read.

    Args:
      state: what `solver.init` made and `solver.update` returned, with one Kourkoutas-β in it.
      file: where to; a kill leaves the old file or the new one.
      buckets: as given to `kourkoutas_beta`.
    """
    write(portable(_only(state), buckets), file)


def load(
    file: str | Path, like: optax.OptState, *, buckets: Buckets = "parameter", rename: Rename | None = None
) -> optax.OptState:
    """A saved state in the structure of `like`; ValueError if it does not fit.

    Counts of schedules beside Kourkoutas-β, as in `kourkoutas_beta(schedule)`, are set to the saved count as well; all
    else that `like` holds stays.

    Args:
      file: written by `save` of any framework.
      like: what `solver.init(params)` makes for the same parameters and settings.
      buckets: as given to `kourkoutas_beta`.
      rename: {name in the file: name here} for those that differ, or a function of the name in the file.

    Returns:
      The state to go on with, with the dtypes and on the devices of `like`.

    Example:
      >>> import tempfile
      >>> from kourkoutas.optax import kourkoutas_beta
      >>> params = {"w": jnp.ones(3)}
      >>> solver = kourkoutas_beta(0.1)
      >>> _, opt_state = solver.update(params, solver.init(params), params)
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save(opt_state, f"{folder}/state.safetensors")
      ...     opt_state = load(f"{folder}/state.safetensors", solver.init(params))
    """
    saved = read(file) if rename is None else read(file).renamed(rename)
    old = _only(like)
    kinds = {"v_max": old.nu_max, "log_beta2": old.log_beta2, "skipped": old.skipped}
    leaves, names = jax.tree.leaves(old.mu), leaf_names(old.mu)
    parts = partition(buckets, names, leaves)
    shapes = {name: x.shape for name, x in zip(names, leaves, strict=True)}
    there = tuple(kind for kind, x in kinds.items() if x is not None)
    check(saved, shapes, dict(zip(names, parts.index, strict=True)), there)

    def moments(kind: str, tree: Any) -> Any:
        if tree is None:
            return None
        new = [_like(getattr(saved, kind)[name], x) for name, x in zip(names, jax.tree.leaves(tree), strict=True)]
        return jax.tree.unflatten(jax.tree.structure(tree), new)

    def vector(kind: str, x: Any, entries: list[str]) -> Any:
        return None if x is None else _like(np.array([saved.entry(kind, name) for name in entries]), x)

    first = [names[parts.index.index(b)] for b in range(len(parts.names))]  # a member of each bucket
    step = np.array([saved.entry("step", name) for name in names])
    limit = np.iinfo(np.int32).max
    count = max(saved.count, step.max(initial=0))
    new = old._replace(
        count=_like(np.minimum(count, limit), old.count),
        mu=moments("m", old.mu),
        nu=moments("v", old.nu),
        nu_max=moments("v_max", old.nu_max),
        ema=vector("ema", old.ema, first),
        log_beta2=vector("log_beta2", old.log_beta2, names),
        skipped=vector("skipped", old.skipped, first),
        missed=_like(np.minimum(count - step, limit), old.missed),
    )
    like = optax.tree_utils.tree_set(like, _is_schedules, count=new.count)
    return jax.tree.map(lambda x: new if _is_ours(x) else x, like, is_leaf=_is_ours)


def _is_ours(x: Any) -> bool:
    return isinstance(x, KourkoutasBetaState)


def _is_schedules(path: Any, _: Any) -> bool:
    """Whether a `count` is that of a schedule, not of a moving average or a parameter of that name."""
    return getattr(path[-1], "tuple_name", None) in _SCHEDULES


def _only(state: optax.OptState) -> KourkoutasBetaState:
    """The state of the one Kourkoutas-β in a solver's state."""
    found = [x for x in jax.tree.leaves(state, is_leaf=_is_ours) if _is_ours(x)]
    if len(found) != 1:
        raise ValueError(
            f"the state must hold one Kourkoutas-β; found {len(found)}: pass the state of kourkoutas_beta or a chain "
            "with one, and each branch of a partition by itself"
        )
    only: KourkoutasBetaState = found[0]
    return only


def _like(x: Any, like: Any) -> Any:
    """The values `x` with the dtype of `like`, where `like` lies."""
    x = jnp.asarray(x, like.dtype)
    return jax.device_put(x, like.sharding) if isinstance(like, jax.Array) else x


def portable(state: KourkoutasBetaState, buckets: Buckets) -> Portable:
    """The state apart from the framework."""
    leaves, names = jax.tree.leaves(state.mu), leaf_names(state.mu)
    for name, x in zip(names, leaves, strict=True):
        if jnp.iscomplexobj(x) or not getattr(x, "is_fully_addressable", True):
            kind = "complex" if jnp.iscomplexobj(x) else "spread over processes"
            raise ValueError(f"parameter {name!r} is {kind}, which the portable form does not hold: use orbax for it")
    parts = partition(buckets, names, leaves)
    if state.ema.shape != (len(parts.names),):
        raise ValueError(
            f"the state has {state.ema.size} buckets and `buckets` {buckets!r} give {len(parts.names)}: pass the "
            "`buckets` that the solver was made with"
        )

    def moments(tree: Any) -> Any:
        return None if tree is None else dict(zip(names, map(_array, jax.tree.leaves(tree)), strict=True))

    def vector(x: Any, dtype: type) -> Any:
        return None if x is None else np.asarray(x).astype(dtype)

    count = int(state.count)
    return Portable(
        names=tuple(names),
        bucket_of=parts.index,
        bucket_names=parts.names,
        count=count,
        m=moments(state.mu),
        v=moments(state.nu),
        v_max=moments(state.nu_max),
        step=np.maximum(count - np.asarray(state.missed, np.int64), 0),
        log_beta2=vector(state.log_beta2, np.float64),
        ema=vector(state.ema, np.float64),
        skipped=vector(state.skipped, np.int64),
    )


def _array(x: Any) -> Any:
    x = np.asarray(x)
    return x if x.dtype in (np.float32, np.float64) else x.astype(np.float32)
