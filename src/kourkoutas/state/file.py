"""The portable form of an optimizer's state, and the file that holds it.

The file is a safetensors file. Per parameter, under its name:

    m/NAME, v/NAME        the moments, float32 or float64, in the parameter's shape
    v_max/NAME            with AMSGrad

Per parameter or bucket, as vectors in the order of the header's lists:

    step                  int64, per parameter: the steps it has taken
    log_beta2             float64, per parameter: Σ log β2, with bias_correction="exact"
    ema                   float64, per bucket: r, the moving average of the pooled norm
    skipped               int64, per bucket, with nonfinite="skip"

The safetensors header's metadata has one entry, "kourkoutas-state", which is JSON:

    version               1
    parameters            [{"name": "...", "bucket": 0}, ...]
    buckets               ["...", ...]: names for people; buckets are told apart by their members
    count                 how often the optimizer was called, skipped steps included; schedules go on from it
    sha256                of all of this and of the tensors, as `_checksum` forms it

NOTE: 16-bit moments are widened to float32, which is exact, and rounded back by an optimizer that keeps 16 bits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kourkoutas import atomic

ENTRY, VERSION = "kourkoutas-state", 1
MOMENTS = ("m", "v", "v_max")
VECTORS = {"step": "int64", "log_beta2": "float64", "ema": "float64", "skipped": "int64"}
PER_BUCKET = ("ema", "skipped")

Array = NDArray[Any]
Rename = Mapping[str, str] | Callable[[str], str]


@dataclass(frozen=True)
class Portable:
    """The state of one optimizer, apart from any framework; what the settings do not need is None.

    Attributes:
      names: the parameters' names.
      bucket_of: for each parameter, the place of its bucket.
      bucket_names: for people.
      count: how often the optimizer was called.
      m, v, v_max: name → array.
      step, log_beta2: one entry per parameter.
      ema, skipped: one entry per bucket.
    """

    names: tuple[str, ...]
    bucket_of: tuple[int, ...]
    bucket_names: tuple[str, ...]
    count: int
    m: dict[str, Array]
    v: dict[str, Array]
    v_max: dict[str, Array] | None
    step: Array
    log_beta2: Array | None
    ema: Array
    skipped: Array | None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The optional parts that are there."""
        return tuple(kind for kind in ("v_max", "log_beta2", "skipped") if getattr(self, kind) is not None)

    @property
    def buckets(self) -> dict[str, frozenset[str]]:
        """Each parameter's bucket as the set of its members."""
        members: dict[int, set[str]] = {}
        for name, bucket in zip(self.names, self.bucket_of, strict=True):
            members.setdefault(bucket, set()).add(name)
        return {name: frozenset(members[b]) for name, b in zip(self.names, self.bucket_of, strict=True)}

    def entry(self, vector: str, name: str) -> Any:
        """The entry of `vector` that is the parameter's own, or its bucket's."""
        at = self.names.index(name)
        return getattr(self, vector)[self.bucket_of[at] if vector in PER_BUCKET else at]

    def renamed(self, rename: Rename) -> Portable:
        """The same state under other names: a dictionary of those that change, or a function of the old name."""
        new = {name: rename(name) if callable(rename) else rename.get(name, name) for name in self.names}
        if not callable(rename) and (unknown := sorted(set(rename) - set(self.names))):
            raise ValueError(f"`rename` has {listed(unknown)}, which the state has not; it has {listed(self.names)}")
        if len(set(new.values())) < len(new):
            double = sorted({y for y in new.values() if list(new.values()).count(y) > 1})
            raise ValueError(f"`rename` gives several parameters the name {listed(double)}: give each its own")

        def moved(moments: dict[str, Array]) -> dict[str, Array]:
            return {new[name]: x for name, x in moments.items()}

        return replace(
            self,
            names=tuple(new.values()),
            m=moved(self.m),
            v=moved(self.v),
            v_max=None if self.v_max is None else moved(self.v_max),
        )


def write(state: Portable, file: str | Path) -> None:
    """Write the file; a kill leaves the old one or the new one."""
    save, _ = _safetensors()
    tensors = {f"{kind}/{name}": x for kind in MOMENTS for name, x in (getattr(state, kind) or {}).items()}
    tensors |= {name: getattr(state, name) for name in VECTORS if getattr(state, name) is not None}
    tensors = {name: np.ascontiguousarray(x).reshape(np.shape(x)) for name, x in tensors.items()}
    header: dict[str, Any] = {
        "version": VERSION,
        "parameters": [{"name": n, "bucket": b} for n, b in zip(state.names, state.bucket_of, strict=True)],
        "buckets": list(state.bucket_names),
        "count": state.count,
    }
    header["sha256"] = _checksum(header, tensors)
    metadata = {ENTRY: json.dumps(header, ensure_ascii=False)}
    atomic.replace(Path(file), lambda stream: stream.write(save(tensors, metadata)))


def read(file: str | Path) -> Portable:
    """Read a file; ValueError says what is wrong with one that is foreign, cut short, damaged or too new."""
    header, tensors = _opened(Path(file))
    if header is None:
        raise ValueError(
            f"{file}: a safetensors file, but not a state of Kourkoutas-β; it holds {listed(sorted(tensors))}: write "
            "one with kourkoutas.state.torch, .optax or .mlx"
        )
    if header.get("version") != VERSION:
        raise ValueError(
            f"{file}: version {header.get('version')} of the format, and this release reads version {VERSION}: "
            "install a newer release of kourkoutas-beta"
        )
    if header.get("sha256") != _checksum(header, tensors):
        raise ValueError(f"{file}: its checksum does not fit, so it was damaged or edited: write or copy it again")
    if strange := sorted(name for name in tensors if name not in VECTORS and name.partition("/")[0] not in MOMENTS):
        raise ValueError(
            f"{file}: holds {listed(strange)}, which this release does not know: read it with the release that wrote it"
        )
    return _portable(header, tensors)


def _portable(header: dict[str, Any], tensors: dict[str, Array]) -> Portable:
    def moments(kind: str) -> dict[str, Array]:
        return {name.partition("/")[2]: x for name, x in tensors.items() if name.startswith(f"{kind}/")}

    return Portable(
        names=tuple(entry["name"] for entry in header["parameters"]),
        bucket_of=tuple(entry["bucket"] for entry in header["parameters"]),
        bucket_names=tuple(header["buckets"]),
        count=header["count"],
        m=moments("m"),
        v=moments("v"),
        v_max=moments("v_max") or None,
        **{name: tensors.get(name) for name in VECTORS},  # type: ignore[arg-type]
    )


def _opened(file: Path) -> tuple[dict[str, Any] | None, dict[str, Array]]:
    """Our entry of the metadata, if there is one, and the tensors of any safetensors file."""
    _, load = _safetensors()
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
    told = {key: value for key, value in header.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"\n{name} {x.dtype.name} {list(x.shape)}\n".encode())
        digest.update(np.ascontiguousarray(x).tobytes())
    return digest.hexdigest()


def listed(names: Any) -> str:
    """Names for an error: the first ten, and how many more."""
    names = list(names)
    return ", ".join(repr(name) for name in names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")


def _safetensors() -> tuple[Callable[..., bytes], Callable[[bytes], dict[str, Array]]]:
    try:
        from safetensors.numpy import load, save
    except ModuleNotFoundError:
        raise ImportError("kourkoutas.state needs safetensors: pip install 'kourkoutas-beta[state]'") from None
    return save, load
