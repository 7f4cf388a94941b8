"""Recipes: the controls isolate what they say, options are checked, rivals say where they can be had."""

import importlib.util

import numpy as np
import pytest
import torch

from kourkoutas.lab import engines
from kourkoutas.lab.optimizers import recipes
from kourkoutas.lab.optimizers.recipes import CONTROLS, LABELS, RIVALS, check, engines_of, recipe
from kourkoutas.lab.running.train import run
from kourkoutas.lab.specs.spec import RunSpec
from kourkoutas.oracle import Oracle
from kourkoutas.rule import Hyper

KBETA = {"warmup_steps": 3, "buckets": "global"}
START = np.array([1.0, -2.0, 3.0], np.float32)
LR = 0.05


def quadratic(E, params, batch):
    return E.sum(E.square(params["w"]) * batch["curvature"]) / 2


def steps(label, engine, n=25, options=None, kbeta=KBETA):
    """w after n updates on ½ Σ cᵢ wᵢ², whose gradient is c·w."""
    it = engines.get(engine).trainer(
        quadratic,
        {"w": START},
        recipe(label, kbeta, options),
        constants={"curvature": np.array([1, 5, 0.2], np.float32)},
    )
    it.run({}, np.full(n, LR) * recipe(label, kbeta, options).lr_factor(np.arange(1, n + 1)))
    return it.params()["w"]


def oracle(hyper, n=25):
    it = Oracle({"w": START}, hyper, buckets="global", lr=LR)
    for _ in range(n):
        it.step({"w": np.array([1, 5, 0.2]) * it.params["w"]})
    return it.params["w"]


def test_kbeta_takes_the_testbeds_options_and_then_the_overrides():
    assert recipe("kbeta", KBETA).options == {"buckets": "global", "warmup_steps": 3}
    changed = recipe("kbeta", KBETA, {"alpha": "0.9", "warmup_steps": "0", "max_ratio": "3", "decay": "none"}).options
    assert changed == {"buckets": "global", "warmup_steps": 0, "alpha": 0.9, "max_ratio": 3, "decay": None}


@pytest.mark.parametrize("engine", engines.NAMES)
def test_kbeta_follows_the_oracle(engine):
    np.testing.assert_allclose(steps("kbeta", engine), oracle(Hyper(warmup_steps=3)), rtol=2e-5)


@pytest.mark.parametrize("engine", engines.NAMES)
def test_the_static_control_freezes_beta2_at_the_midpoint_and_keeps_the_bias_correction(engine):
    w, m, v = START.astype(np.float64), np.zeros(3), np.zeros(3)
    for t in range(1, 26):
        g = np.array([1, 5, 0.2]) * w
        m, v = 0.9 * m + 0.1 * g, 0.9395 * v + 0.0605 * g * g
        w = w - LR * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    np.testing.assert_allclose(steps("kbeta-static", engine), w, rtol=2e-5)


def test_the_exact_control_changes_the_bias_correction_alone():
    a, b = recipe("kbeta", KBETA).options, recipe("kbeta-exact", KBETA).options
    assert b == {**a, "bias_correction": "exact"}


def test_adam_mid_has_the_midpoint_of_the_testbeds_range():
    assert recipe("adam-mid", KBETA).options["beta2"] == 0.9395
    assert recipe("adam-mid", {"beta2_min": 0.9, "beta2_max": 0.99}).options["beta2"] == 0.945


@pytest.mark.parametrize(("label", "beta2"), [("adam95", 0.95), ("adam999", 0.999), ("adam95-warm", 0.95)])
def test_adam_arms_have_the_beta2_of_their_name_and_the_papers_settings(label, beta2):
    expected = {"beta1": 0.9, "beta2": beta2, "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True}
    assert recipe(label, KBETA).options == expected


def test_warm_arms_scale_the_learning_rate_as_the_hidden_warmup_does():
    factor = recipe("adam999-warm").lr_factor(np.array([1, 100, 1000]))
    # √(1 - 0.999^t) at t = 1, 100, 1000, by hand.
    np.testing.assert_allclose(factor, [0.0316228, 0.3085, 0.7952], rtol=1e-3)
    np.testing.assert_array_equal(recipe("adam999").lr_factor(np.array([1, 100])), [1, 1])


def test_any_arm_can_have_its_learning_rate_scaled():
    arm = recipe("lion", overrides={"lr_scale": "0.1"})
    np.testing.assert_allclose(arm.lr_factor(np.array([1, 7])), 0.1)
    assert "lr_scale" not in arm.options
    with pytest.raises(ValueError, match="`lr_scale` must be > 0"):
        recipe("lion", overrides={"lr_scale": 0})


def test_a_label_may_carry_a_tag():
    assert recipe("kbeta[alpha=0.9]", KBETA, {"alpha": 0.9}).options["alpha"] == 0.9
    assert recipe("adam95[x]").options["beta2"] == 0.95


def test_weight_decay_of_adam_is_decoupled_on_every_engine():
    results = [steps("adam999", e, options={"weight_decay": 0.1}) for e in engines.NAMES]
    plain = steps("adam999", "torch")
    assert np.abs(results[0] - plain).max() > 1e-3
    for other in results[1:]:
        np.testing.assert_allclose(other, results[0], atol=2e-5)


@pytest.mark.parametrize(
    ("label", "options", "message"),
    [
        ("kbta", {}, r"unknown optimizer 'kbta': did you mean 'kbeta'"),
        ("kbeta", {"alfa": 1}, r"unknown option of kbeta 'alfa': did you mean 'alpha'"),
        ("adam95", {"beta_2": 1}, r"unknown option of adam95 'beta_2': did you mean 'beta2'"),
        ("kbeta", {"alpha": 1.5}, r"`alpha` must be in \(0, 1\)"),
        ("kbeta", {"alpha": "big"}, r"`alpha` must be a number, for example 0.93; got 'big'"),
        ("kbeta", {"buckets": "globe"}, r"did you mean \"global\""),
        ("adam95", {"beta2": 1.5}, r"`beta2_max` must be in"),
    ],
)
def test_a_wrong_name_or_value_is_refused_with_the_near_ones(label, options, message):
    with pytest.raises(ValueError, match=message):
        recipe(label, KBETA, options)


def test_every_label_is_a_recipe_and_every_control_has_a_label():
    assert set(CONTROLS) <= set(LABELS)
    for label in LABELS:
        assert recipe(label, KBETA).label == label
        assert "family" in recipe(label, KBETA).described


def _at_hand():
    for name, rival in RIVALS.items():
        if name == "muon":  # for matrices: see test_rivals
            continue
        for engine, home in rival.homes.items():
            if importlib.util.find_spec(home.partition(":")[0].partition(".")[0]):
                yield name, engine


@pytest.mark.parametrize(("name", "engine"), list(_at_hand()))
def test_a_rival_lowers_a_quadratic(name, engine):
    start = float(np.sum(np.array([1, 5, 0.2]) * START**2))
    w = steps(name, engine)
    assert np.isfinite(w).all()
    assert float(np.sum(np.array([1, 5, 0.2]) * w**2)) < 0.9 * start


@pytest.mark.parametrize("name", ["radam", "adamw", "rmsprop"])
def test_rivals_with_two_homes_take_the_same_steps(name):
    torch, jax = steps(name, "torch"), steps(name, "jax")
    assert np.abs(torch - START).max() > 0.1
    np.testing.assert_allclose(torch, jax, atol=3e-4)


def test_a_rival_that_an_engine_lacks_names_the_engines_that_have_it():
    assert engines_of(recipe("radam")) == ("torch", "jax")
    with pytest.raises(ValueError, match="'radam' is not available on engine 'mlx': use --engine torch or jax"):
        check(recipe("radam"), "mlx")


def test_a_library_that_is_not_installed_is_named_with_the_way_out(monkeypatch):
    def missing(name):
        raise ImportError(name)

    monkeypatch.setattr(recipes.importlib, "import_module", missing)
    with pytest.raises(ImportError, match=r"pip install pytorch-optimizer, or use --engine jax or mlx"):
        check(recipe("lion"), "torch")


def test_an_option_that_a_rival_lacks_lists_its_own():
    with pytest.raises(ValueError, match=r"unknown option of rmsprop \(torch.optim.RMSprop\) 'momentun'"):
        check(recipe("rmsprop", overrides={"momentun": 0.9}), "torch")


@pytest.mark.parametrize(
    ("label", "engine"), [("torch.Adamax", "torch"), ("optax.novograd", "jax"), ("mlx.SGD", "mlx")]
)
def test_any_optimizer_of_a_library_can_be_a_rival(label, engine):
    assert np.abs(steps(label, engine, n=5) - START).max() > 1e-3
    with pytest.raises(ValueError, match="not available on engine"):
        check(recipe(label), "torch" if engine != "torch" else "jax")


def test_an_unknown_optimizer_of_a_library_lists_near_ones():
    with pytest.raises(ValueError, match=r"unknown optimizer of optax 'adagrd': did you mean 'adagrad'"):
        check(recipe("optax.adagrd"), "jax")


def test_adam_equal_has_one_beta_for_both_moments():
    expected = {"beta1": 0.95, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True}
    assert recipe("adam-equal", KBETA).options == expected
    assert recipe("adam-equal", KBETA, {"beta1": "0.9", "beta2": "0.9"}).options["beta1"] == 0.9


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        *((name, "") for name in ("adagc", "stable-spam", "stableadamw", "laprop")),
        ("soap", ", or use --engine jax or mlx"),
    ],
)
def test_a_rival_of_pytorch_optimizer_that_is_not_installed_is_named_with_the_way_out(name, way_out, monkeypatch):
    def missing(module):
        raise ImportError(module)

    monkeypatch.setattr(recipes.importlib, "import_module", missing)
    with pytest.raises(ImportError, match=f"optimizer '{name}' .* pip install pytorch-optimizer{way_out}$"):
        check(recipe(name), "torch")


def test_kbeta_then_lbfgs_is_kbeta_before_the_switch_and_finds_the_minimum_after_it():
    before = steps("kbeta-lbfgs", "torch", n=12, options={"after": 12})
    np.testing.assert_array_equal(before, steps("kbeta", "torch", n=12))
    after = steps("kbeta-lbfgs", "torch", n=20, options={"after": "12"})
    assert np.abs(after).max() < 1e-3 * np.abs(before).max()


def test_kbeta_then_lbfgs_changes_after_its_share_of_the_steps():
    made = recipe("kbeta-lbfgs", KBETA, {"share": "0.25", "alpha": "0.9"})
    assert made.over(1_000).options["after"] == 250
    assert (made.options["after"], made.options["alpha"]) == (None, 0.9)
    assert recipe("kbeta", KBETA).over(1_000) == recipe("kbeta", KBETA)
    with pytest.raises(ValueError, match=r"set kbeta-lbfgs.after=1000"):
        steps("kbeta-lbfgs", "torch")
    with pytest.raises(ValueError, match="'kbeta-lbfgs' is not available on engine 'jax': use --engine torch"):
        check(made, "jax")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"share": "1.5"}, r"`share` must be in \(0, 1\), for example 0.5; got 1.5"),
        ({"after": "0"}, "`after` must be a number of steps >= 1, or none for a share of all; got 0"),
        ({"shar": 0.5}, "unknown option of kbeta-lbfgs 'shar'"),
    ],
)
def test_a_switch_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        recipe("kbeta-lbfgs", KBETA, options)


@pytest.mark.parametrize("label", ["lbfgs", "kbeta-lbfgs"])
def test_an_optimizer_for_one_and_the_same_loss_refuses_a_testbed_that_draws_batches(label):
    with pytest.raises(
        ValueError, match=f"optimizer '{label}' needs the same loss at every step, and rare_trigger draws"
    ):
        run(RunSpec(testbed="rare_trigger", optimizer=label))


def test_lbfgs_after_kbeta_lowers_the_loss_of_a_pinn_and_a_killed_run_goes_on_to_the_same_bits(tmp_path):
    settings = {"steps": 620, "lr": 3e-3}
    spec = RunSpec(testbed="burgers", optimizer="kbeta-lbfgs", settings=settings)
    whole = run(spec, tmp_path / "whole", checkpoint_every=0)
    assert whole.metrics["final_loss"] < 0.7 * run(spec.model_copy(update={"optimizer": "kbeta"})).metrics["final_loss"]

    class Killed(Exception):
        pass

    def kill(step, steps, loss):
        if step >= 500:  # after the switch
            raise Killed

    with pytest.raises(Killed):
        run(spec, tmp_path / "cut", checkpoint_every=1, on_progress=kill)
    resumed = run(spec, tmp_path / "cut", checkpoint_every=1)
    assert resumed.metrics == whole.metrics


def test_adam_takes_complex_parameters_as_torch_does():
    torch = pytest.importorskip("torch")
    start = torch.tensor([1 + 2j, -0.5j])

    def after(optimizer_of):
        w = torch.nn.Parameter(start.clone())
        optimizer = optimizer_of(w)
        for _ in range(5):
            optimizer.zero_grad()
            (w.abs() ** 2).sum().backward()
            optimizer.step()
        return w.detach()

    for label, beta2 in (("adam95", 0.95), ("adam999-warm", 0.999)):
        own = after(lambda w, label=label: recipe(label).torch([("w", w)], False, lr=0.1))
        torch.testing.assert_close(own, after(lambda w, b=beta2: torch.optim.Adam([w], lr=0.1, betas=(0.9, b))))


pytest.importorskip("torch")
SHAPES = ((3, 2), (4,))


def grads(t):
    rng = np.random.default_rng(t)
    return [rng.normal(size=shape).astype(np.float32) * (20 if t % 9 == 5 else 1) for shape in SHAPES]


def plain_adam(beta2_of, steps, lr=0.01):
    """Adam by its equations in float64; β2 of leaf i at step t from `beta2_of(i, t)`."""
    theta = [np.ones(shape) for shape in SHAPES]
    m, v, product = [0.0] * 2, [0.0] * 2, [1.0] * 2
    for t in range(1, steps + 1):
        for i, g in enumerate(grads(t)):
            beta2 = beta2_of(i, t)
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = beta2 * v[i] + (1 - beta2) * g.astype(np.float64) ** 2
            product[i] *= beta2
            theta[i] = theta[i] - lr * m[i] / (1 - 0.9**t) / (np.sqrt(v[i] / (1 - product[i])) + 1e-8)
    return theta


def by_torch(label, steps, lr=0.01, reload_at=None):
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    named = [(str(i), p) for i, p in enumerate(params)]
    recipe = recipes.recipe(label)
    optimizer = recipe.torch(named)
    for t in range(1, steps + 1):
        if t == reload_at:
            saved = optimizer.state_dict()
            optimizer = recipe.torch(named)
            optimizer.load_state_dict(saved)
        for group in optimizer.param_groups:
            group["lr"] = lr
        for p, g in zip(params, grads(t), strict=True):
            p.grad = torch.from_numpy(g)
        optimizer.step()
    return [p.detach().numpy() for p in params], optimizer


def by_optax(label, steps, lr=0.01):
    jax = pytest.importorskip("jax")
    optax = pytest.importorskip("optax")
    solver = recipes.recipe(label).optax()(lr)
    params = [jax.numpy.ones(shape) for shape in SHAPES]
    state = solver.init(params)
    update = jax.jit(solver.update)
    for t in range(1, steps + 1):
        updates, state = update([jax.numpy.asarray(g) for g in grads(t)], state, params)
        params = optax.apply_updates(params, updates)
    return [np.asarray(p) for p in params], state


@pytest.mark.parametrize("engine", [by_torch, by_optax])
def test_adafactors_schedule_is_one_minus_a_power_of_the_step(engine):
    got, _ = engine("adafactor-beta2", 40)
    for a, b in zip(got, plain_adam(lambda i, t: 1 - t**-0.8, 40), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_it_resumes_to_the_bit():
    there, _ = by_torch("adafactor-beta2", 20)
    again, _ = by_torch("adafactor-beta2", 20, reload_at=11)
    for a, b in zip(there, again, strict=True):
        np.testing.assert_array_equal(a, b)


def test_warmed_it_has_the_factor_of_a_warmed_adam():
    t = np.arange(1, 50)
    assert recipes.recipe("adafactor-beta2-warm").family == "adafactor-beta2"
    want = recipes.recipe("adam999-warm").lr_factor(t)
    np.testing.assert_array_equal(recipes.recipe("adafactor-beta2-warm").lr_factor(t), want)
