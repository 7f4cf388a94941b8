"""Testbed A: a Transformer surrogate of heat conduction on a plate, with INT8 quantization-aware training.

    settings.py    sizes, schedule
    data.py        cases by explicit finite differences, cached on disk
    quantize.py    fake quantization with straight-through gradients
    model.py       tokens, attention, prediction, loss
    evaluate.py    errors on training, validation and test cases; roll-out
    pictures.py    truth beside predictions, errors over time

NOTE: the paper's endpoint is the training MSE after the last epoch: here the plain MSE of all training cases with the
final weights, without the other terms of the loss. Validation and test stand beside it.

NOTE: all seeds share the data (`data_seed`); a seed sets the initial weights and the order of the cases.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kourkoutas.lab.engines import Batches, Engine, Loss, Params
from kourkoutas.lab.optimizers.recipes import USUAL
from kourkoutas.lab.testbeds import PAPER, Endpoint, Plain, Problem, Testbed
from kourkoutas.lab.testbeds.heat2d import evaluate, model
from kourkoutas.lab.testbeds.heat2d.data import cases
from kourkoutas.lab.testbeds.heat2d.settings import Settings, learning_rates

INIT, ORDER = 1, 2
# Bytes of frames handed to the engine at once.
CHUNK = 64 * 2**20


@functools.lru_cache(maxsize=16)
def order(settings: Settings, seed: int, epoch: int) -> NDArray[np.int64]:
    """Training cases of each batch of an epoch (from 0): (batches, batch)."""
    shuffled = np.random.default_rng([ORDER, seed, epoch]).permutation(settings.split.train)
    return shuffled[: settings.epoch_steps * settings.batch].reshape(settings.epoch_steps, settings.batch)


@dataclass(frozen=True)
class Heat2DProblem(Plain):
    """One seed: initial weights and the order of the training cases."""

    settings: Settings

    @property
    def steps(self) -> int:
        return self.settings.epochs * self.settings.epoch_steps

    @property
    def chunk(self) -> int:
        s = self.settings
        most = max(1, min(s.epoch_steps, CHUNK // (4 * s.batch * s.frames * s.nodes)))
        # Whole chunks fill an epoch, and so the run.
        return max(n for n in range(1, most + 1) if s.epoch_steps % n == 0)

    @property
    def tail(self) -> int:
        return self.settings.epoch_steps

    @property
    def evaluate_every(self) -> int:
        return self.settings.evaluate_epochs * self.settings.epoch_steps

    @property
    def compile(self) -> bool:
        # Saves about a third of a step, and takes some ten seconds per layer: only for long runs of shallow networks.
        return self.steps >= 1_000 and self.settings.layers <= 8

    @property
    def loss(self) -> Loss:
        return model.Objective(self.settings)

    @functools.cached_property
    def params(self) -> Mapping[str, NDArray[Any]]:
        return model.initial(self.settings, np.random.default_rng([INIT, self.seed]))

    @property
    def constants(self) -> Mapping[str, NDArray[Any]]:
        return model.constants(self.settings)

    def batches(self, start: int, stop: int) -> Batches:
        data = cases(self.settings)
        per_epoch = self.settings.epoch_steps
        rows = np.stack([order(self.settings, self.seed, t // per_epoch)[t % per_epoch] for t in range(start, stop)])
        return {
            "frames": data.frames[rows],
            "alpha": data.alpha[rows].astype(np.float32),
            "dt": data.dt[rows].astype(np.float32),
        }

    def lr(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        return learning_rates(self.settings, steps)

    def evaluate(self, E: Engine, params: Params, step: int) -> dict[str, float]:
        return evaluate.metrics(E, self.settings, params, final=step == self.steps)


@dataclass(frozen=True)
class Heat2D:
    """See `kourkoutas.lab.testbeds.Testbed`."""

    name: str = "heat2d"
    title: str = "Testbed A: Heat2D Transformer surrogate, INT8 quantization-aware"
    version: int = 1
    endpoints: tuple[Endpoint, ...] = (
        Endpoint("train_mse", "training MSE after the last epoch (the paper's)", log=True),
        Endpoint("validation_mse", "validation MSE", log=True),
        Endpoint("test_mse", "test MSE", log=True),
        Endpoint("rollout_mse", "test MSE rolled out", log=True),
    )
    arms: tuple[str, ...] = USUAL

    @property
    def presets(self) -> Mapping[str, Settings]:
        return {
            "smoke": replace(
                Settings(samples=40, grid=10, frames=20, width=16, layers=2, heads=2, mlp=8, rollout=4),
                epochs=10,
                schedule="1:1e-3 6:1e-4",
                evaluate_epochs=5,
            ),
            "laptop": Settings(samples=400, frames=101, width=128, layers=4, heads=4, mlp=64),
            "paper": Settings(),
        }

    @property
    def kbeta(self) -> Mapping[str, Any]:
        return {**PAPER, "warmup_steps": 350, "buckets": "parameter"}

    def problem(self, settings: Settings, seed: int) -> Problem:
        return Heat2DProblem(settings, seed)

    def figures(self, settings: Settings, runs: Mapping[str, Mapping[str, NDArray[Any]]]) -> list[tuple[Any, str]]:
        """Pictures for the report, with their descriptions, from the final parameters of runs by label."""
        from kourkoutas.lab.testbeds.heat2d import pictures

        return pictures.figures(settings, runs)


TESTBEDS: tuple[Testbed, ...] = (Heat2D(),)
