"""One declarative table of cases that every front end runs against the oracle.

A front end's test supplies one function, `run(case) -> {name: array}`: build the optimizer from `case.hyper`,
`case.buckets` and `case.lr`, start from `case.params()`, feed `case.grads()` (name → array, or None where a gradient is
missing) and return the final parameters. `check(case, run(case))` does the rest.

`CASES` holds every combination of options; `marked(CASES)` marks as slow what is not in `CORE`, in which any three
values of options meet already.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kourkoutas.oracle import Oracle
from kourkoutas.rule import Hyper

SHAPES = {
    "enc.weight": (4, 3),
    "enc.bias": (4,),
    "dec.weight": (4, 3),
    "dec.bias": (3,),
    "out.gain": (),
}
# No axis is longer than the others together, or it has no factor: of a gradient with fewer columns than rows, the
# eigenvectors to the eigenvalue 0 are not determined, and every library has its own.
EIGEN_SHAPES = {
    "enc.weight": (4, 4),
    "enc.bias": (4,),
    "dec.weight": (4, 4),
    "dec.bias": (3,),
    "out.gain": (),
    "conv.weight": (3, 2, 3),
    "table.weight": (6, 4),
    "row.weight": (1, 6),
}
STEPS = 24
TOLERANCE = {"float64": 1e-12, "float32": 2e-6}

OPTIONS: dict[str, tuple[Any, ...]] = {
    "bias_correction": ("none", "beta2max", "exact"),
    "decay": (None, 0, 0.98, 1),
    "max_ratio": (None, 3, 0.5),
    "adaptive_tiny": (False, True),
    "warmup_steps": (0, 7),
}
BUCKETS = ("parameter", "module", "shape", "global")
DTYPES = ("float64", "float32")


@dataclass(frozen=True)
class Case:
    """One configuration and its inputs."""

    id: str
    options: Mapping[str, Any]
    buckets: str
    dtype: str
    lr: float = 1e-2
    missing: bool = True
    seed: int = field(default=0)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return EIGEN_SHAPES if "basis" in self.options else SHAPES

    @property
    def hyper(self) -> Hyper:
        return Hyper(**self.options)

    def params(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng([11, self.seed])
        return {name: _round(rng.normal(size=shape)).astype(self.dtype) for name, shape in self.shapes.items()}

    def grads(self) -> list[dict[str, np.ndarray | None]]:
        """Calm stretches, spikes up to 300×, zero gradients, all-zero steps, and gradients that come and go."""
        return _gradients(tuple(self.shapes.items()), self.dtype, self.missing, self.seed)

    @functools.cached_property
    def expected(self) -> Oracle:
        oracle = Oracle(self.params(), self.hyper, buckets=self.buckets, lr=self.lr)
        for g in self.grads():
            oracle.step(g)
        return oracle


@functools.cache
def _gradients(
    shapes: tuple[tuple[str, tuple[int, ...]], ...], dtype: str, missing: bool, seed: int
) -> list[dict[str, np.ndarray | None]]:
    rng = np.random.default_rng([12, seed])
    steps: list[dict[str, np.ndarray | None]] = []
    for t in range(STEPS):
        scale = {4: 100.0, 13: 300.0}.get(t, 1.0) * (1e-6 if 16 <= t < 18 else 1.0)
        normal = {name: _round(rng.normal(size=shape)).astype(dtype) for name, shape in shapes}
        g: dict[str, np.ndarray | None] = {name: (x * scale).astype(dtype) for name, x in normal.items()}
        if t in (6, 19):  # one layer sees a zero gradient, then every layer does
            for name in ("enc.weight", "enc.bias") if t == 6 else tuple(g):
                g[name] = np.zeros(dict(shapes)[name], dtype)
        if missing:
            if t == 0 or 8 <= t < 11:
                g["dec.weight"] = None
            if 9 <= t < 12:
                g["enc.bias"] = None
            if t in (2, 15):
                g["out.gain"] = None
            if t == 21:
                g = dict.fromkeys(g)
        for x in g.values():
            if x is not None:
                x.setflags(write=False)  # shared by all cases
        steps.append(g)
    return steps


def _round(x: Any) -> np.ndarray:
    """To float32 and back, so that every dtype of the table sees the same numbers."""
    return np.asarray(x, np.float32).astype(np.float64)


def _table() -> list[Case]:
    """Every combination of options, in both dtypes; the bucket kind cycles so that it meets every pair of values."""
    cases = []
    for levels in itertools.product(*(range(len(v)) for v in OPTIONS.values())):
        options = {name: values[i] for (name, values), i in zip(OPTIONS.items(), levels, strict=True)}
        bias, decay, ratio, tiny, warm = levels
        buckets = BUCKETS[(bias + decay + 2 * ratio + 3 * tiny + 2 * warm) % 4]
        for dtype in DTYPES:
            tag = "-".join(str(v) for v in options.values())
            cases.append(Case(f"{tag}-{buckets}-{dtype}", options, buckets, dtype))
    for dtype in DTYPES:
        for name, options in EXTRA.items():
            cases.append(Case(f"{name}-{dtype}", options, "shape", dtype))
        for i, (name, options) in enumerate(EIGEN.items()):
            case = {"basis": "eigen", "basis_every": 3, "basis_limit": 4, **options}
            cases.append(Case(f"eigen-{name}-{dtype}", case, BUCKETS[i % len(BUCKETS)], dtype))
    return cases


EXTRA: dict[str, dict[str, Any]] = {
    "weight-decay": {"weight_decay": 0.1},
    "weight-decay-full": {"weight_decay": 0.1, "decay": 0.98, "max_ratio": 3, "adaptive_tiny": True},
    "no-momentum": {"beta1": 0.0},
    "fixed": {"beta2_min": 0.95, "beta2_max": 0.95},
    "wide": {"beta2_min": 0.0, "beta2_max": 0.9999, "alpha": 0.5, "bias_correction": "exact"},
    "big-eps": {"eps": 1e-2, "tiny_spike": 1e-1, "tiny_denom": 1e-2, "adaptive_tiny": True},
    "lr-warmup": {"lr_warmup": True, "bias_correction": "exact", "weight_decay": 0.1, "max_ratio": 0.5},
}

# In the eigenbasis, with axes of up to 4 entries and a turn every 3 steps unless a case says otherwise.
EIGEN: dict[str, dict[str, Any]] = {
    "plain": {},
    "exact": {"bias_correction": "exact"},
    "soap": {"beta1": 0.95, "beta2_min": 0.95, "beta2_max": 0.95, "bias_correction": "exact"},
    "warmup": {"warmup_steps": 7, "bias_correction": "none"},
    "every-step": {"basis_every": 1, "basis_memory": 0.5},
    "full": {"decay": 0.98, "max_ratio": 3, "adaptive_tiny": True, "weight_decay": 0.1},
    "amsgrad": {"decay": 1, "max_ratio": 0.5, "lr_warmup": True, "bias_correction": "exact"},
    "skip": {"nonfinite": "skip", "basis_limit": 3},
}

CASES = _table()


def _core() -> frozenset[str]:
    """The ids of a part of the table in which any three values of options meet, and any value meets any kind of bucket.

    Always the case that adds most is taken next. All extra cases belong to it, and every case in both dtypes.
    """
    meets: dict[str, set[frozenset[tuple[str, Any]]]] = {}
    for case in CASES:
        if set(case.options) == set(OPTIONS):
            values = tuple(case.options.items())
            met = {frozenset(three) for three in itertools.combinations(values, 3)}
            met |= {frozenset((value, ("buckets", case.buckets))) for value in values}
            meets.setdefault(case.id.removesuffix(case.dtype), set()).update(met)
    missing = set().union(*meets.values())
    chosen = []
    while missing:
        chosen.append(max(meets, key=lambda name: len(meets[name] & missing)))
        missing -= meets[chosen[-1]]
    extra = [case.id for case in CASES if case.id.removesuffix(case.dtype) not in meets]
    return frozenset([*extra, *(name + dtype for name in chosen for dtype in DTYPES)])


CORE = _core()


def marked(cases: Sequence[Case]) -> list[Any]:
    """Parameters of a test, of which those that are not in `CORE` are slow."""
    return [pytest.param(case, id=case.id, marks=[] if case.id in CORE else [pytest.mark.slow]) for case in cases]


def relative_error(case: Case, got: Mapping[str, Any]) -> float:
    """The largest |difference| over all parameters, relative to max(1, largest |p|)."""
    want = case.expected.params
    scale = max(1.0, *(float(np.max(np.abs(p))) for p in want.values()))
    diffs = [float(np.max(np.abs(np.asarray(got[k], np.float64) - want[k]))) for k in want]
    return float("nan") if np.isnan(diffs).any() else max(diffs) / scale


def check(case: Case, got: Mapping[str, Any]) -> None:
    error = relative_error(case, got)
    assert error <= TOLERANCE[case.dtype], f"{case.id}: off the oracle by {error:.3g}"
