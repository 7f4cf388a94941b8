"""Values by optimizer and seed, {optimizer: {seed: value}}: their order, their checks, and what JSON can hold."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Seed = int | str
Values = Mapping[str, Mapping[Seed, float]]
Array = NDArray[np.float64]

LARGEST = 1e100  # beyond it a run has diverged: squares of larger values are no numbers


def in_order(seeds: Iterable[Seed]) -> list[Seed]:
    """Numbers first, then names."""
    return sorted(seeds, key=lambda seed: (isinstance(seed, str), seed))


def listed(items: Sequence[Any], most: int = 20) -> str:
    """Items for a sentence; of very many the first few and how many there are."""
    shown = ", ".join(map(str, items[:most]))
    return shown if len(items) <= most else f"{shown}, … ({len(items)} in all)"


def is_number(value: float) -> bool:
    """Whether a value is one of a run that ended well."""
    return abs(value) <= LARGEST


def check_known(values: Mapping[str, Any], name: str, role: str) -> None:
    if name not in values:
        near = difflib.get_close_matches(name, values, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"`{role}` must be one of {listed([repr(known) for known in values])}; got {name!r}{hint}")


def check_positive(values: Values) -> None:
    for name, by_seed in values.items():
        for seed, value in by_seed.items():
            if is_number(value) and value <= 0:
                raise ValueError(
                    f"`log` needs values > 0; {name!r} has {value!r} for seed {seed!r}: leave out --log (log=False)"
                )


def all_positive(values: Values) -> bool:
    """Whether every value of a run that ended well has a logarithm."""
    return all(x > 0 for by_seed in values.values() for x in by_seed.values() if is_number(x))


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
