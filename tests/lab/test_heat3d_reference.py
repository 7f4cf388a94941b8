"""The finite-element reference of Testbed B against known solutions."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.special import i0, i1, k0, k1

from kourkoutas.lab.testbeds.heat3d import geometry, reference
from kourkoutas.lab.testbeds.heat3d.geometry import LENGTH, R_IN, Case, Wall


def error(given: Case, grid: tuple[int, int, int]) -> float:
    found = reference.solve_case(given, grid)
    assert given.solution is not None
    return found.rms(found.T - given.solution(*np.moveaxis(found.nodes, -1, 0)))


def bessel() -> Case:
    """A straight cylinder: T = 1 - g(r) sin κz with κ = 3π/2L, g = I0(κr)K0(κr_in) - K0(κr)I0(κr_in)."""
    kappa = 1.5 * np.pi / LENGTH

    def g(r: np.ndarray) -> np.ndarray:
        return i0(kappa * r) * k0(kappa * R_IN) - k0(kappa * r) * i0(kappa * R_IN)

    def slope(r: np.ndarray) -> np.ndarray:
        return kappa * (i1(kappa * r) * k0(kappa * R_IN) + k1(kappa * r) * i0(kappa * R_IN))

    return Case(
        Wall(wave=0.0),
        value=lambda r, t, z: 1 + 0 * (r + t + z),
        outlet=lambda r, t, z: 0 * (r + t + z),
        outer=lambda r, t, z: -slope(r) * np.sin(kappa * z) + 0 * t,
        solution=lambda r, t, z: 1 - g(r) * np.sin(kappa * z) + 0 * t,
    )


@pytest.mark.parametrize("given", [bessel(), geometry.case("harmonic")], ids=["straight wall", "wavy wall"])
def test_the_error_against_a_known_solution_falls_with_the_square_of_the_grid(given: Case) -> None:
    coarse, fine = (error(given, grid) for grid in ((6, 24, 12), (12, 48, 24)))
    assert fine < 2e-3
    assert 3.5 < coarse / fine < 4.5


def test_the_papers_case_converges_at_second_order() -> None:
    a, b, c = (reference.solve_case(geometry.case("paper"), (n, 4 * n, 2 * n)) for n in (6, 12, 24))
    first = a.rms(a.T - b.T[::2, ::2, ::2])
    second = b.rms(b.T - c.T[::2, ::2, ::2])
    assert 3 < first / second < 5


def test_the_harmonic_case_satisfies_its_own_boundary_data() -> None:
    given, step = geometry.case("harmonic"), 1e-6
    rng = np.random.default_rng(0)
    theta, z = rng.uniform(0, 2 * np.pi, 20), rng.uniform(0, LENGTH, 20)
    R = given.wall.radius(theta)
    n_r, n_theta = given.wall.normal(theta)
    ahead, behind = (geometry.harmonic(R + s * step * n_r, theta + s * step * n_theta / R, z) for s in (1, -1))
    np.testing.assert_allclose(given.outer(R, theta, z), (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8)
    ahead, behind = (geometry.harmonic(R, theta, LENGTH + s * step) for s in (1, -1))
    np.testing.assert_allclose(given.outlet(R, theta, z), (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8)


def test_the_exact_temperature_of_the_papers_case_is_negative_in_the_lobes() -> None:
    # The sign is no artefact of the grid: between two grids the minimum moves by far less than its size.
    lowest = [reference.solve_case(geometry.case("paper"), grid).T.min() for grid in ((16, 64, 32), (24, 96, 48))]
    assert max(lowest) < 0
    assert abs(lowest[0] - lowest[1]) < 0.1 * abs(lowest[1])


def test_a_grid_that_is_too_coarse_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`grid` must have at least 2, 4 and 2 elements .* got \(1, 8, 8\)"):
        reference.solve_case(geometry.case("paper"), (1, 8, 8))
