"""Trees of gradients and parameters: their paths, and one beside the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten


def flat(tree: Any) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for path, x in tree_flatten(tree):  # type: ignore[str-unpack]
        if path in flat:
            raise _twice(path)
        flat[path] = x
    return flat


def _twice(path: str) -> ValueError:
    return ValueError(f"two parameters have the path {path!r}, dots in names included: name one of them otherwise")


def natural(paths: Any) -> list[str]:
    """Paths in natural order (`layers.2` before `layers.10`), which depends on the names alone."""
    return sorted(
        paths, key=lambda path: [(not s.isdecimal(), int(s) if s.isdecimal() else 0, s) for s in path.split(".")]
    )


def pairs(gradients: Any, parameters: Any, path: str = "") -> Iterator[tuple[str, mx.array | None, mx.array]]:
    """(path, gradient or None, parameter) for each leaf of `gradients`, in the order of `tree_flatten`."""
    if isinstance(gradients, dict):
        children: Any = gradients.items()
    elif isinstance(gradients, (list, tuple)):
        children = enumerate(gradients)
    else:
        if gradients is None and not isinstance(parameters, mx.array):
            raise _mismatch(path, "an array", parameters)
        if gradients is not None and (
            not isinstance(parameters, mx.array) or getattr(gradients, "shape", None) != parameters.shape
        ):
            raise _mismatch(path, f"shape {getattr(gradients, 'shape', None)}", parameters)
        yield path, gradients, parameters
        return
    for key, child in children:
        below = f"{path}.{key}" if path else str(key)
        try:
            parameter = parameters[key]
        except (KeyError, IndexError, TypeError):
            raise ValueError(
                f"`gradients` has an entry at {below!r} and `parameters` has none: "
                "compute the gradients with respect to the same tree"
            ) from None
        yield from pairs(child, parameter, below)


def _mismatch(path: str, gradient: str, parameter: Any) -> ValueError:
    found = f"shape {parameter.shape}" if isinstance(parameter, mx.array) else f"a {type(parameter).__name__}"
    return ValueError(
        f"`gradients` has {gradient} at {path!r} and `parameters` has {found}: "
        "compute the gradients with respect to the same tree"
    )
