"""Which parameters share one β2: from a parameter's name and array to its bucket key.

| buckets       | key                                              |
|---------------|--------------------------------------------------|
| "parameter"   | the parameter's own name (default)               |
| "module"      | the name without its last part: `a.b.weight` → `a.b` |
| "shape"       | the shape, e.g. `(128, 128)`                     |
| "global"      | one bucket for all                               |
| a callable    | `f(name, array)`, any hashable value             |

NOTE: a key is worked out once, when the optimizer first sees the parameter, and never from object identity: arrays are
replaced from step to step in JAX and MLX, and an identity key would open a new bucket each time.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kourkoutas.rule import Buckets

KINDS = ("parameter", "module", "shape", "global")


def by_module(model: Any) -> Callable[[str, Any], str]:
    """Buckets by module where a tool hands the optimizer parameters without their names.

    Hugging Face's `optimizer_cls_and_kwargs` and timm's registry do. The names are taken from the model here instead:

        KourkoutasBeta(groups_of_bare_parameters, buckets=by_module(model))

    Args:
      model: a torch module.

    Returns:
      A function for `buckets`. A parameter that is not the model's is an error.
    """
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}

    def module(name: str, parameter: Any) -> str:
        if parameter not in names:
            raise ValueError(
                f"`buckets` is by_module({type(model).__name__}), which has no such parameter as {name!r}: "
                "pass the model whose parameters the optimizer gets"
            )
        return names[parameter].rpartition(".")[0]

    return module


def names_of(given: Sequence[str] | None, first: int, count: int, buckets: Buckets = "parameter") -> list[str]:
    """The names of `count` parameters; without any, which "module" needs, they are numbered from `first` on."""
    if given:
        return list(given)
    if buckets == "module":
        raise ValueError(
            "`buckets` is 'module' but the parameters have no names: pass model.named_parameters(), or, where a tool "
            "dropped the names, buckets=kourkoutas.buckets.by_module(model)"
        )
    return [f"param_{first + i}" for i in range(count)]


def unique_names(names: Sequence[str], buckets: Buckets = "parameter") -> list[str]:
    """The names, with a number behind those that occur again: two parameters of one name, say of two models, are two.

    Under "module" the name says too little, and ValueError names it; where names are not keys they stay as they are.

    >>> unique_names(["weight", "bias", "weight"])
    ['weight', 'bias', 'weight#2']
    """
    if buckets not in ("parameter", "module"):
        return list(names)
    taken = set(names)
    last: dict[str, int] = {}  # name → the number that it was last given
    out = []
    for name in names:
        if name not in last:
            last[name] = 1
            out.append(name)
            continue
        if buckets == "module":
            raise ValueError(
                f"`buckets` is 'module' but two parameters are named {name!r}: give them names that differ, for "
                "example with the name of their model in front"
            )
        last[name] += 1
        while f"{name}#{last[name]}" in taken:  # somebody's own name
            last[name] += 1
        taken.add(f"{name}#{last[name]}")
        out.append(f"{name}#{last[name]}")
    return out


def check_buckets(buckets: Buckets) -> None:
    """Raise unless `buckets` is a known kind or a callable."""
    if callable(buckets) or buckets in KINDS:
        return
    choices = ", ".join(f'"{kind}"' for kind in KINDS)
    near = difflib.get_close_matches(str(buckets), KINDS, n=1, cutoff=0.5)
    hint = f' (did you mean "{near[0]}"?)' if near else ""
    raise ValueError(f"`buckets` must be one of {choices}, or a callable f(name, array); got {buckets!r}{hint}")


def bucket_key(buckets: Buckets, name: str, array: Any) -> Hashable:
    """The bucket key of one parameter."""
    if callable(buckets):
        key: Hashable = buckets(name, array)
        try:
            hash(key)
        except TypeError:
            raise TypeError(
                f"`buckets` must return a hashable key; got {key!r} for parameter {name!r}: return a str, int or tuple"
            ) from None
        return key
    if buckets == "parameter":
        return name
    if buckets == "module":
        return name.rpartition(".")[0]
    if buckets == "shape":
        return tuple(int(n) for n in array.shape)
    return "all"


@dataclass(frozen=True)
class Partition:
    """Parameters sorted into buckets, in the order of first appearance.

    Attributes:
      bucket_names: one printable name per bucket.
      bucket_of: for each parameter, the number of its bucket.
    """

    bucket_names: tuple[str, ...]
    bucket_of: tuple[int, ...]


def partition(buckets: Buckets, names: Sequence[str], arrays: Iterable[Any]) -> Partition:
    """Sort parameters into buckets.

    >>> import numpy as np
    >>> partition("shape", ["a", "b", "c"], [np.zeros(2), np.zeros(3), np.zeros(2)])
    Partition(bucket_names=('(2,)', '(3,)'), bucket_of=(0, 1, 0))
    """
    check_buckets(buckets)
    number: dict[Hashable, int] = {}
    bucket_of = []
    for name, array in zip(names, arrays, strict=True):
        key = bucket_key(buckets, name, array)
        bucket_of.append(number.setdefault(key, len(number)))
    return Partition(tuple(str(key) for key in number), tuple(bucket_of))
