"""Testbeds: what is trained. Data and initial parameters in NumPy, the loss in an engine's vocabulary.

Every module of this package that has a tuple `TESTBEDS` is found by name; a new testbed is a new file.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kourkoutas.lab.engines import Batches, Engine, Loss, Params
from kourkoutas.lab.errors import unknown
from kourkoutas.lab.specs.spec import Endpoint as Endpoint
from kourkoutas.lab.specs.spec import coerce

PRESETS = ("smoke", "laptop", "paper")

S = TypeVar("S")


class Problem(Protocol):
    """One seed of a testbed: everything that the optimizers of that seed share.

    Attributes:
      params: initial parameters, flat name → array.
      constants: arrays that are part of every batch, moved to the device once.
      steps: updates in the whole run.
      chunk: steps handed to the engine at once; a divisor of `steps` where that is easy.
      tail: the mean training loss of this many last steps is the metric `train_loss`.
      evaluate_every: also evaluate about every so many steps (rounded up to whole chunks); 0 for the end only.
      compile: torch.compile pays for this loss.
      loss: function (E, params, batch) → scalar. See the note in `engines.Trainer` on what it should be.
    """

    @property
    def params(self) -> Mapping[str, NDArray[Any]]: ...
    @property
    def constants(self) -> Mapping[str, NDArray[Any]]: ...
    @property
    def steps(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def tail(self) -> int: ...
    @property
    def evaluate_every(self) -> int: ...
    @property
    def compile(self) -> bool: ...
    @property
    def loss(self) -> Loss: ...

    def batches(self, start: int, stop: int) -> Batches:
        """The batches of steps start ≤ step < stop (from 0), the same whatever the chunks: see `Trainer.run`."""
        ...

    def lr(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """The learning rate of each of these steps (from 0)."""
        ...

    def evaluate(self, E: Engine, params: Params, step: int) -> dict[str, float]:
        """Metrics after `step` updates; those of the endpoints among them when step == steps."""
        ...


# The K-β settings that the paper's testbeds share, written out so that they stay when a default changes.
PAPER: Mapping[str, Any] = {
    "beta1": 0.9,
    "beta2_min": 0.88,
    "beta2_max": 0.999,
    "alpha": 0.93,
    "eps": 1e-8,
    "decay": None,
    "max_ratio": None,
    "adaptive_tiny": False,
    "bias_correction": "beta2max",
}


# K-β on the problems that others set: the paper's settings without a warmup of its own.
FIELD: Mapping[str, Any] = {**PAPER, "warmup_steps": 0, "buckets": "parameter"}


@dataclasses.dataclass(frozen=True)
class Plain:
    """The defaults of `Problem`, to inherit from: the same loss and learning rate at each of `settings.steps` steps."""

    settings: Any
    seed: int

    @property
    def steps(self) -> int:
        return int(self.settings.steps)

    def batches(self, start: int, stop: int) -> Batches:
        return {}

    def lr(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.full(len(steps), self.settings.lr)

    @property
    def constants(self) -> Mapping[str, NDArray[Any]]:
        return {}

    @property
    def chunk(self) -> int:
        return 500

    @property
    def tail(self) -> int:
        return 100

    @property
    def evaluate_every(self) -> int:
        return 0

    @property
    def compile(self) -> bool:
        return False


class Testbed(Protocol):
    """A family of problems, one per seed.

    Attributes:
      name: e.g. "rare_trigger"; "-" and "_" are the same to users.
      title: one line for people.
      version: part of every run's id. Raise it with any change of data, model, loss or evaluation that gives other
        results for the same settings, so that older results do not pass as current ones.
      endpoints: the primary one first.
      presets: "smoke", "laptop" and "paper" → settings, a frozen dataclass.
      kbeta: the K-β options of this testbed; the other K-β arms start from them.
      arms: the optimizers of a study that names none.

    One whose settings name a file also has `pinned`: see the function of that name.
    """

    @property
    def name(self) -> str: ...
    @property
    def title(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def endpoints(self) -> tuple[Endpoint, ...]: ...
    @property
    def presets(self) -> Mapping[str, Any]: ...
    @property
    def kbeta(self) -> Mapping[str, Any]: ...
    @property
    def arms(self) -> tuple[str, ...]: ...

    def problem(self, settings: Any, seed: int) -> Problem: ...


def override(settings: S, overrides: Mapping[str, Any], where: str) -> S:
    """`settings` with some fields replaced; values may be the strings of a command line."""
    names = {f.name: f for f in dataclasses.fields(settings)}  # type: ignore[arg-type]
    changes = {}
    for name, value in overrides.items():
        if name not in names:
            raise unknown(f"setting of {where}", name, tuple(names))
        changes[name] = coerce(name, value, getattr(settings, name))
    return dataclasses.replace(settings, **changes)  # type: ignore[type-var]


def settings_of(testbed: Testbed, preset: str, overrides: Mapping[str, Any]) -> Any:
    """The settings of a preset with overrides from `--set name=value`."""
    if preset not in testbed.presets:
        raise unknown(f"preset of {testbed.name}", preset, tuple(testbed.presets))
    return override(testbed.presets[preset], overrides, testbed.name)


def pinned(testbed: Testbed, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`overrides` and the settings that name for good what they refer to, so that a changed file is noticed.

    A testbed that reads files has a method `pinned`, which gives those settings.
    """
    of_testbed = getattr(testbed, "pinned", None)
    return dict(overrides) if of_testbed is None else {**overrides, **of_testbed(overrides)}


def _all() -> Iterable[Testbed]:
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__)):
        yield from getattr(importlib.import_module(f"{__name__}.{module}"), "TESTBEDS", ())


def every() -> dict[str, Testbed]:
    """All testbeds by name."""
    return {testbed.name: testbed for testbed in _all()}


def get(name: str) -> Testbed:
    """The testbed of that name."""
    known = every()
    key = name.replace("-", "_")
    if key not in known:
        raise unknown("testbed", name, tuple(known))
    return known[key]
