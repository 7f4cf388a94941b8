"""The three engines speak one vocabulary: every call against NumPy, every trainer against the oracle."""

import math

import numpy as np
import pytest

from kourkoutas.lab import engines
from kourkoutas.lab.optimizers.recipes import recipe
from kourkoutas.oracle import Oracle
from tests.lab.testbeds.gradients import value_and_grad

RNG = np.random.default_rng(5)
X = RNG.standard_normal((3, 4)).astype(np.float32)
Y = RNG.standard_normal((3, 4)).astype(np.float32)
POSITIVE = np.abs(X) + 0.5


@pytest.fixture(params=engines.NAMES)
def E(request):
    return engines.get(request.param)


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def layer_norm(x, gain, bias):
    return gain * (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) + bias


CALLS = {
    "sqrt": (lambda E, x: E.sqrt(x), np.sqrt, (POSITIVE,)),
    "tanh": (lambda E, x: E.tanh(x), np.tanh, (X,)),
    "abs": (lambda E, x: E.abs(x), np.abs, (X,)),
    "square": (lambda E, x: E.square(x), np.square, (X,)),
    "round": (lambda E, x: E.round(x), np.round, (np.array([0.5, 1.5, -2.5, 0.2], np.float32),)),
    "logaddexp": (lambda E, x, y: E.logaddexp(x, y), np.logaddexp, (X, Y)),
    "logaddexp of zero": (lambda E, x: E.logaddexp(x, 0.0), lambda x: np.logaddexp(x, 0), (50 * X,)),
    "maximum": (lambda E, x, y: E.maximum(x, y), np.maximum, (X, Y)),
    "maximum of a number": (lambda E, x: E.maximum(x, 0.1), lambda x: np.maximum(x, 0.1), (X,)),
    "clip": (lambda E, x: E.clip(x, -0.5, 0.5), lambda x: np.clip(x, -0.5, 0.5), (X,)),
    "where": (lambda E, x, y: E.where(x > y, x, 0.0), lambda x, y: np.where(x > y, x, 0), (X, Y)),
    "sum": (lambda E, x: E.sum(x), np.sum, (X,)),
    "sum of axes": (lambda E, x: E.sum(x, axis=(0, 1), keepdims=True), lambda x: x.sum(keepdims=True), (X,)),
    "mean": (lambda E, x: E.mean(x, axis=-1, keepdims=True), lambda x: x.mean(-1, keepdims=True), (X,)),
    "max": (lambda E, x: E.max(x), np.max, (X,)),
    "max of an axis": (lambda E, x: E.max(x, axis=0, keepdims=True), lambda x: x.max(0, keepdims=True), (X,)),
    "transpose": (lambda E, x: E.transpose(x, (1, 0)), np.transpose, (X,)),
    "concat": (lambda E, x, y: E.concat([x, y], axis=-1), lambda x, y: np.concatenate([x, y], -1), (X, Y)),
    "split": (lambda E, x: E.split(x, 2)[1], lambda x: x[:, 2:], (X,)),
    "expand": (lambda E, x: E.expand(x, -1), lambda x: x[..., None], (X,)),
    "broadcast": (lambda E, x: E.broadcast(x, (2, 3, 4)), lambda x: np.broadcast_to(x, (2, 3, 4)), (X,)),
    "arange": (lambda E: E.arange(4), lambda: np.arange(4, dtype=np.int32), ()),
    "einsum": (lambda E, x, y: E.einsum("ab,cb->ac", x, y), lambda x, y: x @ y.T, (X, Y)),
    "linear": (lambda E, x, w, b: E.linear(x, w, b), lambda x, w, b: x @ w + b, (X, Y.T.copy(), Y[:, 0])),
    "linear without bias": (lambda E, x, w: E.linear(x, w), lambda x, w: x @ w, (X, Y.T.copy())),
    "sigmoid": (lambda E, x: E.sigmoid(x), sigmoid, (X,)),
    "silu": (lambda E, x: E.silu(x), lambda x: x * sigmoid(x), (X,)),
    "gelu": (lambda E, x: E.gelu(x), gelu, (X,)),
    "softmax": (lambda E, x: E.softmax(x), softmax, (X,)),
    "layer_norm": (lambda E, x, g, b: E.layer_norm(x, g, b), layer_norm, (X, Y[0], Y[1])),
    "take": (lambda E, t, i: E.take(t, i), lambda t, i: t[i], (X, np.array([[2, 0], [1, 1]], np.int32))),
    "take by bytes": (lambda E, t, i: E.take(t, i), lambda t, i: t[i], (X, np.array([2, 0], np.uint8))),
    "bce_with_logits": (
        lambda E, z, y: E.bce_with_logits(z, y),
        lambda z, y: np.mean(-y * np.log(sigmoid(z)) - (1 - y) * np.log(1 - sigmoid(z))),
        (X, (Y > 0).astype(np.float32)),
    ),
    "cross_entropy": (
        lambda E, z, i: E.cross_entropy(z, i),
        lambda z, i: -np.mean([np.log(softmax(z))[k, j] for k, j in enumerate(i)]),
        (X, np.array([3, 0, 1], np.int32)),
    ),
    "cast": (lambda E, x: E.cast(x, "int32"), lambda x: x.astype(np.int32), (3 * X,)),
    "bytes to floats": (lambda E, x: E.cast(x, "float32") / 2, lambda x: x / 2, (np.array([3, 255], np.uint8),)),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_computes_what_numpy_computes(E, call):
    ours, theirs, inputs = CALLS[call]
    got = E.numpy(ours(E, *(E.array(x) for x in inputs)))
    want = np.asarray(theirs(*inputs))
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("kind", ["full", "mask", "causal"])
def test_attention_is_the_softmax_of_scaled_scores_times_the_values(E, kind):
    q, k, v = (RNG.standard_normal((2, 3, n, 4)).astype(np.float32) for n in (5, 6, 6))
    allowed = {
        "full": np.ones((5, 6), bool),
        "mask": np.arange(6) < np.arange(5)[:, None] % 3 + 1,
        "causal": np.arange(6) <= np.arange(5)[:, None],
    }[kind]
    scores = np.where(allowed, np.einsum("bhqd,bhkd->bhqk", q, k) / 2, -np.inf)
    want = softmax(scores) @ v
    mask = None if kind == "causal" else E.array(allowed)
    got = E.numpy(E.attention(*(E.array(x) for x in (q, k, v)), mask))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8", "bool"])
def test_arrays_keep_the_dtype_of_numpy_there_and_back(E, dtype):
    x = np.array([0, 1, 1], dtype)
    assert E.numpy(E.array(x)).dtype == x.dtype
    np.testing.assert_array_equal(E.numpy(E.array(x)), x)


def test_stop_gradient_makes_a_constant_of_a_factor(E):
    def f(p, scale):
        return E.sum(p["a.w"] * E.stop_gradient(p["a.w"]) * scale) + 0 * E.sum(p["b"])

    value, grads = value_and_grad(E, f)({"a.w": E.array(X), "b": E.array(Y)}, 2.0)
    assert float(E.numpy(value)) == pytest.approx(2 * float(np.sum(X * X)), rel=1e-6)
    np.testing.assert_allclose(E.numpy(grads["a.w"]), 2 * X, rtol=1e-6)
    np.testing.assert_array_equal(E.numpy(grads["b"]), np.zeros_like(Y))


def test_rounding_passes_gradients_straight_through_with_stop_gradient(E):
    def f(p):
        return E.sum(3 * (p["w"] + E.stop_gradient(E.round(p["w"]) - p["w"])))

    value, grads = value_and_grad(E, f)({"w": E.array(X)})
    assert float(E.numpy(value)) == pytest.approx(3 * float(np.round(X).sum()), rel=1e-6)
    np.testing.assert_array_equal(E.numpy(grads["w"]), np.full_like(X, 3))


def test_a_compiled_function_gives_the_same_numbers(E):
    f = E.compile(lambda params, batch: E.mean(params["w"] * batch["x"]))
    got = E.numpy(f({"w": E.array(X)}, {"x": E.array(Y)}))
    assert float(got) == pytest.approx(float(np.mean(X * Y)), rel=1e-5)


def test_an_unknown_engine_lists_the_near_names():
    with pytest.raises(ValueError, match=r"unknown engine 'jaks': did you mean 'jax'\?"):
        engines.get("jaks")


# Trainers

TARGET = RNG.standard_normal((4, 3)).astype(np.float32)
START = {"a.w": RNG.standard_normal((4, 3)).astype(np.float32), "b": RNG.standard_normal(3).astype(np.float32)}
STEPS = 12
INPUTS = RNG.standard_normal((STEPS, 5, 4)).astype(np.float32)
INPUTS[6] *= 30
LRS = np.linspace(1e-2, 1e-3, STEPS)


def fit(E, params, batch):
    """½⟨(x·w + b - x·target)²⟩."""
    residual = E.linear(batch["x"], params["a.w"], params["b"]) - batch["x"] @ batch["target"]
    return 0.5 * E.mean(E.square(residual))


def trainer(E, label="kbeta", **kwargs):
    return E.trainer(fit, START, recipe(label, {"warmup_steps": 2}), constants={"target": TARGET}, **kwargs)


def oracle_run():
    """Losses and parameters by hand-written gradients and the float64 oracle."""
    oracle = Oracle(START, recipe_hyper())
    losses = []
    for x, lr in zip(INPUTS.astype(np.float64), LRS, strict=True):
        w, b = oracle.params["a.w"], oracle.params["b"]
        r = x @ w + b - x @ TARGET.astype(np.float64)
        losses.append(0.5 * np.mean(r**2))
        oracle.lr = float(lr)
        oracle.step({"a.w": x.T @ r / r.size, "b": r.sum(0) / r.size})
    return np.array(losses), oracle.params


def recipe_hyper():
    from kourkoutas.rule import Hyper

    return Hyper(warmup_steps=2)


def test_a_trainer_follows_the_oracle_with_one_learning_rate_per_step(E):
    it = trainer(E)
    losses = np.concatenate([it.run({"x": INPUTS[:8]}, LRS[:8]), it.run({"x": INPUTS[8:]}, LRS[8:])])
    want, params = oracle_run()
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    for name, p in it.params().items():
        np.testing.assert_allclose(p, params[name], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(p, E.numpy(it.arrays()[name]))


def test_batches_may_come_one_by_one_with_shapes_of_their_own(E):
    it, other = trainer(E), trainer(E)
    ragged = [{"x": x[: 3 + i % 2]} for i, x in enumerate(INPUTS[:4])]
    losses = it.run(ragged, LRS[:4])
    each = [other.run([b], LRS[i : i + 1])[0] for i, b in enumerate(ragged)]
    np.testing.assert_array_equal(losses, each)
    x = ragged[0]["x"]
    residual = x @ START["a.w"] + START["b"] - x @ TARGET
    assert losses[0] == pytest.approx(0.5 * np.mean(residual**2), rel=1e-5)


@pytest.mark.parametrize("label", ["kbeta", "adam999-nobc", "adamw"])
def test_a_restored_trainer_goes_on_bit_for_bit(E, label):
    it = trainer(E, label, trace_every=1)
    it.run({"x": INPUTS[:5]}, LRS[:5])
    saved = {k: np.array(v) for k, v in it.state().items()}
    assert all(v.dtype.kind in "biuf" for v in saved.values())
    rest = it.run({"x": INPUTS[5:10]}, LRS[5:10])

    other = trainer(E, label, trace_every=1)
    other.run({"x": INPUTS[:5][::-1]}, LRS[:5])
    other.restore(saved)
    np.testing.assert_array_equal(other.run({"x": INPUTS[5:10]}, LRS[5:10]), rest)
    after, expected = other.state(), it.state()
    assert after.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_array_equal(after[key], value, err_msg=key)


def test_a_trace_holds_every_kth_row_of_sun_and_beta2(E):
    it = trainer(E, trace_every=3)
    it.run({"x": INPUTS}, LRS)
    assert it.trace is not None
    np.testing.assert_array_equal(it.trace.steps, [3, 6, 9, 12])
    assert sorted(it.trace.names) == ["a.w", "b"]
    # Step 7 is the spike: β2 = 0.999 - 0.119·sun falls below the calm value 0.9395 right there.
    full = trainer(E, trace_every=1)
    full.run({"x": INPUTS}, LRS)
    column = full.trace.names.index("a.w")
    sun, beta2 = full.trace.sun[:, column], full.trace.beta2[:, column]
    assert np.argmin(beta2) == 6
    np.testing.assert_allclose(beta2[:2], 0.9395, rtol=1e-5)
    np.testing.assert_allclose(beta2[2:], 0.999 - 0.119 * sun[2:], rtol=1e-5)


def test_arms_without_a_sun_have_no_trace(E):
    assert trainer(E, "adam95", trace_every=1).trace is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_torch_compile_of_the_loss_gives_the_same_run():
    E = engines.get("torch")
    it, other = trainer(E, compile=True), trainer(E)
    np.testing.assert_allclose(it.run({"x": INPUTS}, LRS), other.run({"x": INPUTS}, LRS), rtol=1e-5)


def test_without_a_compiler_the_loss_stays_eager_and_says_so(monkeypatch):
    def loss(E, params, batch):  # compiled losses are kept, so that this one has to be new
        return fit(E, params, batch)

    monkeypatch.setattr("shutil.which", lambda name: None)
    E = engines.get("torch")
    kbeta = recipe("kbeta", {"warmup_steps": 2})
    with pytest.warns(UserWarning, match=r"no C\+\+ compiler found.*Install g\+\+ or clang\+\+"):
        it = E.trainer(loss, START, kbeta, constants={"target": TARGET}, compile=True)
    np.testing.assert_array_equal(it.run({"x": INPUTS}, LRS), trainer(E).run({"x": INPUTS}, LRS))
