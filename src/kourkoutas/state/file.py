"""The portable form of an optimizer's state, the file that holds it (docs/checkpoints.md), and whether it fits.

NOTE: 16-bit moments are widened to float32, which is exact, and rounded back by an optimizer that keeps 16 bits.
Moments of a complex parameter are written as pairs (real, imaginary) along one more axis, the last.

NOTE: with `basis="eigen"` the moments are those in the basis, and the file has factors and bases of each parameter: of
a complex one along the axes of the pairs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kourkoutas import atomic
from kourkoutas.rule import Hyper

try:
    from safetensors.numpy import load, save
except ModuleNotFoundError:
    raise ImportError("kourkoutas.state needs safetensors: pip install 'kourkoutas-beta[state]'") from None

Array = NDArray[Any]

ENTRY, VERSION = "kourkoutas-state", 1
MOMENTS = ("m", "v", "v_max")
SCALARS = {
    "step": np.int64,
    "log_beta2": np.float64,
    "ema": np.float64,
    "skipped": np.int64,
    "seen": np.int64,
    "factor_scale": np.float64,
}
PER_BUCKET = ("ema", "skipped")
PER_AXIS = ("factor", "basis")
_OPTIONS = {
    "v_max": "`decay` or `max_ratio` (a v_max)",
    "log_beta2": "`bias_correction='exact'`",
    "skipped": "`nonfinite='skip'`",
    "seen": "`basis='eigen'`",
}


def kinds_of(hyper: Hyper) -> set[str]:
    """The optional parts of the state that an optimizer with these settings keeps."""
    kept = {
        "v_max": hyper.leak is not None,
        "log_beta2": hyper.bias_correction == "exact",
        "skipped": hyper.nonfinite == "skip",
        "seen": hyper.basis is not None,
    }
    return {kind for kind, there in kept.items() if there}


class Parameter(NamedTuple):
    """What a state must fit: one parameter of an optimizer."""

    shape: tuple[int, ...]
    bucket: Any  # a key, equal for parameters of one bucket
    is_complex: bool = False
    axes: tuple[int, ...] = ()  # those that have a factor, by `kourkoutas.eigenbasis.factored_axes`

    def bases(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its factors and bases."""
        lengths = (*self.shape, 2) if self.is_complex else self.shape
        shapes: dict[str, tuple[int, ...]] = {}
        for axis in self.axes:
            for what in PER_AXIS:
                shapes[f"{what}_{axis}"] = (lengths[axis], lengths[axis])
        return shapes


@dataclass(frozen=True)
class Portable:
    """The state of one optimizer, apart from any framework.

    Attributes:
      names: the parameters' names.
      bucket_of: for each parameter, the number of its bucket.
      count: how often the optimizer was called.
      moments: "m", "v" and with AMSGrad "v_max": name → array.
      scalars: "step" and with bias_correction="exact" "log_beta2", with one entry per parameter; "ema" and with
        nonfinite="skip" "skipped", with one entry per bucket; with basis="eigen" "seen" and "factor_scale", with one
        entry per parameter, 0 in "factor_scale" for one that has no factor.
      bases: with basis="eigen" "factor_0", "basis_0", "factor_1" and so on: name → matrix, for each axis of the
        parameter that has a factor. The eigenvectors are the columns of a basis.
    """

    names: tuple[str, ...]
    bucket_of: tuple[int, ...]
    count: int
    moments: dict[str, dict[str, Array]]
    scalars: dict[str, Array]
    bases: dict[str, dict[str, Array]] = field(default_factory=dict)

    @property
    def kinds(self) -> set[str]:
        return {*self.moments, *self.scalars} & _OPTIONS.keys()

    def arranged(self, here: Mapping[str, Parameter], kinds: set[str]) -> Portable:
        """This state in the order of the parameters `here`, with buckets in the order of their first members.

        `kinds` are the optional parts that the optimizer keeps. ValueError lists all that does not fit.
        """
        number = {name: i for i, name in enumerate(self.names)}
        if wrong := list(self._misfits(here, kinds if here else self.kinds, number)):
            raise ValueError(f"the state does not fit, and nothing was changed: {'; '.join(wrong)}")
        rows = [number[name] for name in here]
        buckets = [self.bucket_of[row] for row in rows]
        columns = list(dict.fromkeys(buckets))
        new_number = {bucket: i for i, bucket in enumerate(columns)}
        bucket_of = tuple(new_number[bucket] for bucket in buckets)
        scalars = {kind: x[columns if kind in PER_BUCKET else rows] for kind, x in self.scalars.items()}
        return Portable(tuple(here), bucket_of, self.count, self.moments, scalars, self.bases)

    def _misfits(self, here: Mapping[str, Parameter], kinds: set[str], number: Mapping[str, int]) -> Iterable[str]:
        there_only, here_only = sorted(number.keys() - here.keys()), sorted(here.keys() - number.keys())
        if there_only or here_only:
            yield (
                f"only the file has {_listed(there_only)}, only the optimizer has {_listed(here_only)}: give the "
                "parameters the same names in both"
            )
        for name in here:
            if name not in number:
                continue
            want = _described(tuple(here[name].shape), here[name].is_complex)
            for kept in self.moments.values():
                x = kept.get(name)
                found = "shape none" if x is None else _described(x.shape, np.iscomplexobj(x))
                if found != want:
                    yield f"{name!r} has {found} in the file and {want} here"
                    break
        if "seen" in kinds & self.kinds:
            yield from self._other_bases(here, number)
        if not there_only and not here_only:
            theirs = _buckets({name: self.bucket_of[i] for name, i in number.items()})
            ours = _buckets({name: each.bucket for name, each in here.items()})
            if moved := [name for name in here if theirs[name] != ours[name]]:
                yield f"other parameters share a bucket with {_listed(moved)} here: use the same `buckets`"
        for kind, x in self.scalars.items():
            entries = max(self.bucket_of, default=-1) + 1 if kind in PER_BUCKET else len(self.names)
            if len(x) != entries:
                yield f"`{kind}` has {len(x)} entries in the file, which lists {entries}"
        for kind in sorted(kinds ^ self.kinds):
            where = "with, the optimizer without" if kind in self.kinds else "without, the optimizer with"
            yield f"the file was written {where} {_OPTIONS[kind]}"

    def _other_bases(self, here: Mapping[str, Parameter], number: Mapping[str, int]) -> Iterable[str]:
        """What does not fit of the factors and bases."""
        for name, parameter in here.items():
            found = {kind: arrays[name].shape for kind, arrays in self.bases.items() if name in arrays}
            if name in number and found != parameter.bases():
                yield (
                    f"{name!r} has {_listed(sorted(found))} in the file and {_listed(sorted(parameter.bases()))} here: "
                    "use the same `basis_limit`"
                )


def _described(shape: tuple[int, ...], is_complex: bool) -> str:
    return f"complex shape {shape}" if is_complex else f"shape {shape}"


def _buckets(bucket_of: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Each parameter's bucket as the set of its members."""
    members: dict[Any, list[str]] = {}
    for name, bucket in bucket_of.items():
        members.setdefault(bucket, []).append(name)
    sets = {bucket: frozenset(names) for bucket, names in members.items()}
    return {name: sets[bucket] for name, bucket in bucket_of.items()}


def _listed(names: list[str]) -> str:
    """Names for an error: the first ten, and how many more."""
    if not names:
        return "none"
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return ", ".join(map(repr, names[:10])) + more


def made(
    here: Mapping[str, Parameter],
    count: int,
    moments: Mapping[str, Any],
    bases: Mapping[str, dict[str, Array]] | None = None,
    **scalars: Any,
) -> Portable:
    """The state of an optimizer with these parameters; what it does not keep is None."""
    place: dict[Any, int] = {}
    bucket_of = tuple(place.setdefault(each.bucket, len(place)) for each in here.values())
    if len(scalars["ema"]) != len(place):
        raise ValueError(
            f"the state has {len(scalars['ema'])} buckets and `buckets` gives {len(place)}: use the `buckets` that "
            "the state was made with"
        )
    kept = {kind: dict(zip(here, arrays, strict=True)) for kind, arrays in moments.items() if arrays is not None}
    wide = {kind: np.asarray(x).astype(SCALARS[kind]) for kind, x in scalars.items() if x is not None}
    return Portable(tuple(here), bucket_of, count, kept, wide, dict(bases or {}))


def write(state: Portable, file: str | Path) -> None:
    """Write the file; a kill leaves the old one or the new one."""
    tensors: dict[str, Array] = {}
    paired: set[str] = set()
    for kind, arrays in state.moments.items():
        for name, x in arrays.items():
            if np.iscomplexobj(x):
                paired.add(name)
                x = np.stack([x.real, x.imag], -1)
            tensors[f"{kind}/{name}"] = _contiguous(x)
    for kind, arrays in state.bases.items():
        for name, x in arrays.items():
            tensors[f"{kind}/{name}"] = _contiguous(x)
    for kind, x in state.scalars.items():
        tensors[kind] = _contiguous(x)
    header: dict[str, Any] = {
        "version": VERSION,
        "parameters": [{"name": n, "bucket": b} for n, b in zip(state.names, state.bucket_of, strict=True)],
        "complex": sorted(paired),
        "count": state.count,
    }
    header["sha256"] = _checksum(header, tensors)
    metadata = {ENTRY: json.dumps(header, ensure_ascii=False)}
    atomic.replace(Path(file), lambda stream: stream.write(save(tensors, metadata)))


def _contiguous(x: Array) -> Array:
    """x in one piece; NumPy would make an array of one entry of a 0-d one."""
    return np.ascontiguousarray(x).reshape(np.shape(x))


def read(file: str | Path) -> Portable:
    """Read a file; ValueError says what is wrong with one that is foreign, cut short, damaged or too new."""
    header, tensors = _opened(Path(file))
    if header is None:
        raise ValueError(
            f"{file}: a safetensors file, but not a state of Kourkoutas-β; it holds {_listed(sorted(tensors))}: write "
            "one with kourkoutas.state.torch, .optax or .mlx"
        )
    if header.get("version") != VERSION:
        raise ValueError(
            f"{file}: version {header.get('version')} of the format, and this release reads version {VERSION}: "
            "install a newer release of kourkoutas-beta"
        )
    if header.get("sha256") != _checksum(header, tensors):
        raise ValueError(f"{file}: its checksum does not fit, so it was damaged or edited: write or copy it again")
    moments: dict[str, dict[str, Array]] = {}
    bases: dict[str, dict[str, Array]] = {}
    paired = set(header["complex"])
    for key in [key for key in tensors if key not in SCALARS]:
        kind, _, name = key.partition("/")
        what, _, axis = kind.partition("_")
        if what in PER_AXIS and axis.isdecimal():
            bases.setdefault(kind, {})[name] = tensors.pop(key)
            continue
        if kind not in MOMENTS:
            raise ValueError(
                f"{file}: holds {key!r}, which this release does not know: read it with the release that wrote it"
            )
        x = tensors.pop(key)
        if name in paired:
            x = x.view(np.result_type(x.dtype, np.complex64)).squeeze(-1)
        moments.setdefault(kind, {})[name] = x
    names = tuple(entry["name"] for entry in header["parameters"])
    bucket_of = tuple(entry["bucket"] for entry in header["parameters"])
    return Portable(names, bucket_of, header["count"], moments, tensors, bases)


def _opened(file: Path) -> tuple[dict[str, Any] | None, dict[str, Array]]:
    """Our entry of the metadata, if there is one, and the tensors of any safetensors file."""
    data = file.read_bytes()
    try:
        # The header's length in 8 bytes, then the header, which `load` checks but does not hand out.
        tensors: dict[str, Array] = load(data)
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__") or {}
        header = json.loads(metadata[ENTRY]) if ENTRY in metadata else None
        if not isinstance(header, dict | None):
            raise ValueError(f"its {ENTRY} is {header!r}")
    except Exception as error:  # safetensors raises its own exceptions, and numpy's for dtypes it does not know
        raise ValueError(f"{file}: not a whole safetensors file ({error}): write or copy it again") from None
    return header, tensors


def _checksum(header: Mapping[str, Any], tensors: Mapping[str, Array]) -> str:
    """SHA-256 of the header's JSON with sorted keys, and of every tensor's name, dtype, shape and bytes, by name."""
    rest = {key: value for key, value in header.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"\n{name} {x.dtype.name} {list(x.shape)}\n".encode())
        digest.update(np.ascontiguousarray(x).tobytes())
    return digest.hexdigest()
