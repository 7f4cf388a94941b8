r"""A finite-element solution of Testbed B, independent of any network.

The domain is mapped to a box by r = r_in + ρ·w(θ), w = R(θ) - r_in, 0 ≤ ρ ≤ 1. The solution minimises

.. math::
    \tfrac12 \int |∇T|^2\,dV - \int_\text{outer} g\,T\,dS - \int_\text{outlet} g\,T\,dA, \qquad
    |∇T|^2 = \Big(\frac{T_ρ}{w}\Big)^2 + \frac1{r^2}\Big(T_θ - \frac{ρ w'}{w} T_ρ\Big)^2 + T_z^2

over trilinear functions of (ρ, θ, z) that take the given values on the inner wall and at the inlet and are periodic in
θ, with dV = r w dρ dθ dz, dA = r w dρ dθ and dS = √(R² + R'²) dθ dz. Two Gauss points per direction.

NOTE: nothing but the data depends on z, so the stiffness is K⊗M_z + M⊗K_z with two-dimensional K and M. In the basis
of K_z v = λ M_z v the three-dimensional system falls apart into one sparse system (K + λM) for each λ.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array, csc_array

from kourkoutas.lab.testbeds.heat3d import geometry
from kourkoutas.lab.testbeds.heat3d.geometry import LENGTH, R_IN, Case

Array = NDArray[np.float64]

GRID = (24, 96, 80)
# Gauss points and hat functions on [0, 1], both weights ½.
_GAUSS = 0.5 + np.array([-0.5, 0.5]) / np.sqrt(3)
_HAT = np.stack([1 - _GAUSS, _GAUSS])
_HAT_SLOPE = np.array([[-1.0, -1.0], [1.0, 1.0]])
# The corners of an element of the cross-section: (ρ side, θ side).
_CORNERS = ((0, 0), (0, 1), (1, 0), (1, 1))


@dataclass(frozen=True)
class Solution:
    """T at the nodes of the grid.

    Attributes:
      nodes: (r, θ, z) of every node, shape (nρ + 1, nθ + 1, nz + 1, 3); θ = 2π repeats θ = 0.
      T: the temperature there.
      volume: the share of the domain's volume that belongs to each node.
    """

    nodes: Array
    T: Array
    volume: Array

    def mean(self, values: Array) -> float:
        """The mean over the volume."""
        return float(np.sum(self.volume * values))

    def rms(self, values: Array) -> float:
        return float(np.sqrt(self.mean(values**2)))


def _line(n: int, length: float) -> tuple[Array, Array]:
    """Stiffness ∫φ_i'φ_j' and mass ∫φ_iφ_j of hat functions on n equal elements."""
    h = length / n
    ends = np.r_[1.0, np.full(n - 1, 2.0), 1.0]
    off = np.ones(n)
    K = (np.diag(ends) - np.diag(off, 1) - np.diag(off, -1)) / h
    M = (np.diag(2 * ends) + np.diag(off, 1) + np.diag(off, -1)) * h / 6
    return K, M


@dataclass(frozen=True)
class _Section:
    """The cross-section. Its node (i, j), ρ = i/nρ and θ = 2πj/nθ, has the number i·nθ + j.

    Attributes:
      K, M: stiffness and mass.
      theta, r: at the nodes; θ by j, r by (i, j).
    """

    K: Any
    M: Any
    theta: Array
    r: Array


def _section(given: Case, n_rho: int, n_theta: int) -> _Section:
    wall = given.wall
    h_rho, h_theta = 1 / n_rho, 2 * np.pi / n_theta
    i, j = np.meshgrid(np.arange(n_rho), np.arange(n_theta), indexing="ij")
    corners = np.stack([((i + p) * n_theta + (j + q) % n_theta).ravel() for p, q in _CORNERS])
    K = np.zeros((4, 4, i.size))
    M = np.zeros((4, 4, i.size))
    for a in range(2):
        for b in range(2):
            rho = ((i + _GAUSS[a]) * h_rho).ravel()
            theta = ((j + _GAUSS[b]) * h_theta).ravel()
            w, slope = wall.radius(theta) - R_IN, wall.slope(theta)
            r = R_IN + rho * w
            weight = r * w * h_rho * h_theta / 4
            phi, along_r, along_theta = [], [], []
            for p, q in _CORNERS:
                d_rho = _HAT_SLOPE[p, a] * _HAT[q, b] / h_rho
                d_theta = _HAT[p, a] * _HAT_SLOPE[q, b] / h_theta
                phi.append(_HAT[p, a] * _HAT[q, b])
                along_r.append(d_rho / w)
                along_theta.append((d_theta - rho * slope / w * d_rho) / r)
            for m in range(4):
                for n in range(4):
                    K[m, n] += weight * (along_r[m] * along_r[n] + along_theta[m] * along_theta[n])
                    M[m, n] += weight * phi[m] * phi[n]
    size = (n_rho + 1) * n_theta
    row, column = np.broadcast_arrays(corners[:, None], corners[None, :])  # of entry (m, n) of every element
    at = (row.ravel(), column.ravel())
    nodes_theta = h_theta * np.arange(n_theta, dtype=np.float64)
    r_nodes = R_IN + np.linspace(0, 1, n_rho + 1)[:, None] * (wall.radius(nodes_theta) - R_IN)
    make = functools.partial(coo_array, shape=(size, size))
    return _Section(make((K.ravel(), at)).tocsc(), make((M.ravel(), at)).tocsc(), nodes_theta, r_nodes)


def _outer_load(given: Case, n_theta: int, n_z: int) -> Array:
    """∫ g φ dS of every node (θ, z) of the outer wall."""
    h_theta, h_z = 2 * np.pi / n_theta, LENGTH / n_z
    load = np.zeros((n_theta, n_z + 1))
    j, k = np.arange(n_theta), np.arange(n_z)
    for b in range(2):
        theta = (j + _GAUSS[b]) * h_theta
        R = given.wall.radius(theta)
        arc = np.sqrt(R**2 + given.wall.slope(theta) ** 2) * h_theta / 2
        for c in range(2):
            z = (k + _GAUSS[c]) * h_z
            g = given.outer(R[:, None], theta[:, None], z[None, :]) * arc[:, None] * h_z / 2
            for q in (0, 1):
                for s in (0, 1):
                    # The other end of an element is the next node; in θ the last one's is the first.
                    load[:, s : s + n_z] += np.roll(_HAT[q, b] * _HAT[s, c] * g, q, axis=0)
    return load


def solve_case(given: Case, grid: tuple[int, int, int] = GRID) -> Solution:
    """The solution for boundary data `given` on `grid` = elements in ρ, θ and z."""
    from scipy import linalg  # imported here: every report imports this module, and solves nothing
    from scipy.sparse.linalg import splu

    n_rho, n_theta, n_z = grid
    if min(grid) < 2 or n_theta < 4:
        raise ValueError(f"`grid` must have at least 2, 4 and 2 elements in ρ, θ and z; got {grid!r}")
    section = _section(given, n_rho, n_theta)
    theta, r = section.theta, section.r
    K_z, M_z = _line(n_z, LENGTH)
    z = np.linspace(0, LENGTH, n_z + 1)

    shape = (n_rho + 1, n_theta, n_z + 1)
    at = (r[:, :, None], theta[None, :, None], z[None, None, :])
    load = np.zeros(shape)
    load[-1] = _outer_load(given, n_theta, n_z)
    # At the outlet g is interpolated between nodes: ∫ g φ dA = M g.
    load[:, :, -1] += (section.M @ given.outlet(r, theta[None, :], np.full_like(r, LENGTH)).ravel()).reshape(r.shape)

    lift = np.broadcast_to(given.value(*at), shape).copy()
    lift[1:, :, 1:] = 0
    flat = lift.reshape(-1, n_z + 1)
    right = load.reshape(-1, n_z + 1) - (section.K @ flat) @ M_z - (section.M @ flat) @ K_z

    # Unknown: all nodes but the inner wall (the first nθ of a section) and the inlet (the first of a line).
    free = slice(n_theta, None)
    K, M = csc_array(section.K[free, free]), csc_array(section.M[free, free])
    eigenvalues, V = linalg.eigh(K_z[1:, 1:], M_z[1:, 1:])
    modes = right[free, 1:] @ V
    for k, value in enumerate(eigenvalues):
        modes[:, k] = splu(K + value * M).solve(modes[:, k])
    T = lift
    T.reshape(-1, n_z + 1)[free, 1:] += modes @ V.T

    r_all, theta_all = np.concatenate([r, r[:, :1]], 1), np.append(theta, 2 * np.pi)
    nodes = np.stack(np.broadcast_arrays(r_all[:, :, None], theta_all[None, :, None], z[None, None, :]), -1)
    # dV = r w dρ dθ dz by the trapezoidal rule
    w = given.wall.radius(theta_all) - R_IN
    ends = [np.r_[0.5, np.ones(n - 1), 0.5] for n in grid]
    volume = (r_all * w * ends[0][:, None] * ends[1])[:, :, None] * ends[2]
    return Solution(nodes, np.concatenate([T, T[:, :1]], 1), volume / volume.sum())


@functools.lru_cache(maxsize=2)
def solve(case: str, grid: tuple[int, int, int] = GRID) -> Solution:
    """The reference of a case of `geometry`: its known solution at the nodes, or the finite-element one."""
    given = geometry.case(case)
    found = solve_case(given, grid)
    if given.solution is None:
        return found
    return Solution(found.nodes, given.solution(*np.moveaxis(found.nodes, -1, 0)), found.volume)
