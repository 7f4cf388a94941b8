"""The emulator: the solver by finer grids and other methods, the network by plain convolution; engines agree."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from scipy.integrate import solve_ivp

from kourkoutas.lab import engines, testbeds
from kourkoutas.lab.running.train import run
from kourkoutas.lab.specs.spec import RunSpec
from kourkoutas.lab.testbeds import emulator
from kourkoutas.lab.testbeds.emulator import EQUATIONS, OVER, SUBSTEPS, EmulatorProblem, Settings, Solver, start

SMOKE = testbeds.get("emulator").presets["smoke"]


def advanced(solver: Solver, u: Any, steps: int) -> Any:
    for _ in range(steps):
        u = solver.step(u)
    return u


@pytest.mark.parametrize("name", EQUATIONS)
@pytest.mark.parametrize("points", [64, 160])
def test_trajectories_are_those_of_a_finer_grid_and_shorter_steps(name: str, points: int) -> None:
    ours = Solver(EQUATIONS[name], points, OVER * points)
    finer = Solver(EQUATIONS[name], points, 2 * OVER * points, 4 * SUBSTEPS)
    u = advanced(ours, start(OVER * points, 4, 0), 20)
    v = advanced(finer, start(2 * OVER * points, 4, 0), 20)[:, ::2]
    assert np.linalg.norm(u - v) / np.linalg.norm(v) < 2e-4


def test_the_time_differencing_is_of_fourth_order() -> None:
    exact = advanced(Solver(EQUATIONS["ks"], 32, 64, 128), start(64, 4, 0), 4)
    one, two = (np.abs(advanced(Solver(EQUATIONS["ks"], 32, 64, n), start(64, 4, 0), 4) - exact).max() for n in (8, 16))
    assert 10 < one / two < 24


@pytest.mark.parametrize("name", EQUATIONS)
def test_the_equation_has_apebenchs_difficulties(name: str) -> None:
    # The equation as it is written, by finite differences and a stiff solver of SciPy; N = 20 points of reference.
    q, N, n = EQUATIONS[name], 20, 800
    nu, mu, b = q.diffusion / (2 * N**2), q.hyperdiffusion / (8 * N**4), q.convection / N
    h = 1 / n
    u = start(n, 1, 3)[0]

    def rate(t: float, u: Any) -> Any:
        l1, r1, l2, r2 = np.roll(u, 1), np.roll(u, -1), np.roll(u, 2), np.roll(u, -2)
        slope = (0.5 * r1**2 - 0.5 * l1**2) / (2 * h)
        return nu * (r1 - 2 * u + l1) / h**2 - b * slope - mu * (r2 - 4 * r1 + 6 * u - 4 * l1 + l2) / h**4

    found = solve_ivp(rate, (0, 3), u, "BDF", [3], rtol=1e-6, atol=1e-8).y[:, 0]
    ours = advanced(Solver(q, N, n, 8), u[None], 3)[0]
    assert np.linalg.norm(found - ours) / np.linalg.norm(ours) < 2e-3


def test_starts_have_five_modes_a_largest_value_of_one_and_do_not_depend_on_the_grid() -> None:
    u = start(1_024, 6, 0)
    np.testing.assert_allclose(np.abs(u).max(1), 1, rtol=1e-12)
    spectrum = np.abs(np.fft.rfft(u)) / 1_024
    assert spectrum[:, 1:6].max(1).min() > 1e-2
    assert spectrum[:, [0, *range(6, 513)]].max() < 1e-12
    np.testing.assert_allclose(start(64, 6, 0), u[:, ::16], atol=1e-12)


def test_kuramoto_and_sivashinsky_neither_dies_out_nor_blows_up() -> None:
    u = emulator.trajectories("ks", 64, 3, 20, 0)
    assert u.shape == (3, 21, 64)
    assert 0.5 < u.std() < 2
    assert np.abs(u[:, -1] - u[:, 0]).max() > 0.1


def test_the_network_is_a_chain_of_periodic_convolutions() -> None:
    E = engines.get("torch")
    params = emulator.init(5, 2, 0)
    u = np.random.default_rng(0).standard_normal((2, 9)).astype(np.float32)
    h = u[..., None].astype(float)
    for k in range(3):
        w, b = params[f"layer{k:02d}.w"].reshape(3, -1, params[f"layer{k:02d}.b"].size), params[f"layer{k:02d}.b"]
        h = sum(np.roll(h, 1 - i, axis=1) @ w[i] for i in range(3)) + b
        h = np.maximum(h, 0) if k < 2 else h
    found = emulator.emulate(E, {name: E.array(p) for name, p in params.items()}, E.array(u))
    np.testing.assert_allclose(E.numpy(found), h[..., 0], rtol=1e-4, atol=1e-5)


def test_apebenchs_network_has_its_number_of_parameters() -> None:
    assert sum(p.size for p in emulator.init(34, 10, 0).values()) == 31_757


class Exact:
    """An engine that advances the true solution, or multiplies it."""

    name = "exact"

    def array(self, x: Any) -> Any:
        return x

    def numpy(self, x: Any) -> Any:
        return x


def test_the_error_is_the_mean_of_relative_errors_of_a_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    it = EmulatorProblem(SMOKE, 0)
    truth = emulator.trajectories("ks", SMOKE.points, SMOKE.tests, SMOKE.rollout, emulator.TEST).astype(float)
    monkeypatch.setattr(emulator, "_compiled", lambda engine: lambda params, u: u)
    stays = np.linalg.norm(truth[:, :1] - truth[:, 1:], axis=2) / np.linalg.norm(truth[:, 1:], axis=2)
    found = it.evaluate(Exact(), {}, 0)  # type: ignore[arg-type]
    assert found == pytest.approx({"error": stays.mean(), "one_step": stays[:, 0].mean()}, rel=1e-5)
    # One that blows up is as bad as can be, and finite.
    monkeypatch.setattr(
        emulator, "_compiled", lambda engine: lambda params, u: np.full_like(u, np.inf if abs(u).max() > 9 else 1e6)
    )
    assert it.evaluate(Exact(), {}, 0)["error"] == emulator.WORST  # type: ignore[arg-type]


def test_batches_are_steps_of_trajectories_and_do_not_depend_on_the_chunks() -> None:
    it = EmulatorProblem(SMOKE, 0)
    got = it.batches(0, 6)
    np.testing.assert_array_equal(got["now"][4:], it.batches(4, 6)["now"])
    u = emulator.trajectories("ks", SMOKE.points, SMOKE.samples, SMOKE.horizon, emulator.TRAIN)
    following = {a.tobytes(): b for t in u for a, b in itertools.pairwise(t)}
    for now, then in zip(got["now"].reshape(-1, SMOKE.points), got["next"].reshape(-1, SMOKE.points), strict=True):
        np.testing.assert_array_equal(following[now.tobytes()], then)
    assert not np.array_equal(got["now"], EmulatorProblem(SMOKE, 1).batches(0, 6)["now"])


def test_the_learning_rate_rises_in_a_line_and_falls_as_a_cosine() -> None:
    it = EmulatorProblem(Settings(steps=100, warmup=20, lr=2.0), 0)
    np.testing.assert_allclose(it.lr(np.array([0, 10, 20, 60, 100])), [0, 1, 2, 1, 0], atol=1e-12)


def test_the_paper_preset_has_apebenchs_sizes() -> None:
    s = testbeds.get("emulator").presets["paper"]
    assert (s.steps, s.warmup, s.lr, s.batch, s.points) == (10_000, 2_000, 1e-3, 20, 160)
    assert (s.samples, s.horizon, s.tests, s.rollout, s.width, s.depth) == (50, 50, 30, 200, 34, 10)


def test_engines_agree_on_the_losses_of_a_smoke_run() -> None:
    results = {e: run(RunSpec(testbed="emulator", optimizer="kbeta", engine=e, seed=1)) for e in engines.NAMES}
    reference = results["torch"]
    assert reference.curve["loss"][-1] < 0.9 * reference.curve["loss"][0]
    for result in results.values():
        np.testing.assert_allclose(result.curve["loss"], reference.curve["loss"], rtol=2e-3)
        assert result.metrics == pytest.approx(reference.metrics, rel=5e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"equation": "kdv"}, "unknown equation 'kdv'"),
        ({"points": 12}, "`points` must be >= 20 for 5 modes; got 12"),
        ({"warmup": 100}, r"`warmup` must be in 0 ... steps - 1; got 100 with steps=100"),
    ],
)
def test_a_bad_setting_is_named_with_its_value_and_the_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        testbeds.override(SMOKE, changes, "emulator")
