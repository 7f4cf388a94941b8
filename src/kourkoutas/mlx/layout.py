"""The state: which arrays there are, who has which entry in them, and how it grows when parameters appear.

The state holds arrays only, in one flat dictionary per kind, so that it saves with `tree_flatten` and
`mx.save_safetensors` and is captured by `mx.compile`:

    step, learning_rate, alpha         scalars
    m, v, v_max                        path → array, in the parameter's dtype
    t                                  step count: one while all parameters share it, else as log_beta2
    log_beta2                          (P,), one entry per parameter, paths in natural order
    ema, skipped                       (B,), one entry per bucket
    ring, count                        as `kourkoutas.trace` describes them, with `diagnostics=True`

and with `basis="eigen"`, when m, v and v_max are float32 at least:

    seen                               (P,), how many gradients a parameter had, skipped ones included
    basis_age                          path → an array of which only the length counts, see below
    factor_scale                       shape → (n,), s of `kourkoutas.eigenbasis.factor_weights`
    factor_0, factor_1, …              shape → (n, length, length), the factors along each axis
    basis_0, basis_1, …                shape → (n, length, length), their eigenvectors as columns

A shape is written as in "128x64"; n parameters have it, paths in natural order. So all of them take part in one product,
and in one QR, and nothing is copied together for it.

NOTE: `t` is one number as long as every parameter has had a gradient at every step. All of them then share their bias
corrections, which spares MLX two small operations per parameter and step. That it becomes a vector otherwise is seen in
the state, by a compiled step as well.

NOTE: the length of a `basis_age` is 0 before the parameter's first gradient, 1 when its basis was made or has turned, and
grows by one with each gradient. A length is known without waiting for any array, and also while `mx.compile` traces a
step, where no number is known: so a compiled step, too, makes and turns the basis in time. MLX traces it once for each
length there is, `basis_every` + 1 times in all.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
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


class Kind(NamedTuple):
    """The parameters of one shape, if that shape has a basis.

    Attributes:
      shape: as it is written in the state.
      lengths: axis → its length, of the axes that have a factor.
      paths: of the parameters, in natural order.
    """

    shape: str
    lengths: tuple[tuple[int, int], ...]
    paths: tuple[str, ...]

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(axis for axis, _ in self.lengths)

    def start(self, dtype: mx.Dtype) -> dict[str, mx.array]:
        """What is kept of a parameter that has had no gradient, by its name in the state."""
        first = {"factor_scale": mx.zeros((), dtype)}
        for axis, length in self.lengths:
            first[f"factor_{axis}"] = mx.zeros((length, length), dtype)
            first[f"basis_{axis}"] = mx.eye(length, dtype=dtype)
        return first


def kinds_of(moments: Mapping[str, mx.array], paths: Iterable[str], limit: int) -> dict[str, Kind]:
    """The kinds among some parameters, by their shape; `moments` have the shapes."""
    kinds: dict[str, Kind] = {}
    for path in paths:
        lengths = moments[path].shape
        shape = "x".join(map(str, lengths))
        if axes := factored_axes(lengths, limit):
            known = kinds.get(shape, Kind(shape, tuple((axis, lengths[axis]) for axis in axes), ()))
            kinds[shape] = known._replace(paths=(*known.paths, path))
    return kinds


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
      kinds: the parameters that have a basis, by their shape.
    """

    def __init__(self, hyper: Hyper, buckets: Buckets, diagnostics: bool) -> None:
        self.hyper, self.buckets, self.diagnostics = hyper, buckets, diagnostics
        self.number: dict[str, int] = {}
        self.parts = Partition((), ())
        self.kinds: tuple[Kind, ...] = ()
        self._keys: dict[str, Hashable] = {}

    @property
    def slots(self) -> tuple[str, ...]:
        """What is kept per parameter, like the parameter."""
        return ("m", "v") if self.hyper.leak is None else ("m", "v", "v_max")

    @property
    def vectors(self) -> tuple[str, ...]:
        """What is kept per parameter or bucket, as one number."""
        exact = ("log_beta2",) if self.hyper.bias_correction == "exact" else ()
        seen = ("seen",) if self.hyper.basis else ()
        return ("t", *exact, *seen, "ema", "skipped")

    def moment_dtype(self, p: mx.array) -> mx.Dtype:
        """In a basis the entries of v may lie further apart than float16 reaches, or bfloat16 resolves."""
        return p.dtype if self.hyper.basis is None else precision([p])

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
        needed = (*self.slots, "basis_age") if self.hyper.basis else self.slots
        held = [name for name in ("m", "v", "v_max", "basis_age") if name in state or name in needed]
        kept: State = {name: flat(state.get(name, {})) for name in held}
        if self.hyper.basis is None and "basis_age" in kept:
            raise ValueError(
                "the state has a 'basis_age', so its m and v lie in an eigenbasis, but `basis` is None: construct with "
                "basis='eigen', or start with a new state"
            )
        for slot in needed:
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
            self._extend(state, name, source, size, mx.int32 if name in COUNTS else dtype, bool(old))
        if self.diagnostics:
            if "ring" not in state:
                state["ring"] = mx.full((WINDOW, len(KEYS), len(before.bucket_names)), math.nan, dtype)
                state["count"] = mx.array(0, mx.int32)
            state["ring"] = _rearranged(state["ring"], bucket_from_old, math.nan)
        for slot in self.slots:
            for path, p in new.items():
                if path not in state[slot]:
                    state[slot][path] = mx.zeros(p.shape, self.moment_dtype(p))
        if self.hyper.basis is not None:
            self._build_bases(state, old, names)
        self.number, self.parts = number, after

    def _build_bases(self, state: State, old: list[str], names: list[str]) -> None:
        """The same for what `basis="eigen"` keeps."""
        before = kinds_of(state["m"], old, self.hyper.basis_limit)
        after = kinds_of(state["m"], names, self.hyper.basis_limit)
        self._check_bases(state, before)
        for kind in after.values():
            known = before[kind.shape].paths if kind.shape in before else ()
            row = {path: i for i, path in enumerate(known)}
            rows = [row.get(path, len(known)) for path in kind.paths]
            dtype = precision(state["m"][path] for path in kind.paths)
            for name, first in kind.start(dtype).items():
                held = state.setdefault(name, {})
                if rows != list(range(len(known))):
                    parts = [held[kind.shape].astype(dtype)] if known else []
                    held[kind.shape] = mx.concatenate([*parts, first[None]])[mx.array(rows, mx.int32)]
        for path in names:
            state["basis_age"].setdefault(path, age(0))
        self.kinds = tuple(after.values())

    def _check_bases(self, state: State, kinds: Mapping[str, Kind]) -> None:
        """Raise unless the state has the factors and bases of exactly these kinds."""
        wanted = {}
        for kind in kinds.values():
            for name, first in kind.start(mx.float32).items():
                wanted[name, kind.shape] = (len(kind.paths), *first.shape)
        found = {}
        for name, held in state.items():
            if name.startswith(("factor_", "basis_")) and name != "basis_age":
                found.update({(name, shape): tuple(x.shape) for shape, x in held.items()})
        for key in {**wanted, **found}:
            if wanted.get(key) != found.get(key):
                name, shape = key
                raise ValueError(
                    f"the state's {name!r} of {shape!r} has shape {found.get(key)} but the parameters and "
                    f"`basis_limit` {self.hyper.basis_limit} give {wanted.get(key)}: load a state saved with the same "
                    "parameters and `basis_limit`"
                )

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


def age(length: int) -> mx.array:
    """A `basis_age`."""
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
