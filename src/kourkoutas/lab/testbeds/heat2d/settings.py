"""The sizes of a run of Testbed A, and its learning rates by epoch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TIMESTEPS = ("own", "common")
MASKS = ("block", "causal")
# Explicit finite differences of ∂u/∂t = α∇²u on a square grid are stable up to α·Δt/Δx² = 1/4.
STABLE = 0.25


class Split(NamedTuple):
    """How many cases are for what, in this order in the data."""

    train: int
    validation: int
    test: int


@dataclass(frozen=True)
class Settings:
    """The sizes of a run; the defaults are the paper's.

    Attributes:
      samples: cases in all, split 70/20/10 % into training, validation and test.
      grid: nodes along each side of the unit square.
      frames: snapshots of a case, the initial one among them.
      timestep: "own" gives each case Δt = courant·Δx²/α, "common" gives all Δt = courant·Δx²/α_max.
      courant: α·Δt/Δx² of the fastest case.
      data_seed: of the data, which all run seeds share; the run's seed sets the initial weights and the order.
      known: first frames of a case, which the model is given.
      mask: "block" (every frame looks at the known frames only) or "causal" (at itself and all before it).
      shortcut: in block mode, compute keys and values of the known frames only; off masks a full attention.
      quantize: INT8 quantization-aware training of the input projection and the positional table.
      schedule: "epoch:lr" pairs; a rate holds from the start of its epoch, the first epoch being 1.
      lr: a highest rate, to which all rates of the schedule are scaled; None leaves them as they are.
      boundary, residual, start: weights of the loss terms beside the MSE.
      evaluate_epochs: epochs between evaluations on training and validation cases.
      rollout: test cases of the roll-out.
    """

    samples: int = 4_000
    grid: int = 26
    frames: int = 401
    timestep: str = "own"
    courant: float = 0.1
    data_seed: int = 0
    width: int = 512
    layers: int = 24
    heads: int = 16
    mlp: int = 256
    known: int = 5
    mask: str = "block"
    shortcut: bool = True
    quantize: bool = True
    batch: int = 4
    epochs: int = 100
    schedule: str = "1:1e-3 30:5e-4 40:1e-4 60:1e-5"
    lr: float | None = None
    boundary: float = 0.1
    residual: float = 0.001
    start: float = 0.1
    evaluate_epochs: int = 10
    rollout: int = 8

    def __post_init__(self) -> None:
        if self.timestep not in TIMESTEPS:
            raise ValueError(f"`timestep` must be 'own' or 'common'; got {self.timestep!r}")
        if self.mask not in MASKS:
            raise ValueError(f"`mask` must be 'block' or 'causal'; got {self.mask!r}")
        if not 0 < self.courant <= STABLE:
            raise ValueError(
                f"`courant` must be in (0, {STABLE}], the stability limit of explicit differences in two dimensions, "
                f"for example 0.1; got {self.courant!r}"
            )
        for name, least in (
            ("samples", 10),
            ("grid", 3),
            ("width", 2),
            ("layers", 1),
            ("heads", 1),
            ("mlp", 1),
            ("known", 1),
            ("batch", 1),
            ("epochs", 1),
            ("evaluate_epochs", 1),
            ("rollout", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be >= {least}; got {getattr(self, name)!r}")
        for name in ("boundary", "residual", "start"):
            if not getattr(self, name) >= 0:
                raise ValueError(
                    f"`{name}` must be a weight >= 0, 0 to leave the term out; got {getattr(self, name)!r}"
                )
        if self.frames < 2 * self.known:
            raise ValueError(
                f"`frames` must be at least 2·known = {2 * self.known}, so that a roll-out can feed back; "
                f"got {self.frames!r}"
            )
        if self.width % (2 * self.heads):
            raise ValueError(
                f"`width` must be a multiple of 2·heads = {2 * self.heads}: heads share it evenly and channels turn in "
                f"pairs; got {self.width!r}"
            )
        if self.batch > self.split.train:
            raise ValueError(f"`batch` must be at most the {self.split.train} training cases; got {self.batch!r}")
        highest = max(rate for _, rate in rates(self.schedule))
        if self.lr is not None and not (isinstance(self.lr, int | float) and self.lr > 0 and highest > 0):
            raise ValueError(
                f"`lr` must be a highest rate > 0 for the schedule {self.schedule!r}, for example 1e-3; got {self.lr!r}"
            )

    @property
    def nodes(self) -> int:
        return self.grid**2

    @property
    def split(self) -> Split:
        train, validation = round(0.7 * self.samples), round(0.2 * self.samples)
        return Split(train, validation, self.samples - train - validation)

    @property
    def epoch_steps(self) -> int:
        """Updates in an epoch. Cases that do not fill a last batch are left out, others in each epoch."""
        return self.split.train // self.batch


@functools.lru_cache(maxsize=16)
def rates(schedule: str) -> tuple[tuple[int, float], ...]:
    """The pairs (epoch, learning rate) of a schedule.

    >>> rates("1:1e-3 30:5e-4")
    ((1, 0.001), (30, 0.0005))
    """
    try:
        pairs = tuple((int(epoch), float(lr)) for epoch, lr in (pair.split(":") for pair in schedule.split()))
    except ValueError:
        pairs = ()
    epochs = [epoch for epoch, _ in pairs]
    if not pairs or epochs != sorted(set(epochs)) or epochs[0] != 1 or not all(lr >= 0 for _, lr in pairs):
        raise ValueError(
            f"`schedule` must be rising epoch:lr pairs from epoch 1, for example '1:1e-3 30:5e-4'; got {schedule!r}"
        )
    return pairs


def learning_rates(settings: Settings, steps: NDArray[np.int64]) -> NDArray[np.float64]:
    """γ(e) of each step, e = 1 + step // epoch_steps; with `lr` set, lr·γ(e)/max γ."""
    first, lrs = zip(*rates(settings.schedule), strict=True)
    epoch = 1 + np.asarray(steps) // settings.epoch_steps
    own = np.array(lrs) if settings.lr is None else settings.lr * (np.array(lrs) / max(lrs))
    return own[np.searchsorted(first, epoch, side="right") - 1]
