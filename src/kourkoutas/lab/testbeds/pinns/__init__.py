r"""Physics-informed networks on problems that others set: DeepXDE's Burgers example and cases of PINNacle.

.. math::
    \text{loss} = ⟨\text{residual}^2⟩ + \sum_\text{given} ⟨(u - \text{target})^2⟩
    \;(+\, ⟨(∂_t u)^2⟩ \text{ where it starts at rest})

The equation's residual is taken at all points, those of the boundary included, and every term has the weight 1, as in
DeepXDE and PINNacle. Every step sees all points; the learning rate is constant. The metric `error` is the relative L2
error against the solution: see `cases`.

NOTE: a seed sets the initial parameters and the points, which are uniform random here and a Hammersley sequence there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kourkoutas.lab import engines
from kourkoutas.lab.engines import Array, Batch, Engine, Loss, Params
from kourkoutas.lab.errors import unknown
from kourkoutas.lab.optimizers.recipes import USUAL
from kourkoutas.lab.testbeds import FIELD, Endpoint, Plain, Problem, Testbed
from kourkoutas.lab.testbeds.pinns import network
from kourkoutas.lab.testbeds.pinns.cases import CASES, Counts

POINTS = 12


@dataclass(frozen=True)
class Settings:
    """The sizes of a run. `depth` counts hidden layers; `interior`, `boundary` and `initial` are numbers of points."""

    case: str
    steps: int
    width: int
    depth: int
    interior: int
    boundary: int
    initial: int
    lr: float = 1e-3

    def __post_init__(self) -> None:
        if self.case not in CASES:
            raise unknown("case", self.case, tuple(CASES))
        for name in ("steps", "width", "depth", "interior", "boundary", "initial"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be >= 1; got {getattr(self, name)!r}")
        if not self.lr > 0:
            raise ValueError(f"`lr` must be > 0, for example 1e-3; got {self.lr!r}")

    @property
    def counts(self) -> Counts:
        return Counts(self.interior, self.boundary, self.initial)


def terms(E: Engine, params: Params, batch: Batch, case: str) -> dict[str, Array]:
    """The mean squares of the loss by name."""
    it = CASES[case]
    u, slopes, second = network.channels(E, params, batch["x"], it.second)
    found = {"residual": E.mean(E.square(it.residual(u, slopes, second)))}
    # The given points stand at the end of x, in the order of `given`: JAX sorts the names of a batch.
    start = batch["x"].shape[0] - sum(batch[name].shape[0] for name in it.given)
    for name in it.given:
        target = batch[name]
        stop = start + target.shape[0]
        found[name] = E.mean(E.square(u[start:stop] - target))
        if name == "initial" and it.at_rest is not None:
            found["at_rest"] = E.mean(E.square(slopes[it.at_rest][start:stop]))
        start = stop
    return found


@dataclass(frozen=True)
class Composite:
    """The loss of a case."""

    case: str

    def __call__(self, E: Engine, params: Params, batch: Batch) -> Array:
        found = terms(E, params, batch, self.case)
        return sum(found.values(), start=0.0 * found["residual"])


@functools.lru_cache(maxsize=16)
def _compiled(engine: str, case: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    E = engines.get(engine)
    return E.compile(functools.partial(network.values, E)), E.compile(functools.partial(terms, E, case=case))


@dataclass(frozen=True)
class PinnProblem(Plain):
    """One seed: initial parameters and points."""

    settings: Settings

    @property
    def evaluate_every(self) -> int:
        return max(1, self.settings.steps // 20)

    @property
    def compile(self) -> bool:
        # Compiling takes some seconds: only for runs that last longer.
        return self.settings.steps >= 1_000

    @functools.cached_property
    def loss(self) -> Loss:
        return Composite(self.settings.case)

    @functools.cached_property
    def params(self) -> Mapping[str, NDArray[Any]]:
        s = self.settings
        return network.init(CASES[s.case].inputs, s.width, s.depth, self.seed)

    @functools.cached_property
    def constants(self) -> Mapping[str, NDArray[Any]]:  # type: ignore[override]
        it = CASES[self.settings.case]
        drawn = it.draw(np.random.default_rng([POINTS, self.seed]), self.settings.counts)
        points = [drawn.inside, *(drawn.given[name][0] for name in it.given)]
        return {
            "x": np.concatenate(points).astype(np.float32),
            **{name: drawn.given[name][1].astype(np.float32) for name in it.given},
        }

    def evaluate(self, E: Engine, params: Params, step: int) -> dict[str, float]:
        values, parts = _compiled(E.name, self.settings.case)
        points, truth = CASES[self.settings.case].truth()
        u = E.numpy(values(params, E.array(points.astype(np.float32)))).astype(np.float64)
        found = parts(params, {name: E.array(x) for name, x in self.constants.items()})
        losses = {f"loss_{name}": float(E.numpy(found[name])) for name in sorted(found)}
        return {
            "error": float(np.linalg.norm(u - truth) / np.linalg.norm(truth)),
            "error_max": float(np.abs(u - truth).max()),
            "final_loss": sum(losses.values()),
            **losses,
        }


@dataclass(frozen=True)
class Pinn:
    """See `kourkoutas.lab.testbeds.Testbed`."""

    name: str
    title: str
    settings: tuple[tuple[str, Settings], ...]
    version: int = 1
    endpoints: tuple[Endpoint, ...] = (
        Endpoint("error", "relative L2 error against the solution", log=True),
        Endpoint("final_loss", "loss after the last update", log=True),
    )
    arms: tuple[str, ...] = USUAL

    @property
    def presets(self) -> Mapping[str, Settings]:
        return dict(self.settings)

    @property
    def kbeta(self) -> Mapping[str, Any]:
        return FIELD

    def problem(self, settings: Settings, seed: int) -> Problem:
        return PinnProblem(settings, seed)


TESTBEDS: tuple[Testbed, ...] = (
    Pinn(
        "burgers",
        "Burgers 1-D PINN (DeepXDE's example)",
        (
            ("smoke", Settings("burgers1d", steps=100, width=8, depth=2, interior=64, boundary=8, initial=16)),
            (
                "laptop",
                Settings("burgers1d", steps=15_000, width=20, depth=3, interior=2_540, boundary=80, initial=160),
            ),
            # The example goes on with L-BFGS after these steps: `kbeta-lbfgs`.
            ("paper", Settings("burgers1d", steps=15_000, width=20, depth=3, interior=2_540, boundary=80, initial=160)),
            # PINNacle's sizes for the same equation.
            (
                "pinnacle",
                Settings("burgers1d", steps=20_000, width=100, depth=5, interior=8_192, boundary=2_048, initial=2_048),
            ),
        ),
    ),
    Pinn(
        "pinnacle",
        "PINNacle cases: Wave1D-C, Heat2D-Multiscale, Poisson2D-Classic",
        (
            ("smoke", Settings("wave1d_c", steps=100, width=8, depth=2, interior=64, boundary=16, initial=8)),
            ("laptop", Settings("wave1d_c", steps=10_000, width=50, depth=3, interior=1_024, boundary=128, initial=64)),
            # Of PINNacle's 2,048 points on the sides of the square in (x, t), those at the walls and at t = 0.
            (
                "paper",
                Settings("wave1d_c", steps=20_000, width=100, depth=5, interior=8_192, boundary=1_024, initial=512),
            ),
        ),
    ),
)
