"""The state: which arrays there are, who has which entry in them, and how it grows when parameters appear.

The state holds arrays only, in one flat dictionary per kind, so that it saves with `tree_flatten` and
`mx.save_safetensors` and is captured by `mx.compile`:

    step, learning_rate, alpha         scalars
    m, v, v_max                        path → array, in the parameter's dtype
    t                                  step count: one while all parameters share it, else as log_beta2
    log_beta2                          (P,), one entry per parameter, paths in natural order
    ema, skipped                       (B,), one entry per bucket
    ring, count                        as `kourkoutas.trace` describes them, with `diagnostics=True`

NOTE: `t` is one number as long as every parameter has had a gradient at every step. All of them then share their bias
corrections, which spares MLX two small operations per parameter and step. That it becomes a vector otherwise is seen in
the state, by a compiled step as well.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from kourkoutas.buckets import Partition, bucket_key, partition
from kourkoutas.rule import Buckets, Hyper
from kourkoutas.trace import KEYS, WINDOW

State = dict[str, Any]
PER_PARAMETER = ("t", "log_beta2")


def precision(arrays: Iterable[mx.array]) -> mx.Dtype:
    """The dtype of scalars and of elementwise arithmetic: float64 as soon as one of `arrays` is, else float32."""
    return mx.float64 if any(x.dtype == mx.float64 for x in arrays) else mx.float32


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step does, apart from the numbers: the key under which its compiled form is kept.

    Attributes:
      rows: numbers of the parameters that have a gradient; None when all have one.
      columns: numbers of the buckets that have a gradient; None when all have one.
      owner: for each parameter with a gradient, the position of its bucket among `columns`.
      buckets: how many buckets there are.
    """

    hyper: Hyper
    rows: tuple[int, ...] | None
    columns: tuple[int, ...] | None
    owner: tuple[int, ...]
    buckets: int

    @property
    def one_each(self) -> bool:
        return self.owner == tuple(range(len(self.owner)))

    @property
    def width(self) -> int:
        """How many buckets have a gradient."""
        return self.buckets if self.columns is None else len(self.columns)

    def take(self, name: str, x: mx.array) -> mx.array:
        """The entries of the state's vector `name` that this step concerns."""
        numbers = self._numbers(name)
        return x if numbers is None else x[mx.array(numbers, mx.int32)]

    def put(self, name: str, x: mx.array, new: mx.array) -> mx.array:
        """The state's vector `name` with `new` in these entries."""
        numbers = self._numbers(name)
        if numbers is None:
            return new
        places = mx.array(numbers, mx.int32).reshape(-1, *[1] * (x.ndim - 1))
        return mx.put_along_axis(x, mx.broadcast_to(places, new.shape), new, axis=0)

    def _numbers(self, name: str) -> tuple[int, ...] | None:
        return self.rows if name in PER_PARAMETER else self.columns

    # From buckets to parameters and back, as `rule.Members` has it.

    def spread(self, x: mx.array) -> mx.array:
        return x[mx.array(self.owner, mx.int32)]

    def largest(self, x: mx.array) -> mx.array:
        return mx.zeros(self.width, x.dtype).at[mx.array(self.owner, mx.int32)].maximum(x) if x.ndim else x


class Layout:
    """Where the parameters and buckets of one optimizer are in its state.

    Attributes:
      number: path → the parameter's entry in the vectors of the state.
      parts: the parameters' buckets.
    """

    def __init__(self, hyper: Hyper, buckets: Buckets, diagnostics: bool) -> None:
        self.hyper, self.buckets, self.diagnostics = hyper, buckets, diagnostics
        self.number: dict[str, int] = {}
        self.parts = Partition((), ())
        self._keys: dict[str, Hashable] = {}

    @property
    def slots(self) -> tuple[str, ...]:
        """What is kept per parameter, like the parameter."""
        return ("m", "v") if self.hyper.leak is None else ("m", "v", "v_max")

    @property
    def vectors(self) -> tuple[str, ...]:
        """What is kept per parameter or bucket, as one number."""
        exact = ("log_beta2",) if self.hyper.bias_correction == "exact" else ()
        return ("t", *exact, "ema", "skipped")

    def plan(self, numbers: list[int]) -> Plan:
        """The plan of a step in which the parameters `numbers`, ascending, have a gradient."""
        owner = [self.parts.bucket_of[i] for i in numbers]
        columns = tuple(sorted(set(owner)))
        local = {b: k for k, b in enumerate(columns)}
        return Plan(
            hyper=self.hyper,
            rows=None if len(numbers) == len(self.number) else tuple(numbers),
            columns=None if len(columns) == len(self.parts.bucket_names) else columns,
            owner=tuple(local[b] for b in owner),
            buckets=len(self.parts.bucket_names),
        )

    def build(self, state: State, new: Mapping[str, mx.array], parameters: Any) -> None:
        """Bring `state` to the union of its own paths and those of `new`, keeping every value that is there."""
        for path, p in new.items():
            if not mx.issubdtype(p.dtype, mx.floating):
                raise TypeError(
                    f"parameter {path!r} must be an array of a real floating-point dtype; got {p.dtype}: "
                    "freeze it, or leave it out, as model.trainable_parameters() does"
                )
        # NOTE: tree_unflatten nests the dotted paths of a loaded state; flattening brings both forms to one.
        held = [slot for slot in ("m", "v", "v_max") if slot in state or slot in self.slots]
        kept: State = {slot: flat(state.get(slot, {})) for slot in held}
        for slot in self.slots:
            if lacking := [path for path in kept["m"] if path not in kept[slot]]:
                raise ValueError(
                    f"the state has no {slot!r} of {lacking[0]!r}, which these settings need: load a state saved with "
                    "the same settings"
                )
        state.update(kept)
        old = natural(state["m"])
        names = natural({*old, *new})
        if any(path not in self._keys for path in old):
            known = flat(parameters)
            new = {**{path: known.get(path, state["m"][path]) for path in old}, **new}
        for path in names:
            if path not in self._keys:
                self._keys[path] = bucket_key(self.buckets, path, new[path])
        before, after = self._partition(old), self._partition(names)

        dtype = precision((*new.values(), *state["m"].values()))
        number = {path: i for i, path in enumerate(names)}
        home = {path: i for i, path in enumerate(old)}
        from_old = [home.get(path, -1) for path in names]
        bucket_home = {after.bucket_of[number[path]]: before.bucket_of[i] for path, i in home.items()}
        bucket_from_old = [bucket_home.get(b, -1) for b in range(len(after.bucket_names))]
        self._spread_steps(state, len(old), grown=len(names) > len(old) > 0)
        for name in self.vectors:
            if name == "t" and "t" in state and not state["t"].ndim:
                continue
            source, size = (
                (from_old, len(old)) if name in PER_PARAMETER else (bucket_from_old, len(before.bucket_names))
            )
            self._extend(state, name, source, size, mx.int32 if name in ("t", "skipped") else dtype, bool(old))
        if self.diagnostics:
            if "ring" not in state:
                state["ring"] = mx.full((WINDOW, len(KEYS), len(before.bucket_names)), math.nan, dtype)
                state["count"] = mx.array(0, mx.int32)
            state["ring"] = _rearranged(state["ring"], bucket_from_old, math.nan)
        for slot in self.slots:
            for path, p in new.items():
                if path not in state[slot]:
                    state[slot][path] = mx.zeros_like(p)
        self.number, self.parts = number, after

    def _partition(self, names: list[str]) -> Partition:
        return partition(lambda path, _: self._keys[path], names, names)

    def _spread_steps(self, state: State, size: int, grown: bool) -> None:
        """Start the step count, and make it a vector of `size` as soon as parameters may differ in it."""
        if not size:
            state["t"] = mx.array(0, mx.int32)
        if "t" in state and not state["t"].ndim and (grown or self.hyper.nonfinite == "skip"):
            state["t"] = mx.broadcast_to(state["t"], (size,))

    def _extend(self, state: State, name: str, source: list[int], size: int, dtype: mx.Dtype, loaded: bool) -> None:
        """state[name][i] ← its entry source[i], or zero where source[i] is -1."""
        if name not in state:
            if loaded:
                raise ValueError(
                    f"the state has no {name!r}, which these settings need: load a state saved with the same settings"
                )
            state[name] = mx.zeros((size,), dtype)
        if state[name].shape != (size,):
            raise ValueError(
                f"the state's {name!r} has shape {tuple(state[name].shape)} but `buckets` {self.buckets!r} give "
                f"{(size,)}: load a state saved with the same parameters, buckets and settings"
            )
        if state[name].dtype != dtype:  # a float64 parameter has come
            state[name] = state[name].astype(dtype)
        state[name] = _rearranged(state[name], source, 0)


def _rearranged(x: mx.array, source: list[int], fill: float) -> mx.array:
    """The entries `source` of x's last axis, with `fill` where `source` is -1."""
    size = x.shape[-1]
    if source == list(range(size)):
        return x
    padded = mx.concatenate([x, mx.full((*x.shape[:-1], 1), fill, x.dtype)], axis=-1)
    return padded[..., mx.array([i if i >= 0 else size for i in source], mx.int32)]


def flat(tree: Any) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for path, x in tree_flatten(tree):  # type: ignore[str-unpack]
        if path in flat:
            raise ValueError(
                f"two parameters have the path {path!r}, dots in names included: name one of them otherwise"
            )
        flat[path] = x
    return flat


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
