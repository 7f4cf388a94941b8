"""Darcy flow: the solver by a series and by finer grids, the operator by NumPy's FFT; engines agree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kourkoutas.lab import engines, testbeds
from kourkoutas.lab.running.train import run
from kourkoutas.lab.specs.spec import RunSpec
from kourkoutas.lab.testbeds.darcy import DarcyProblem, Settings, data, loss, model

SMOKE = testbeds.get("darcy").presets["smoke"]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBETA_CACHE", str(tmp_path))
    data.pairs.cache_clear()


def test_the_pressure_of_a_uniform_medium_is_its_series() -> None:
    n, a = 90, 3.0
    x = (np.arange(n) + 0.5) / n
    k = np.arange(1, 200, 2)
    waves = np.sin(np.pi * k[:, None] * x)
    # -a Δu = 1: u = Σ 16 sin kπx sin lπy / (a π⁴ kl(k² + l²)) over odd k, l
    c = 16 / (a * np.pi**4 * k[:, None] * k * (k[:, None] ** 2 + k**2))
    np.testing.assert_allclose(data.pressure(np.full((n, n), a)), waves.T @ c @ waves, atol=2e-5, rtol=1e-3)


def test_what_flows_out_of_every_row_of_cells_is_its_source() -> None:
    n = 40
    a = np.repeat(np.where(np.arange(n) < n // 2, 12.0, 3.0)[:, None], n, 1)
    u = data.pressure(a)
    # Between rows by the harmonic mean of a, out of the ends of a row by 2a; the source of a row is n cells of 1/n².
    to_next = (2 * a[1:] * a[:-1] / (a[1:] + a[:-1]) * (u[:-1] - u[1:])).sum(1)
    out_of_ends = 2 * (a[:, 0] * u[:, 0] + a[:, -1] * u[:, -1])
    np.testing.assert_allclose(np.diff(to_next) + out_of_ends[1:-1], 1 / n, rtol=1e-9)


def test_the_pressure_converges_as_cells_get_smaller() -> None:
    misses = []
    for seed in range(3):
        c = data.coefficients(np.random.default_rng([9, seed]))
        fine = data.pair(c, 8, refine=27)[1]
        misses.append([np.linalg.norm(data.pair(c, 8, r)[1] - fine) / np.linalg.norm(fine) for r in (1, 3, 9)])
    coarse, middle, near = np.mean(misses, 0)
    assert coarse > 2 * middle > 4 * near
    assert near < 0.02


def test_permeability_has_two_values_with_equal_shares_and_the_same_field_on_every_grid() -> None:
    fields = [data.coefficients(np.random.default_rng([8, i])) for i in range(300)]
    shares = [np.mean(data.permeability(c, 12) == data.HIGH) for c in fields]
    assert np.mean(shares) == pytest.approx(0.5, abs=4 * np.std(shares) / np.sqrt(300))
    fine = data.permeability(fields[0], 36)
    assert set(np.unique(fine)) == {3.0, 12.0}
    np.testing.assert_array_equal(fine[1::3, 1::3], data.permeability(fields[0], 12))


def test_pairs_are_made_once_and_a_damaged_file_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = data.pairs(6, 4, 0)
    file = data.cache_file(6, 4, 0)
    stored = file.read_bytes()
    data.pairs.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(data, "pair", None)
        np.testing.assert_array_equal(data.pairs(6, 4, 0).u, first.u)
    data.pairs.cache_clear()
    file.write_bytes(stored[:100])
    np.testing.assert_array_equal(data.pairs(6, 4, 0).u, first.u)
    assert file.read_bytes() == stored
    data.pairs.cache_clear()
    # More pairs begin with the same ones.
    np.testing.assert_array_equal(data.pairs(6, 5, 0).a[:4], first.a)


def test_a_transform_and_its_inverse_leave_fields_of_the_kept_modes_as_they_are() -> None:
    n, rng = 12, np.random.default_rng(0)
    forward, inverse = model.transforms(n, 8)
    spectrum = np.zeros((n, n // 2 + 1), complex)
    kept = rng.standard_normal((7, 5)) + 1j * rng.standard_normal((7, 5))
    spectrum[np.arange(-3, 4), :5] = kept
    field = np.fft.irfft2(spectrum, (n, n))
    np.testing.assert_allclose(inverse @ (forward @ field.ravel()), field.ravel(), atol=1e-6)
    other = np.cos(2 * np.pi * 5 * np.arange(n) / n)[:, None] * np.ones(n)
    np.testing.assert_allclose(forward @ other.ravel(), 0, atol=1e-6)


def test_the_spectral_layer_multiplies_each_mode_by_its_complex_matrix() -> None:
    E = engines.get("torch")
    n, modes, width, samples = 8, 4, 3, 2
    rng = np.random.default_rng(1)
    v = rng.standard_normal((n, n, samples, width)).astype(np.float32)
    re, im = (rng.standard_normal((model.kept(modes), width, width)).astype(np.float32) for _ in range(2))
    forward, inverse = model.transforms(n, modes)
    found = model.spectral(E, *(E.array(x) for x in (v.reshape(n * n, samples, width), re, im, forward, inverse)))
    V = np.fft.fft2(v, axes=(0, 1))
    j = np.arange(n)
    R = (re + 1j * im).reshape(modes, modes // 2 + 1, width, width)
    want = np.zeros((n, n, samples, width))
    for i, kx in enumerate(range(-2, 2)):
        for ky in range(3):
            W = V[kx, ky] @ R[i, ky] / n**2
            wave = np.exp(2j * np.pi * (kx * j[:, None] + ky * j) / n)
            want += (1 if ky == 0 else 2) * (wave[:, :, None, None] * W).real
    np.testing.assert_allclose(E.numpy(found), want.reshape(n * n, samples, width), atol=2e-5)


def test_the_loss_is_the_mean_relative_error_of_the_batch() -> None:
    E = engines.get("torch")
    it = DarcyProblem(SMOKE, 0)
    batch = {**it.constants, **{name: x[0] for name, x in it.batches(0, 1).items()}}
    nothing = {name: E.array(np.zeros_like(p)) for name, p in it.params.items()}
    assert float(loss(E, nothing, {name: E.array(x) for name, x in batch.items()})) == pytest.approx(1, rel=1e-6)
    nothing["project1.b"] = E.array(np.array([0.3], np.float32))
    want = np.mean(np.linalg.norm(batch["u"] - 0.3, axis=1) / np.linalg.norm(batch["u"], axis=1))
    assert float(loss(E, nothing, {name: E.array(x) for name, x in batch.items()})) == pytest.approx(want, rel=1e-5)


def test_an_epoch_sees_every_pair_once_in_an_order_of_the_seed_whatever_the_chunks() -> None:
    it = DarcyProblem(SMOKE, 0)
    epoch = it.batches(0, SMOKE.per_epoch)["u"].reshape(-1, SMOKE.grid**2)
    assert len({u.tobytes() for u in epoch}) == SMOKE.train
    assert not np.array_equal(epoch, DarcyProblem(SMOKE, 1).batches(0, 3)["u"].reshape(epoch.shape))
    np.testing.assert_array_equal(it.batches(0, 5)["a"][3:], it.batches(3, 5)["a"])


def test_the_paper_preset_has_the_gallerys_sizes() -> None:
    s = Settings()
    assert (s.train, s.grid, s.modes, s.width, s.layers, s.batch, s.epochs) == (1_000, 16, 8, 24, 4, 64, 15)


def test_engines_agree_on_the_losses_of_a_smoke_run() -> None:
    results = {e: run(RunSpec(testbed="darcy", optimizer="kbeta", engine=e, seed=1)) for e in engines.NAMES}
    reference = results["torch"]
    assert reference.curve["loss"][-1] < 0.95 * reference.curve["loss"][0]
    for result in results.values():
        np.testing.assert_allclose(result.curve["loss"], reference.curve["loss"], rtol=5e-3)
        assert result.metrics == pytest.approx(reference.metrics, rel=5e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modes": 5}, "`modes` must be even and in 2 ... grid; got modes=5 with grid=8"),
        ({"batch": 100}, r"`batch` must be at most `train` \(24\); got 100"),
        ({"epochs": 0}, "`epochs` must be >= 1; got 0"),
    ],
)
def test_a_bad_setting_is_named_with_its_value_and_the_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        testbeds.override(SMOKE, changes, "darcy")
