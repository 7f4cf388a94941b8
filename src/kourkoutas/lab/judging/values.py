"""Values of runs as the statistics take them: {optimizer: {seed: value}}, NaN or infinite for a diverged run."""

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


def in_order(seeds: Iterable[Seed]) -> list[Seed]:
    """Numbers first, then names."""
    return sorted(seeds, key=lambda seed: (isinstance(seed, str), seed))


def listed(items: Sequence[Any], most: int = 20) -> str:
    """Items for a sentence; of very many the first few and how many there are."""
    shown = ", ".join(map(str, items[:most]))
    return shown if len(items) <= most else f"{shown}, … ({len(items)} in all)"


def check_known(values: Values, name: str, role: str) -> None:
    if name not in values:
        near = difflib.get_close_matches(name, values, n=1, cutoff=0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"`{role}` must be one of {listed([repr(known) for known in values])}; got {name!r}{hint}")


def check_positive(values: Values, names: Iterable[str]) -> None:
    for name in names:
        for seed, value in values[name].items():
            if math.isfinite(value) and value <= 0:
                raise ValueError(
                    f"`log` needs values > 0; {name!r} has {value!r} for seed {seed!r}: leave out --log (log=False)"
                )


def all_positive(values: Values) -> bool:
    """Whether every finite value has a logarithm."""
    return all(x > 0 for by_seed in values.values() for x in by_seed.values() if math.isfinite(x))


def plain(value: Any) -> Any:
    """For JSON: dataclasses as mappings, text keys, lists, and "nan", "inf" and "-inf" for what is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if dataclasses.is_dataclass(value):
        return {name: plain(getattr(value, name)) for name in value.__dataclass_fields__}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value
