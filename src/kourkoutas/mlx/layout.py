"""The state: which arrays there are, who has which entry in them, and how it grows when parameters appear.

The state holds arrays only, in one flat dictionary per kind, so that it saves with `tree_flatten` and
`mx.save_safetensors` and is captured by `mx.compile`:

    step, learning_rate, alpha         scalars
    m, v, v_max                        path → array, in the parameter's dtype
    t                                  step count: one while all parameters share it, else as log_beta2
    log_beta2                          (P,), one scalar per parameter, paths in natural order
    ema, skipped                       (B,), one scalar per bucket
    ring, count                        as `kourkoutas.trace` describes them, with `diagnostics=True`

NOTE: `t` is 0-d as long as every parameter has had a gradient at every step. All of them then share their bias
corrections, which spares MLX two small operations per parameter and step. When it becomes an array of (P,), the state
has another shape, and `mx.compile` traces a compiled step again.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

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
class Members:
    """The parameters of a step, those that have a gradient, and their buckets. Equal ones share a compiled step.

    Attributes:
      bucket_of: for each parameter, the number of its bucket.
      bucket_names: one name per bucket.
      rows: the places of the parameters in the state's arrays; None when all have a gradient.
      columns: the places of the buckets in the state's arrays; None when all have a gradient.
    """

    bucket_of: tuple[int, ...]
    bucket_names: tuple[str, ...] = field(compare=False)
    rows: tuple[int, ...] | None
    columns: tuple[int, ...] | None

    @property
    def one_each(self) -> bool:
        """Whether each parameter is a bucket of its own."""
        return self.bucket_of == tuple(range(len(self.bucket_of)))

    def take(self, name: str, x: mx.array) -> mx.array:
        """The entries of the state's scalars `name` that this step concerns."""
        places = self._places(name)
        return x if places is None else x[mx.array(places, mx.int32)]

    def put(self, name: str, x: mx.array, new: mx.array) -> mx.array:
        """The state's scalars `name` with `new` in these entries."""
        places = self._places(name)
        if places is None:
            return new
        index = mx.array(places, mx.int32).reshape(-1, *[1] * (x.ndim - 1))
        return mx.put_along_axis(x, mx.broadcast_to(index, new.shape), new, axis=0)

    def _places(self, name: str) -> tuple[int, ...] | None:
        return self.rows if name in PER_PARAMETER else self.columns

    # From buckets to parameters and back, as `rule.Members` has it.

    def spread(self, x: mx.array) -> mx.array:
        return x if self.one_each else x[self._index()]

    def largest(self, x: mx.array) -> mx.array:
        if self.one_each or not x.ndim:
            return x
        return mx.zeros(len(self.bucket_names), x.dtype).at[self._index()].maximum(x)

    def total(self, x: mx.array) -> mx.array:
        if self.one_each:
            return x
        return mx.zeros(len(self.bucket_names), x.dtype).at[self._index()].add(x)

    def _index(self) -> mx.array:
        return mx.array(self.bucket_of, mx.int32)


class Layout:
    """Where the parameters and buckets of one optimizer are in its state.

    Attributes:
      place: path → the parameter's place in those arrays of the state that have an entry per parameter.
      parts: the parameters' buckets.
    """

    def __init__(self, hyper: Hyper, buckets: Buckets, diagnostics: bool) -> None:
        self.hyper, self.buckets, self.diagnostics = hyper, buckets, diagnostics
        self.place: dict[str, int] = {}
        self.parts = Partition((), ())
        self._keys: dict[str, Hashable] = {}

    @property
    def slots(self) -> tuple[str, ...]:
        """What is kept per parameter, like the parameter."""
        return ("m", "v") if self.hyper.leak is None else ("m", "v", "v_max")

    @property
    def scalars(self) -> tuple[str, ...]:
        """What is kept per parameter or per bucket, one scalar each."""
        exact = ("log_beta2",) if self.hyper.bias_correction == "exact" else ()
        return ("t", *exact, "ema", "skipped")

    def members(self, places: list[int]) -> Members:
        """The members of a step in which the parameters at `places`, ascending, have a gradient."""
        buckets = [self.parts.bucket_of[i] for i in places]
        columns = tuple(sorted(set(buckets)))
        number = {column: i for i, column in enumerate(columns)}
        return Members(
            bucket_of=tuple(number[column] for column in buckets),
            bucket_names=tuple(self.parts.bucket_names[column] for column in columns),
            rows=None if len(places) == len(self.place) else tuple(places),
            columns=None if len(columns) == len(self.parts.bucket_names) else columns,
        )

    def build(self, state: State, new: Mapping[str, mx.array], parameters: Any) -> None:
        """Bring `state` to the union of its own paths and those of `new`, keeping every value that is there."""
        _check_dtypes(new)
        self._flatten_moments(state)
        old = natural(state["m"])
        names = natural({*old, *new})
        if any(path not in self._keys for path in old):  # the state was loaded
            known = flat(parameters)
            loaded = {path: known.get(path, state["m"][path]) for path in old}
            new = {**loaded, **new}
        for path in names:
            if path not in self._keys:
                self._keys[path] = bucket_key(self.buckets, path, new[path])
        before, after = self._partition(old), self._partition(names)
        place = {path: i for i, path in enumerate(names)}
        # Where each parameter and each bucket was before; -1 for a new one.
        old_place = {path: i for i, path in enumerate(old)}
        parameters_from = [old_place.get(path, -1) for path in names]
        buckets_from = [-1] * len(after.bucket_names)
        for path, i in old_place.items():
            buckets_from[after.bucket_of[place[path]]] = before.bucket_of[i]

        dtype = precision((*new.values(), *state["m"].values()))
        self._start_steps(state, len(old), grown=len(names) > len(old) > 0)
        for name in self.scalars:
            if name == "t" and "t" in state and not state["t"].ndim:
                continue
            kind = mx.int32 if name in ("t", "skipped") else dtype
            self._check_scalars(state, name, len(old) if name in PER_PARAMETER else len(before.bucket_names), kind)
            state[name] = _rearranged(state[name], parameters_from if name in PER_PARAMETER else buckets_from, 0)
        if self.diagnostics:
            if "ring" not in state:
                state["ring"] = mx.full((WINDOW, len(KEYS), len(before.bucket_names)), math.nan, dtype)
                state["count"] = mx.array(0, mx.int32)
            state["ring"] = _rearranged(state["ring"], buckets_from, math.nan)
        for slot in self.slots:
            for path, p in new.items():
                if path not in state[slot]:
                    state[slot][path] = mx.zeros_like(p)
        self.place, self.parts = place, after

    def _flatten_moments(self, state: State) -> None:
        """Make one flat dictionary per slot of the moments in `state`; tree_unflatten nests those of a loaded one."""
        kept: State = {}
        for slot in ("m", "v", "v_max"):
            if slot in state or slot in self.slots:
                kept[slot] = flat(state.get(slot, {}))
        for slot in self.slots:
            if lacking := [path for path in kept["m"] if path not in kept[slot]]:
                raise ValueError(
                    f"the state has no {slot!r} of {lacking[0]!r}, which these settings need: load a state saved with "
                    "the same settings"
                )
        state.update(kept)

    def _partition(self, names: list[str]) -> Partition:
        return partition(lambda path, _: self._keys[path], names, names)

    def _start_steps(self, state: State, size: int, grown: bool) -> None:
        """Start the step count, and make it an array of `size` as soon as parameters may differ in it."""
        if not size:
            state["t"] = mx.array(0, mx.int32)
        if "t" in state and not state["t"].ndim and (grown or self.hyper.nonfinite == "skip"):
            state["t"] = mx.broadcast_to(state["t"], (size,))

    def _check_scalars(self, state: State, name: str, size: int, dtype: mx.Dtype) -> None:
        """Make state[name] zeros of `size` where a new state has none, and raise where a loaded one does not fit."""
        if name not in state:
            if state["m"]:
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


def _check_dtypes(parameters: Mapping[str, mx.array]) -> None:
    for path, p in parameters.items():
        if not mx.issubdtype(p.dtype, mx.floating):
            raise TypeError(
                f"parameter {path!r} must be an array of a real floating-point dtype; got {p.dtype}: "
                "freeze it, or leave it out, as model.trainable_parameters() does"
            )


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

    def key(path: str) -> list[tuple[bool, int, str]]:
        """For each part: numbers before words, numbers by their value, words by their letters."""
        return [(not part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in path.split(".")]

    return sorted(paths, key=key)


class Leaf(NamedTuple):
    """One leaf of a tree of gradients."""

    path: str
    gradient: mx.array | None
    parameter: mx.array


def leaves_of(gradients: Any, parameters: Any, path: str = "") -> Iterator[Leaf]:
    """The leaves of `gradients` beside their parameters, in the order of `tree_flatten`."""
    if isinstance(gradients, dict):
        children: Any = gradients.items()
    elif isinstance(gradients, (list, tuple)):
        children = enumerate(gradients)
    else:
        _check_leaf(path, gradients, parameters)
        yield Leaf(path, gradients, parameters)
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
        yield from leaves_of(child, parameter, below)


def _check_leaf(path: str, gradient: Any, parameter: Any) -> None:
    """Raise unless `parameter` is an array, of the gradient's shape where there is a gradient."""
    shape = getattr(gradient, "shape", None)
    if isinstance(parameter, mx.array) and (gradient is None or shape == parameter.shape):
        return
    given = "an array" if gradient is None else f"shape {shape}"
    found = f"shape {parameter.shape}" if isinstance(parameter, mx.array) else f"a {type(parameter).__name__}"
    raise ValueError(
        f"`gradients` has {given} at {path!r} and `parameters` has {found}: "
        "compute the gradients with respect to the same tree"
    )
