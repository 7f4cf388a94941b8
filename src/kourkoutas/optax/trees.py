"""Trees of parameters: the names of their leaves, their buckets, their mesh axes, and gradients in the same order.

Inside `shard_map`, `axis_name` says over which mesh axes each parameter is sharded: for all parameters at once, by a
tree with their structure (or a prefix of it), or by a function of a parameter's dotted name and of an object with its
shape and dtype. For one parameter it is

| value                        | meaning                                                          |
|------------------------------|------------------------------------------------------------------|
| None or ()                   | replicated: every device has the whole of it                     |
| "x" or ("x", "y")            | each device along these axes has a part of it                    |
| a PartitionSpec              | as given to `shard_map`: the same, and along which dimensions    |

NOTE: a sum over an axis on which a parameter is replicated would count it once per device. That is why axes are given
per parameter, and why the axis along which only the data are sharded must not be named.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from kourkoutas.buckets import Partition, check_buckets, partition, unique_names
from kourkoutas.rule import Buckets

PyTree = Any
AxisNames = str | tuple[str, ...] | PartitionSpec | None
AxisName = AxisNames | Callable[[str, Any], AxisNames] | Any


def name_of(path: Sequence[Any]) -> str:
    """The dotted name of a leaf."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator=".") or "params"


def leaf_names(params: PyTree) -> list[str]:
    """The dotted names of all leaves, each its own."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    # flax boxes parameters in nodes with one child, `value`, which is no part of the name.
    if all(path and path[-1] == jax.tree_util.GetAttrKey("value") for path in paths):
        paths = [path[:-1] for path in paths]
    names = [name_of(path) for path in paths]
    if len(set(names)) < len(names):  # {"a.b": ...} beside {"a": {"b": ...}}
        names = unique_names(names)
    return names


class Axes(NamedTuple):
    """How one parameter is sharded.

    Attributes:
      names: the axes of the mesh, sorted.
      dims: for each dimension, its axes; None where only the names are known.
    """

    names: tuple[str, ...] = ()
    dims: tuple[tuple[str, ...], ...] | None = ()

    def size(self) -> int:
        """Into how many parts."""
        return _axis_size(self.names)

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the parameter of which this device has a part of shape `shape`."""
        whole = list(shape)
        for i, axes in enumerate((self.dims or ())[: len(shape)]):
            whole[i] *= _axis_size(axes)
        return tuple(whole)


def _axis_size(names: tuple[str, ...]) -> int:
    return int(lax.psum(1, names)) if names else 1


class Layout(NamedTuple):
    """The buckets of a tree of parameters, and the mesh axes of each parameter."""

    parts: Partition
    axes: list[Axes]

    @property
    def unbound(self) -> list[str]:
        """The axes, all of them if one is not an axis of a `shard_map` (or another map) around this trace."""
        if _are_bound(self.axes):
            return []
        return sorted(set(itertools.chain.from_iterable(each.names for each in self.axes)))


def layouts(buckets: Buckets, axis_name: AxisName = None) -> Callable[[PyTree], Layout]:
    """The function from a tree of parameters to its `Layout`.

    The tree may be any of their shape and dtype, such as `mu`. The buckets of one tree are worked out once: a callable
    `buckets` is asked once for each parameter.
    """
    check_buckets(buckets)
    known: dict[Any, Partition] = {}

    def layout(params: PyTree) -> Layout:
        names = leaf_names(params)
        shapes = [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(params)]
        axes = _axes_of(axis_name, params, names, [jax.ShapeDtypeStruct(*shape) for shape in shapes])
        if buckets == "shape" and any(each.dims is None for each in axes):
            raise ValueError(
                "`buckets` is 'shape', which needs the shapes of whole parameters, and `axis_name` only has names of "
                "axes: give `axis_name` as the PartitionSpecs of the parameters"
            )
        if _are_bound(axes):
            shapes = [(each.whole(shape), dtype) for each, (shape, dtype) in zip(axes, shapes, strict=True)]
        key = (tuple(names), tuple(shapes))
        if key not in known:
            known[key] = partition(buckets, names, [jax.ShapeDtypeStruct(*shape) for shape in shapes])
        return Layout(known[key], axes)

    return layout


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
    return layouts(buckets)(params).parts.bucket_names


def _axes_of(axis_name: AxisName, params: PyTree, names: list[str], shapes: list[Any]) -> list[Axes]:
    """The `Axes` of each leaf of `params`."""
    if _is_one(axis_name):
        return [_read_axes(axis_name)] * len(names)
    if not names:  # nothing to say; `optax.tree.map_params` calls init with a placeholder of no structure
        return []
    if callable(axis_name):
        return [_read_axes(axis_name(name, shape)) for name, shape in zip(names, shapes, strict=True)]
    try:
        leaves = jax.tree.leaves(jax.tree.broadcast(axis_name, params, is_leaf=_is_one), is_leaf=_is_one)
    except ValueError as error:
        raise ValueError(
            f"`axis_name` must be a tree with the structure of the parameters, or a prefix of it; got {axis_name!r}: "
            "give each parameter the PartitionSpec that shard_map has for it"
        ) from error
    return [_read_axes(leaf) for leaf in leaves]


def _is_one(value: Any) -> bool:
    """Whether `value` is for one parameter, and not a tree."""
    if value is None or isinstance(value, (str, PartitionSpec)):
        return True
    return type(value) is tuple and all(isinstance(name, str) for name in value)


def _read_axes(value: Any) -> Axes:
    """`Axes` from what was given for one parameter."""
    if value is None:
        return Axes()
    if isinstance(value, str):
        return Axes((value,), None)
    if isinstance(value, PartitionSpec):
        dims = tuple(_axes_of_dimension(entry) for entry in value)
        names = set(itertools.chain.from_iterable(dims))
        return Axes(tuple(sorted(names)), dims)
    if isinstance(value, tuple) and all(isinstance(name, str) for name in value):
        return Axes(tuple(sorted(set(value))), None if value else ())
    raise TypeError(
        f"`axis_name` must be the name of a mesh axis, a tuple of names, a PartitionSpec or None, "
        f"a tree of these like the parameters, or a callable f(name, array); got {value!r}"
    )


def _axes_of_dimension(entry: Any) -> tuple[str, ...]:
    """The axes of one dimension, from its entry in a PartitionSpec: None, a name or several."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def _are_bound(axes: list[Axes]) -> bool:
    """Whether this is traced by a `shard_map` (or another map) over these axes."""
    try:
        for names in {each.names for each in axes}:
            _axis_size(names)
    except NameError:
        return False
    return True


def align(tree: PyTree, like: PyTree, what: str) -> tuple[list[Any], Callable[[Sequence[Any]], PyTree]]:
    """The leaves of `tree` in the order of those of `like`, None where `tree` has None, and how to put them back."""
    treedef: Any
    leaves, treedef = jax.tree.flatten(tree)
    if treedef == jax.tree.structure(like):
        return leaves, treedef.unflatten
    got, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_none)
    want = jax.tree_util.tree_leaves_with_path(like, is_leaf=_is_none)
    end: Any = (None, None)
    for (path, x), (path_there, y) in itertools.zip_longest(got, want, fillvalue=end):
        if path != path_there or (y is None and x is not None):
            here = "nothing" if x is None else repr(name_of(path))
            there = "nothing" if y is None else repr(name_of(path_there))
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
