"""Which memory would have predicted recorded norms best: against a plain computation, and where the answer is known."""

import itertools
import math

import numpy as np
import pytest

pytest.importorskip("scipy")

from kourkoutas.lab.judging import beta2_forecast as forecast


def plainly(norms, beta, floor=1e-9):
    """ℓ_t of one bucket from its definition, sum by sum."""
    found = [math.nan]
    for t in range(1, len(norms)):
        weights = [beta ** (t - 1 - i) * (1 - beta) for i in range(t)]
        s = sum(w * n**2 for w, n in zip(weights, norms[:t], strict=True)) / (1 - beta**t)
        forecast = math.sqrt(s) + floor
        found.append(math.log(forecast**2) + min(norms[t] / forecast, 10) ** 2)
    return found


def test_the_losses_are_those_of_the_definition():
    norms = np.exp(np.random.default_rng(0).normal(size=(60, 2)))
    got = forecast.losses(norms)
    for b in range(2):
        for k, beta in enumerate(forecast.BETAS):
            np.testing.assert_allclose(got[:, b, k], plainly(norms[:, b], beta), rtol=1e-10)


def test_a_step_without_a_gradient_is_not_there():
    norms = np.exp(np.random.default_rng(1).normal(size=(40, 1)))
    holes = np.insert(norms, [0, 5, 5, 30], np.nan, axis=0)
    there = np.isfinite(holes[:, 0])
    np.testing.assert_array_equal(forecast.losses(holes)[there], forecast.losses(norms))
    assert np.isnan(forecast.losses(holes)[~there]).all()


def test_norms_of_any_size_have_a_loss():
    for size in (0.0, 1e-200, 1e-30, 1e30, 1e200):
        assert np.isfinite(forecast.losses(np.full((20, 1), size))[1:]).all()


def test_one_spike_that_no_memory_saw_coming_does_not_decide_a_stretch():
    """A random walk is best predicted by a short memory, with and without one step of 10⁴ times its size."""
    norms = np.exp(np.cumsum(0.3 * np.random.default_rng(5).normal(size=2000)))[:, None]
    spiked = norms.copy()
    spiked[1000] *= 1e4
    for own in (norms, spiked):
        assert forecast.examine(["b"], np.arange(2000), own, stretches=1).best.item() == 0.8
    np.testing.assert_allclose(forecast.losses(spiked)[1000, 0, 0], plainly(spiked[:, 0], 0.8)[1000], rtol=1e-10)


def test_a_level_that_never_moves_wants_the_longest_memory_and_a_random_walk_a_short_one():
    rng = np.random.default_rng(2)
    still = np.abs(rng.normal(size=4000))
    walk = np.exp(np.cumsum(0.3 * rng.normal(size=4000)) * 1.0)
    found = forecast.examine(["still", "walk"], np.arange(1, 4001), np.stack([still, walk], 1), stretches=2)
    assert found.best[1].tolist() == [0.999, 0.8]


def test_a_planted_memory_is_found_within_one_place_of_the_list():
    # Volatility that follows its own past: n² = s·χ², s the moving average of n² with β = 0.95, pulled to 1.
    rng = np.random.default_rng(3)
    s, norms = 1.0, []
    for _ in range(20000):
        n2 = s * rng.chisquare(8) / 8
        s = max(0.95 * s + 0.05 * n2, 1e-3)
        norms.append(math.sqrt(n2))
    found = forecast.examine(["b"], np.arange(20000), np.array(norms)[:, None], stretches=1)
    assert found.best.item() in (0.9, 0.95, 0.98)
    assert found.excess[0, 0, forecast.BETAS.index(0.95)] < found.excess[0, 0, 0]


def test_the_stretches_hold_every_step_once_and_excess_is_never_negative():
    norms = np.exp(np.random.default_rng(4).normal(size=(101, 3)))
    norms[:, 2] = np.nan
    found = forecast.examine("abc", np.arange(7, 108), norms)
    assert found.edges[0] == 7
    assert found.edges[-1] == 108
    assert np.isnan(found.best[:, 2]).all()
    assert (found.excess[:, :2] >= 0).all()
    assert (found.excess[:, :2].min(-1) == 0).all()
    loss = forecast.losses(norms)
    by_hand = np.nanmean(loss[found.edges[1] - 7 : found.edges[2] - 7, :2], 0)
    np.testing.assert_allclose(found.excess[1, :2], by_hand - by_hand.min(-1, keepdims=True), atol=1e-12)
    both = forecast.over_runs([found, found])
    np.testing.assert_allclose(both.excess, found.excess, atol=1e-12)
    assert found.to_json()["best"][0][2] == "nan"


def test_the_command_tells_of_a_real_run_what_a_plain_computation_tells(tmp_path):
    import json
    import subprocess
    import sys

    pytest.importorskip("mlx.core")
    from typer.testing import CliRunner

    from kourkoutas.cli.app import app
    from kourkoutas.lab.results.snapshot import Snapshot

    call = [sys.executable, "-m", "kourkoutas"]
    made = [*call, "study", "rare_trigger", "--preset", "smoke", "--engine", "mlx", "--seeds", "0-1"]
    made += ["--optimizers", "kbeta,adam999", "--workers", "1", "--out", str(tmp_path)]
    subprocess.run(made, check=True, capture_output=True, timeout=300)
    found = json.loads(CliRunner().invoke(app, ["norms", str(tmp_path), "--json"], catch_exceptions=False).output)
    assert list(found) == ["kbeta"]
    traces = [run.trace() for run in Snapshot.read(tmp_path).runs if run.spec.optimizer == "kbeta"]
    steps = traces[0]["every_step"]
    assert steps.tolist() == list(range(1, len(steps) + 1))
    norms = [trace["every_norm"][:, 0].astype(float) for trace in traces]
    losses = [np.array([plainly(n, beta) for beta in forecast.BETAS]) for n in norms]
    for part, (low, high) in enumerate(itertools.pairwise(found["kbeta"]["edges"])):
        means = np.array([np.nanmean(loss[:, (steps >= low) & (steps < high)], 1) for loss in losses])
        want = np.mean(means - means.min(1, keepdims=True), 0)
        np.testing.assert_allclose(found["kbeta"]["excess"][part][0], want - want.min(), atol=1e-9)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Which β2 predicts the norms?" not in page  # only the command tells it
    bad = CliRunner().invoke(app, ["norms", str(tmp_path), "--optimizer", "adam999"])
    assert "has no recorded norms" in str(bad.exception)
