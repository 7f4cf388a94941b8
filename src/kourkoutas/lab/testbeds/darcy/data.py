r"""Darcy flow in the unit square: permeabilities and pressures, by a finite-volume solver.

.. math::
    -∇·(a ∇u) = 1, \qquad u = 0 \text{ on the boundary}, \qquad a = 12 \text{ where } g > 0, \text{ else } 3

g is a Gaussian field of covariance (-Δ + 9)⁻² with zero slope at the boundary and mean zero, as in Li et al. (arXiv
2010.08895). a and u are given at the centres of `grid` × `grid` cells; u is solved for on cells `REFINE` times smaller.

NOTE: the pairs are cached as one file per content hash in the folder of `kourkoutas.lab.machine.cache_folder`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array

from kourkoutas.lab.locks import wait_for_lock
from kourkoutas.lab.machine import cache_folder

Floats = NDArray[np.float64]

HIGH, LOW = 12.0, 3.0
# Odd, so that the centre of a cell is the centre of one of its parts.
REFINE = 5
# Modes of g along each coordinate.
MODES = 32
_VERSION = 1


def coefficients(rng: np.random.Generator) -> Floats:
    """g = Σ c_kl cos kπx cos lπy: the c, of variance ∝ (π²(k² + l²) + 9)⁻²; the sign of g alone matters."""
    k = np.arange(MODES)
    eigenvalue = np.pi**2 * (k[:, None] ** 2 + k**2) + 9
    # ‖cos kπx‖² is ½, and 1 for k = 0.
    norm = np.where(k == 0, 1.0, np.sqrt(2.0))
    c = rng.standard_normal((MODES, MODES)) * norm[:, None] * norm / eigenvalue
    c[0, 0] = 0.0
    return np.asarray(c)


def permeability(c: Floats, cells: int) -> Floats:
    """a at the centres of `cells` × `cells` cells."""
    x = (np.arange(cells) + 0.5) / cells
    waves = np.cos(np.pi * np.arange(MODES)[:, None] * x)
    return np.where(waves.T @ c @ waves > 0, HIGH, LOW)


@functools.lru_cache(maxsize=4)
def _neighbours(n: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pairs of cells that share a face."""
    number = np.arange(n * n).reshape(n, n)
    one = np.concatenate([number[:-1].ravel(), number[:, :-1].ravel()])
    other = np.concatenate([number[1:].ravel(), number[:, 1:].ravel()])
    return one, other


def pressure(a: Floats) -> Floats:
    r"""u at the centres of the cells of `a`.

    The flow between two cells is their difference of u times the harmonic mean 2aa'/(a + a'); the boundary is half a
    cell away, so that its face has 2a.
    """
    from scipy.sparse.linalg import spsolve  # imported here: every report imports this module, and solves nothing

    n = len(a)
    one, other = _neighbours(n)
    flat = a.ravel()
    face = 2 * flat[one] * flat[other] / (flat[one] + flat[other])
    diagonal = np.zeros(n * n)
    np.add.at(diagonal, one, face)
    np.add.at(diagonal, other, face)
    edge = np.zeros((n, n))
    edge[0] += 1
    edge[-1] += 1
    edge[:, 0] += 1
    edge[:, -1] += 1
    diagonal += 2 * flat * edge.ravel()
    own = np.arange(n * n)
    A = coo_array(
        (
            np.concatenate([-face, -face, diagonal]),
            (np.concatenate([one, other, own]), np.concatenate([other, one, own])),
        )
    )
    return np.asarray(spsolve(A.tocsc(), np.full(n * n, 1 / n**2))).reshape(n, n)


def pair(c: Floats, grid: int, refine: int = REFINE) -> tuple[Floats, Floats]:
    """(a, u) at the centres of `grid` × `grid` cells."""
    centre = slice(refine // 2, None, refine)
    return permeability(c, grid), pressure(permeability(c, grid * refine))[centre, centre]


@dataclass(frozen=True)
class Pairs:
    """Permeabilities and pressures (samples, grid, grid), float32."""

    a: NDArray[np.float32]
    u: NDArray[np.float32]


def cache_file(grid: int, samples: int, seed: int) -> Path:
    content = {"grid": grid, "samples": samples, "seed": seed, "refine": REFINE, "modes": MODES, "version": _VERSION}
    text = json.dumps(content, sort_keys=True)
    return cache_folder() / f"darcy-{hashlib.sha256(text.encode()).hexdigest()[:16]}.npy"


# A worker runs many arms and seeds on the same data.
@functools.lru_cache(maxsize=2)
def pairs(grid: int, samples: int, seed: int) -> Pairs:
    """`samples` pairs, made now or read from the cache."""
    file = cache_file(grid, samples, seed)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_suffix(".lock").open("w") as lock:
        wait_for_lock(lock)
        found = _cached(file, (2, samples, grid, grid))
        if found is None:
            made = [pair(coefficients(np.random.default_rng([seed, i])), grid) for i in range(samples)]
            found = np.array(made, np.float32).swapaxes(0, 1)
            partial = file.with_suffix(".partial")
            with partial.open("wb") as stream:
                np.save(stream, found)
            os.replace(partial, file)
    return Pairs(found[0], found[1])


def _cached(file: Path, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
    """The file's array; None when it is missing or not what it should be."""
    try:
        found: NDArray[np.float32] = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return found if found.shape == shape and found.dtype == np.float32 else None
