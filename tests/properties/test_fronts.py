"""Properties of every front end and route, for gradients of any size."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kourkoutas.rule import Hyper
from tests.properties.fronts import SHAPES, mlx_run, optax_run, params, torch_run
from tests.state.problem import entry

pytest.importorskip("torch")
pytest.importorskip("optax")
pytest.importorskip("mlx.core")

TORCH = {
    "kernel": {"fused": True},
    "fused": {"fused": True},
    "plain": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "capturable": {"capturable": True, "fused": False},
}
FRONTS = [*TORCH, "optax", "mlx"]
LR, STEPS = 2.0**-7, 4
TINY = float(np.finfo(np.float32).smallest_subnormal)
ANY = st.sampled_from([0.0, TINY, -1e-40, 1e-30, -1.0, 2.5, 1e4, -1e30, np.inf, -np.inf, np.nan]) | st.floats(
    width=32, allow_nan=True, allow_infinity=True
)
# Squares of these neither underflow nor overflow.
CALM = st.floats(-8, 8, width=32).map(lambda x: x if abs(x) > 1e-3 else 0.0)
EACH = sum(int(np.prod(shape)) for shape in SHAPES.values())


def gradients(values, scale=1.0):
    """The numbers of a list as the gradients of `STEPS` steps."""
    flat, out = np.array(values, np.float32) * np.float32(scale), []
    for t in range(STEPS):
        one, at = flat[t * EACH : (t + 1) * EACH], 0
        g = {}
        for name, shape in SHAPES.items():
            size = int(np.prod(shape))
            g[name], at = one[at : at + size].reshape(shape), at + size
        out.append(g)
    return out


def lists(values):
    return st.lists(values, min_size=STEPS * EACH, max_size=STEPS * EACH)


def run(front, options, grads, monkeypatch, lr=LR, **how):
    if front == "fused":
        from kourkoutas.torch import kernel

        monkeypatch.setattr(kernel, "extension", None)
    with np.errstate(all="ignore"):
        if front in TORCH:
            return torch_run(TORCH[front], options, lr, grads, **how)
        return {"optax": optax_run, "mlx": mlx_run}[front](options, lr, grads, **how)


def tried(examples):
    """A property of every front end; the monkeypatch sets the same thing for every example."""
    from hypothesis import HealthCheck

    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]

    def decorate(test):
        return pytest.mark.parametrize("front", FRONTS)(
            settings(max_examples=examples, deadline=None, suppress_health_check=quiet)(test)
        )

    return decorate


@tried(20)
@given(values=lists(ANY))
@example(values=[0.0] * (STEPS * EACH - 1) + [-1e30])
@example(values=[3.4028232635611926e38] + [0.0] * (STEPS * EACH - 1))  # the largest float32
def test_sun_and_beta2_stay_in_their_ranges_for_any_gradients(front, values, monkeypatch):
    out = run(front, {"nonfinite": "skip", "buckets": "module"}, gradients(values), monkeypatch)
    skipped = np.isnan(out.sun)
    assert (skipped == np.isnan(out.beta2)).all()
    assert (skipped.sum(0) == out.states[-1].scalars["skipped"]).all()
    sun, beta2 = out.sun[~skipped], out.beta2[~skipped]
    assert ((sun >= 0) & (sun < 1)).all()
    assert ((beta2 >= Hyper.beta2_min - 1e-6) & (beta2 <= Hyper.beta2_max + 1e-6)).all()
    assert np.isfinite(out.states[-1].scalars["ema"]).all()


@tried(8)
@given(values=lists(CALM), power=st.integers(-8, 8))
def test_sun_does_not_change_when_all_gradients_are_scaled(front, values, power, monkeypatch):
    options = {"buckets": "module", "tiny_spike": 1e-15}
    one = run(front, options, gradients(values), monkeypatch)
    other = run(front, options, gradients(values, 2.0**power), monkeypatch)
    np.testing.assert_allclose(one.sun, other.sun, rtol=1e-6)


@tried(8)
@given(values=lists(CALM))
def test_v_is_below_the_largest_square_v_max_does_not_fall_and_the_clip_holds(front, values, monkeypatch):
    grads = gradients(values)
    out = run(front, {"decay": 1.0, "max_ratio": 0.7}, grads, monkeypatch, every_state=True)
    theta, before = params(), {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    largest, bound = {name: np.zeros(shape) for name, shape in SHAPES.items()}, 0.0
    for g, after, state in zip(grads, out.params, out.states, strict=True):
        bound = Hyper.beta2_max * bound + 1
        for name in SHAPES:
            largest[name] = np.maximum(largest[name], g[name].astype(np.float64) ** 2)
            v, v_max = state.moments["v"][name], state.moments["v_max"][name]
            assert (v <= largest[name] * (1 + 1e-6)).all()
            assert (v <= (1 - Hyper.beta2_min) * bound * largest[name].max() * (1 + 1e-6)).all()
            assert (v_max >= before[name]).all()
            assert (v_max >= v).all()
            moved = np.abs(after[name].astype(np.float64) - theta[name])
            assert (moved <= 0.7 * LR * (1 + 1e-6) + np.spacing(np.abs(theta[name]))).all()
            before[name] = v_max
        theta = after


@tried(6)
@given(values=lists(CALM))
def test_a_fixed_beta2_is_adam(front, values, monkeypatch):
    grads = gradients(values)
    out = run(front, {"beta2_min": 0.97, "beta2_max": 0.97, "buckets": "global"}, grads, monkeypatch)
    for name, start in params().items():
        theta = start.astype(np.float64)
        m, v = np.zeros_like(theta), np.zeros_like(theta)
        for t, g in enumerate(grads, start=1):
            x = g[name].astype(np.float64)
            m, v = 0.9 * m + 0.1 * x, 0.97 * v + 0.03 * x * x
            theta = theta - LR * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.97**t)) + 1e-8)
        # |Δθ| ≤ about lr per step; a gradient near ε = 1e-8 is where rounding shows most
        np.testing.assert_allclose(out.params[-1][name], theta, rtol=0, atol=4e-6)


@pytest.mark.parametrize("front", TORCH)
@pytest.mark.parametrize("how", ["order", "groups"])
def test_results_depend_neither_on_the_order_nor_on_the_grouping_of_parameters(front, how, monkeypatch):
    grads = gradients(np.random.default_rng(9).normal(size=STEPS * EACH))
    options = {"decay": 0.9, "bias_correction": "exact", "weight_decay": 0.01}
    one = run(front, options, grads, monkeypatch)
    changed = {"order": tuple(reversed(SHAPES))} if how == "order" else {"groups": True}
    other = run(front, options, grads, monkeypatch, **changed)
    for name in SHAPES:
        np.testing.assert_array_equal(other.params[-1][name], one.params[-1][name])
        np.testing.assert_array_equal(other.states[-1].moments["v"][name], one.states[-1].moments["v"][name])
        assert entry(other.states[-1], "ema", name) == entry(one.states[-1], "ema", name)


def solved(front, how, options, grads):
    """The final parameters in Optax or MLX, under names that sort the other way, or with a solver for each of them."""
    names = dict(zip("xyz", reversed(SHAPES) if how == "order" else SHAPES, strict=True))
    start, each = params(), [{key: g[name] for key, name in names.items()} for g in grads]
    if front == "optax":
        import jax
        import jax.numpy as jnp
        import optax

        from kourkoutas.optax import kourkoutas_beta

        solver = kourkoutas_beta(LR, **options)
        if how == "groups":
            solver = optax.partition(dict.fromkeys(names, solver), {key: key for key in names})
        tree = {key: jnp.asarray(start[name]) for key, name in names.items()}
        state, update = solver.init(tree), jax.jit(solver.update)
        for g in each:
            updates, state = update(g, state, tree)
            tree = optax.apply_updates(tree, updates)
    else:
        import mlx.core as mx
        from mlx.optimizers import MultiOptimizer

        from kourkoutas.mlx import KourkoutasBeta

        parts = [KourkoutasBeta(LR, **options) for _ in names]
        alone = [lambda path, _, key=key: path == key for key in list(names)[:-1]]
        solver = MultiOptimizer(parts, alone) if how == "groups" else parts[0]
        tree = {key: mx.array(start[name]) for key, name in names.items()}
        solver.init(tree)
        for g in each:
            tree = solver.apply_gradients({key: mx.array(x) for key, x in g.items()}, tree)
            mx.eval(tree)
    return {names[key]: np.array(x) for key, x in tree.items()}


@pytest.mark.parametrize("front", ["optax", "mlx"])
@pytest.mark.parametrize("how", ["order", "groups"])
def test_nor_do_they_in_optax_and_mlx(front, how):
    grads = gradients(np.random.default_rng(9).normal(size=STEPS * EACH))
    options = {"decay": 0.9, "bias_correction": "exact", "weight_decay": 0.01}
    one, other = solved(front, "", options, grads), solved(front, how, options, grads)
    for name in SHAPES:
        np.testing.assert_array_equal(other[name], one[name])


@pytest.mark.parametrize("beta1", [0.0, 0.9])
@pytest.mark.parametrize("front", FRONTS)
def test_a_learning_rate_of_zero_moves_the_state_alone_and_a_beta1_of_zero_keeps_the_gradient(
    front, beta1, monkeypatch
):
    grads = gradients(np.random.default_rng(10).normal(size=STEPS * EACH))
    out = run(front, {"beta1": beta1, "weight_decay": 0.1}, grads, monkeypatch, lr=0.0)
    last = out.states[-1]
    assert last.scalars["step"].tolist() == [STEPS] * len(SHAPES)
    for name, start in params().items():
        np.testing.assert_array_equal(out.params[-1][name], start)
        m, r = np.zeros(SHAPES[name]), 0.0
        for g in grads:
            m = beta1 * m + (1 - beta1) * g[name].astype(np.float64)
            r = 0.93 * r + 0.07 * np.linalg.norm(g[name].astype(np.float64))
        np.testing.assert_allclose(last.moments["m"][name], m, rtol=1e-6, atol=1e-7)
        assert entry(last, "ema", name) == pytest.approx(r, rel=1e-6)


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("front", FRONTS)
def test_weight_decay_does_not_drift_from_its_power_in_float32(front, nonfinite, monkeypatch):
    """1 - γλ lies half-way between two numbers of float32 here: rounded, it would be 9e-6 off after 300 steps."""
    fade, steps = 1677.5 * 2.0**-24, 300
    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    out = run(front, {"weight_decay": fade / LR, "nonfinite": nonfinite}, [zeros] * steps, monkeypatch)
    for name, start in params().items():
        # θ_t = (1 - γλ)^t·θ_0, as a gradient of zero moves nothing else
        np.testing.assert_allclose(out.params[-1][name], (1 - fade) ** steps * start.astype(np.float64), rtol=2e-6)
