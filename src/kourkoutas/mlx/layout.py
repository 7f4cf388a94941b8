"""The state: which arrays there are, who has which entry in them, and how it grows when parameters appear.

The state holds arrays only, in one flat dictionary per kind, so that it saves with `tree_flatten` and
`mx.save_safetensors` and is captured by `mx.compile`:

    step, learning_rate, alpha         scalars
    m, v, v_max                        path → array, in the parameter's dtype
    t                                  step count: one while all parameters share it, else as log_beta2
    log_beta2                          (P,), one scalar per parameter, paths in natural order
    ema, skipped                       (B,), one scalar per bucket
    ring, count                        as `kourkoutas.trace` describes them, with `diagnostics=True`

and with `basis="eigen"`, when m, v and v_max are float32 at least:

    seen                               (P,), how many gradients each parameter had, skipped ones included
    basis_age                          path → an array of which only the length counts, see below
    factor_scale                       shape → (n,), s of `kourkoutas.eigenbasis.factor_weights`
    factor_0, factor_1, …              shape → (n, length, length), the factors along each axis
    basis_0, basis_1, …                shape → (n, length, length), their eigenvectors as columns

A shape is written like "128x64"; n parameters have it, paths in natural order. So all of them take part in one product
and in one QR, and nothing is copied together for that.

NOTE: `t` is 0-d as long as every parameter has had a gradient at every step. All of them then share their bias
corrections, which spares MLX two small operations per parameter and step. When it becomes an array of (P,), the state
has another shape, and `mx.compile` traces a compiled step again.

NOTE: the length of a `basis_age` is 0 before the parameter's first gradient, 1 when its basis was just made or has just
turned, and grows by one with each gradient. A length is known without evaluating anything, and also while `mx.compile`
traces a step, where no value is known. So a compiled step, too, makes and turns the basis in time. It is traced once
for each length, `basis_every` + 1 times in all.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from kourkoutas.buckets import Partition, bucket_key, partition
from kourkoutas.eigenbasis import factored_axes
from kourkoutas.rule import Buckets, Hyper
from kourkoutas.trace import KEYS, WINDOW

State = dict[str, Any]
PER_PARAMETER = ("t", "log_beta2", "seen")
COUNTS = ("t", "seen", "skipped")


def precision(arrays: Iterable[mx.array]) -> mx.Dtype:
    """The dtype of scalars and of elementwise arithmetic: float64 as soon as one of `arrays` is, else float32."""
    return mx.float64 if any(x.dtype == mx.float64 for x in arrays) else mx.float32


def moment_dtype(hyper: Hyper, p: mx.array) -> mx.Dtype:
    """That of the parameter; in a basis at least float32, since there the entries of v lie further apart."""
    return p.dtype if hyper.basis is None else precision([p])


class Kind(NamedTuple):
    """The parameters of one shape, if parameters of that shape have a basis.

    Attributes:
      shape: as it is written in the state.
      lengths: (axis, its length) of the axes that have a factor.
      paths: of the parameters, in natural order.
    """

    shape: str
    lengths: tuple[tuple[int, int], ...]
    paths: tuple[str, ...]

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(axis for axis, _ in self.lengths)

    def start(self, dtype: mx.Dtype) -> dict[str, mx.array]:
        """What is kept of one parameter before its first gradient, by its name in the state."""
        first = {"factor_scale": mx.zeros((), dtype)}
        for axis, length in self.lengths:
            first[f"factor_{axis}"] = mx.zeros((length, length), dtype)
            first[f"basis_{axis}"] = mx.eye(length, dtype=dtype)
        return first


def kinds_of(moments: Mapping[str, mx.array], paths: Iterable[str], limit: int) -> dict[str, Kind]:
    """The kinds of the parameters `paths`, by their shapes, which `moments` have as well."""
    kinds: dict[str, Kind] = {}
    for path in paths:
        lengths = moments[path].shape
        shape = "x".join(map(str, lengths))
        axes = factored_axes(lengths, limit)
        if axes:
            kind = kinds.get(shape, Kind(shape, tuple((axis, lengths[axis]) for axis in axes), ()))
            kinds[shape] = kind._replace(paths=(*kind.paths, path))
    return kinds


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
      kinds: the parameters that have a basis.
    """

    def __init__(self, hyper: Hyper, buckets: Buckets, diagnostics: bool) -> None:
        self.hyper, self.buckets, self.diagnostics = hyper, buckets, diagnostics
        self.place: dict[str, int] = {}
        self.parts = Partition((), ())
        self.kinds: tuple[Kind, ...] = ()
        self._keys: dict[str, Hashable] = {}

    @property
    def slots(self) -> tuple[str, ...]:
        """What is kept per parameter, like the parameter."""
        return ("m", "v") if self.hyper.leak is None else ("m", "v", "v_max")

    @property
    def scalars(self) -> tuple[str, ...]:
        """What is kept per parameter or per bucket, one scalar each."""
        exact = ("log_beta2",) if self.hyper.bias_correction == "exact" else ()
        seen = () if self.hyper.basis is None else ("seen",)
        return ("t", *exact, *seen, "ema", "skipped")

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
            kind = mx.int32 if name in COUNTS else dtype
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
                    state[slot][path] = mx.zeros(p.shape, moment_dtype(self.hyper, p))
        if self.hyper.basis is not None:
            self._build_bases(state, old, names)
        self.place, self.parts = place, after

    def _build_bases(self, state: State, old: list[str], names: list[str]) -> None:
        """The same for what `basis="eigen"` keeps; the state was of the parameters `old`, and is of `names` now."""
        before = kinds_of(state["m"], old, self.hyper.basis_limit)
        after = kinds_of(state["m"], names, self.hyper.basis_limit)
        self._check_bases(state, before)
        for kind in after.values():
            known = before[kind.shape].paths if kind.shape in before else ()
            dtype = precision(state["m"][path] for path in kind.paths)
            for name, first in kind.start(dtype).items():
                stacks = state.setdefault(name, {})
                if kind.paths != known:
                    stacks[kind.shape] = _grown(stacks.get(kind.shape), known, kind.paths, first)
        for path in names:
            state["basis_age"].setdefault(path, basis_age(0))
        self.kinds = tuple(after.values())

    def _check_bases(self, state: State, kinds: Mapping[str, Kind]) -> None:
        """Raise unless the state has the factors and bases of exactly these kinds."""
        wanted, found = {}, {}
        for kind in kinds.values():
            for name, first in kind.start(mx.float32).items():
                wanted[name, kind.shape] = (len(kind.paths), *first.shape)
        for name, stacks in state.items():
            if name.startswith(("factor_", "basis_")) and name != "basis_age":
                for shape, x in stacks.items():
                    found[name, shape] = tuple(x.shape)
        for name, shape in {**wanted, **found}:
            here, there = wanted.get((name, shape), "none"), found.get((name, shape), "none")
            if here != there:
                raise ValueError(
                    f"the state's {name!r} of {shape!r} has shape {there} but the parameters and `basis_limit` "
                    f"{self.hyper.basis_limit} give {here}: "
                    "load a state saved with the same parameters and `basis_limit`"
                )

    def _flatten_moments(self, state: State) -> None:
        """Make one flat dictionary per slot of the moments in `state`; tree_unflatten nests those of a loaded one."""
        needed = self.slots if self.hyper.basis is None else (*self.slots, "basis_age")
        if "basis_age" in state and "basis_age" not in needed:
            raise ValueError(
                "the state was made with basis='eigen' and its moments lie in that basis, but `basis` is None: "
                "construct with basis='eigen', or begin with a new state"
            )
        kept: State = {}
        for slot in ("m", "v", "v_max", "basis_age"):
            if slot in state or slot in needed:
                kept[slot] = flat(state.get(slot, {}))
        for slot in needed:
            if lacking := [path for path in kept["m"] if path not in kept[slot]]:
                raise ValueError(
                    f"the state has no {slot!r} of {lacking[0]!r}, which these settings need: "
                    "load a state saved with the same settings"
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


def _grown(x: mx.array | None, old: Sequence[str], new: Sequence[str], first: mx.array) -> mx.array:
    """The stack x of the parameters `old` as one of the parameters `new`; what is new begins with `first`."""
    row = {path: i for i, path in enumerate(old)}
    rows = mx.array([row.get(path, len(old)) for path in new], mx.int32)
    known = [] if x is None else [x.astype(first.dtype)]
    return mx.concatenate([*known, first[None]])[rows]


def basis_age(length: int) -> mx.array:
    return mx.zeros((length,), mx.bool_)


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
