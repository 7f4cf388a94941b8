r"""Heat conduction on a square plate, by explicit finite differences for all cases at once.

.. math::
    u^{n+1}_{ij} = u^n_{ij} + \frac{α Δt}{Δx^2}
    \left(u^n_{i+1,j} + u^n_{i-1,j} + u^n_{i,j+1} + u^n_{i,j-1} - 4 u^n_{ij}\right)

The walls keep their values; the interior starts uniform. Wall values and diffusivities are evenly spaced over their
ranges, each list permuted on its own.

NOTE: with Δt = courant·Δx²/α per case, the paper's choice, α cancels from the frames, and each frame is a linear
function of five numbers: the four walls and the initial value. With a common Δt it does not cancel.

NOTE: frames are cached as one file per content hash, in $KBETA_CACHE, else $XDG_CACHE_HOME/kbeta, else ~/.cache/kbeta,
and read as a memory map: the paper's 4,000 cases are 4.3 GB, of which a batch touches four.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kourkoutas.lab.locks import wait_for_lock
from kourkoutas.lab.machine import cache_folder
from kourkoutas.lab.testbeds.heat2d.settings import STABLE, Settings

SLOWEST, FASTEST = 0.01, 0.1
LEFT, RIGHT, TOP, BOTTOM = range(4)
# Highest value of each wall.
WALLS = (1.0, 1.0, 1.0, 0.1)
# Cases advanced together: their state stays in a core's cache.
TOGETHER = 64
# The settings that decide the frames, and the version of this generator.
_CONTENT = ("samples", "grid", "frames", "timestep", "courant", "data_seed")
_VERSION = 1


@dataclass(frozen=True)
class Cases:
    """Cases and their frames.

    Attributes:
      frames: (samples, frames, grid²) float32, rows from top to bottom; a memory map when it comes from the cache.
      walls: (samples, 4): left, right, top, bottom.
      initial: (samples,) the interior's value at the start.
      alpha: (samples,) diffusivity.
      dt: (samples,) time between frames.
    """

    frames: NDArray[np.float32]
    walls: NDArray[np.float64]
    initial: NDArray[np.float64]
    alpha: NDArray[np.float64]
    dt: NDArray[np.float64]


def draw(settings: Settings) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """(walls, initial, alpha) of all cases."""
    rng = np.random.default_rng([_VERSION, settings.data_seed])
    n = settings.samples
    walls = np.stack([rng.permutation(np.linspace(0, high, n)) for high in WALLS], axis=1)
    alpha = rng.permutation(np.linspace(SLOWEST, FASTEST, n))
    return walls, rng.random(n), alpha


def advance(u: NDArray[np.float64], number: NDArray[np.float64], frames: int, out: NDArray[np.float32]) -> None:
    """Write `frames` snapshots of u (cases, rows, columns) to out (cases, frames, rows, columns).

    Args:
      u: the first snapshot, walls included; overwritten.
      number: α·Δt/Δx² of each case.
    """
    if not (number <= STABLE).all():
        raise ValueError(
            f"α·Δt/Δx² must be at most {STABLE} for explicit differences to be stable; got {number.max():.4g}: "
            "take a smaller `courant`"
        )
    c = number[:, None, None]
    inside = u[:, 1:-1, 1:-1]
    change = np.empty_like(inside)
    out[:, 0] = u
    for n in range(1, frames):
        # u ← u + (αΔt/Δx²)·(north + south + west + east - 4u)
        np.add(u[:, :-2, 1:-1], u[:, 2:, 1:-1], out=change)
        change += u[:, 1:-1, :-2]
        change += u[:, 1:-1, 2:]
        change -= 4 * inside
        change *= c
        inside += change
        out[:, n] = u


def plates(settings: Settings, walls: NDArray[np.float64], initial: NDArray[np.float64]) -> NDArray[np.float64]:
    """First snapshots (cases, rows, columns); the corners belong to the top and the bottom."""
    u = np.empty((len(initial), settings.grid, settings.grid))
    u[:] = initial[:, None, None]
    u[:, :, 0], u[:, :, -1] = walls[:, LEFT, None], walls[:, RIGHT, None]
    u[:, 0, :], u[:, -1, :] = walls[:, TOP, None], walls[:, BOTTOM, None]
    return u


def cache_file(settings: Settings) -> Path:
    """Where the frames of these settings are kept."""
    content = {name: value for name, value in dataclasses.asdict(settings).items() if name in _CONTENT}
    text = json.dumps({**content, "version": _VERSION}, sort_keys=True)
    return cache_folder() / f"heat2d-{hashlib.sha256(text.encode()).hexdigest()[:16]}.npy"


# A worker runs many arms and seeds on the same data.
@functools.lru_cache(maxsize=2)
def cases(settings: Settings) -> Cases:
    """All cases of these settings, their frames made now or read from the cache."""
    walls, initial, alpha = draw(settings)
    # Δt = courant·Δx²/α
    dx = 1 / (settings.grid - 1)
    dt = settings.courant * dx**2 / (alpha if settings.timestep == "own" else np.full_like(alpha, FASTEST))
    number = np.minimum(alpha * dt / dx**2, settings.courant)
    file = cache_file(settings)
    shape = (settings.samples, settings.frames, settings.nodes)
    with _alone(file):
        frames = _cached(file, shape)
        if frames is None:
            _make(file, shape, plates(settings, walls, initial), number)
            frames = _cached(file, shape)
    if frames is None:
        raise OSError(f"{file} was written but cannot be read: check the disk, or set KBETA_CACHE to another folder")
    return Cases(frames, walls, initial, alpha, dt)


@contextmanager
def _alone(file: Path) -> Iterator[None]:
    """One process at a time makes a file; the others wait for it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        wait_for_lock(lock)
        yield


def _cached(file: Path, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
    """The file as a memory map; None when it is missing or not what it should be."""
    try:
        found: NDArray[np.float32] = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return found if found.shape == shape and found.dtype == np.float32 else None


def _make(file: Path, shape: tuple[int, ...], u: NDArray[np.float64], number: NDArray[np.float64]) -> None:
    """Write the frames under another name and move them in one step, so that no reader sees half a file."""
    need = 4 * int(np.prod(shape))
    free = shutil.disk_usage(file.parent).free
    if free < need:
        raise OSError(
            f"{file.parent} has {free / 1e9:.1f} GB free, and the frames need {need / 1e9:.1f} GB: "
            "make room, take fewer `samples`, or set KBETA_CACHE to a folder on another disk"
        )
    partial = file.with_suffix(".partial")
    frames = np.lib.format.open_memmap(partial, mode="w+", dtype=np.float32, shape=shape)
    for first in range(0, shape[0], TOGETHER):
        here = slice(first, first + TOGETHER)
        out = np.empty((len(u[here]), shape[1], *u.shape[1:]), np.float32)
        advance(u[here], number[here], shape[1], out)
        frames[here] = out.reshape(-1, *shape[1:])
    frames.flush()
    del frames
    os.replace(partial, file)
