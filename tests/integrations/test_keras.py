"""Keras on the backend that KERAS_BACKEND names, against the oracle and against its own Adam."""

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.conformance.table import CASES, EXTRA, check

if os.environ.get("KERAS_BACKEND") not in ("torch", "jax"):
    pytest.skip("KERAS_BACKEND is neither torch nor jax", allow_module_level=True)
if importlib.util.find_spec("keras") is None:
    pytest.skip("needs keras", allow_module_level=True)

if os.environ["KERAS_BACKEND"] == "jax":
    import jax

    jax.config.update("jax_enable_x64", True)  # before Keras asks

import keras
from keras import ops

from kourkoutas.keras import KourkoutasBeta
from kourkoutas.oracle import Oracle
from kourkoutas.rule import Hyper


@pytest.fixture(autouse=True)
def _floatx():
    yield
    keras.config.set_floatx("float32")


def variables(params):
    """Keras variables whose paths are the names with slashes."""
    made = {}
    for name, value in params.items():
        scope, _, last = name.rpartition(".")
        with keras.name_scope(scope or "top"):
            made[name] = keras.Variable(value, dtype=str(value.dtype), name=last)
    return made


def run(case, **options):
    keras.config.set_floatx(case.dtype)  # of the learning rate
    made = variables(case.params())
    optimizer = KourkoutasBeta(case.lr, buckets=case.buckets, **{"weight_decay": None, **case.options}, **options)
    optimizer.build(list(made.values()))
    for grads in case.grads():
        present = {name: g for name, g in grads.items() if g is not None}
        if present:
            optimizer.apply([ops.convert_to_tensor(g) for g in present.values()], [made[name] for name in present])
    return optimizer, {name: v.numpy() for name, v in made.items()}


PLAIN = [case for case in CASES if case.hyper.basis is None]
EXTRAS = 2 * len(EXTRA)  # in two dtypes, at the end


# Every eighth case of the table, and its extra ones.
@pytest.mark.parametrize("case", PLAIN[:-EXTRAS:8] + PLAIN[-EXTRAS:], ids=lambda case: case.id)
def test_it_follows_the_oracle(case):
    optimizer, params = run(case)
    check(case, params)
    snapshot = optimizer.snapshot()
    assert {name: row["beta2"] for name, row in snapshot.items()} == pytest.approx(case.expected.beta2, rel=1e-5)


def test_a_fixed_beta2_is_keras_adam():
    values = {"a.kernel": np.linspace(-1, 1, 6, dtype="float32"), "a.bias": np.ones(3, "float32")}
    ours, theirs = variables(values), variables(values)
    fixed = KourkoutasBeta(1e-2, beta2_min=0.95, beta2_max=0.95, eps=1e-7)
    adam = keras.optimizers.Adam(1e-2, beta_2=0.95, epsilon=1e-7)
    rng = np.random.default_rng(0)
    for _ in range(20):
        grads = [rng.normal(size=v.shape).astype("float32") for v in values.values()]
        fixed.apply([ops.convert_to_tensor(g) for g in grads], list(ours.values()))
        adam.apply([ops.convert_to_tensor(g) for g in grads], list(theirs.values()))
    for name in values:
        np.testing.assert_allclose(ours[name].numpy(), theirs[name].numpy(), rtol=2e-5, atol=1e-6)


def test_a_bucket_whose_gradient_is_not_finite_is_skipped_and_counted():
    params = {"a.w": np.ones(3), "b.w": np.ones(2)}
    keras.config.set_floatx("float64")
    made = variables(params)
    optimizer = KourkoutasBeta(0.1, nonfinite="skip")
    oracle = Oracle(params, Hyper(nonfinite="skip"), lr=0.1)
    for bad in (False, True, False):
        grads = {"a.w": np.array([0.5, np.inf if bad else 1.0, -1.0]), "b.w": np.array([1.0, -2.0])}
        optimizer.apply([ops.convert_to_tensor(g) for g in grads.values()], list(made.values()))
        oracle.step(grads)
    for name, variable in made.items():
        np.testing.assert_allclose(variable.numpy(), oracle.params[name], rtol=1e-12)
    assert optimizer._skipped.numpy().tolist() == [1, 0]


def data_and_model(**options):
    keras.utils.set_random_seed(0)
    x = np.linspace(-1, 1, 64, dtype="float32")[:, None]
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(8, activation="tanh", name="a"), keras.layers.Dense(1, name="b")]
    )
    model.compile(optimizer=KourkoutasBeta(1e-2, buckets="module", **options), loss="mse")
    return x, np.sin(3 * x), model


def test_a_saved_model_goes_on_as_if_it_had_not_been_saved(tmp_path):
    once = {"batch_size": 16, "shuffle": False, "verbose": 0}
    x, y, model = data_and_model(decay=0.98, max_ratio=3, adaptive_tiny=True, weight_decay=0.01)
    model.fit(x, y, epochs=4, **once)
    expected = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]

    x, y, model = data_and_model(decay=0.98, max_ratio=3, adaptive_tiny=True, weight_decay=0.01)
    model.fit(x, y, epochs=2, **once)
    model.save(tmp_path / "model.keras")
    model = keras.models.load_model(tmp_path / "model.keras")
    assert model.optimizer.hyper.max_ratio == 3
    assert model.optimizer.bucket_names == ["a", "b"]
    model.fit(x, y, epochs=2, **once)
    got = [v.numpy() for v in (*model.variables, *model.optimizer.variables)]
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_keras_own_options_work_beside_ours():
    x, y, model = data_and_model(clipnorm=1.0, gradient_accumulation_steps=2, use_ema=True)
    before = model.evaluate(x, y, verbose=0)
    model.fit(x, y, batch_size=16, epochs=100, verbose=0)
    assert model.evaluate(x, y, verbose=0) < 0.7 * before
    assert model.optimizer._t.numpy().tolist() == [200] * 4


def test_the_warmup_of_a_bucket_ends_with_its_oldest_member():
    """`late` joins its bucket at the third step; the bucket's warmup of three is over after the third all the same."""
    keras.config.set_floatx("float64")
    params = {"a.w": np.ones(3), "a.late": np.ones(2)}
    made = variables(params)
    optimizer = KourkoutasBeta(0.1, buckets="module", warmup_steps=3)
    optimizer.build(list(made.values()))
    oracle = Oracle(params, Hyper(warmup_steps=3), lr=0.1, buckets="module")
    for t in range(5):
        grads = {"a.w": np.array([0.5, 1.0, -1.0]) * (t + 1), "a.late": np.array([1.0, -2.0]) if t >= 2 else None}
        present = {name: g for name, g in grads.items() if g is not None}
        optimizer.apply([ops.convert_to_tensor(g) for g in present.values()], [made[name] for name in present])
        oracle.step(grads)
    for name, variable in made.items():
        np.testing.assert_allclose(variable.numpy(), oracle.params[name], rtol=1e-12)


@keras.saving.register_keras_serializable(package="tests")
def by_axes(name, variable):
    return len(variable.shape)


def test_a_function_for_the_buckets_and_a_schedule_are_saved_with_the_optimizer():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    optimizer = KourkoutasBeta(schedule, buckets=by_axes)
    again = KourkoutasBeta.from_config(optimizer.get_config())
    assert again.buckets is by_axes
    assert again.get_config() == optimizer.get_config()
    made = variables({"a.w": np.ones((2, 3), "float32"), "a.b": np.ones(3, "float32"), "b.b": np.ones(3, "float32")})
    again.build(list(made.values()))
    again.build(list(made.values()))  # a second time changes nothing
    assert again.bucket_names == ["2", "1"]
    assert float(again.learning_rate) == pytest.approx(0.1)


def test_another_backend_is_refused():
    code = "import kourkoutas.keras"
    found = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "KERAS_BACKEND": "numpy"}, capture_output=True, text=True
    )
    assert "runs on the torch and jax backends of Keras; this process uses 'numpy'" in found.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nonfinite": "raise"}, "`nonfinite`"),
        ({"basis": "eigen"}, "`basis` must be None in Keras; got 'eigen': .*kourkoutas.torch or kourkoutas.optax"),
        ({"alpha": 2.0}, "`alpha`"),
        ({"learning_rate": -1.0}, "`learning_rate`"),
        ({"buckets": "modul"}, 'did you mean "module"'),
        ({"unheard_of": 1}, "unheard_of"),
    ],
)
def test_a_bad_option_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        KourkoutasBeta(**options)


# What a stranger may do: each of a defect that was found by trying.


class Block(keras.layers.Layer):
    """Two of these have variables of one path."""

    def __init__(self):
        super().__init__()
        self.fc = keras.layers.Dense(2, name="fc", use_bias=False)
        self.fc.build((None, 2))

    def call(self, x):
        return self.fc(x)


def test_two_variables_of_one_path_have_buckets_of_their_own():
    model = keras.Sequential([Block(), Block()])
    model.build((None, 2))
    optimizer = KourkoutasBeta()
    optimizer.build(model.trainable_variables)
    assert optimizer.bucket_names == ["fc.kernel", "fc.kernel#2"]


def test_a_frozen_model_is_fitted():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.build((None, 2))
    model.trainable = False
    model.compile(optimizer=KourkoutasBeta(), loss="mse")
    model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)


def test_a_config_may_leave_out_what_has_a_default():
    config = {"class_name": "kourkoutas>KourkoutasBeta", "config": {"learning_rate": 0.1}}
    assert keras.optimizers.get(config).buckets == "parameter"


def test_a_snapshot_before_anything_is_empty():
    assert KourkoutasBeta().snapshot() == {}


@pytest.mark.parametrize("grads", [[np.inf, 1.0], [np.nan, 2.0]])
def test_a_fixed_beta2_is_adam_where_the_norm_is_not_finite(grads):
    results = []
    for optimizer in (KourkoutasBeta(0.1, beta2_min=0.999), keras.optimizers.Adam(0.1, epsilon=1e-8)):
        variable = keras.Variable(np.ones(2, np.float32))
        for step in ([1.0, 1.0], grads, [1.0, 1.0]):
            optimizer.apply([keras.ops.convert_to_tensor(np.array(step, np.float32))], [variable])
        results.append(np.array(keras.ops.convert_to_numpy(variable)))
    np.testing.assert_allclose(*results, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta_1": 0.8}, r"KourkoutasBeta\(\) has no argument `beta_1`; got 0\.8: write beta1=0\.8"),
        ({"beta_2": 0.99}, r"`beta_2`; got 0\.99: .*write beta2_max=0\.99, and beta2_min=0\.99 too"),
        ({"epsilon": 1e-7}, "`epsilon`; got 1e-07: write eps=1e-07"),
        ({"amsgrad": True}, "`amsgrad`; got True: write decay=1 for AMSGrad"),
    ],
)
def test_what_users_of_keras_adam_type_is_refused_in_one_line_with_the_remedy(options, message):
    with pytest.raises(TypeError, match=message) as caught:
        KourkoutasBeta(1e-3, **options)
    assert "\n" not in str(caught.value)


def test_arguments_that_keras_adam_takes_by_position_are_asked_for_by_name():
    with pytest.raises(TypeError, match=r"takes only `learning_rate` by position; got also 0\.9: write its name"):
        KourkoutasBeta(1e-3, 0.9, 0.999)
