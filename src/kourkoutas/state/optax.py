"""Optax's state to and from the portable form."""

# Annotations stay objects here (no `from __future__ import annotations`): Optax's own checks read them.
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kourkoutas.optax.eigenbasis import Eigenbasis, Stack, stacks_of
from kourkoutas.optax.optimizer import AnyState, KourkoutasBetaEigenState, is_state, only_state
from kourkoutas.optax.trees import layouts, leaf_names
from kourkoutas.rule import Buckets
from kourkoutas.state.file import Parameter, Portable, made, read, write

_LAST = np.iinfo(np.int32).max
_FIELDS = ("log_beta2", "ema", "skipped")  # scalars of the portable form that are fields of the same name


def save(state: optax.OptState, file: str | Path, *, buckets: Buckets = "parameter") -> None:
    """Write the state of a solver to a file that PyTorch and MLX also read; `buckets` as given to `kourkoutas_beta`.

    There must be one Kourkoutas-β in the solver. A kill leaves the old file or the new one.
    """
    ours = only_state(state)
    here, count = _parameters(ours, buckets), int(ours.count)
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
        _matrices(ours, list(here)),
        step=np.maximum(count - np.asarray(ours.missed, np.int64), 0),
        log_beta2=ours.log_beta2,
        ema=ours.ema,
        skipped=ours.skipped,
        seen=None if ours.basis is None else ours.basis.seen,
        factor_scale=None if ours.basis is None else ours.basis.scale,
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
    here = _parameters(old, buckets)
    optional = {"v_max": old.nu_max, "log_beta2": old.log_beta2, "skipped": old.skipped, "seen": old.basis}
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
        **{kind: _like(x, getattr(old, kind)) for kind, x in saved.scalars.items() if kind in _FIELDS},
    )
    if isinstance(new, KourkoutasBetaEigenState):
        new = new._replace(basis=_basis(old, new.basis, saved))
    return jax.tree.map(lambda x: new if is_state(x) else x, like, is_leaf=is_state)


def _parameters(state: AnyState, buckets: Buckets) -> dict[str, Parameter]:
    bucket_of = layouts(buckets)(state.mu).parts.bucket_of
    axes_of = {i: tuple(sorted(stack.axes)) for stack in _stacks(state) for i in stack.numbers}
    found = {}
    leaves = zip(leaf_names(state.mu), jax.tree.leaves(state.mu), bucket_of, strict=True)
    for i, (name, x, bucket) in enumerate(leaves):
        found[name] = Parameter(x.shape, bucket, jnp.iscomplexobj(x), axes_of.get(i, ()))
    return found


def _stacks(state: AnyState) -> list[Stack]:
    """All parameters by shape, with their factors and bases; none without a basis."""
    leaves = jax.tree.leaves(state.mu)
    return stacks_of(state.basis, leaves) if state.basis is not None and leaves else []


def _matrices(state: AnyState, names: list[str]) -> dict[str, dict[str, Any]]:
    """Factors and bases of single parameters: "factor_0", "basis_0" and so on → name → matrix."""
    found: dict[str, dict[str, Any]] = {}
    for stack in _stacks(state):
        for axis, factors, bases in zip(stack.axes, stack.factors, stack.bases, strict=True):
            for row, i in enumerate(stack.numbers):
                found.setdefault(f"factor_{axis}", {})[names[i]] = np.asarray(factors)[row]
                found.setdefault(f"basis_{axis}", {})[names[i]] = np.asarray(bases)[row]
    return found


def _basis(old: AnyState, kept_basis: Eigenbasis, saved: Portable) -> Eigenbasis:
    """What the file has of the bases, like those of `old`."""

    def joined(what: str, kept: Any) -> Any:
        if not isinstance(kept, dict):  # of no parameters
            return kept
        new: dict[str, dict[str, Any]] = {}
        for stack in _stacks(old):
            for axis in stack.axes:
                matrices = [saved.bases[f"{what}_{axis}"][saved.names[i]] for i in stack.numbers]
                like = kept[stack.shape][str(axis)]
                new.setdefault(stack.shape, {})[str(axis)] = _like(np.stack(matrices), like)
        return new

    return Eigenbasis(
        seen=_like(np.minimum(saved.scalars["seen"], _LAST), kept_basis.seen),
        scale=_like(saved.scalars["factor_scale"], kept_basis.scale),
        factors=joined("factor", kept_basis.factors),
        bases=joined("basis", kept_basis.bases),
    )


def _like(x: Any, like: Any) -> Any:
    """The values `x` with the dtype of `like`, where `like` lies."""
    x = jnp.asarray(x, like.dtype)
    return jax.device_put(x, like.sharding) if isinstance(like, jax.Array) else x
