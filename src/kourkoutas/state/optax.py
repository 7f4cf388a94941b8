"""Optax's state to and from the portable form."""

# Annotations stay objects here (no `from __future__ import annotations`): Optax's own checks read them.
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kourkoutas.optax.optimizer import is_state, only_state
from kourkoutas.optax.trees import PyTree, layouts, leaf_names
from kourkoutas.rule import Buckets
from kourkoutas.state.file import Parameter, made, read, write

_LAST = np.iinfo(np.int32).max


def save(state: optax.OptState, file: str | Path, *, buckets: Buckets = "parameter") -> None:
    """Write the state of a solver to a file that PyTorch and MLX also read; `buckets` as given to `kourkoutas_beta`.

    There must be one Kourkoutas-β in the solver. A kill leaves the old file or the new one.
    """
    ours = only_state(state)
    here, count = _parameters(ours.mu, buckets), int(ours.count)
    for name, x in zip(here, jax.tree.leaves(ours.mu), strict=True):
        if not getattr(x, "is_fully_addressable", True):
            raise ValueError(
                f"parameter {name!r} is spread over processes, which the portable form does not hold: use orbax for it"
            )

    def moments(tree: Any) -> Any:
        if tree is None:
            return None
        arrays = [np.asarray(x) for x in jax.tree.leaves(tree)]
        return [x if x.itemsize >= 4 else x.astype(np.float32) for x in arrays]

    kept = made(
        here,
        count,
        {"m": moments(ours.mu), "v": moments(ours.nu), "v_max": moments(ours.nu_max)},
        step=np.maximum(count - np.asarray(ours.missed, np.int64), 0),
        log_beta2=ours.log_beta2,
        ema=ours.ema,
        skipped=ours.skipped,
    )
    write(kept, file)


def load(file: str | Path, like: optax.OptState, *, buckets: Buckets = "parameter") -> optax.OptState:
    """A state saved from any framework, with the dtypes and on the devices of `like`; ValueError if it does not fit.

    `like` is what `solver.init(params)` makes for the same parameters and settings, `buckets` as given there.

    NOTE: a schedule in the same solver keeps a count of its own, which is not in the file and stays that of `like`. To
    go on with it, set all counts to the saved one:
    `opt_state = optax.tree_utils.tree_set(opt_state, count=opt_state[0].count)`.
    """
    old = only_state(like)
    here = _parameters(old.mu, buckets)
    optional = {"v_max": old.nu_max, "log_beta2": old.log_beta2, "skipped": old.skipped}
    saved = read(file).arranged(here, {kind for kind, x in optional.items() if x is not None})

    def moments(kind: str, tree: Any) -> Any:
        new = [saved.moments[kind][name] for name in here] if tree is not None else []
        return jax.tree.map(_like, jax.tree.unflatten(jax.tree.structure(tree), new), tree)

    step = saved.scalars["step"]
    count = max(saved.count, step.max(initial=0))
    new = old._replace(
        count=_like(np.minimum(count, _LAST), old.count),
        mu=moments("m", old.mu),
        nu=moments("v", old.nu),
        nu_max=moments("v_max", old.nu_max),
        missed=_like(np.minimum(count - step, _LAST), old.missed),
        **{kind: _like(x, getattr(old, kind)) for kind, x in saved.scalars.items() if kind != "step"},
    )
    return jax.tree.map(lambda x: new if is_state(x) else x, like, is_leaf=is_state)


def _parameters(mu: PyTree, buckets: Buckets) -> dict[str, Parameter]:
    bucket_of = layouts(buckets)(mu).parts.bucket_of
    found = {}
    for name, x, bucket in zip(leaf_names(mu), jax.tree.leaves(mu), bucket_of, strict=True):
        found[name] = Parameter(x.shape, bucket, jnp.iscomplexobj(x))
    return found


def _like(x: Any, like: Any) -> Any:
    """The values `x` with the dtype of `like`, where `like` lies."""
    x = jnp.asarray(x, like.dtype)
    return jax.device_put(x, like.sharding) if isinstance(like, jax.Array) else x
