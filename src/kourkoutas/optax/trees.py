"""Trees of parameters: the names of their leaves, their buckets, and gradients in the same order."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kourkoutas.buckets import Partition, partition, unique_names
from kourkoutas.optax.axes import Axes, AxisName, are_bound, axes_of
from kourkoutas.rule import Buckets

PyTree = Any


def name_of(path: Sequence[Any]) -> str:
    """The dotted name of a leaf."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator=".") or "params"


def leaf_names(params: PyTree) -> list[str]:
    """The dotted names of all leaves, each its own."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    # flax boxes parameters in nodes with one child, `value`, which is no part of the name.
    if all(path and path[-1] == jax.tree_util.GetAttrKey("value") for path in paths):
        paths = [path[:-1] for path in paths]
    return unique_names([name_of(path) for path in paths])  # {"a.b": ...} beside {"a": {"b": ...}}


def layout_of(params: PyTree, buckets: Buckets, axis_name: AxisName = None) -> tuple[Partition, list[Axes]]:
    """(the buckets of a tree of parameters, over which mesh axes each parameter is sharded).

    `params` may be any tree of their shape and dtype, such as `mu`.
    """
    names = leaf_names(params)
    leaves = jax.tree.leaves(params)
    shapes = [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]
    axes = axes_of(axis_name, params, names, shapes)
    if buckets == "shape" and any(each.dims is None for each in axes):
        raise ValueError(
            "`buckets` is 'shape', which needs the shapes of whole parameters, and `axis_name` only has names of axes: "
            "give `axis_name` as the PartitionSpecs of the parameters"
        )
    if are_bound(axes):
        shapes = [jax.ShapeDtypeStruct(a.whole(s.shape), s.dtype) for a, s in zip(axes, shapes, strict=True)]
    return partition(buckets, names, shapes), axes


def bucket_names(params: PyTree, buckets: Buckets = "parameter") -> tuple[str, ...]:
    """The names of the buckets of `params`, in the order of the entries of `KourkoutasBetaState.ema`.

    Args:
      params: the tree given to `init`.
      buckets: as given to `kourkoutas_beta`.

    Returns:
      One name per bucket.

    Example:
      >>> bucket_names({"enc": {"b": jnp.zeros(2), "w": jnp.zeros((2, 3))}, "gain": jnp.ones(())}, "module")
      ('enc', '')
    """
    return layout_of(params, buckets)[0].names


def align(tree: PyTree, like: PyTree, what: str) -> tuple[list[Any], Callable[[Sequence[Any]], PyTree]]:
    """The leaves of `tree` in the order of those of `like`, None where `tree` has None, and how to put them back."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    if treedef == jax.tree.structure(like):
        return leaves, treedef.unflatten
    got, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_none)
    want = jax.tree_util.tree_leaves_with_path(like, is_leaf=_is_none)
    for a, b in itertools.zip_longest(got, want):
        if a is None or b is None or a[0] != b[0] or (b[1] is None and a[1] is not None):
            here = "nothing" if a is None or a[1] is None else repr(name_of(a[0]))
            there = "nothing" if b is None or b[1] is None else repr(name_of(b[0]))
            raise ValueError(
                f"the tree of {what} does not match the parameters; the first path that differs: {here} in the {what}, "
                f"{there} in the parameters given to init(): pass the same tree, with None where a gradient is missing"
            )
    slots = [i for i, (_, x) in enumerate(want) if x is not None]

    def rebuild(leaves: Sequence[Any]) -> PyTree:
        full = [None] * len(got)
        for i, x in zip(slots, leaves, strict=True):
            full[i] = x
        return treedef.unflatten(full)

    return [got[i][1] for i in slots], rebuild


def _is_none(x: object) -> bool:
    return x is None
