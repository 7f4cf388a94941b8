"""Testbed B: derivatives, loss, geometry and the run as a whole."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import i0, i1, k0, k1

from kourkoutas.lab import engines, testbeds
from kourkoutas.lab.optimizers import recipes
from kourkoutas.lab.running import train
from kourkoutas.lab.specs.spec import RunSpec
from kourkoutas.lab.testbeds import get
from kourkoutas.lab.testbeds.heat3d import Heat3DProblem, Settings, geometry, network, pictures, reference
from kourkoutas.lab.testbeds.heat3d.geometry import LENGTH, R_IN, Case, Points, Wall
from kourkoutas.lab.testbeds.heat3d.taylor import rows
from tests.lab.testbeds.gradients import value_and_grad

torch = pytest.importorskip("torch")

POINTS = Points(interior=60, boundary=24, pairs=10)


def scaled(dtype: Any, factor: float = 2.5, depth: int = 6, width: int = 24) -> dict[str, NDArray[Any]]:
    """A network with weights scaled up, as the Laplacian of a fresh deep one is lost in rounding."""
    return {
        name: (p * factor if name.endswith(".w") else p).astype(dtype)
        for name, p in network.init(width, depth, 3).items()
    }


def batch(dtype: Any = np.float32, case: str = "paper") -> dict[str, NDArray[Any]]:
    return geometry.constants(POINTS, case, np.dtype(dtype).name)


def nested(params: dict[str, Any], x: Any) -> tuple[Any, Any, Any]:
    """T, its gradient and its Laplacian in cylindrical coordinates at the rows of `x`, by autograd of autograd."""
    E = engines.get("torch")
    x = x.clone().requires_grad_()
    T = network.temperature(E, params, x)
    (g,) = torch.autograd.grad(T.sum(), x, create_graph=True)
    second = [torch.autograd.grad(g[:, k].sum(), x, create_graph=True)[0][:, k] for k in range(3)]
    r = x[:, 0]
    return T, g, second[0] + g[:, 0] / r + second[1] / r**2 + second[2]


def nested_terms(params: dict[str, Any], constants: dict[str, Any], points: Points) -> dict[str, Any]:
    """The terms of the loss from nested autograd and the plain formulas of the boundary conditions."""
    n, nb, pairs = points.interior, points.boundary, points.pairs
    ends = np.cumsum([n, nb, nb, pairs, pairs, nb, nb])
    interior, outlet, outer, start, end, inner, inlet = (
        constants["x"][a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)
    )
    square = lambda x: torch.mean(x**2)  # noqa: E731
    theta = outer[:, 1]
    R, slope = 1 + 0.25 * torch.sin(3 * theta), 0.75 * torch.cos(3 * theta)
    _, g, _ = nested(params, outer)
    normal = (g[:, 0] - slope / R**2 * g[:, 1]) / torch.sqrt(1 + (slope / R) ** 2)
    T0, g0, _ = nested(params, start)
    T1, g1, _ = nested(params, end)
    return {
        "residual": square(nested(params, interior)[2]),
        "inner": square(nested(params, inner)[0] - constants["value"][:nb]),
        "inlet": square(nested(params, inlet)[0] - constants["value"][nb:]),
        "outlet": square(nested(params, outlet)[1][:, 2] - constants["outlet"]),
        "outer": square(normal - constants["outer"]),
        "periodic": square(T0 - T1) + square(g0[:, 1] - g1[:, 1]),
    }


def nested_loss(params: dict[str, Any], constants: dict[str, Any], points: Points) -> Any:
    parts = nested_terms(params, constants, points)
    weights = {"residual": 1, "inner": 1.25, "inlet": 5, "outlet": 1.25, "outer": 2.5, "periodic": 2.5}
    return sum(weights[name] * part for name, part in parts.items())


def close(a: Any, b: Any, tolerance: float) -> None:
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


def tensors(arrays: dict[str, NDArray[Any]], leaves: bool = False) -> dict[str, Any]:
    return {name: torch.tensor(x, requires_grad=leaves) for name, x in arrays.items()}


PRECISIONS = [(np.float32, 1e-5), (np.float64, 1e-10)]


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_taylor_channels_equal_nested_autodiff(dtype: Any, tolerance: float, factor: float) -> None:
    E = engines.get("torch")
    params, x = tensors(scaled(dtype, factor)), torch.tensor(batch(dtype)["x"])
    y = network.channels(E, params, x, POINTS)
    n, end = POINTS.interior, rows(POINTS.counts)
    # The right answer to more digits than either way has.
    exact = {name: p.double() for name, p in params.items()}
    T, g, laplacian = nested(exact, torch.tensor(batch(np.float64)["x"][: end[0]]))
    values = y[: end[0]] + params["layer05.b"]
    assert float(laplacian.detach()[:n].abs().max()) > 1e-3
    close(values.detach(), T.detach(), tolerance)
    slopes = torch.stack([y[end[0] : end[0] + n], y[end[1] : end[2]] * x[:n, 0], y[end[2] : end[3]]], 1)
    close(slopes.detach(), g[:n].detach(), tolerance)
    close(y[end[3] :].detach(), laplacian[:n].detach(), tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS)
@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_the_loss_and_its_gradient_equal_reverse_over_reverse(dtype: Any, tolerance: float, factor: float) -> None:
    E = engines.get("torch")
    params, constants = scaled(dtype, factor), tensors(batch(dtype))
    loss = functools.partial(network.Composite(POINTS), E)
    value, grads = value_and_grad(E, loss)(tensors(params), constants)
    leaves = {name: p.double().requires_grad_() for name, p in tensors(params).items()}
    expected = nested_loss(leaves, tensors(batch(np.float64)), POINTS)
    close(value, expected.detach(), tolerance)
    for name, g in zip(leaves, torch.autograd.grad(expected, list(leaves.values())), strict=True):
        close(grads[name], g, tolerance)


@pytest.mark.parametrize("engine", ["jax", "mlx"])
def test_engines_agree_on_loss_terms_and_gradient(engine: str) -> None:
    pytest.importorskip(engine if engine == "jax" else "mlx.core")
    params, constants = scaled(np.float32), batch()
    found = {}
    for name in ("torch", engine):
        E = engines.get(name)
        p, c = ({k: E.array(x) for k, x in d.items()} for d in (params, constants))
        value, grads = value_and_grad(E, functools.partial(network.Composite(POINTS), E))(p, c)
        terms = E.compile(functools.partial(network.terms, E, points=POINTS))
        parts = {k: float(E.numpy(x)) for k, x in terms(p, c).items()}
        found[name] = float(E.numpy(value)), {k: E.numpy(g) for k, g in grads.items()}, parts
    (value, grads, parts), (expected, expected_grads, expected_parts) = found[engine], found["torch"]
    assert value == pytest.approx(expected, rel=1e-4)
    assert parts == pytest.approx(expected_parts, rel=1e-4)
    for name, g in grads.items():
        close(g, expected_grads[name], 1e-4)


def test_the_loss_is_the_weighted_sum_of_its_terms() -> None:
    E = engines.get("torch")
    params, constants = tensors(scaled(np.float32)), tensors(batch())
    parts = network.terms(E, params, constants, POINTS)
    weights = {"residual": 1, "inner": 1.25, "inlet": 5, "outlet": 1.25, "outer": 2.5, "periodic": 2.5}
    total = sum(weights[name] * float(part) for name, part in parts.items())
    assert float(network.Composite(POINTS)(E, params, constants)) == pytest.approx(total, rel=1e-6)


def test_points_lie_where_their_condition_holds() -> None:
    points = Points(interior=4_000, boundary=2_000, pairs=400)
    x = geometry.constants(points, "paper")["x"].astype(np.float64)
    n, nb, pairs = 4_000, 2_000, 400
    ends = np.cumsum([n, nb, nb, pairs, pairs, nb, nb])
    interior, outlet, outer, start, end, inner, inlet = (x[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True))
    assert x.shape == (33_600, 3)
    for part in (interior, outlet, inlet):
        assert (part[:, 0] >= R_IN).all()
        assert (part[:, 0] <= 1 + 0.25 * np.sin(3 * part[:, 1]) + 1e-6).all()
    np.testing.assert_allclose(outer[:, 0], 1 + 0.25 * np.sin(3 * outer[:, 1]), rtol=1e-6)
    np.testing.assert_allclose(inner[:, 0], R_IN, rtol=1e-6)
    assert (outlet[:, 2] == LENGTH).all()
    assert (inlet[:, 2] == 0).all()
    assert (start[:, 2] == 0).sum() == pairs // 5
    np.testing.assert_array_equal(start[:, [0, 2]], end[:, [0, 2]])
    np.testing.assert_allclose(end[:, 1], 2 * np.pi, rtol=1e-6)
    # θ is uniform: a quarter of the circle holds a quarter of the points, give or take five standard deviations.
    assert abs((interior[:, 1] < np.pi / 2).mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / n)


def test_the_flux_is_the_papers() -> None:
    np.testing.assert_allclose(geometry.flux(np.array([0, 2.5, 5, 7.5, 10])), [0, 0, 0.25, 0.5, 0.5])


def test_the_normal_is_a_unit_vector_across_the_wall() -> None:
    wall, theta = geometry.Wall(), np.linspace(0, 2 * np.pi, 50)
    n_r, n_theta = wall.normal(theta)
    np.testing.assert_allclose(n_r**2 + n_theta**2, 1)
    # The wall runs along (R', R) in (e_r, e_θ).
    np.testing.assert_allclose(n_r * wall.slope(theta) + n_theta * wall.radius(theta), 0, atol=1e-14)
    assert (n_r > 0).all()


def test_the_learning_rate_is_a_cosine_and_then_constant() -> None:
    problem = Heat3DProblem(Settings(), seed=0)
    lr = problem.lr(np.array([0, 20_000, 40_000, 99_999]))
    np.testing.assert_allclose(lr, [1e-2, (1e-2 + 1e-5) / 2, 1e-5, 1e-5], rtol=1e-12)


def test_the_seed_sets_the_network_and_not_the_points() -> None:
    a, b = (Heat3DProblem(testbeds.get("heat3d").presets["smoke"], seed) for seed in (0, 1))
    assert a.constants is b.constants
    assert not np.array_equal(a.params["layer00.w"], b.params["layer00.w"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 1}, "`depth` must be >= 2 linear layers; got 1"),
        ({"case": "papr"}, "did you mean 'paper'"),
        ({"lr_end": 1.0}, "lr_end <= lr; got lr=0.01, lr_end=1.0"),
        ({"pairs": 0}, "`pairs` must be >= 1; got 0"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**changes)


@pytest.mark.parametrize("engine", ["torch", *(pytest.param(name, marks=pytest.mark.slow) for name in ("jax", "mlx"))])
def test_a_smoke_run_reports_terms_and_error(engine: str) -> None:
    pytest.importorskip({"mlx": "mlx.core"}.get(engine, engine))
    result = train.run(RunSpec(testbed="heat3d", engine=engine, settings={"steps": 20, "ramp": 10}))
    assert result.status == "ok"
    assert result.endpoint == result.metrics["final_loss"]
    weighted = sum(network.WEIGHTS[name] * result.metrics[f"loss_{name}"] for name in network.WEIGHTS)
    assert result.metrics["final_loss"] == pytest.approx(weighted)
    assert {"error", "error_max", "T_min", "T_negative"} <= set(result.metrics)


def test_the_second_order_rival_falls_below_adam_in_as_many_steps() -> None:
    settings = {"steps": 60, "ramp": 60, "case": "harmonic"}
    found = {arm: train.run(RunSpec(testbed="heat3d", optimizer=arm, settings=settings)) for arm in ("lbfgs", "adam95")}
    assert found["lbfgs"].status == "ok"
    assert found["lbfgs"].metrics["final_loss"] < found["adam95"].metrics["final_loss"]


def test_lbfgs_continues_from_its_state_bit_for_bit() -> None:
    E = engines.get("torch")
    problem = Heat3DProblem(testbeds.get("heat3d").presets["smoke"], seed=0)
    make = functools.partial(
        E.trainer, problem.loss, problem.params, recipes.recipe("lbfgs"), constants=problem.constants
    )
    through, first, second = make(), make(), make()
    through.run({}, np.ones(8))
    first.run({}, np.ones(4))
    second.restore(first.state())
    second.run({}, np.ones(4))
    for name, p in through.params().items():
        np.testing.assert_array_equal(p, second.params()[name])


@pytest.mark.slow
def test_a_trained_network_finds_a_known_harmonic_solution() -> None:
    # Between too few points the network is free: with 256 and 128 it reached a loss of 1e-3 and an error of 0.4.
    sizes = {"width": 48, "depth": 6, "interior": 1_000, "boundary": 1_000, "pairs": 100}
    result = train.run(RunSpec(testbed="heat3d", settings={"case": "harmonic", "steps": 5_000, "ramp": 5_000, **sizes}))
    assert result.metrics["final_loss"] < 1e-3
    truth = reference.solve("harmonic").T
    assert result.metrics["error"] < 0.01 * (truth.max() - truth.min())


def test_a_short_training_halves_the_error_of_a_known_solution() -> None:
    problem = Heat3DProblem(
        Settings(200, 200, width=16, depth=4, interior=64, boundary=32, pairs=10, case="harmonic"), 0
    )
    E = engines.get("torch")
    before = problem.evaluate(E, tensors(dict(problem.params)), problem.steps)
    trainer = E.trainer(problem.loss, problem.params, recipes.recipe("adam95"), constants=problem.constants)
    trainer.run({}, problem.lr(np.arange(200)))
    after = problem.evaluate(E, trainer.arrays(), problem.steps)
    assert after["error"] < before["error"] / 2


SETTINGS = get("heat3d").presets["smoke"]
PARAMS = {label: network.init(16, 4, seed) for seed, label in enumerate(("kbeta", "adam95"))}


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> reference.Solution:
    truth = reference.solve_case(geometry.case("paper"), (6, 24, 8))
    monkeypatch.setattr(reference, "solve", lambda case: truth)
    return truth


def test_every_picture_draws_and_is_described(coarse: reference.Solution) -> None:
    made = get("heat3d").figures(SETTINGS, PARAMS)  # type: ignore[attr-defined]
    assert len(made) == 5
    for figure, text in made:
        figure.canvas.draw()
        ink = np.asarray(figure.canvas.buffer_rgba()).astype(int) @ [1 << 16, 1 << 8, 1, 0]  # one number per colour
        assert len(np.unique(ink)) > 20
        assert text


def test_slices_show_the_reference_and_every_run(coarse: reference.Solution) -> None:
    fields = {label: pictures.temperature(p, coarse.nodes) for label, p in PARAMS.items()}
    figure = pictures.slices(coarse, fields)
    labels = [ax.get_ylabel() for ax in figure.axes]
    assert [label for label in labels if label] == ["reference", "kbeta", "adam95", "T"]


def test_the_share_below_zero_is_by_volume(coarse: reference.Solution) -> None:
    inlet_half = np.where(coarse.nodes[..., 2] < 5, -1.0, 1.0)
    figure = pictures.below_zero(coarse, {"half": inlet_half})
    texts = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    # Nodes in z at 0, 1.25, ... count half at the ends: 3.5 of 8 lie below 5.
    assert texts[1] == "half: 43.75 % of the volume, lowest -1.000"


def test_no_runs_give_no_pictures() -> None:
    assert pictures.figures(SETTINGS, {}) == []


def test_the_laplacian_of_a_network_equals_central_differences() -> None:
    params = {name: p.astype(np.float64) * 2.5 for name, p in PARAMS["kbeta"].items()}
    x = np.array([[0.7, 1.0, 3.0], [0.3, 4.0, 8.0]])
    h = 1e-4

    def T(r: float, t: float, z: float) -> np.ndarray:
        return pictures.temperature(params, x + h * np.array([r, t, z]))

    r = x[:, 0]
    second = [(T(*e) - 2 * T(0, 0, 0) + T(*(-e))) / h**2 for e in np.eye(3)]
    expected = second[0] + (T(1, 0, 0) - T(-1, 0, 0)) / (2 * h) / r + second[1] / r**2 + second[2]
    np.testing.assert_allclose(pictures.laplacian(params, x), expected, rtol=1e-4)


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
