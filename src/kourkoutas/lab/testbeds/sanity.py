r"""Sanity checks: three convex toys on which fixed β2 must be Adam, and the two Adam-equivalence ablations.

| testbed                | objective, minimised over w                 | steps, lr (paper)   |
|------------------------|---------------------------------------------|---------------------|
| sanity1                | ½⟨(X·w - y)²⟩, y = X·w* + 0.01·noise        | 10,000 at 1e-3      |
| sanity2                | ⟨log(1 + exp z) - y·z⟩, z = X·w, separable  | 20,000 at 1e-2      |
| sanity3                | -⟨log σ(s·X·w)⟩, s = ±1, separable          | 50,000 at 5e-2      |
| adam_equivalence       | ½⟨(X·w - y)²⟩ on pure noise, no correction  | 1,000 at 1e-3       |
| adam_equivalence_bc    | the same with bias correction               | 1,000 at 1e-3       |

The data are one fixed draw; the seed sets the initial w. Bias correction is off except in the last, the bucket is
global, and the 200 updates before the paper's clock starts count as updates here.

NOTE: two endpoints. `final_loss` is the paper's: the float32 loss after the last update. On sanity2 it is mostly
rounding near 1e-9: for y = 1 it subtracts z from log(1 + exp z), which leaves 0 once z passes 17. `exact_loss` is the
same loss of the same w in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kourkoutas.lab.engines import Array, Batch, Engine, Loss, Params
from kourkoutas.lab.testbeds import PAPER, Endpoint, Plain, Problem, Testbed

KINDS = ("least_squares", "logistic", "utility", "noise")
Data = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Settings:
    """The sizes of a run; `first` updates are taken before `steps` are counted."""

    steps: int
    lr: float
    first: int = 200
    samples: int = 1_000
    width: int = 100

    def __post_init__(self) -> None:
        for name in ("steps", "samples", "width"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be >= 1; got {getattr(self, name)!r}")
        if self.first < 0:
            raise ValueError(f"`first` must be >= 0; got {self.first!r}")


@functools.lru_cache(maxsize=8)
def data(kind: str, samples: int, width: int) -> Data:
    """X (samples, width) and the target `y` of a kind: values, labels in {0, 1}, or signs."""
    rng = np.random.default_rng([1, KINDS.index(kind)])
    X = rng.standard_normal((samples, width)).astype(np.float32)
    z = X @ rng.standard_normal(width).astype(np.float32)
    noise = rng.standard_normal(samples)
    y = {"least_squares": z + 0.01 * noise, "logistic": z > 0, "utility": 2.0 * (z > 0) - 1, "noise": noise}[kind]
    return {"X": X, "y": y.astype(np.float32)}


def squares(E: Engine, params: Params, batch: Batch) -> Array:
    """½⟨(X·w - y)²⟩."""
    return 0.5 * E.mean(E.square(batch["X"] @ params["w"] - batch["y"]))


def logistic(E: Engine, params: Params, batch: Batch) -> Array:
    """⟨log(1 + exp z) - y·z⟩."""
    return E.bce_with_logits(batch["X"] @ params["w"], batch["y"])


def disutility(E: Engine, params: Params, batch: Batch) -> Array:
    """-⟨log σ(s·X·w)⟩ = ⟨log(1 + exp(-s·X·w))⟩."""
    return E.mean(E.logaddexp(-batch["y"] * (batch["X"] @ params["w"]), 0.0))


LOSSES: dict[str, Loss] = {"least_squares": squares, "logistic": logistic, "utility": disutility, "noise": squares}


@dataclass(frozen=True)
class SanityProblem(Plain):
    """One seed: an initial w on the fixed data."""

    kind: str
    settings: Settings

    @property
    def steps(self) -> int:
        return self.settings.first + self.settings.steps

    @property
    def loss(self) -> Loss:
        return LOSSES[self.kind]

    @property
    def params(self) -> Mapping[str, NDArray[Any]]:
        w = 0.01 * np.random.default_rng([2, self.seed]).standard_normal(self.settings.width)
        return {"w": w.astype(np.float32)}

    @property
    def constants(self) -> Mapping[str, NDArray[Any]]:
        return data(self.kind, self.settings.samples, self.settings.width)

    def evaluate(self, E: Engine, params: Params, step: int) -> dict[str, float]:
        constants = {name: E.array(x) for name, x in self.constants.items()}
        metrics = {"final_loss": float(E.numpy(self.loss(E, params, constants)))}
        X, y = (self.constants[name].astype(np.float64) for name in ("X", "y"))
        z = X @ E.numpy(params["w"]).astype(np.float64)
        if self.kind in ("least_squares", "noise"):
            return {**metrics, "exact_loss": float(0.5 * np.mean((z - y) ** 2))}
        s = y if self.kind == "utility" else 2 * y - 1
        metrics["exact_loss"] = float(np.mean(np.logaddexp(0, -s * z)))
        metrics["accuracy"] = float(np.mean((z > 0) == (s > 0)))
        return {**metrics, "utility": -metrics["final_loss"]} if self.kind == "utility" else metrics


@dataclass(frozen=True)
class Sanity:
    """See `kourkoutas.lab.testbeds.Testbed`."""

    name: str
    title: str
    kind: str
    paper: Settings
    bias_correction: str = "none"
    version: int = 1
    arms: tuple[str, ...] = ("kbeta", "kbeta-fixed", "adam999-nobc")
    endpoints: tuple[Endpoint, ...] = (
        Endpoint("final_loss", "loss after the last update, float32 (the paper's)", log=True),
        Endpoint("exact_loss", "the same in float64", log=True),
    )

    @property
    def presets(self) -> Mapping[str, Settings]:
        return {
            "smoke": replace(self.paper, steps=190, first=10),
            "laptop": replace(self.paper, steps=min(self.paper.steps, 5_000)),
            "paper": self.paper,
        }

    @property
    def kbeta(self) -> Mapping[str, Any]:
        return {
            **PAPER,
            "alpha": 0.95,
            "bias_correction": self.bias_correction,
            "warmup_steps": 0,
            "buckets": "global",
        }

    def problem(self, settings: Settings, seed: int) -> Problem:
        return SanityProblem(settings, seed, self.kind)


_NOISE = Settings(1_000, 1e-3, first=0, samples=128, width=16)

TESTBEDS: tuple[Testbed, ...] = (
    Sanity("sanity1", "Sanity 1: least squares", "least_squares", Settings(10_000, 1e-3)),
    Sanity("sanity2", "Sanity 2: logistic regression on separable data", "logistic", Settings(20_000, 1e-2)),
    Sanity("sanity3", "Sanity 3: concave utility", "utility", Settings(50_000, 5e-2)),
    Sanity(
        "adam_equivalence",
        "K-β with fixed β2 against Adam, no bias correction",
        "noise",
        _NOISE,
        arms=("kbeta-fixed", "adam999-nobc"),
    ),
    Sanity(
        "adam_equivalence_bc",
        "K-β with fixed β2 against Adam, bias correction on",
        "noise",
        _NOISE,
        bias_correction="beta2max",
        arms=("kbeta-fixed", "adam999"),
    ),
)
