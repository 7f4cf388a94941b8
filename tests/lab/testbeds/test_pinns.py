"""Physics-informed networks: derivatives, loss and solutions, each by a second method; engines agree."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.integrate import solve_ivp
from scipy.sparse import diags_array, eye_array, kron
from scipy.sparse.linalg import expm_multiply

from kourkoutas.lab import engines, testbeds
from kourkoutas.lab.running.train import run
from kourkoutas.lab.specs.spec import RunSpec
from kourkoutas.lab.testbeds.pinns import POINTS, PinnProblem, Settings, cases, network, terms
from kourkoutas.lab.testbeds.pinns.cases import CASES, CENTRES, NU, RADIUS, Counts

torch = pytest.importorskip("torch")


def problem(case: str, seed: int = 0) -> PinnProblem:
    return PinnProblem(Settings(case, steps=5, width=12, depth=3, interior=40, boundary=20, initial=10), seed)


def nested(params: dict[str, Any], x: Any) -> tuple[Any, Any, Any]:
    """u, its slopes and its second derivatives along each coordinate, by autograd of autograd."""
    x = x.clone().requires_grad_()
    u = network.values(engines.get("torch"), params, x)
    (g,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    second = [torch.autograd.grad(g[:, k].sum(), x, create_graph=True)[0][:, k] for k in range(x.shape[1])]
    return u, g.T, torch.stack(second)


def in_double(it: PinnProblem) -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(1)
    params = {name: torch.tensor(p.astype(float) + 0.1 * rng.standard_normal(p.shape)) for name, p in it.params.items()}
    return params, {name: torch.tensor(x.astype(float)) for name, x in it.constants.items()}


@pytest.mark.parametrize("case", CASES)
def test_values_slopes_and_second_derivatives_are_those_of_autodiff(case: str) -> None:
    params, batch = in_double(problem(case))
    u, slopes, second = network.channels(engines.get("torch"), params, batch["x"], CASES[case].second)
    want, g, each = nested(params, batch["x"])
    np.testing.assert_allclose(u, want.detach(), rtol=1e-12)
    np.testing.assert_allclose(slopes, g.detach(), rtol=1e-10, atol=1e-12)
    weighted = sum(c * each[i] for i, c in enumerate(CASES[case].second))
    np.testing.assert_allclose(second, weighted.detach(), rtol=1e-10, atol=1e-12)


def by_hand(case: str, params: dict[str, Any], batch: dict[str, Any]) -> dict[str, float]:
    """The terms of the loss from the equations as they are written in the module's table."""
    x = batch["x"]
    u, g, d2 = nested(params, x)
    residual = {
        "burgers1d": lambda: g[1] + u * g[0] - 0.01 / np.pi * d2[0],
        "wave1d_c": lambda: d2[1] - 4 * d2[0],
        "heat2d_ms": lambda: g[2] - d2[0] / (500 * np.pi) ** 2 - d2[1] / np.pi**2,
        "poisson2d_c": lambda: d2[0] + d2[1],
    }[case]()
    found = {"residual": torch.mean(residual**2)}
    if case == "poisson2d_c":
        on_sides = (x.abs() > 0.5 - 1e-6).any(1)
        from_disc = torch.linalg.norm(x[:, None] - torch.tensor(CENTRES), dim=2).amin(1)
        found["sides"] = torch.mean((u[on_sides] - 1) ** 2)
        found["discs"] = torch.mean(u[(from_disc - RADIUS).abs() < 1e-6] ** 2)
    else:
        low = -1 if case == "burgers1d" else 0
        walls = ((x[:, :-1] == low) | (x[:, :-1] == 1)).any(1)
        initial = x[:, -1] == 0
        start = {
            "burgers1d": lambda: -torch.sin(torch.pi * x[:, 0]),
            "wave1d_c": lambda: torch.sin(torch.pi * x[:, 0]) + 0.5 * torch.sin(4 * torch.pi * x[:, 0]),
            "heat2d_ms": lambda: torch.sin(20 * torch.pi * x[:, 0]) * torch.sin(torch.pi * x[:, 1]),
        }[case]()
        found["walls"] = torch.mean(u[walls] ** 2)
        found["initial"] = torch.mean((u - start)[initial] ** 2)
        if case == "wave1d_c":
            found["at_rest"] = torch.mean(g[1][initial] ** 2)
    return {name: float(value.detach()) for name, value in found.items()}


@pytest.mark.parametrize("case", CASES)
def test_the_loss_holds_the_equation_and_its_conditions(case: str) -> None:
    params, batch = in_double(problem(case))
    found = terms(engines.get("torch"), params, batch, case)
    # Targets and points are rounded to float32.
    assert {name: float(x) for name, x in found.items()} == pytest.approx(by_hand(case, params, batch), rel=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_points_lie_where_they_should_and_belong_to_the_seed(case: str) -> None:
    drawn = CASES[case].draw(np.random.default_rng([POINTS, 0]), Counts(200, 60, 30))
    assert len(drawn.inside) == 200
    assert sum(len(x) for x, _ in drawn.given.values()) == (60 if case == "poisson2d_c" else 90)
    assert tuple(drawn.given) == CASES[case].given
    if case == "poisson2d_c":
        assert np.linalg.norm(drawn.inside[:, None] - CENTRES, axis=2).min() > RADIUS
        # As many for each length of boundary: four sides of length 1, four circles of length 2πr.
        assert len(drawn.given["discs"][0]) == round(60 * 0.8 * np.pi / (4 + 0.8 * np.pi))
    a, b, c = problem(case).constants["x"], problem(case).constants["x"], problem(case, seed=1).constants["x"]
    np.testing.assert_array_equal(a, b)
    assert not np.array_equal(a, c)


# The solutions, each by another method


def test_cole_and_hopfs_burgers_is_that_of_finite_differences() -> None:
    # u is odd: half the domain, with u = 0 at both ends; nodes closer where the shock stands.
    s = np.linspace(0, 1, 1_201)
    x = np.sinh(4 * s) / np.sinh(4)
    left, right = np.diff(x)[:-1], np.diff(x)[1:]

    def rate(t: float, u: Any) -> Any:
        full = np.concatenate([[0], u, [0]])
        flux = 0.5 * full**2
        convection = (flux[2:] - flux[:-2]) / (left + right)
        diffusion = 2 * ((full[2:] - u) / right - (u - full[:-2]) / left) / (left + right)
        return NU * diffusion - convection

    times = np.array([0.25, 0.5, 0.75, 0.99])
    found = solve_ivp(rate, (0, 0.99), -np.sin(np.pi * x[1:-1]), "LSODA", times, rtol=1e-7, atol=1e-9, lband=1, uband=1)
    exact = cases.burgers(x[1:-1, None], times[None])
    assert np.linalg.norm(found.y - exact) / np.linalg.norm(exact) < 2e-4
    assert np.abs(found.y - exact).max() < 2e-3


def test_burgers_quadrature_has_converged_on_the_grid_of_the_error() -> None:
    points, u = CASES["burgers1d"].truth()
    np.testing.assert_allclose(u, cases.burgers(points[:, 0], points[:, 1], nodes=320), atol=1e-9)
    np.testing.assert_allclose(u[points[:, 1] == 0], -np.sin(np.pi * points[points[:, 1] == 0, 0]), atol=1e-12)


def test_the_wave_is_that_of_finite_differences() -> None:
    n = 800
    x = np.linspace(0, 1, n + 1)
    dt = 0.5 / n * 0.5  # half of the largest stable step h/c
    ratio = (2 * dt * n) ** 2
    u = np.sin(np.pi * x) + 0.5 * np.sin(4 * np.pi * x)
    bend = lambda v: np.concatenate([[0], v[2:] - 2 * v[1:-1] + v[:-2], [0]])  # noqa: E731
    before, now = u, u + 0.5 * ratio * bend(u)
    for _ in range(round(0.7 / dt) - 1):
        before, now = now, 2 * now - before + ratio * bend(now)
    np.testing.assert_allclose(now, cases.wave(x, np.full_like(x, 0.7)), atol=5e-3)


def test_the_heat_of_two_scales_is_that_of_finite_differences() -> None:
    nx, ny = 401, 41
    hx, hy = 1 / (nx + 1), 1 / (ny + 1)
    line = lambda n, h: diags_array([1.0, -2.0, 1.0], offsets=[-1, 0, 1], shape=(n, n)) / h**2  # noqa: E731
    A = kron(line(nx, hx) / (500 * np.pi) ** 2, eye_array(ny)) + kron(eye_array(nx), line(ny, hy) / np.pi**2)
    x, y = (g.ravel() for g in np.meshgrid(hx * np.arange(1, nx + 1), hy * np.arange(1, ny + 1), indexing="ij"))
    found = expm_multiply(A.tocsr() * 2.0, np.sin(20 * np.pi * x) * np.sin(np.pi * y))
    np.testing.assert_allclose(found, cases.heat(x, y, np.full_like(x, 2.0)), atol=1e-3)


def fundamental(points: Any) -> Any:
    """Laplace's equation between square and discs by sources outside of it: u = Σ qⱼ log|x - sⱼ|."""
    angle = 2 * np.pi * (np.arange(80) + 0.5) / 80
    ring = np.stack([np.cos(angle), np.sin(angle)], 1)
    far = np.stack([np.cos(np.linspace(0, 2 * np.pi, 241)[:-1]), np.sin(np.linspace(0, 2 * np.pi, 241)[:-1])], 1)
    sources = np.concatenate([*(c + 0.6 * RADIUS * ring for c in CENTRES), 1.2 * far])
    edge = np.linspace(-0.5, 0.5, 161)
    sides = np.concatenate([np.stack([edge * 0 + s, edge], 1)[:, ::o] for s in (-0.5, 0.5) for o in (1, -1)])
    many = 2 * np.pi * (np.arange(160) + 0.5) / 160
    circles = np.concatenate([c + RADIUS * np.stack([np.cos(many), np.sin(many)], 1) for c in CENTRES])
    at = np.concatenate([sides, circles])
    value = np.concatenate([np.ones(len(sides)), np.zeros(len(circles))])
    matrix = lambda p: np.concatenate(  # noqa: E731
        [np.log(np.linalg.norm(p[:, None] - sources, axis=2)), np.ones((len(p), 1))], axis=1
    )
    q = np.linalg.lstsq(matrix(at), value, rcond=1e-13)[0]
    assert np.abs(matrix(at) @ q - value).max() < 1e-4
    return matrix(points) @ q


def test_the_potential_between_square_and_discs_is_that_of_sources_outside() -> None:
    points, u = CASES["poisson2d_c"].truth()
    coarse_points, coarse = cases.poisson(40)
    exact = fundamental(np.concatenate([points, coarse_points]))
    miss, coarse_miss = np.abs(u - exact[: len(u)]).max(), np.abs(coarse - exact[len(u) :]).max()
    assert miss < 1e-3
    assert 5 < coarse_miss / miss < 60  # second order: 16 of a four times finer grid


# Runs


def test_the_presets_have_the_published_sizes() -> None:
    s = testbeds.get("burgers").presets["paper"]
    assert (s.steps, s.width, s.depth, s.interior, s.boundary, s.initial) == (15_000, 20, 3, 2_540, 80, 160)
    s = testbeds.get("pinnacle").presets["paper"]
    assert (s.steps, s.width, s.depth, s.interior) == (20_000, 100, 5, 8_192)
    params = network.init(2, 400, 3, 0)
    assert params["layer1.w"].std() == pytest.approx(np.sqrt(2 / 800), rel=0.01)
    assert not params["layer1.b"].any()


def test_the_error_is_relative_to_the_solution() -> None:
    it = problem("burgers1d")
    E = engines.get("torch")
    nothing = {name: E.array(np.zeros_like(p)) for name, p in it.params.items()}
    assert it.evaluate(E, nothing, 5)["error"] == 1
    _, u = CASES["burgers1d"].truth()
    nothing["layer3.b"] = E.array(np.array([0.5], np.float32))
    assert it.evaluate(E, nothing, 5)["error"] == pytest.approx(np.linalg.norm(0.5 - u) / np.linalg.norm(u), rel=1e-6)


# The two share their network and all derivatives, whose compilation is what takes long.
@pytest.mark.parametrize("name", [pytest.param("burgers", marks=pytest.mark.slow), "pinnacle"])
def test_engines_agree_on_the_losses_of_a_smoke_run(name: str) -> None:
    results = {e: run(RunSpec(testbed=name, optimizer="kbeta", engine=e, seed=1)) for e in engines.NAMES}
    reference = results["torch"]
    assert reference.curve["loss"][-1] < 0.9 * reference.curve["loss"][0]
    for result in results.values():
        np.testing.assert_allclose(result.curve["loss"], reference.curve["loss"], rtol=1e-3)
        assert result.metrics == pytest.approx(reference.metrics, rel=2e-3)


@pytest.mark.parametrize("case", CASES)
def test_every_case_lowers_its_loss(case: str) -> None:
    settings = {"case": case, "steps": 200, "lr": 3e-3}
    result = run(RunSpec(testbed="pinnacle", optimizer="adam95", engine="torch", settings=settings))
    assert result.curve["loss"][-1] < 0.9 * result.curve["loss"][0]
    assert set(result.metrics) >= {"error", "final_loss"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"case": "poison"}, "unknown case 'poison': did you mean 'poisson2d_c'"),
        ({"interior": 0}, "`interior` must be >= 1; got 0"),
        ({"lr": 0.0}, "`lr` must be > 0, for example 1e-3; got 0.0"),
    ],
)
def test_a_bad_setting_is_named_with_its_value_and_the_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        testbeds.override(testbeds.get("pinnacle").presets["smoke"], changes, "pinnacle")
