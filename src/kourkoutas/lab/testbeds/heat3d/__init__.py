"""Testbed B: a physics-informed network for steady heat conduction in a cylinder with a wavy outer wall.

| part          | what it holds                                                                        |
|---------------|--------------------------------------------------------------------------------------|
| `geometry`    | the domain, boundary data and the points                                             |
| `network`     | the network, the loss, derivatives by forward Taylor propagation                     |
| `reference`   | a finite-element solution of the same problem, to measure the network's error        |
| `pictures`    | slices, scatter, residual map, temperatures below zero                               |

Every step sees all points. The learning rate falls from `lr` to `lr_end` as a cosine over `ramp` steps and stays there.

NOTE: the loss says how well the conditions hold at the training points, not how near T is to the solution. The metric
`error` does: the root mean square of T - T_reference over the volume, where T_reference is the known solution of
`case="harmonic"` and the finite-element solution of the paper's case.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kourkoutas.lab.engines import Engine, Loss, Params
from kourkoutas.lab.errors import unknown
from kourkoutas.lab.optimizers.recipes import USUAL
from kourkoutas.lab.testbeds import PAPER, Endpoint, Plain, Problem, Testbed
from kourkoutas.lab.testbeds.heat3d import geometry, network, reference
from kourkoutas.lab.testbeds.heat3d.geometry import Points

THRESHOLD = 9e-5


@dataclass(frozen=True)
class Settings:
    """The sizes of a run; the defaults are the paper's. `depth` counts linear layers, `boundary` points per surface."""

    steps: int = 100_000
    ramp: int = 40_000
    lr: float = 1e-2
    lr_end: float = 1e-5
    width: int = 128
    depth: int = 16
    interior: int = 4_000
    boundary: int = 2_000
    pairs: int = 400
    case: str = "paper"

    def __post_init__(self) -> None:
        for name in ("steps", "ramp", "width", "interior", "boundary", "pairs"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be >= 1; got {getattr(self, name)!r}")
        if self.depth < 2:
            raise ValueError(f"`depth` must be >= 2 linear layers; got {self.depth!r}")
        if not 0 < self.lr_end <= self.lr:
            raise ValueError(
                f"`lr` and `lr_end` must satisfy 0 < lr_end <= lr; got lr={self.lr!r}, lr_end={self.lr_end!r}"
            )
        if self.case not in geometry.CASES:
            raise unknown("case", self.case, geometry.CASES)

    @property
    def points(self) -> Points:
        return Points(self.interior, self.boundary, self.pairs)


@dataclass(frozen=True)
class Heat3DProblem(Plain):
    """One seed: initial parameters; the points are the same for all."""

    settings: Settings

    @property
    def chunk(self) -> int:
        # About a second each, so that progress is seen and checkpoints can be taken at any size.
        work = sum(self.settings.points.counts) * self.settings.depth * self.settings.width**2
        return int(np.clip(10**10 // work, 1, 500))

    @functools.cached_property
    def loss(self) -> Loss:
        return network.Composite(self.settings.points, native=True)

    @functools.cached_property
    def params(self) -> Mapping[str, NDArray[Any]]:
        return network.init(self.settings.width, self.settings.depth, self.seed)

    @property
    def constants(self) -> Mapping[str, NDArray[Any]]:
        return geometry.constants(self.settings.points, self.settings.case)

    def lr(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        # γ_t = γ_end + ½(γ_0 - γ_end)(1 + cos(π t / ramp)), then γ_end
        s = self.settings
        t = np.minimum(steps, s.ramp)
        return np.asarray(s.lr_end + 0.5 * (s.lr - s.lr_end) * (1 + np.cos(np.pi * t / s.ramp)))

    def evaluate(self, E: Engine, params: Params, step: int) -> dict[str, float]:
        batch = {name: E.array(x) for name, x in self.constants.items()}
        evaluate = E.compile(functools.partial(network.terms, E, points=self.settings.points))
        parts = {name: float(E.numpy(x)) for name, x in evaluate(params, batch).items()}
        metrics = {"final_loss": sum(network.WEIGHTS[name] * part for name, part in parts.items())}
        metrics.update({f"loss_{name}": part for name, part in parts.items()})
        if step == self.steps:
            metrics.update(self._against_reference(E, params))
        return metrics

    def _against_reference(self, E: Engine, params: Params) -> dict[str, float]:
        truth = reference.solve(self.settings.case)
        T = field(E, params, truth.nodes)
        miss = T - truth.T
        return {
            "error": truth.rms(miss),
            "error_max": float(np.abs(miss).max()),
            "T_min": float(T.min()),
            "T_negative": truth.mean((T < 0).astype(float)),
        }


def field(E: Engine, params: Params, nodes: NDArray[np.float64], piece: int = 65_536) -> NDArray[np.float64]:
    """T at `nodes` (…, 3), computed in pieces."""
    flat = nodes.reshape(-1, 3).astype(np.float32)
    temperature = E.compile(functools.partial(network.temperature, E))
    parts = [E.numpy(temperature(params, E.array(flat[i : i + piece]))) for i in range(0, len(flat), piece)]
    return np.concatenate(parts).astype(np.float64).reshape(nodes.shape[:-1])


@dataclass(frozen=True)
class Heat3D:
    """See `kourkoutas.lab.testbeds.Testbed`."""

    name: str = "heat3d"
    title: str = "Testbed B: 3-D cylindrical PINN (Heat3D)"
    version: int = 1
    endpoints: tuple[Endpoint, ...] = (
        Endpoint("final_loss", "loss after the last update", log=True, threshold=THRESHOLD),
        Endpoint("error", "RMS error of T against the reference solution", log=True),
    )
    arms: tuple[str, ...] = USUAL

    @property
    def presets(self) -> Mapping[str, Settings]:
        return {
            "smoke": Settings(steps=200, ramp=80, width=16, depth=4, interior=64, boundary=32, pairs=10),
            # The paper's network, whose depth and width bring about the failures of Adam, on far fewer points.
            "laptop": Settings(steps=5_000, ramp=2_000, interior=64, boundary=32, pairs=10),
            "paper": Settings(),
        }

    @property
    def kbeta(self) -> Mapping[str, Any]:
        return {
            **PAPER,
            "decay": 0.98,
            "max_ratio": 3.0,
            "adaptive_tiny": True,
            "tiny_spike": 1e-9,
            "tiny_denom": 1e-8,
            "warmup_steps": 0,
            "buckets": "shape",
        }

    def problem(self, settings: Settings, seed: int) -> Problem:
        return Heat3DProblem(settings, seed)

    def figures(self, settings: Settings, runs: Mapping[str, Mapping[str, NDArray[Any]]]) -> list[tuple[Any, str]]:
        """Pictures for the report, with their descriptions, from the final parameters of runs by label."""
        from kourkoutas.lab.testbeds.heat3d import pictures

        return pictures.figures(settings, runs)


TESTBEDS: tuple[Testbed, ...] = (Heat3D(),)
