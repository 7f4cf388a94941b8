"""Values by optimizer and seed, {optimizer: {seed: value}}: their order, their checks, and what JSON can hold."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kourkoutas.lab.specs.spec import LARGEST

Seed = int | str
Outcomes = Mapping[str, Mapping[Seed, float]]
Array = NDArray[np.float64]
Of = TypeVar("Of")


class Sides(NamedTuple, Generic[Of]):
    """The same of both optimizers of a contrast."""

    treatment: Of
    baseline: Of


def in_order(seeds: Iterable[Seed]) -> list[Seed]:
    """Numbers first, then names."""
    return sorted(seeds, key=lambda seed: (isinstance(seed, str), seed))


def all_values(values: Outcomes) -> list[float]:
    """The values of all runs, one optimizer after the other."""
    return list(itertools.chain.from_iterable(by_seed.values() for by_seed in values.values()))


def all_seeds(values: Outcomes) -> list[Seed]:
    """The seeds that any optimizer has, in order."""
    return in_order(set(itertools.chain.from_iterable(values.values())))


def first_few(items: Sequence[Any], most: int = 20) -> str:
    """Items for a sentence; of very many the first few and how many there are."""
    shown = ", ".join(map(str, items[:most]))
    return shown if len(items) <= most else f"{shown}, … ({len(items)} in all)"


def of_seeds(seeds: Sequence[Any]) -> str:
    """ "seed 3", or "seeds 3, 4"."""
    return f"seed{'s' if len(seeds) > 1 else ''} {first_few(seeds)}"


def is_number(value: float) -> bool:
    """Whether a value is one of a run that ended well."""
    return abs(value) <= LARGEST


def without_logarithm(values: Outcomes) -> tuple[str, Seed] | None:
    """The first run, by optimizer and seed, that ended well at a value without a logarithm."""
    for name, by_seed in values.items():
        for seed, x in by_seed.items():
            if is_number(x) and x <= 0:
                return name, seed
    return None


def to_json(value: Any) -> Any:
    """Dataclasses as mappings, text keys, lists, and "nan", "inf" and "-inf" for what is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if dataclasses.is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value) if field.repr}
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    return value


def seed_ranges(seeds: Sequence[int]) -> str:
    """Seeds as the command line takes them.

    >>> seed_ranges([3, 0, 1, 2, 7])
    '0-3,7'
    """
    parts: list[list[int]] = []
    for seed in sorted(set(seeds)):
        if parts and seed == parts[-1][1] + 1:
            parts[-1][1] = seed
        else:
            parts.append([seed, seed])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
