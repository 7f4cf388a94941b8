"""Testbed A: the data solve the heat equation, the shortcut is the full attention, the weights are INT8."""

import base64
import dataclasses

import numpy as np
import pytest

from kourkoutas.lab import engines, testbeds
from kourkoutas.lab.engines.numpy import ENGINE as NUMPY
from kourkoutas.lab.running.train import run
from kourkoutas.lab.showing.pictures import embed
from kourkoutas.lab.specs.spec import RunSpec
from kourkoutas.lab.testbeds.heat2d import data, evaluate, model
from kourkoutas.lab.testbeds.heat2d.quantize import fake_quantize, int8
from kourkoutas.lab.testbeds.heat2d.settings import Settings, learning_rates
from tests.lab.testbeds.gradients import value_and_grad

TESTBED = testbeds.get("heat2d")
SMALL = dataclasses.replace(TESTBED.presets["smoke"], samples=20, frames=14)


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    # One folder for the whole process, so that data are made once; never the user's own.
    monkeypatch.setenv("KBETA_CACHE", str(tmp_path_factory.getbasetemp() / "heat2d"))


def small(**changes):
    return testbeds.override(SMALL, changes, "heat2d")


def some_params(settings, seed=0):
    """Weights without the ties of the initial ones: positions differ from row to row."""
    rng = np.random.default_rng(seed)
    params = model.initial(settings, rng)
    return {name: (p + 0.1 * rng.standard_normal(p.shape)).astype(np.float32) for name, p in params.items()}


def first_batch(settings):
    problem = TESTBED.problem(settings, 0)
    return {**problem.constants, **{name: x[0] for name, x in problem.batches(0, 1).items()}}


def on(E, arrays):
    return {name: E.array(x) for name, x in arrays.items()}


def value_and_gradient(E, settings, params):
    f = value_and_grad(E, lambda p, batch: model.Objective(settings)(E, p, batch))
    # JAX would compile the model operation by operation.
    f = E.compile(f) if E.name == "jax" else f
    value, grads = f(on(E, params), on(E, first_batch(settings)))
    return float(E.numpy(value)), {name: E.numpy(g) for name, g in grads.items()}


# Data


def test_the_paper_preset_has_the_papers_sizes():
    s = TESTBED.presets["paper"]
    assert (s.samples, s.split, s.grid, s.frames, s.known) == (4_000, (2_800, 800, 400), 26, 401, 5)
    assert (s.layers, s.width, s.heads, s.mlp, s.batch, s.epochs) == (24, 512, 16, 256, 4, 100)
    assert TESTBED.problem(s, 0).steps == 70_000
    assert (s.boundary, s.residual, s.start) == (0.1, 0.001, 0.1)


def test_a_separable_mode_decays_as_the_scheme_says_and_nearly_as_the_heat_equation_does():
    n, frames, number = 26, 60, 0.1
    x = np.linspace(0, 1, n)
    mode = np.sin(np.pi * x)[:, None] * np.sin(2 * np.pi * x)
    mode[:, -1] = mode[-1] = 0
    out = np.empty((1, frames, n, n), np.float32)
    data.advance(mode[None].copy(), np.array([number]), frames, out)
    # The mode sin(πx)·sin(2πy) is an eigenvector: each step multiplies it by 1 - 4·number·(sin²(πh/2) + sin²(πh)).
    h = 1 / (n - 1)
    factor = 1 - 4 * number * (np.sin(np.pi * h / 2) ** 2 + np.sin(np.pi * h) ** 2)
    decay = factor ** np.arange(frames)
    np.testing.assert_allclose(out[0], decay[:, None, None] * mode, atol=2e-7)
    # exp(-5π²αt) with αt = number·h² per frame; the scheme is second order in h.
    exact = np.exp(-5 * np.pi**2 * number * h**2 * np.arange(frames))
    np.testing.assert_allclose(out[0], exact[:, None, None] * mode, atol=5e-3 * (1 - exact[-1]))


def test_equal_walls_pull_the_plate_to_their_value():
    s = small()
    u = data.plates(s, np.full((1, 4), 0.3), np.array([0.9]))
    out = np.empty((1, 3_000, s.grid, s.grid), np.float32)
    data.advance(u, np.array([0.25]), 3_000, out)
    assert out[0, 0, 4, 4] == np.float32(0.9)
    np.testing.assert_allclose(out[0, -1], 0.3, atol=1e-6)


def test_wall_values_and_diffusivities_are_evenly_spaced_and_permuted_on_their_own():
    s = small(samples=50)
    walls, initial, alpha = data.draw(s)
    for wall, high in zip(walls.T, (1, 1, 1, 0.1), strict=True):
        np.testing.assert_allclose(np.sort(wall), np.linspace(0, high, 50))
    np.testing.assert_allclose(np.sort(alpha), np.linspace(0.01, 0.1, 50))
    lists = [*walls.T, alpha, initial]
    assert len({tuple(np.argsort(values)) for values in lists}) == len(lists)
    assert ((initial > 0) & (initial < 1)).all()


def test_a_first_frame_has_its_walls_and_a_uniform_inside():
    s = small()
    d = data.cases(s)
    first = d.frames[3, 0].reshape(s.grid, s.grid)
    np.testing.assert_allclose(first[1:-1, 1:-1], d.initial[3], rtol=1e-6)
    for side, wall in ((first[1:-1, 0], 0), (first[1:-1, -1], 1), (first[0], 2), (first[-1], 3)):
        np.testing.assert_allclose(side, d.walls[3, wall], rtol=1e-6)


def test_with_timesteps_of_their_own_frames_are_linear_in_four_walls_and_the_initial_value():
    s = small()
    d = data.cases(s)
    causes = np.column_stack([d.walls, d.initial])
    frames = d.frames.reshape(s.samples, -1).astype(float)
    fit, *_ = np.linalg.lstsq(causes, frames, rcond=None)
    np.testing.assert_allclose(causes @ fit, frames, atol=1e-6)


def test_with_a_common_timestep_the_diffusivity_matters():
    own, common = data.cases(small()), data.cases(small(timestep="common"))
    assert len(set(common.dt)) == 1
    assert len(set(own.dt)) == len(own.dt)
    fastest, slowest = np.argmax(own.alpha), np.argmin(own.alpha)
    np.testing.assert_allclose(common.frames[fastest], own.frames[fastest], atol=1e-7)
    # A tenth of the diffusivity: ten frames go as far as one.
    moved = [np.abs(d.frames[slowest, 11] - d.frames[slowest, 0]).sum() for d in (own, common)]
    assert moved[1] < 0.5 * moved[0]


def test_frames_are_made_once_and_then_read_from_the_cache(monkeypatch):
    s = small(data_seed=77)
    made = data.cases(s).frames
    assert isinstance(made, np.memmap)
    assert data.cache_file(s).exists()
    data.cases.cache_clear()
    monkeypatch.setattr(data, "_make", lambda *_: pytest.fail("made twice"))
    np.testing.assert_array_equal(data.cases(s).frames, made)


def test_a_broken_cache_file_is_made_anew():
    s = small(data_seed=78)
    good = np.array(data.cases(s).frames)
    file = data.cache_file(s)
    file.unlink()
    file.write_bytes(b"half a file")
    data.cases.cache_clear()
    np.testing.assert_array_equal(data.cases(s).frames, good)
    assert not file.with_suffix(".partial").exists()


def test_what_changes_the_frames_changes_the_file_and_nothing_else_does():
    file = data.cache_file(small())
    for changes in ({"samples": 30}, {"frames": 15}, {"timestep": "common"}, {"courant": 0.2}, {"data_seed": 1}):
        assert data.cache_file(small(**changes)) != file
    assert data.cache_file(small(layers=3, epochs=9, quantize=False)) == file


def test_an_unstable_step_is_refused():
    with pytest.raises(ValueError, match=r"`courant` must be in \(0, 0.25\], the stability limit .* got 0.3"):
        small(courant=0.3)
    with pytest.raises(ValueError, match=r"must be at most 0.25 .* got 0.26"):
        data.advance(np.zeros((1, 4, 4)), np.array([0.26]), 2, np.zeros((1, 2, 4, 4), np.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"timestep": "mine"}, "`timestep` must be 'own' or 'common'; got 'mine'"),
        ({"mask": "none"}, "`mask` must be 'block' or 'causal'; got 'none'"),
        ({"width": 10, "heads": 4}, "`width` must be a multiple of 2·heads = 8"),
        ({"frames": 9}, "`frames` must be at least 2·known = 10"),
        ({"schedule": "2:1e-3"}, "`schedule` must be rising epoch:lr pairs from epoch 1"),
        ({"schedule": "1:1e-3 fast"}, "got '1:1e-3 fast'"),
        ({"batch": 15}, "`batch` must be at most the 14 training cases; got 15"),
        ({"layers": 0}, "`layers` must be >= 1; got 0"),
        ({"residual": -1}, "`residual` must be a weight >= 0"),
        ({"quantise": "off"}, "did you mean 'quantize'"),
    ],
)
def test_a_bad_setting_is_named_with_its_value_and_the_remedy(changes, message):
    with pytest.raises(ValueError, match=message):
        small(**changes)


# Order and schedule


def test_batches_do_not_depend_on_how_they_are_asked_for():
    p = TESTBED.problem(SMALL, 3)
    whole = p.batches(0, 2 * SMALL.epoch_steps)
    parts = [p.batches(t, t + 1) for t in range(2 * SMALL.epoch_steps)]
    for name, x in whole.items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), x)


def test_an_epoch_shows_each_training_case_at_most_once_and_no_other_case():
    s = small(samples=40)
    p = TESTBED.problem(s, 3)
    train = {float(a) for a in data.cases(s).alpha[:28].astype(np.float32)}
    orders = []
    for epoch in range(3):
        alpha = p.batches(epoch * 7, epoch * 7 + 7)["alpha"].ravel()
        assert set(alpha.tolist()) == train
        orders.append(alpha.tolist())
    assert orders[0] != orders[1] != orders[2]


def test_learning_rates_change_at_the_start_of_the_listed_epochs():
    s = Settings()
    per = s.epoch_steps
    epochs = {1: 1e-3, 29: 1e-3, 30: 5e-4, 39: 5e-4, 40: 1e-4, 59: 1e-4, 60: 1e-5, 100: 1e-5}
    for epoch, lr in epochs.items():
        np.testing.assert_array_equal(learning_rates(s, np.array([(epoch - 1) * per, epoch * per - 1])), lr)


@pytest.mark.parametrize("preset", ["smoke", "laptop", "paper"])
def test_whole_chunks_fill_an_epoch_of_every_preset(preset):
    p = TESTBED.problem(TESTBED.presets[preset], 0)
    assert p.settings.epoch_steps % p.chunk == 0
    assert p.chunk * p.settings.batch * p.settings.frames * p.settings.nodes * 4 <= 64 * 2**20


# Quantization


@pytest.mark.parametrize("engine", engines.NAMES)
def test_fake_quantized_weights_take_at_most_255_levels_per_channel(engine):
    E = engines.get(engine)
    rng = np.random.default_rng(0)
    w = (rng.standard_normal((4_000, 6)) * 10.0 ** np.arange(-3, 3)).astype(np.float32)
    w[:, 2] = 0
    q = E.numpy(fake_quantize(E, E.array(w)))
    levels, scale = (E.numpy(x) for x in int8(E, E.array(w)))
    np.testing.assert_array_equal(levels, np.round(levels))
    assert np.abs(levels).max() == 127
    np.testing.assert_array_equal(q, levels * scale)
    assert all(100 < len(np.unique(column)) <= 255 for column in np.delete(q, 2, axis=1).T)
    assert not q[:, 2].any()
    # No weight moves by more than half a level of its own channel.
    assert (np.abs(q - w) <= 0.5001 * np.abs(w).max(axis=0) / 127).all()


@pytest.mark.parametrize("engine", engines.NAMES)
def test_gradients_pass_straight_through_quantization(engine):
    E = engines.get(engine)
    rng = np.random.default_rng(1)
    w, c = (rng.standard_normal((30, 4)).astype(np.float32) for _ in range(2))
    f = value_and_grad(E, lambda p: E.sum(fake_quantize(E, p["w"]) * E.array(c)))
    _, grads = f({"w": E.array(w)})
    np.testing.assert_array_equal(E.numpy(grads["w"]), c)


def test_quantization_changes_the_prediction_and_can_be_turned_off():
    E = engines.get("torch")
    on_, off = small(), small(quantize="off")
    params = some_params(on_)
    batch = first_batch(on_)
    quantized = {
        **params,
        **{n: E.numpy(fake_quantize(E, E.array(params[n]))) for n in ("project.w", "position.table")},
    }
    a = evaluate.one_shot(E, on_, on(E, params), batch["frames"], batch["alpha"])
    b = evaluate.one_shot(E, off, on(E, params), batch["frames"], batch["alpha"])
    c = evaluate.one_shot(E, off, on(E, quantized), batch["frames"], batch["alpha"])
    np.testing.assert_array_equal(a, c)
    assert np.abs(a - b).max() > 1e-4


# Model


def test_the_block_shortcut_equals_full_masked_attention():
    """On one engine: `test_engines_agree_on_loss_and_gradient` has the shortcut and the mask on all."""
    E = engines.get("torch")
    s = small(layers=2, width=32, heads=4)
    params = some_params(s)
    a, b = (value_and_gradient(E, dataclasses.replace(s, shortcut=shortcut), params) for shortcut in (True, False))
    assert a[0] == pytest.approx(b[0], rel=1e-5)
    batch = first_batch(s)
    frames = [
        evaluate.one_shot(E, dataclasses.replace(s, shortcut=shortcut), on(E, params), batch["frames"], batch["alpha"])
        for shortcut in (True, False)
    ]
    np.testing.assert_allclose(frames[0], frames[1], atol=1e-5)
    for name, g in a[1].items():
        np.testing.assert_allclose(g, b[1][name], atol=1e-5 * max(1, np.abs(g).max()), err_msg=name)


@pytest.mark.parametrize("mask", ["block", pytest.param("causal", marks=pytest.mark.slow)])
def test_engines_agree_on_loss_and_gradient(mask):
    s = small(mask=mask)
    params = some_params(s)
    found = {name: value_and_gradient(engines.get(name), s, params) for name in engines.NAMES}
    value, grads = found["torch"]
    for other, (v, g) in found.items():
        assert v == pytest.approx(value, rel=1e-4), other
        for name in params:
            scale = np.abs(grads[name]).max()
            assert scale > 0, name
            np.testing.assert_allclose(g[name], grads[name], atol=1e-4 * scale, err_msg=f"{other} {name}")


def test_a_block_prediction_sees_the_known_frames_only_and_a_causal_one_the_past_only():
    E = engines.get("torch")
    for mask, blind in (("block", slice(5, None)), ("causal", slice(9, None))):
        s = small(mask=mask)
        params, batch = on(E, some_params(s)), first_batch(s)
        changed = batch["frames"].copy()
        changed[:, blind] += 1
        a, b = (evaluate.one_shot(E, s, params, frames, batch["alpha"]) for frames in (batch["frames"], changed))
        if mask == "block":
            np.testing.assert_array_equal(a, b)
        else:
            # Frame s is given by frames 0 … s-1: frames up to 9 do not see the change, those after do.
            np.testing.assert_array_equal(a[:, :10], b[:, :10])
            assert (np.abs(a[:, 10:] - b[:, 10:]).max(axis=(0, 2)) > 1e-4).all()


def test_positions_turn_by_the_angles_of_rope_with_base_100():
    E = engines.get("torch")
    s = small(width=8)
    x = np.random.default_rng(0).standard_normal((s.frames, 8))
    r = model.rotations(s)
    turned = E.numpy(model.turned(E, E.array(x), E.array(r["cos"]), E.array(r["sin"])))
    pairs, after = x[:, :4] + 1j * x[:, 4:], turned[:, :4] + 1j * turned[:, 4:]
    angles = np.arange(s.frames)[:, None] * 100.0 ** (-np.arange(4) / 4)
    np.testing.assert_allclose(after, pairs * np.exp(1j * angles), atol=1e-6)


def test_the_diffusivity_reaches_every_frame():
    E = engines.get("torch")
    s = small()
    params, batch = on(E, some_params(s)), first_batch(s)
    a = evaluate.one_shot(E, s, params, batch["frames"], np.full(4, 0.02))
    b = evaluate.one_shot(E, s, params, batch["frames"], np.full(4, 0.09))
    assert (np.abs(a - b).max(axis=(0, 2)) > 1e-4).all()


# Loss


def written_out(s, predicted, truth, alpha, dt):
    """The four terms as the paper's code page lists them, in float64 and with plain slices."""
    n = s.grid
    u, v = (np.asarray(x, float).reshape(*x.shape[:2], n, n) for x in (predicted, truth))
    e = (u - v) ** 2
    now = u[:, :-1]
    lap = now[:, :, 2:, 1:-1] + now[:, :, :-2, 1:-1] + now[:, :, 1:-1, 2:] + now[:, :, 1:-1, :-2]
    lap = (lap - 4 * now[:, :, 1:-1, 1:-1]) * (n - 1) ** 2
    rate = (u[:, 1:, 1:-1, 1:-1] - now[:, :, 1:-1, 1:-1]) / dt[:, None, None, None]
    sides = e[..., 0].mean() + e[..., -1].mean() + e[..., 0, :].mean() + e[..., -1, :].mean()
    residual = np.mean((rate - alpha[:, None, None, None] * lap) ** 2)
    return e.mean() + s.boundary * sides + s.residual * residual + s.start * e[:, : s.known].mean()


@pytest.mark.parametrize("mask", ["block", "causal"])
def test_the_loss_is_the_sum_of_its_four_terms(mask):
    E = engines.get("torch")
    s = small(mask=mask, boundary=0.3, residual=0.002, start=0.7)
    params, batch = some_params(s), first_batch(s)
    value, _ = value_and_gradient(E, s, params)
    predicted = evaluate.one_shot(E, s, on(E, params), batch["frames"], batch["alpha"])
    skip = int(mask == "causal")
    want = written_out(s, predicted[:, skip:], batch["frames"][:, skip:], batch["alpha"], batch["dt"])
    assert value == pytest.approx(want, rel=1e-5)


def test_true_frames_leave_no_residual():
    E = engines.get("torch")
    batch = on(E, first_batch(small()))
    # Frames are rounded to 6e-8 and divided by timesteps of about 0.03.
    assert float(E.numpy(model.residual(E, batch["frames"], batch))) < 1e-9


# Evaluation


def test_a_mean_square_over_pieces_is_that_of_all_cases(monkeypatch):
    E = engines.get("torch")
    s = small()
    params, d = on(E, some_params(s)), data.cases(s)
    truth = d.frames[2:13]
    want = np.mean((evaluate.one_shot(E, s, params, truth, d.alpha[2:13]).astype(float) - truth) ** 2)
    monkeypatch.setattr(evaluate, "PIECE", 4 * 4 * s.frames * s.nodes)
    assert evaluate.mean_square(E, s, params, d, 2, 11) == pytest.approx(want, rel=1e-5)


def test_a_block_roll_out_feeds_back_five_frames_at_a_time():
    E = engines.get("torch")
    s = small()
    params, d = on(E, some_params(s)), data.cases(s)
    rolled = evaluate.roll_out(E, s, params, d.frames[:2], d.alpha[:2])
    np.testing.assert_array_equal(rolled[:, :5], d.frames[:2, :5])
    once = evaluate.one_shot(E, s, params, d.frames[:2], d.alpha[:2])
    np.testing.assert_allclose(rolled[:, 5:10], once[:, 5:10], atol=1e-5)
    again = np.concatenate([rolled[:, 5:10], np.zeros_like(rolled[:, 5:])], axis=1)
    np.testing.assert_allclose(rolled[:, 10:], evaluate.one_shot(E, s, params, again, d.alpha[:2])[:, 5:9], atol=1e-5)


def test_a_causal_roll_out_is_a_fixed_point_of_one_shot_prediction():
    E = engines.get("torch")
    s = small(mask="causal")
    params, d = on(E, some_params(s)), data.cases(s)
    rolled = evaluate.roll_out(E, s, params, d.frames[:2], d.alpha[:2])
    np.testing.assert_array_equal(rolled[:, :5], d.frames[:2, :5])
    np.testing.assert_allclose(evaluate.one_shot(E, s, params, rolled, d.alpha[:2])[:, 5:], rolled[:, 5:], atol=1e-5)


# Runs


@pytest.mark.parametrize("engine", [pytest.param("jax", marks=pytest.mark.slow), "mlx"])  # XLA compiles long
def test_engines_agree_on_a_smoke_run_and_it_learns(engine):
    spec = RunSpec(testbed="heat2d", optimizer="adam95", seed=1, settings={"frames": 14, "layers": 1})
    reference, result = (run(spec.model_copy(update={"engine": e})) for e in ("torch", engine))
    np.testing.assert_allclose(result.curve["loss"], reference.curve["loss"], rtol=2e-3)
    assert result.metrics == pytest.approx(reference.metrics, rel=5e-3)
    for each in (reference, result):
        assert each.status == "ok"
        assert set(each.metrics) >= {e.metric for e in TESTBED.endpoints}
    assert reference.curve["loss"][-1] < 0.5 * reference.curve["loss"][0]


def test_kbeta_gives_each_parameter_its_own_bucket(tmp_path):
    run(RunSpec(testbed="heat2d", settings={"epochs": 1}), tmp_path, checkpoint_every=0)
    with np.load(tmp_path / "trace.npz") as trace:
        names = set(trace["names"].tolist())
    assert names == set(TESTBED.problem(TESTBED.presets["smoke"], 0).params)


@pytest.mark.parametrize("mask", ["block", "causal"])
def test_pictures_are_drawn_from_final_parameters_without_an_engine(mask):
    s = small(mask=mask)
    E, params, d = engines.get("torch"), some_params(s), data.cases(s)
    want = evaluate.one_shot(E, s, on(E, params), d.frames[:2], d.alpha[:2])
    np.testing.assert_allclose(evaluate.one_shot(NUMPY, s, params, d.frames[:2], d.alpha[:2]), want, atol=1e-4)
    drawn = TESTBED.figures(s, {"kbeta": params, "adam95": some_params(s, 1)})
    assert len(drawn) == {"block": 2, "causal": 1}[mask]
    first, words = drawn[0]
    assert "truth first" in words
    titles = [axes.get_title().partition("\n")[0] for axes in first.axes if axes.get_title()]
    assert titles == ["truth", "kbeta", "adam95"]
    for figure, _ in drawn:
        picture = base64.b64decode(embed(figure).partition(",")[2])
        assert picture.startswith(b"<?xml")
    assert TESTBED.figures(s, {}) == []
