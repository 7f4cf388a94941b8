"""What users of MLX expect of an optimizer, beyond the numbers of the conformance table."""

import os
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from kourkoutas.mlx import KourkoutasBeta
from kourkoutas.oracle import Oracle
from kourkoutas.rule import Hyper, NonFiniteGradient
from kourkoutas.trace import WINDOW, Trace

SRC = Path(__file__).parents[2] / "src"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 1)]

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = nn.silu(layer(x))
        return self.layers[-1](x)


def problem(seed=0):
    rng = np.random.default_rng(seed)
    model = Net()
    model.update(
        tree_unflatten(
            [
                (k, mx.array(rng.normal(size=p.shape).astype(np.float32)))
                for k, p in tree_flatten(model.trainable_parameters())
            ]
        )
    )
    x = mx.array(rng.normal(size=(16, 3)).astype(np.float32))
    y = mx.array(rng.normal(size=(16, 1)).astype(np.float32))
    return model, x, y


def loss(model, x, y):
    return mx.mean(mx.square(model(x) - y))


def train(optimizer, steps, compiled=False, init=True, between=None):
    model, x, y = problem()
    if init:
        optimizer.init(model.trainable_parameters())
    grad = nn.value_and_grad(model, loss)

    def step(x, y):
        value, grads = grad(model, x, y)
        optimizer.update(model, grads)
        return value

    state = [model.state, optimizer.state]
    run = mx.compile(step, inputs=state, outputs=state) if compiled else step
    for t in range(steps):
        if between is not None:
            between(optimizer, t)
        value = run(x, y)
        mx.eval(state, value)
    return {name: np.array(p) for name, p in tree_flatten(model.trainable_parameters())}


def assert_close(a, b, atol):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=0, atol=atol, err_msg=name)


def toy(dtype=mx.float32):
    return {"a": mx.array([1.0, -2.0], dtype), "b": {"c": mx.array([[0.5], [3.0]], dtype)}}


def toy_grads(scale=1.0, dtype=mx.float32):
    return {"a": mx.array([0.3, -0.1], dtype) * scale, "b": {"c": mx.array([[1.0], [2.0]], dtype) * scale}}


FULL = {"decay": 0.98, "max_ratio": 3.0, "adaptive_tiny": True, "warmup_steps": 3, "bias_correction": "exact"}


@pytest.mark.parametrize("corrected", [False, True])
def test_a_fixed_beta2_is_the_adam_of_mlx_whatever_the_buckets(corrected):
    fixed = {"beta2_min": 0.95, "beta2_max": 0.95, "bias_correction": "beta2max" if corrected else "none"}
    every = ["parameter", "module", "shape", "global", lambda name, p: p.ndim]
    optimizers = [optim.Adam(1e-2, betas=[0.9, 0.95], bias_correction=corrected)]
    optimizers += [KourkoutasBeta(1e-2, buckets=buckets, **fixed) for buckets in every]
    rng = np.random.default_rng(3)
    params = [toy() for _ in optimizers]
    for _ in range(1000):
        g = {"a": mx.array(rng.normal(size=2)), "b": {"c": mx.array(rng.normal(size=(2, 1)))}}
        params = [optimizer.apply_gradients(g, p) for optimizer, p in zip(optimizers, params, strict=True)]
        mx.eval(params)
    want, *found = (dict(tree_flatten(p)) for p in params)
    for got, buckets in zip(found, every, strict=True):
        for name in want:
            np.testing.assert_allclose(
                np.array(got[name]), np.array(want[name]), rtol=0, atol=1e-6, err_msg=str(buckets)
            )


@pytest.mark.parametrize("options", [{}, {**FULL, "nonfinite": "skip", "diagnostics": True, "weight_decay": 0.1}])
def test_a_compiled_step_equals_the_eager_one(options):
    eager = train(KourkoutasBeta(1e-2, **options), 20)
    compiled = train(KourkoutasBeta(1e-2, **options), 20, compiled=True)
    assert_close(eager, compiled, 2e-6)


def test_a_compiled_step_may_build_the_state_itself():
    with_init = train(KourkoutasBeta(1e-2), 20, compiled=True)
    without = train(KourkoutasBeta(1e-2), 20, compiled=True, init=False)
    assert_close(with_init, without, 2e-6)


def test_a_learning_rate_set_by_hand_is_seen_by_a_compiled_step():
    def stop(optimizer, t):
        if t == 5:
            optimizer.learning_rate = 0.0

    five = train(KourkoutasBeta(1e-2), 5, compiled=True)
    stopped = train(KourkoutasBeta(1e-2), 9, compiled=True, between=stop)
    assert_close(five, stopped, 0)


@pytest.mark.parametrize("compiled", [False, True])
def test_schedules_of_learning_rate_and_alpha_follow_the_step(compiled):
    seen = []

    def lr(step):
        return 1e-2 * mx.power(0.5, step.astype(mx.float32))

    def alpha(step):
        return 0.5 + 0.1 * step.astype(mx.float32)

    optimizer = KourkoutasBeta(lr, alpha=alpha)
    train(optimizer, 4, compiled, between=lambda o, t: seen.append((o.learning_rate.item(), o.state["alpha"].item())))
    seen.append((optimizer.learning_rate.item(), optimizer.state["alpha"].item()))
    # A schedule is read at the step count before the step, as in MLX's own optimizers.
    np.testing.assert_allclose(seen, [(1e-2, 0.5), (1e-2, 0.5), (5e-3, 0.6), (2.5e-3, 0.7), (1.25e-3, 0.8)], rtol=1e-6)


def test_scheduled_values_enter_the_update_as_the_oracle_has_them():
    rates, alphas = [0.1, 0.02, 0.3, 0.05], [0.5, 0.9, 0.2, 0.7]
    optimizer = KourkoutasBeta(lambda t: mx.array(rates)[t], alpha=lambda t: mx.array(alphas)[t])
    p, theta = toy(), {"a": [1.0, -2.0], "b.c": [[0.5], [3.0]]}
    state = None
    for k in range(4):
        g = toy_grads(1.0 + k)
        p = optimizer.apply_gradients(g, p)
        oracle = Oracle(theta, Hyper(alpha=alphas[k]), lr=rates[k])
        if state is not None:
            for name in ("params", "m", "v", "t", "r"):
                setattr(oracle, name, getattr(state, name))
        oracle.step({name: np.array(x) for name, x in tree_flatten(g)})
        state = oracle
    for name, x in tree_flatten(p):
        np.testing.assert_allclose(np.array(x), state.params[name], rtol=0, atol=2e-6)


def test_a_schedule_may_return_a_python_number():
    p = KourkoutasBeta(lambda _: 1e-2).apply_gradients(toy_grads(), toy())
    q = KourkoutasBeta(1e-2).apply_gradients(toy_grads(), toy())
    assert mx.array_equal(p["a"], q["a"])


def test_parameters_of_a_multi_optimizer_go_their_own_ways():
    one = KourkoutasBeta(1e-2, buckets="global")
    multi = optim.MultiOptimizer([one, optim.SGD(1e-1)], [lambda name, _: name.endswith("weight")])
    together = train(multi, 6)
    assert list(one.state["m"]) == ["layers.0.weight", "layers.1.weight", "layers.2.weight"]
    assert one.bucket_names == ("all",)

    # The same by hand: one model, each optimizer given its own part of the gradients.
    model, x, y = problem()
    ours, sgd = KourkoutasBeta(1e-2, buckets="global"), optim.SGD(1e-1)
    for _ in range(6):
        _, grads = nn.value_and_grad(model, loss)(model, x, y)
        for optimizer, key in ((ours, "weight"), (sgd, "bias")):
            optimizer.update(model, {"layers": [{key: layer[key]} for layer in grads["layers"]]})
        mx.eval(model.parameters())
    assert_close(together, {name: np.array(p) for name, p in tree_flatten(model.parameters())}, 0)


def test_an_optimizer_with_nothing_to_do_in_a_multi_optimizer_is_fine():
    idle = KourkoutasBeta(1e-2, diagnostics=True)
    result = train(optim.MultiOptimizer([idle, KourkoutasBeta(1e-2)], [lambda *_: False]), 3)
    assert_close(result, train(KourkoutasBeta(1e-2), 3), 0)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_half_precision_parameters_are_updated_in_float32_and_rounded_once(dtype):
    optimizer = KourkoutasBeta(1e-2)
    p = optimizer.apply_gradients(toy_grads(dtype=dtype), toy(dtype))
    exact = Oracle({k: np.array(x.astype(mx.float32)) for k, x in tree_flatten(toy(dtype))}, lr=1e-2)
    exact.step({k: np.array(x.astype(mx.float32)) for k, x in tree_flatten(toy_grads(dtype=dtype))})
    for name, x in tree_flatten(p):
        assert x.dtype == dtype
        assert mx.array_equal(x, mx.array(exact.params[name].astype(np.float32)).astype(dtype))
    for slot in ("m", "v"):
        assert all(x.dtype == dtype for x in optimizer.state[slot].values())
    assert optimizer.state["ema"].dtype == mx.float32


def test_float16_gradients_whose_squares_overflow_float16_have_a_finite_norm():
    optimizer = KourkoutasBeta(1e-2)
    optimizer.apply_gradients({"w": mx.full((4,), 3e4, mx.float16)}, {"w": mx.zeros((4,), mx.float16)})
    assert np.isclose(optimizer.state["ema"].item(), 0.07 * 6e4, rtol=1e-3)


@pytest.mark.parametrize("shape", [(1 << 22,), (1 << 21, 2), (2, 1 << 21), (3_000_017,)], ids=str)
def test_the_norm_of_millions_of_entries_is_right_to_float32(shape):
    g = np.random.default_rng(0).normal(size=shape).astype(np.float32) + 1
    optimizer = KourkoutasBeta(0.0, alpha=0.5)
    optimizer.apply_gradients({"w": mx.array(g)}, {"w": mx.zeros(shape)})
    assert np.isclose(2 * optimizer.state["ema"].item(), np.linalg.norm(g.astype(np.float64).ravel()), rtol=2e-6)


def test_large_arrays_of_one_bucket_are_summed_and_averaged_as_the_oracle_does():
    rng = np.random.default_rng(1)
    params = {"a": 3 * rng.normal(size=300_001), "b": 5 * rng.normal(size=(700, 500)), "c": rng.normal(size=7)}
    grads = {name: rng.normal(size=p.shape) for name, p in params.items()}
    options = {"adaptive_tiny": True, "tiny_denom": 1.0}
    optimizer = KourkoutasBeta(1e-2, buckets="global", **options)
    oracle = Oracle(params, Hyper(**options), buckets="global", lr=1e-2)
    p = {name: mx.array(x.astype(np.float32)) for name, x in params.items()}
    for _ in range(2):
        p = optimizer.apply_gradients({name: mx.array(g.astype(np.float32)) for name, g in grads.items()}, p)
        oracle.step(grads)
    for name in params:
        np.testing.assert_allclose(np.array(p[name]), oracle.params[name], rtol=1e-6, atol=2e-6)


def test_an_empty_and_a_scalar_parameter_are_updated():
    params = {"none": mx.zeros((0, 3)), "one": mx.array(1.0)}
    for options in ({}, FULL):
        new = KourkoutasBeta(0.1, **options).apply_gradients({"none": mx.zeros((0, 3)), "one": mx.array(2.0)}, params)
        assert new["none"].shape == (0, 3)
        assert np.isfinite(new["one"].item())
        assert new["one"].item() < 1.0


SESSION = """
    import sys
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten
    from kourkoutas.mlx import KourkoutasBeta

    def grads(t):
        mx.random.seed(t)
        g = {"a": mx.random.normal((7, 5)), "b": [{"c": mx.random.normal((3,))}, {}, {"d": mx.random.normal((2, 3))}]}
        if t % 5 == 2:
            del g["a"]
        return {k: v for k, v in [("a", g.get("a")), ("b", g["b"])] if v is not None}

    mode, first, last, path = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    dtype = getattr(mx, sys.argv[5])
    optimizer = KourkoutasBeta(1e-2, buckets="shape", bias_correction="exact", decay=0.98, diagnostics=True)
    params = {"a": mx.ones((7, 5), dtype), "b": [{"c": mx.ones((3,), dtype)}, {}, {"d": mx.ones((2, 3), dtype)}]}
    if mode == "resume":
        loaded = tree_unflatten(list(mx.load(path).items()))
        params, optimizer.state = loaded["params"], loaded["state"]
    for t in range(first, last):
        params.update(optimizer.apply_gradients(grads(t), params))
        mx.eval(params, optimizer.state)
    mx.save_safetensors(path, dict(tree_flatten({"params": params, "state": optimizer.state})))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_saved_and_loaded_in_a_new_process_goes_on_bit_for_bit(tmp_path, dtype):
    script = tmp_path / "session.py"
    script.write_text(textwrap.dedent(SESSION))

    def session(*args):
        env = {**os.environ, "PYTHONPATH": str(SRC)}
        subprocess.run([sys.executable, str(script), *map(str, args), dtype], check=True, env=env)

    one, two = tmp_path / "one.safetensors", tmp_path / "two.safetensors"
    session("start", 0, 60, one)
    session("start", 0, 23, two)
    session("resume", 23, 60, two)
    want, got = mx.load(str(one)), mx.load(str(two))
    assert want.keys() == got.keys()
    for name in want:
        assert want[name].dtype == got[name].dtype
        assert mx.array_equal(want[name], got[name], equal_nan=True), name


def test_the_state_is_nested_dictionaries_of_arrays_with_the_same_keys_from_init_on():
    optimizer = KourkoutasBeta(1e-2, diagnostics=True, **FULL)
    optimizer.init(toy())
    before = tree_flatten(optimizer.state)
    assert all(isinstance(x, mx.array) for _, x in before)
    optimizer.apply_gradients(toy_grads(), toy())
    after = tree_flatten(optimizer.state)
    assert [(name, x.shape, x.dtype) for name, x in before] == [(name, x.shape, x.dtype) for name, x in after]


def test_a_state_saved_with_other_buckets_is_refused():
    saved = KourkoutasBeta(1e-2, buckets="global")
    saved.init(toy())
    optimizer = KourkoutasBeta(1e-2)
    optimizer.state = saved.state
    with pytest.raises(ValueError, match=r"'ema' has shape \(1,\) but `buckets` 'parameter' give \(2,\)"):
        optimizer.apply_gradients(toy_grads(), toy())


def test_a_state_without_what_the_settings_need_is_refused():
    saved = KourkoutasBeta(1e-2)
    saved.init(toy())
    optimizer = KourkoutasBeta(1e-2, bias_correction="exact")
    optimizer.state = saved.state
    with pytest.raises(ValueError, match="no 'log_beta2'"):
        optimizer.init(toy())


def test_parameters_without_a_gradient_keep_value_moments_and_count():
    optimizer = KourkoutasBeta(1e-2, buckets="global", diagnostics=True)
    p = optimizer.apply_gradients(toy_grads(), toy())
    new = optimizer.apply_gradients({"a": toy_grads()["a"], "b": {"c": None}}, p)
    assert mx.array_equal(new["b"]["c"], p["b"]["c"])
    assert optimizer.state["t"].tolist() == [2, 1]
    assert optimizer.apply_gradients({}, new) == {}
    assert optimizer.state["t"].tolist() == [2, 1]
    assert optimizer.step.item() == 3


def test_steps_are_one_number_until_parameters_differ_in_them():
    optimizer = KourkoutasBeta(1e-2)
    p = toy()
    for _ in range(2):
        p = optimizer.apply_gradients(toy_grads(), p)
    assert optimizer.state["t"].tolist() == 2
    optimizer.apply_gradients({"a": toy_grads()["a"], "b": {"c": None}}, p)
    assert optimizer.state["t"].tolist() == [3, 2]
    skipping = KourkoutasBeta(1e-2, nonfinite="skip")
    skipping.init(toy())
    assert skipping.state["t"].tolist() == [0, 0]


@pytest.mark.parametrize("first", ["shared", "own"])
def test_a_compiled_step_sees_whether_a_loaded_state_shares_its_steps(first):
    """Compiled with the one kind of state, continued with the other; beside it the same without mx.compile."""

    def state(kind):
        optimizer = KourkoutasBeta(1e-2)
        p = toy()
        for _ in range(3):
            p = optimizer.apply_gradients(toy_grads(), p)
        if kind == "own":
            p = optimizer.apply_gradients({"a": toy_grads()["a"], "b": {"c": None}}, p)
        mx.eval(p, optimizer.state)
        assert optimizer.state["t"].ndim == (kind == "own")
        return optimizer.state

    then = "own" if first == "shared" else "shared"
    optimizer = KourkoutasBeta(1e-2)
    optimizer.init(toy())
    optimizer.state.update(state(first))
    held = [optimizer.state]
    step = mx.compile(optimizer.apply_gradients, inputs=held, outputs=held)
    mx.eval(step(toy_grads(), toy()))
    optimizer.state.update(state(then))
    found = step(toy_grads(), toy())
    plain = KourkoutasBeta(1e-2)
    plain.state = state(then)
    expected = plain.apply_gradients(toy_grads(), toy())
    for (_, a), (_, b) in zip(tree_flatten(found), tree_flatten(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    assert optimizer.state["t"].tolist() == plain.state["t"].tolist()


def test_a_layer_that_is_unfrozen_later_joins_and_the_others_keep_their_state():
    optimizer = KourkoutasBeta(1e-2, buckets="module", diagnostics=True)
    names = [f"layers.{i}" for i in (2, 10)]
    params = {"layers": [{"w": mx.ones(3), "b": mx.ones(1)} for _ in range(11)]}

    def grads(*which):
        return {"layers": [{"w": mx.ones(3), "b": mx.ones(1)} if i in which else {} for i in range(11)]}

    for _ in range(3):
        optimizer.apply_gradients(grads(10), params)
    ema = optimizer.state["ema"].item()
    optimizer.apply_gradients(grads(2), params)
    assert list(optimizer.bucket_names) == names
    np.testing.assert_allclose(optimizer.state["ema"].tolist(), [0.14, ema], rtol=1e-6)
    assert optimizer.state["t"].tolist() == [1, 1, 3, 3]
    trace = Trace(optimizer.bucket_names)
    optimizer.pull(trace)
    assert np.isnan(trace.sun).tolist() == [[True, False]] * 3 + [[False, True]]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"bias_correction": "none", "diagnostics": True}], ids=["default", "traced"])
def test_ten_thousand_steps_keep_as_many_buckets_as_parameters_and_flat_memory(options):
    mx.clear_cache()  # a buffer kept from another test may be larger than the array it comes to hold
    optimizer = KourkoutasBeta(1e-3, **options)
    p = toy()
    active, resident = [], []
    for t in range(10_000):
        p = optimizer.apply_gradients(toy_grads(1 + t % 7), p)
        mx.eval(p)  # the parameters alone: the state must not pile up unevaluated
        if t % 1000 == 999:
            active.append(mx.get_active_memory())
            resident.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert len(optimizer.bucket_names) == len(optimizer.state["ema"].tolist()) == 2
    assert len(optimizer.state["m"]) == len(optimizer.state["v"]) == 2
    assert len(set(active)) == 1
    assert resident[-1] - resident[1] < 1024  # KiB


def test_skip_leaves_a_bucket_with_a_non_finite_gradient_as_it_was():
    optimizer = KourkoutasBeta(1e-2, nonfinite="skip", bias_correction="exact", decay=1.0, diagnostics=True)
    p = optimizer.apply_gradients(toy_grads(), toy())
    before = {name: np.array(x) for name, x in tree_flatten(optimizer.state)}
    bad = toy_grads()
    bad["a"] = mx.array([float("inf"), 1.0])
    new = optimizer.apply_gradients(bad, p)
    after = {name: np.array(x) for name, x in tree_flatten(optimizer.state)}
    assert mx.array_equal(new["a"], p["a"])
    assert not mx.array_equal(new["b"]["c"], p["b"]["c"])
    for slot in ("m", "v", "v_max"):
        np.testing.assert_array_equal(before[f"{slot}.a"], after[f"{slot}.a"])
    for name in ("t", "ema", "log_beta2"):
        assert before[name][0] == after[name][0]
        assert before[name][1] != after[name][1]
    assert after["skipped"].tolist() == [1, 0]
    assert np.isnan(after["ring"][1, :, 0]).all()
    assert np.isfinite(after["ring"][1, :, 1]).all()


def test_skip_with_every_gradient_finite_changes_nothing():
    assert_close(train(KourkoutasBeta(1e-2, nonfinite="skip", **FULL), 10), train(KourkoutasBeta(1e-2, **FULL), 10), 0)


def test_raise_names_the_bucket_and_changes_nothing():
    optimizer = KourkoutasBeta(lambda t: 1e-2 / (1 + t), nonfinite="raise")
    p = optimizer.apply_gradients(toy_grads(), toy())
    before = {name: np.array(x) for name, x in tree_flatten(optimizer.state)}
    bad = toy_grads()
    bad["b"]["c"] = mx.array([[float("nan")], [1.0]])
    with pytest.raises(NonFiniteGradient, match=r"bucket 'b\.c'"):
        optimizer.apply_gradients(bad, p)
    for name, x in tree_flatten(optimizer.state):
        np.testing.assert_array_equal(before[name], np.array(x))


def test_raise_inside_compile_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="cannot be compiled: use nonfinite='skip'"):
        train(KourkoutasBeta(1e-2, nonfinite="raise"), 1, compiled=True)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_trace_holds_sun_and_beta2_as_the_oracle_has_them(compiled):
    optimizer = KourkoutasBeta(1e-2, buckets="global", diagnostics=True, warmup_steps=2)
    oracle = Oracle({k: np.array(x) for k, x in tree_flatten(toy())}, Hyper(warmup_steps=2), buckets="global", lr=1e-2)
    p = toy()
    optimizer.init(p)
    state = [p, optimizer.state]

    def raw(g):
        p.update(optimizer.apply_gradients(g, p))

    step = mx.compile(raw, inputs=state, outputs=state) if compiled else raw
    want = []
    for t in range(6):
        g = toy_grads(1.0 + 5 * (t == 4))
        step(g)
        oracle.step({k: np.array(x) for k, x in tree_flatten(g)})
        want.append((oracle.sun["all"], oracle.beta2["all"]))
    trace = Trace(optimizer.bucket_names)
    optimizer.pull(trace)
    assert trace.steps.tolist() == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(np.stack([trace.sun[:, 0], trace.beta2[:, 0]], 1), want, rtol=1e-5)


def test_the_trace_goes_round_its_ring():
    optimizer = KourkoutasBeta(1e-2, diagnostics=True)
    trace = Trace(["w"])
    p = {"w": mx.ones(2)}
    for t in range(WINDOW + 3):
        p = optimizer.apply_gradients({"w": mx.ones(2) * (1 + t % 3)}, p)
        mx.eval(p, optimizer.state)
        if t == 5:
            optimizer.pull(trace)
    optimizer.pull(trace)
    assert trace.lost == 0
    assert trace.steps.tolist() == list(range(1, WINDOW + 4))
    assert np.isfinite(trace.sun).all()


def test_diagnostics_do_not_change_the_numbers():
    assert_close(train(KourkoutasBeta(1e-2, diagnostics=True), 10), train(KourkoutasBeta(1e-2), 10), 0)


def test_pulling_without_diagnostics_or_before_any_state_is_refused():
    with pytest.raises(ValueError, match="diagnostics=True"):
        KourkoutasBeta(1e-2).pull(Trace(()))
    with pytest.raises(ValueError, match="no state yet"):
        KourkoutasBeta(1e-2, diagnostics=True).pull(Trace(()))


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ({"a": mx.ones(2), "b": {"d": mx.ones(2)}}, r"entry at 'b\.d' and `parameters` has none"),
        ({"a": mx.ones(3)}, r"shape \(3,\) at 'a' and `parameters` has shape \(2,\)"),
        ({"b": mx.ones(2)}, r"at 'b' and `parameters` has a dict"),
        ({"a": [mx.ones(2)], "b": None}, r"'a\.0'|at 'b'"),
    ],
)
def test_gradients_that_do_not_match_name_the_first_path_that_differs(gradients, message):
    optimizer = KourkoutasBeta(1e-2)
    with pytest.raises(ValueError, match=message):
        optimizer.apply_gradients(gradients, toy())
    assert optimizer.step.item() == 0
    assert "m" not in optimizer.state


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"learning_rate": -1.0}, ValueError, r"`learning_rate` .*got -1\.0"),
        ({"beta2_min": 0.9, "beta2_max": 0.8}, ValueError, "`beta2_min` must not exceed `beta2_max`"),
        ({"alpha": 1.0}, ValueError, r"`alpha` .*got 1\.0"),
        ({"buckets": "modul"}, ValueError, 'did you mean "module"'),
        ({"bias_correction": "full"}, ValueError, "`bias_correction` must be one of"),
        ({"nonfinite": "ignore"}, ValueError, "`nonfinite` must be one of"),
        ({"diagnostics": 1}, TypeError, "`diagnostics` must be True or False; got 1"),
    ],
)
def test_bad_arguments_are_named_with_their_value(arguments, error, message):
    with pytest.raises(error, match=message):
        KourkoutasBeta(**{"learning_rate": 1e-3, **arguments})


def test_a_parameter_that_is_not_real_floating_point_is_refused():
    with pytest.raises(TypeError, match=r"parameter 'n' .*complex64"):
        KourkoutasBeta(1e-3).init({"n": mx.zeros((2,), mx.complex64)})


def test_a_bucket_function_is_called_once_per_parameter_with_its_path():
    calls = []
    optimizer = KourkoutasBeta(1e-3, buckets=lambda path, p: calls.append(path) or "x")
    p = toy()
    for _ in range(3):
        p = optimizer.apply_gradients(toy_grads(), p)
    assert sorted(calls) == ["a", "b.c"]


def test_frozen_layers_of_a_module_are_left_alone():
    model, x, y = problem()
    model.layers[1].freeze()
    optimizer = KourkoutasBeta(1e-2)
    before = {name: np.array(p) for name, p in tree_flatten(model.parameters())}
    _, grads = nn.value_and_grad(model, loss)(model, x, y)
    optimizer.update(model, grads)
    changed = {name for name, p in tree_flatten(model.parameters()) if not np.array_equal(before[name], np.array(p))}
    assert changed == {"layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"}


def test_a_missing_framework_is_one_line_that_names_the_extra():
    code = "import sys; sys.modules['mlx.core'] = None; import kourkoutas.mlx"
    env = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    last = done.stderr.strip().splitlines()[-1]
    assert last == "ImportError: kourkoutas.mlx needs MLX: pip install 'kourkoutas-beta[mlx]'"


def test_no_gradient_for_something_that_is_no_parameter_is_named():
    optimizer = KourkoutasBeta(0.1)
    with pytest.raises(ValueError, match=r"a\.w"):
        optimizer.apply_gradients(
            {"a": {"w": None}, "b": mx.ones(2)}, {"a": {"w": {"deep": mx.ones(2)}}, "b": mx.ones(2)}
        )
    assert "m" not in optimizer.state


def test_a_step_does_not_check_the_hyper_parameters_again(monkeypatch):
    params = {"w": mx.ones(2)}
    optimizer = KourkoutasBeta(1e-3)
    checks = []
    monkeypatch.setattr(Hyper, "__post_init__", checks.append)
    for _ in range(3):
        params = optimizer.apply_gradients({"w": mx.ones(2)}, params)
    assert checks == []


def test_a_state_that_grows_searches_no_list_of_names():
    """One search per parameter through the names of all of them would be quadratic in their number."""
    searches = []

    def note(frame, event, what):
        if event == "c_call" and "kourkoutas" in frame.f_code.co_filename and what.__name__ in ("index", "count"):
            searches.append(what)

    optimizer = KourkoutasBeta(1e-3, buckets="module")
    optimizer.init({f"layer{i}": {"weight": mx.ones(1)} for i in range(30)})
    sys.setprofile(note)
    try:
        optimizer.init({f"layer{i}": {"weight": mx.ones(1)} for i in range(40)})
    finally:
        sys.setprofile(None)
    assert searches == []
    assert len(optimizer.bucket_names) == 40
