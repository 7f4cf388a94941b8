"""Over which mesh axes each parameter is sharded, inside `shard_map`.

`axis_name` says it for all parameters at once, by a tree with their structure (or a prefix of it), or by a function of
a parameter's dotted name and of an object with its shape and dtype. For one parameter it is

| value                        | meaning                                                          |
|------------------------------|------------------------------------------------------------------|
| None or ()                   | replicated: every device has the whole of it                     |
| "x" or ("x", "y")            | each device along these axes has a part of it                    |
| a PartitionSpec              | as given to `shard_map`: the same, and along which dimensions    |

NOTE: a sum over an axis on which a parameter is replicated would count it once per device. That is why this is said
per parameter, and why the axis along which only the data are sharded must not be named.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import PartitionSpec

AxisNames = str | tuple[str, ...] | PartitionSpec | None
AxisName = AxisNames | Callable[[str, Any], AxisNames] | Any


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
        return axis_size(self.names)

    def whole(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the parameter of which this device has a part of shape `shape`."""
        dims = (self.dims or ())[: len(shape)]
        return (*(n * axis_size(axes) for n, axes in zip(shape, dims, strict=False)), *shape[len(dims) :])


def axis_size(names: tuple[str, ...]) -> int:
    return int(lax.psum(1, names)) if names else 1


def read_axes(value: Any) -> Axes:
    """`Axes` from what was given for one parameter."""
    if value is None:
        return Axes()
    if isinstance(value, str):
        return Axes((value,), None)
    if isinstance(value, PartitionSpec):
        dims = tuple(() if d is None else (d,) if isinstance(d, str) else tuple(d) for d in value)
        return Axes(tuple(sorted({name for axes in dims for name in axes})), dims)
    if isinstance(value, tuple) and all(isinstance(name, str) for name in value):
        return Axes(tuple(sorted(set(value))), None if value else ())
    raise TypeError(
        f"`axis_name` must be the name of a mesh axis, a tuple of names, a PartitionSpec or None, "
        f"a tree of these like the parameters, or a callable f(name, array); got {value!r}"
    )


def axes_of(axis_name: AxisName, params: Any, names: list[str], shapes: list[Any]) -> list[Axes]:
    """The `Axes` of each leaf of `params`."""
    if axis_name is None or _is_one(axis_name):
        return [read_axes(axis_name)] * len(names)
    if not names:  # nothing to say; `optax.tree.map_params` calls init with a placeholder of no structure
        return []
    if callable(axis_name):
        return [read_axes(axis_name(name, shape)) for name, shape in zip(names, shapes, strict=True)]
    try:
        leaves = jax.tree.leaves(jax.tree.broadcast(axis_name, params, is_leaf=_is_one), is_leaf=_is_one)
    except ValueError as error:
        raise ValueError(
            f"`axis_name` must be a tree with the structure of the parameters, or a prefix of it; got {axis_name!r}: "
            "give each parameter the PartitionSpec that shard_map has for it"
        ) from error
    return [read_axes(leaf) for leaf in leaves]


def _is_one(value: Any) -> bool:
    """Whether `value` is for one parameter, and not a tree."""
    if value is None or isinstance(value, (str, PartitionSpec)):
        return True
    return type(value) is tuple and all(isinstance(name, str) for name in value)


def are_bound(axes: list[Axes]) -> bool:
    """Whether this is traced by a `shard_map` (or another map) over these axes."""
    try:
        for names in {each.names for each in axes}:
            axis_size(names)
    except NameError:
        return False
    return True
