r"""A Fourier neural operator on Darcy flow: from the permeability a to the pressure u.

.. math::
    \text{loss} = \Big⟨ \frac{\lVert û - u \rVert_2}{\lVert u \rVert_2} \Big⟩_\text{samples of the batch}

`error` is the same on pairs that were not trained on. Problem and sizes are those of neuraloperator's small Darcy
example (16 × 16 cells, 1,000 pairs, 8 × 8 modes, 24 channels); its files are a download, so the pairs are our own:
see `data`. The learning rate falls to zero as a cosine. All seeds share the pairs; a seed sets initial parameters and
order.
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
from kourkoutas.lab.optimizers.recipes import USUAL
from kourkoutas.lab.testbeds import FIELD, Endpoint, Plain, Problem, Testbed
from kourkoutas.lab.testbeds.darcy import data, model

ORDER = 22


@dataclass(frozen=True)
class Settings:
    """The sizes of a run. `modes` along each coordinate; `test` pairs measure the error; `data_seed` draws others."""

    epochs: int = 15
    batch: int = 64
    train: int = 1_000
    test: int = 100
    grid: int = 16
    modes: int = 8
    width: int = 24
    layers: int = 4
    lr: float = 1e-2
    data_seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "train", "test", "width", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be >= 1; got {getattr(self, name)!r}")
        if not 2 <= self.modes <= self.grid or self.modes % 2:
            raise ValueError(
                f"`modes` must be even and in 2 ... grid; got modes={self.modes!r} with grid={self.grid!r}"
            )
        if self.batch > self.train:
            raise ValueError(f"`batch` must be at most `train` ({self.train}); got {self.batch!r}")
        if not self.lr > 0:
            raise ValueError(f"`lr` must be > 0, for example 1e-2; got {self.lr!r}")

    @property
    def per_epoch(self) -> int:
        return self.train // self.batch


def misses(E: Engine, params: Params, batch: Batch) -> Array:
    """‖û - u‖/‖u‖ of each sample; û is of u in units of its spread."""
    # (samples, cells) → (cells, samples)
    a, u = E.transpose(batch["a"], (1, 0)), E.transpose(batch["u"], (1, 0))
    here = E.broadcast(E.expand(batch["where"], 1), (*u.shape, 2))
    out = model.operator(E, params, E.concat([E.expand(a, 2), here], 2), batch["forward"], batch["inverse"])
    return E.sqrt(E.sum(E.square(out - u), 0) / E.sum(E.square(u), 0))


def loss(E: Engine, params: Params, batch: Batch) -> Array:
    return E.mean(misses(E, params, batch))


@functools.lru_cache(maxsize=3)
def _compiled(engine: str) -> Callable[..., Array]:
    return engines.get(engine).compile(functools.partial(misses, engines.get(engine)))


@functools.lru_cache(maxsize=2)
def _scaled(settings: Settings) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """a and u of all pairs as rows of cells: a as -1 or 1, u in units of its root mean square in training."""
    pairs = data.pairs(settings.grid, settings.train + settings.test, settings.data_seed)
    a = np.where(pairs.a > data.LOW, 1, -1).reshape(len(pairs.a), -1).astype(np.float32)
    u = pairs.u.reshape(len(pairs.u), -1)
    return a, u / np.sqrt(np.mean(np.square(u[: settings.train], dtype=np.float64))).astype(np.float32)


@dataclass(frozen=True)
class DarcyProblem(Plain):
    """One seed: initial parameters and the order of the pairs."""

    settings: Settings

    @property
    def steps(self) -> int:
        return self.settings.epochs * self.settings.per_epoch

    @property
    def chunk(self) -> int:
        return self.settings.per_epoch

    @property
    def tail(self) -> int:
        return self.settings.per_epoch

    @property
    def evaluate_every(self) -> int:
        return max(1, self.steps // 20)

    @property
    def loss(self) -> Loss:
        return loss

    @functools.cached_property
    def params(self) -> Mapping[str, NDArray[Any]]:
        s = self.settings
        return model.init(s.width, s.modes, s.layers, self.seed)

    @functools.cached_property
    def constants(self) -> Mapping[str, NDArray[Any]]:  # type: ignore[override]
        s = self.settings
        forward, inverse = model.transforms(s.grid, s.modes)
        x = (np.arange(s.grid, dtype=np.float32) + 0.5) / s.grid
        where = np.stack(np.meshgrid(x, x, indexing="ij"), -1).reshape(-1, 2)
        return {"forward": forward, "inverse": inverse, "where": where}

    def batches(self, start: int, stop: int) -> Batches:
        a, u = _scaled(self.settings)
        chosen = np.stack([self._batch(step) for step in range(start, stop)])
        return {"a": a[chosen], "u": u[chosen]}

    def _batch(self, step: int) -> NDArray[np.int64]:
        s = self.settings
        epoch, place = divmod(step, s.per_epoch)
        order = np.random.default_rng([ORDER, self.seed, epoch]).permutation(s.train)
        return order[place * s.batch : (place + 1) * s.batch]

    def lr(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        # ½γ(1 + cos(π t/T))
        return np.asarray(self.settings.lr * 0.5 * (1 + np.cos(np.pi * steps / self.steps)))

    def evaluate(self, E: Engine, params: Params, step: int) -> dict[str, float]:
        a, u = _scaled(self.settings)
        fixed = {name: E.array(x) for name, x in self.constants.items()}
        errors = {}
        n = self.settings.train
        for name, here in (("error", slice(n, None)), ("train_error", slice(0, min(n, self.settings.test)))):
            batch = {**fixed, "a": E.array(a[here]), "u": E.array(u[here])}
            errors[name] = float(np.mean(E.numpy(_compiled(E.name)(params, batch)), dtype=np.float64))
        return errors


@dataclass(frozen=True)
class Darcy:
    """See `kourkoutas.lab.testbeds.Testbed`."""

    name: str = "darcy"
    title: str = "Fourier neural operator on Darcy flow"
    version: int = 1
    endpoints: tuple[Endpoint, ...] = (
        Endpoint("error", "relative L2 error on test pairs", log=True),
        Endpoint("train_error", "relative L2 error on training pairs", log=True),
    )
    arms: tuple[str, ...] = USUAL

    @property
    def presets(self) -> Mapping[str, Settings]:
        return {
            "smoke": Settings(epochs=10, batch=8, train=24, test=8, grid=8, modes=4, width=6, layers=2),
            "laptop": Settings(epochs=60, batch=32),
            "laptop-32": Settings(epochs=30, batch=32, grid=32, modes=12),
            # neuraloperator's gallery example.
            "paper": Settings(),
        }

    @property
    def kbeta(self) -> Mapping[str, Any]:
        return FIELD

    def problem(self, settings: Settings, seed: int) -> Problem:
        return DarcyProblem(settings, seed)


TESTBEDS: tuple[Testbed, ...] = (Darcy(),)
