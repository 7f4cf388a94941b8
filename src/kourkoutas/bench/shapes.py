"""The four models whose parameters are timed: lists of tensor shapes; and the options of "K-β full"."""

from __future__ import annotations

from math import prod
from typing import Any

Shape = tuple[int, ...]

FULL: dict[str, Any] = {"decay": 0.98, "max_ratio": 3, "adaptive_tiny": True}


def _pinn(width: int = 128, hidden: int = 14) -> list[Shape]:
    layers = [(3, width), *[(width, width)] * hidden, (width, 1)]
    return [s for fan_in, fan_out in layers for s in ((fan_out, fan_in), (fan_out,))]


def _char_lm(width: int = 512, layers: int = 6, letters: int = 256, context: int = 512) -> list[Shape]:
    norm: list[Shape] = [(width,), (width,)]
    block: list[Shape] = [
        *norm,
        (3 * width, width),
        (3 * width,),
        (width, width),
        (width,),
        *norm,
        (4 * width, width),
        (4 * width,),
        (width, 4 * width),
        (width,),
    ]
    return [(letters, width), (context, width), *block * layers, *norm, (letters, width), (letters,)]


SHAPES: dict[str, list[Shape]] = {
    "tiny": [(100,)],
    "pinn": _pinn(),
    "charlm": _char_lm(),
    "big": [(4096, 4096)] * 6,
}


def count(name: str) -> int:
    """The number of parameters.

    >>> [count(name) for name in SHAPES]
    [100, 231809, 19439872, 100663296]
    """
    return sum(prod(shape) for shape in SHAPES[name])
