r"""The domain of Testbed B, its boundary conditions, and the points at which they are asked for.

.. math::
    r_\text{in} < r < R(θ) = 1 + \tfrac14 \sin 3θ, \qquad 0 ≤ θ ≤ 2π, \qquad 0 < z < 10, \qquad r_\text{in} = 0.2

with ΔT = 0 inside, T given on the inner wall and at the inlet z = 0, ∂T/∂z at the outlet z = 10, and ∂T/∂n on the
outer wall. A `Case` says what is given there:

| case       | inner wall, inlet | outlet  | outer wall  | solution                                                  |
|------------|-------------------|---------|-------------|-----------------------------------------------------------|
| "paper"    | T = 1             | 0       | -q(z)       | unknown: see `reference`                                   |
| "harmonic" | T = T*            | ∂T*/∂z  | ∂T*/∂n      | T* = 1 - z ln(r/r_in)/20 + (r³ - r_in⁶/r³) sin(3θ)/5      |

with q = 0 below z = 2.5, rising linearly to 0.5 at z = 7.5, and 0.5 from there.

NOTE: the points are drawn once and are the same for every seed, as in the paper; the seed sets the network only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kourkoutas.lab.errors import unknown
from kourkoutas.lab.testbeds.heat3d.taylor import Counts

Array = NDArray[np.float64]

R_IN, R_MAX, WAVE, LENGTH = 0.2, 1.0, 0.25, 10.0
POINTS = 5  # of the generators: the points of this testbed, whatever the seed of a run


@dataclass(frozen=True)
class Wall:
    """The outer wall R(θ) = 1 + wave·sin 3θ."""

    wave: float = WAVE

    def radius(self, theta: Array) -> Array:
        return R_MAX * (1 + self.wave * np.sin(3 * theta))

    def slope(self, theta: Array) -> Array:
        """R'(θ)."""
        return R_MAX * 3 * self.wave * np.cos(3 * theta)

    def normal(self, theta: Array) -> tuple[Array, Array]:
        """The outward unit normal (n_r, n_θ): the direction of ∇(r - R(θ)) = (1, -R'/R)."""
        tilt = -self.slope(theta) / self.radius(theta)
        length = np.sqrt(1 + tilt**2)
        return 1 / length, tilt / length


def flux(z: Array) -> Array:
    """q(z), the heat that leaves through the outer wall."""
    return np.clip((z - 2.5) / 5, 0, 1) * 0.5


@dataclass(frozen=True)
class Case:
    """Boundary data as functions of (r, θ, z); `solution` where it is known in closed form."""

    wall: Wall
    value: Callable[[Array, Array, Array], Array]
    outlet: Callable[[Array, Array, Array], Array]
    outer: Callable[[Array, Array, Array], Array]
    solution: Callable[[Array, Array, Array], Array] | None = None


def _ones(r: Array, theta: Array, z: Array) -> Array:
    return np.ones(np.broadcast(r, theta, z).shape)


def harmonic(r: Array, theta: Array, z: Array) -> Array:
    """T*: both terms vanish on the inner wall but for the constant, and Δ(z ln r) = Δ(r^±3 sin 3θ) = 0."""
    return np.asarray(1 - z * np.log(r / R_IN) / 20 + (r**3 - R_IN**6 / r**3) * np.sin(3 * theta) / 5)


def _harmonic_z(r: Array, theta: Array, z: Array) -> Array:
    return -np.log(r / R_IN) / 20 + 0 * (theta + z)


def _harmonic_n(wall: Wall, r: Array, theta: Array, z: Array) -> Array:
    along_r = -z / (20 * r) + 3 * (r**2 + R_IN**6 / r**4) * np.sin(3 * theta) / 5
    along_theta = 3 * (r**3 - R_IN**6 / r**3) * np.cos(3 * theta) / (5 * r)
    n_r, n_theta = wall.normal(theta)
    return n_r * along_r + n_theta * along_theta


@functools.cache
def case(name: str) -> Case:
    """The boundary data of that name."""
    wall = Wall()
    known = {
        "paper": Case(wall, _ones, lambda r, t, z: 0 * (r + t + z), lambda r, t, z: -flux(z) + 0 * (r + t)),
        "harmonic": Case(wall, harmonic, _harmonic_z, functools.partial(_harmonic_n, wall), harmonic),
    }
    if name not in known:
        raise unknown("case", name, tuple(known))
    return known[name]


CASES = ("paper", "harmonic")


@dataclass(frozen=True)
class Points:
    """Sizes of the point sets: collocation points, points on each of four boundaries, θ-periodicity pairs."""

    interior: int
    boundary: int
    pairs: int

    @property
    def counts(self) -> Counts:
        """For `taylor_layer`: interior; outlet, outer wall and both ends of the pairs; inner wall and inlet."""
        return self.interior, 2 * self.boundary + 2 * self.pairs, 2 * self.boundary


def inside(rng: np.random.Generator, wall: Wall, count: int) -> tuple[Array, Array]:
    """θ uniform, and r uniform between r_in and R(θ): the cross-section in which all points but pairs are drawn."""
    theta = rng.uniform(0, 2 * np.pi, count)
    return rng.uniform(0, 1, count) * (wall.radius(theta) - R_IN) + R_IN, theta


def _along(r: Any, theta: Any, z: Any, count: int) -> Array:
    return np.stack([np.broadcast_to(x, count) for x in (r, theta, z)], 1)


def rows_of_interior(x: Array) -> Array:
    """The five channels of the coordinates (r, θ, z) at points `x`: value, three slopes, and the Laplacian.

    The slopes are along the orthonormal e_r, e_θ and e_z, so that ΔT needs the sum of their squares. Of the
    coordinates themselves, Δr = 1/r and Δθ = Δz = 0.
    """
    n, r = len(x), x[:, 0]
    return np.concatenate([x, _along(1, 0, 0, n), _along(0, 1 / r, 0, n), _along(0, 0, 1, n), _along(1 / r, 0, 0, n)])


@functools.lru_cache(maxsize=4)
def constants(points: Points, name: str, dtype: str = "float32") -> dict[str, NDArray[Any]]:
    """Rows of the network's input with their channels, in the order of `taylor_layer`, and the boundary targets.

    Slopes are along z at the outlet, along the normal on the outer wall, and along θ for the pairs.
    """
    rng = np.random.default_rng([POINTS])
    given = case(name)
    n, nb = points.interior, points.boundary

    def section(count: int, z: Array) -> Array:
        r, theta = inside(rng, given.wall, count)
        return np.stack([r, theta, z], 1)

    def around(count: int, radius: Callable[[Array], Array]) -> Array:
        theta, z = rng.uniform(0, 2 * np.pi, count), rng.uniform(0, LENGTH, count)
        return np.stack([radius(theta), theta, z], 1)

    interior = section(n, rng.uniform(0, LENGTH, n))
    inner = around(nb, lambda theta: np.full(len(theta), R_IN))
    inlet = section(nb, np.zeros(nb))
    outlet = section(nb, np.full(nb, LENGTH))
    outer = around(nb, given.wall.radius)
    # A fifth of the pairs lie at the inlet.
    z = np.where(np.arange(points.pairs) < points.pairs // 5, 0, rng.uniform(0, LENGTH, points.pairs))
    start = np.stack([rng.uniform(R_IN, R_MAX, points.pairs), np.zeros(points.pairs), z], 1)
    end = start + np.array([0, 2 * np.pi, 0])

    n_r, n_theta = given.wall.normal(outer[:, 1])
    five = np.split(rows_of_interior(interior), 5)
    x = [
        *(five[0], outlet, outer, start, end, inner, inlet),
        *(five[1], _along(0, 0, 1, nb), _along(n_r, n_theta / outer[:, 0], 0, nb), _along(0, 1, 0, 2 * points.pairs)),
        *five[2:],
    ]
    values = np.concatenate([inner, inlet])
    out = {
        "x": np.concatenate(x),
        "value": given.value(*values.T),
        "outlet": given.outlet(*outlet.T),
        "outer": given.outer(*outer.T),
    }
    return {key: np.ascontiguousarray(array, dtype) for key, array in out.items()}
