r"""The equations, their conditions and their solutions: DeepXDE's example, and PINNacle (arXiv 2306.08827).

| case          | equation                                           | conditions                                    |
|---------------|----------------------------------------------------|-----------------------------------------------|
| `burgers1d`   | u_t + u u_x = (0.01/π) u_xx, [-1, 1] × [0, 0.99]   | u(x, 0) = -sin πx; u = 0 at the walls         |
| `wave1d_c`    | u_tt = 4 u_xx, [0, 1] × [0, 1]                     | u of the solution and u_t = 0 at t = 0; walls |
| `heat2d_ms`   | u_t = u_xx/(500π)² + u_yy/π², [0, 1]² × [0, 5]     | u(x, y, 0) = sin 20πx sin πy; u = 0 at walls  |
| `poisson2d_c` | Δu = 0, [-½, ½]² less four discs of radius 0.1     | u = 1 on the square, 0 on the discs           |

Coordinates stand in the order in which they are written, time last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array

from kourkoutas.lab.engines import Array

Floats = NDArray[np.float64]
NU = 0.01 / np.pi
SPEED = 2.0
HEAT = (1 / (500 * np.pi) ** 2, 1 / np.pi**2)
HALF, RADIUS = 0.5, 0.1
CENTRES = np.array([[0.3, 0.3], [-0.3, 0.3], [0.3, -0.3], [-0.3, -0.3]])


@dataclass(frozen=True)
class Drawn:
    """Points of one seed.

    Attributes:
      inside: where only the equation holds.
      given: by name, points where u is given, and u there.
    """

    inside: Floats
    given: Mapping[str, tuple[Floats, Floats]]


@dataclass(frozen=True)
class Counts:
    """How many points are drawn inside, on the boundary, and at the start (equations with time)."""

    interior: int
    boundary: int
    initial: int


@dataclass(frozen=True)
class Case:
    """One problem.

    Attributes:
      inputs: coordinates.
      second: cᵢ of L u = Σ cᵢ ∂ᵢ∂ᵢ u.
      residual: function (u, slopes, L u) → what the equation makes zero.
      draw: function (rng, counts) → points.
      given: the names of the points where u is given, in order.
      truth: function → (points, u there), where the error is measured.
      at_rest: the coordinate along which the slope is zero at the points "initial"; None where none is given.
    """

    inputs: int
    second: tuple[float, ...]
    residual: Callable[[Array, Array, Array], Array]
    draw: Callable[[np.random.Generator, Counts], Drawn]
    given: tuple[str, ...]
    truth: Callable[[], tuple[Floats, Floats]]
    at_rest: int | None = None


def _zero(points: Floats) -> tuple[Floats, Floats]:
    return points, np.zeros(len(points))


def _grid(*axes: Floats) -> Floats:
    """All combinations, one in a row."""
    return np.stack([a.ravel() for a in np.meshgrid(*axes, indexing="ij")], axis=1)


# Burgers


def burgers(x: Floats, t: Floats, nodes: int = 200) -> Floats:
    r"""The solution by Cole and Hopf, with Gauss–Hermite quadrature.

    .. math::
        u(x, t) = -\frac{\int \sin π(x - η)\, f(x - η)\, e^{-η^2/4νt}\,dη}{\int f(x - η)\, e^{-η^2/4νt}\,dη},
        \qquad f(y) = e^{-\cos(πy)/2πν}
    """
    z, weight = np.polynomial.hermite.hermgauss(nodes)
    y = np.asarray(x)[..., None] - np.sqrt(4 * NU * np.asarray(t)[..., None]) * z
    f = weight * np.exp(-np.cos(np.pi * y) / (2 * np.pi * NU))
    return np.asarray(-np.sum(np.sin(np.pi * y) * f, -1) / np.sum(f, -1))


def _draw_burgers(rng: np.random.Generator, n: Counts) -> Drawn:
    inside = rng.uniform([-1, 0], [1, 0.99], (n.interior, 2))
    walls = np.stack([rng.choice([-1.0, 1.0], n.boundary), rng.uniform(0, 0.99, n.boundary)], 1)
    x = rng.uniform(-1, 1, n.initial)
    start = np.stack([x, np.zeros_like(x)], 1)
    return Drawn(inside, {"walls": _zero(walls), "initial": (start, -np.sin(np.pi * x))})


@functools.cache
def _true_burgers() -> tuple[Floats, Floats]:
    points = _grid(np.linspace(-1, 1, 256), np.linspace(0, 0.99, 100))
    return points, burgers(points[:, 0], points[:, 1])


# Wave


def wave(x: Floats, t: Floats) -> Floats:
    """sin πx cos 2πt + ½ sin 4πx cos 8πt."""
    one = np.sin(np.pi * x) * np.cos(SPEED * np.pi * t)
    return np.asarray(one + 0.5 * np.sin(4 * np.pi * x) * np.cos(4 * SPEED * np.pi * t))


def _draw_wave(rng: np.random.Generator, n: Counts) -> Drawn:
    inside = rng.random((n.interior, 2))
    walls = np.stack([rng.choice([0.0, 1.0], n.boundary), rng.random(n.boundary)], 1)
    x = rng.random(n.initial)
    start = np.stack([x, np.zeros_like(x)], 1)
    return Drawn(inside, {"walls": _zero(walls), "initial": (start, wave(x, np.zeros_like(x)))})


@functools.cache
def _true_wave() -> tuple[Floats, Floats]:
    points = _grid(np.linspace(0, 1, 101), np.linspace(0, 1, 101))
    return points, wave(points[:, 0], points[:, 1])


# Heat with two scales


def heat(x: Floats, y: Floats, t: Floats) -> Floats:
    """sin 20πx sin πy exp(-((20π)²k₁ + π²k₂) t)."""
    rate = (20 * np.pi) ** 2 * HEAT[0] + np.pi**2 * HEAT[1]
    return np.asarray(np.sin(20 * np.pi * x) * np.sin(np.pi * y) * np.exp(-rate * t))


def _draw_heat(rng: np.random.Generator, n: Counts) -> Drawn:
    inside = rng.random((n.interior, 3)) * [1, 1, 5]
    walls = rng.random((n.boundary, 3)) * [1, 1, 5]
    side = rng.integers(0, 4, n.boundary)
    walls[np.arange(n.boundary), side // 2] = side % 2
    start = rng.random((n.initial, 3)) * [1, 1, 0]
    return Drawn(inside, {"walls": _zero(walls), "initial": (start, heat(*start.T))})


@functools.cache
def _true_heat() -> tuple[Floats, Floats]:
    points = _grid(np.linspace(0, 1, 101), np.linspace(0, 1, 21), np.linspace(0, 5, 11))
    return points, heat(*points.T)


# Laplace's equation between a square and four discs


def _in_discs(points: Floats) -> NDArray[np.bool_]:
    return np.asarray((np.linalg.norm(points[:, None] - CENTRES, axis=2) < RADIUS).any(1))


def _draw_poisson(rng: np.random.Generator, n: Counts) -> Drawn:
    # The discs take an eighth of the square, so twice as many draws are enough.
    inside = rng.uniform(-HALF, HALF, (2 * n.interior, 2))
    inside = inside[~_in_discs(inside)][: n.interior]
    # Points per length of boundary: the sides are 4 long, the circles 4·2πr.
    circles = round(n.boundary * 8 * np.pi * RADIUS / (4 + 8 * np.pi * RADIUS))
    sides = rng.uniform(-HALF, HALF, (n.boundary - circles, 2))
    side = rng.integers(0, 4, len(sides))
    sides[np.arange(len(sides)), side // 2] = HALF * (2 * (side % 2) - 1)
    angle = rng.uniform(0, 2 * np.pi, circles)
    around = CENTRES[rng.integers(0, 4, circles)] + RADIUS * np.stack([np.cos(angle), np.sin(angle)], 1)
    return Drawn(inside, {"sides": (sides, np.ones(len(sides))), "discs": _zero(around)})


def poisson(intervals: int) -> tuple[Floats, Floats]:
    r"""(nodes between square and discs, u there) by finite differences on a square grid.

    Where a circle cuts the way to a neighbour at a distance h₊ < h, u = 0 stands there (Shortley and Weller):

    .. math::
        u_{xx} ≈ \frac{2}{h_- + h_+} \Big(\frac{u_+ - u}{h_+} - \frac{u - u_-}{h_-}\Big)
    """
    from scipy.sparse.linalg import spsolve  # imported here: every report imports this module, and solves nothing

    h = 2 * HALF / intervals
    axis = np.linspace(-HALF, HALF, intervals + 1)
    nodes = _grid(axis[1:-1], axis[1:-1])
    number = np.full(len(nodes), -1)
    free = ~_in_discs(nodes)
    number[free] = np.arange(free.sum())
    side = intervals - 1
    index = np.flatnonzero(free)
    i, j = index // side, index % side
    rows, columns, entries = [], [], []
    rhs, diagonal = np.zeros(len(index)), np.zeros(len(index))
    for direction in (np.array([1.0, 0.0]), np.array([0.0, 1.0])):
        di, dj = direction.astype(int)
        away = {s: _to_circle(nodes[index], s * direction, h) for s in (-1, 1)}
        for s in (-1, 1):
            weight = 2 / (away[s] * (away[-1] + away[1]))
            diagonal += weight
            ni, nj = i + s * di, j + s * dj
            outside = (ni < 0) | (ni == side) | (nj < 0) | (nj == side)
            rhs += np.where(outside, weight, 0.0)  # u = 1 on the square
            near = np.where(outside, -1, number[np.clip(ni, 0, side - 1) * side + np.clip(nj, 0, side - 1)])
            inner = (near >= 0) & (away[s] == h)
            rows.append(np.flatnonzero(inner))
            columns.append(near[inner])
            entries.append(-weight[inner])
    own = np.arange(len(index))
    A = coo_array(
        (np.concatenate([*entries, diagonal]), (np.concatenate([*rows, own]), np.concatenate([*columns, own])))
    )
    return nodes[index], np.asarray(spsolve(A.tocsc(), rhs))


def _to_circle(points: Floats, direction: Floats, h: float) -> Floats:
    """How far a circle is in that direction, at most h."""
    away = np.full(len(points), h)
    for centre in CENTRES:
        # |p + s·d - c| = r: s = b - √(b² - |p - c|² + r²) with b = d·(c - p)
        to = centre - points
        b = to @ direction
        root = b**2 - np.sum(to**2, 1) + RADIUS**2
        s = b - np.sqrt(np.maximum(root, 0))
        away = np.where((root > 0) & (s > 0) & (s < away), s, away)
    return away


@functools.cache
def _true_poisson() -> tuple[Floats, Floats]:
    return poisson(160)


def _burgers_residual(u: Array, slopes: Array, second: Array) -> Array:
    return slopes[1] + u * slopes[0] - NU * second


def _second_order_residual(u: Array, slopes: Array, second: Array) -> Array:
    return second


def _heat_residual(u: Array, slopes: Array, second: Array) -> Array:
    return slopes[2] - second


CASES: Mapping[str, Case] = {
    "burgers1d": Case(2, (1.0, 0.0), _burgers_residual, _draw_burgers, ("walls", "initial"), _true_burgers),
    "wave1d_c": Case(
        2, (-(SPEED**2), 1.0), _second_order_residual, _draw_wave, ("walls", "initial"), _true_wave, at_rest=1
    ),
    "heat2d_ms": Case(3, (*HEAT, 0.0), _heat_residual, _draw_heat, ("walls", "initial"), _true_heat),
    "poisson2d_c": Case(2, (1.0, 1.0), _second_order_residual, _draw_poisson, ("sides", "discs"), _true_poisson),
}
