r"""An emulator of a 1-D equation, of APEBench's kind: it learns one time step and is rolled out.

| equation  | per time step, on a periodic domain of length 1                         | APEBench's scenario    |
|-----------|-------------------------------------------------------------------------|------------------------|
| `burgers` | u_t + b (u²/2)_x = ν u_xx                                               | 1-D Burgers            |
| `ks`      | u_t + b (u²/2)_x = -ν u_xx - μ u_xxxx, chaotic                          | conservative           |
|           |                                                                         | Kuramoto–Sivashinsky   |

APEBench states an equation by its difficulties for a grid of N points: γ₂ = 2N²ν, γ₄ = 8N⁴μ, δ = Nb. Burgers has
γ₂ = 1.5 and δ = 2; KS γ₂ = 2, γ₄ = 15 and δ = 1. So a coarser grid gives an equation that is as hard for a network.

Trajectories start from five random Fourier modes, of largest value 1; those of KS run 500 steps before they count. A
solver of ours makes them: exponential time differencing of fourth order. The network is APEBench's plain one: periodic
convolutions of three points, ReLU between them, and the mean square of one step as the loss.

.. math::
    \text{error} = \Big⟨ \Big⟨ \frac{\lVert û_n - u_n \rVert}{\lVert u_n \rVert} \Big⟩_\text{trajectories}
    \Big⟩_{n = 1 … \text{rollout}}

in which û is fed back from its own steps, on trajectories that were not trained on.

NOTE: trajectories are the same for all seeds; a seed sets initial parameters and batches. An emulator may blow up when
it is rolled out; its relative error of a step counts as at most `WORST`, so that the mean stays finite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kourkoutas.lab import engines
from kourkoutas.lab.engines import Array, Batch, Batches, Engine, Loss, Params
from kourkoutas.lab.errors import unknown
from kourkoutas.lab.optimizers.recipes import USUAL
from kourkoutas.lab.testbeds import FIELD, Endpoint, Plain, Problem, Testbed

Floats = NDArray[np.float64]

INIT, BATCHES = 31, 32
TRAIN, TEST = 0, 773
MODES = 5
# The solver's grid and time steps are finer than the data's.
OVER, SUBSTEPS = 2, 4
WORST = 100.0


@dataclass(frozen=True)
class Equation:
    """γ₂, γ₄ and δ as above, signs as in u_t = -b (u²/2)_x + ν u_xx - μ u_xxxx; `spin_up` steps before any count."""

    diffusion: float
    hyperdiffusion: float
    convection: float
    spin_up: int = 0


EQUATIONS = {"burgers": Equation(1.5, 0.0, 2.0), "ks": Equation(-2.0, 15.0, 1.0, spin_up=500)}


@dataclass(frozen=True)
class Settings:
    """The sizes of a run; the defaults are APEBench's. `samples` and `horizon` train, `tests` and `rollout` test."""

    equation: str = "ks"
    steps: int = 10_000
    warmup: int = 2_000
    lr: float = 1e-3
    batch: int = 20
    points: int = 160
    samples: int = 50
    horizon: int = 50
    tests: int = 30
    rollout: int = 200
    width: int = 34
    depth: int = 10

    def __post_init__(self) -> None:
        if self.equation not in EQUATIONS:
            raise unknown("equation", self.equation, tuple(EQUATIONS))
        for name in ("steps", "batch", "samples", "horizon", "tests", "rollout", "width", "depth"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be >= 1; got {getattr(self, name)!r}")
        if self.points < 4 * MODES:
            raise ValueError(f"`points` must be >= {4 * MODES} for {MODES} modes; got {self.points!r}")
        if not 0 <= self.warmup < self.steps:
            raise ValueError(f"`warmup` must be in 0 ... steps - 1; got {self.warmup!r} with steps={self.steps!r}")
        if not self.lr > 0:
            raise ValueError(f"`lr` must be > 0, for example 1e-3; got {self.lr!r}")


# The solver


def start(points: int, samples: int, seed: int) -> Floats:
    """(samples, points): Σ aₖ cos 2πkx + bₖ sin 2πkx for k = 1 … 5, divided by its largest value."""
    amplitude = np.random.default_rng([seed, 1]).uniform(-1, 1, (samples, 2, MODES))
    # The largest value of a fine grid, so that a start does not depend on `points`.
    fine = _series(amplitude, 1_024)
    return np.asarray(_series(amplitude, points) / np.abs(fine).max(1, keepdims=True))


def _series(amplitude: Floats, points: int) -> Floats:
    phase = 2 * np.pi * np.arange(1, MODES + 1)[:, None] * np.arange(points) / points
    return np.asarray(amplitude[:, 0] @ np.cos(phase) + amplitude[:, 1] @ np.sin(phase))


@dataclass(frozen=True)
class Solver:
    r"""Exponential time differencing (ETDRK4: Cox and Matthews, Kassam and Trefethen) for all trajectories at once.

    In Fourier space û_t = c û + F(û) with c = -ν κ² - μ κ⁴, F = -½ i b κ (u²)^ and κ = 2πk; F keeps |k| < N/3, so that
    products do not alias. The coefficients are means over a circle around hc, which avoids their cancellation near 0.

    Attributes:
      equation: what is solved, with its coefficients from a grid of `reference` points.
      points: the solver's own grid.
      substeps: of a time step.
    """

    equation: Equation
    reference: int
    points: int
    substeps: int = SUBSTEPS

    @functools.cached_property
    def _coefficients(self) -> tuple[Any, ...]:
        N, q = self.reference, self.equation
        kappa = 2 * np.pi * np.fft.rfftfreq(self.points, 1 / self.points)
        nu, mu, b = q.diffusion / (2 * N**2), q.hyperdiffusion / (8 * N**4), q.convection / N
        h = 1 / self.substeps
        z = h * (-nu * kappa**2 - mu * kappa**4)
        circle = np.exp(2j * np.pi * (np.arange(1, 33) - 0.5) / 32)
        w = z[:, None] + circle
        e = np.exp(w)

        def mean(x: Any) -> Floats:
            return np.asarray(h * np.mean(x, 1).real)

        half = mean((np.exp(w / 2) - 1) / w)
        first = mean((-4 - w + e * (4 - 3 * w + w**2)) / w**3)
        middle = mean((2 + w + e * (-2 + w)) / w**3)
        last = mean((-4 - 3 * w - w**2 + e * (4 - w)) / w**3)
        convect = np.where(np.arange(len(kappa)) < self.points / 3, -0.5j * b * kappa, 0)
        return np.exp(z), np.exp(z / 2), half, first, middle, last, convect

    def step(self, u: Floats) -> Floats:
        """u (samples, points) one time step later."""
        whole, over_half, half, first, middle, last, convect = self._coefficients

        def F(v: Any) -> Any:
            return convect * np.fft.rfft(np.fft.irfft(v, self.points) ** 2)

        v = np.fft.rfft(u)
        for _ in range(self.substeps):
            Nv = F(v)
            a = over_half * v + half * Nv
            Na = F(a)
            b = over_half * v + half * Na
            Nb = F(b)
            c = over_half * a + half * (2 * Nb - Nv)
            v = whole * v + first * Nv + 2 * middle * (Na + Nb) + last * F(c)
        return np.asarray(np.fft.irfft(v, self.points))


# A worker runs many arms and seeds on the same data.
@functools.lru_cache(maxsize=4)
def trajectories(equation: str, points: int, samples: int, horizon: int, seed: int) -> NDArray[np.float32]:
    """(samples, horizon + 1, points)."""
    solver = Solver(EQUATIONS[equation], points, OVER * points)
    u = start(OVER * points, samples, seed)
    for _ in range(solver.equation.spin_up):
        u = solver.step(u)
    frames = [u]
    for _ in range(horizon):
        frames.append(solver.step(frames[-1]))
    return np.stack(frames, 1)[..., ::OVER].astype(np.float32)


# The network


def init(width: int, depth: int, seed: int) -> dict[str, NDArray[Any]]:
    """`depth` hidden convolutions of three points and one to a single channel, uniform in ±1/√inputs."""
    rng = np.random.default_rng([INIT, seed])
    params: dict[str, NDArray[Any]] = {}
    channels = [1, *[width] * depth, 1]
    for k in range(depth + 1):
        limit = 1 / np.sqrt(3 * channels[k])
        shape = (3 * channels[k], channels[k + 1])
        params[f"layer{k:02d}.w"] = rng.uniform(-limit, limit, shape).astype(np.float32)
        params[f"layer{k:02d}.b"] = rng.uniform(-limit, limit, channels[k + 1]).astype(np.float32)
    return params


def emulate(E: Engine, params: Params, u: Array) -> Array:
    """u (samples, points) one time step later, as the network has it."""
    last = len(params) // 2 - 1
    h = E.expand(u, 2)
    for k in range(last + 1):
        left = E.concat([h[:, -1:], h[:, :-1]], 1)
        right = E.concat([h[:, 1:], h[:, :1]], 1)
        h = E.linear(E.concat([left, h, right], 2), params[f"layer{k:02d}.w"], params[f"layer{k:02d}.b"])
        if k < last:
            h = E.maximum(h, 0.0)
    return h[..., 0]


def loss(E: Engine, params: Params, batch: Batch) -> Array:
    return E.mean(E.square(emulate(E, params, batch["now"]) - batch["next"]))


@functools.lru_cache(maxsize=3)
def _compiled(engine: str) -> Callable[..., Array]:
    return engines.get(engine).compile(functools.partial(emulate, engines.get(engine)))


@dataclass(frozen=True)
class EmulatorProblem(Plain):
    """One seed: initial parameters and batches."""

    settings: Settings

    @property
    def chunk(self) -> int:
        return min(250, self.settings.steps)

    @property
    def evaluate_every(self) -> int:
        return max(1, self.settings.steps // 10)

    @property
    def compile(self) -> bool:
        # Compiling takes some seconds: only for runs that last longer.
        return self.settings.steps >= 1_000

    @property
    def loss(self) -> Loss:
        return loss

    @functools.cached_property
    def params(self) -> Mapping[str, NDArray[Any]]:
        return init(self.settings.width, self.settings.depth, self.seed)

    def batches(self, start: int, stop: int) -> Batches:
        s = self.settings
        u = trajectories(s.equation, s.points, s.samples, s.horizon, TRAIN)
        draws = [np.random.default_rng([BATCHES, self.seed, step]) for step in range(start, stop)]
        sample = np.stack([rng.integers(0, s.samples, s.batch) for rng in draws])
        time = np.stack([rng.integers(0, s.horizon, s.batch) for rng in draws])
        return {"now": u[sample, time], "next": u[sample, time + 1]}

    def lr(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        # From 0 in a line over `warmup` steps, then down to 0 as a cosine.
        s = self.settings
        rising = steps / max(s.warmup, 1)
        falling = 0.5 * (1 + np.cos(np.pi * (steps - s.warmup) / (s.steps - s.warmup)))
        return np.asarray(s.lr * np.where(steps < s.warmup, rising, falling))

    def evaluate(self, E: Engine, params: Params, step: int) -> dict[str, float]:
        s = self.settings
        truth = trajectories(s.equation, s.points, s.tests, s.rollout, TEST)
        u = E.array(truth[:, 0])
        misses = []
        for n in range(1, s.rollout + 1):
            u = _compiled(E.name)(params, u)
            now = E.numpy(u).astype(np.float64)
            if n == 1 and not np.isfinite(now).all():
                break
            with np.errstate(over="ignore", invalid="ignore"):
                miss = np.linalg.norm(now - truth[:, n], axis=1) / np.linalg.norm(truth[:, n], axis=1)
            misses.append(np.where(miss < WORST, miss, WORST).mean())
        if not misses:
            return {"error": np.inf, "one_step": np.inf}
        return {"error": float(np.mean(misses)), "one_step": float(misses[0])}


@dataclass(frozen=True)
class Emulator:
    """See `kourkoutas.lab.testbeds.Testbed`."""

    name: str = "emulator"
    title: str = "Emulator of a 1-D equation, one step trained, rolled out (APEBench's kind)"
    version: int = 1
    endpoints: tuple[Endpoint, ...] = (
        Endpoint("error", "relative error of the rollout", log=True),
        Endpoint("one_step", "relative error of one step", log=True),
    )
    arms: tuple[str, ...] = USUAL

    @property
    def presets(self) -> Mapping[str, Settings]:
        small = {"points": 32, "samples": 4, "horizon": 10, "tests": 3, "rollout": 10, "width": 6, "depth": 2}
        return {
            "smoke": Settings(steps=100, warmup=20, lr=1e-2, **small),  # type: ignore[arg-type]
            "laptop": Settings(steps=5_000, warmup=1_000, points=64, width=24, depth=6, rollout=50),
            "paper": Settings(),
        }

    @property
    def kbeta(self) -> Mapping[str, Any]:
        return FIELD

    def problem(self, settings: Settings, seed: int) -> Problem:
        return EmulatorProblem(settings, seed)


TESTBEDS: tuple[Testbed, ...] = (Emulator(),)
