"""The paper's classes: what its constructor and snapshots add to `kourkoutas.mlx`."""

import inspect

import mlx.core as mx
import numpy as np
import pytest

from kourkoutas import mlx, paper
from kourkoutas.rule import HYPER_NAMES, Hyper
from kourkoutas.trace import WINDOW

PARAMS = {"w": mx.array([[1.0, 2.0]]), "b": mx.array([0.5])}


def grads(t):
    return {"w": mx.array([[0.1, -0.3]]) * (1 + t), "b": mx.array([1.0])}


def advance(optimizer, steps):
    p = PARAMS
    for t in range(steps):
        p = optimizer.apply_gradients(grads(t), p)
        mx.eval(p, optimizer.state)
    return p


def test_both_names_of_the_class_are_one():
    assert paper.KourkoutasBeta is paper.KourkoutasSoftmaxFlex
    assert issubclass(paper.KourkoutasSoftmaxFlex, mlx.KourkoutasBeta)


def test_the_constructor_has_the_papers_arguments_with_the_shared_defaults():
    signature = inspect.signature(paper.KourkoutasSoftmaxFlex)
    assert set(signature.parameters) == {
        *("learning_rate", "beta1", "beta2_max", "beta2_min", "eps", "alpha", "decay", "adaptive_tiny", "max_ratio"),
        *("bias_correction", "warmup_steps", "layer_key_fn", "diagnostics", "tiny_spike", "tiny_denom", "schedulers"),
    }
    for name in set(HYPER_NAMES) & set(signature.parameters):
        assert signature.parameters[name].default == getattr(Hyper(), name)


def test_no_layer_key_fn_means_one_bucket_per_parameter_named_by_path():
    optimizer = paper.KourkoutasSoftmaxFlex(1e-2)
    p, q = advance(optimizer, 5), advance(mlx.KourkoutasBeta(1e-2), 5)
    assert optimizer.bucket_names == ("b", "w")
    assert mx.array_equal(p["w"], q["w"])


@pytest.mark.parametrize(
    ("key", "kind"), [(lambda _: 0, "global"), (lambda p: p.shape, "shape"), (lambda p: p.ndim, "parameter")]
)
def test_a_layer_key_fn_makes_the_buckets_and_is_called_once_per_parameter(key, kind):
    calls = []
    optimizer = paper.KourkoutasSoftmaxFlex(1e-2, layer_key_fn=lambda p: calls.append(1) or key(p))
    p, q = advance(optimizer, 5), advance(mlx.KourkoutasBeta(1e-2, buckets=kind), 5)
    assert mx.array_equal(p["w"], q["w"])
    assert len(calls) == len(PARAMS)


def test_a_layer_key_fn_that_looks_arrays_up_by_identity_works_from_init_on():
    names = {id(p): name for name, p in PARAMS.items()}
    optimizer = paper.KourkoutasSoftmaxFlex(1e-2, layer_key_fn=lambda p: names[id(p)])
    optimizer.init(PARAMS)
    advance(optimizer, 20)
    assert optimizer.bucket_names == ("b", "w")


def test_schedulers_replace_learning_rate_and_alpha():
    optimizer = paper.KourkoutasSoftmaxFlex(
        1e-2, schedulers={"learning_rate": lambda t: 1.0 / (1 + t), "alpha": lambda t: 0.5 + 0.1 * t}
    )
    advance(optimizer, 3)
    assert optimizer.learning_rate.item() == pytest.approx(1 / 3)
    assert optimizer.state["alpha"].item() == pytest.approx(0.7)


def test_an_unknown_schedule_is_named():
    with pytest.raises(ValueError, match="'learning_rate' and 'alpha'; got 'beta1'"):
        paper.KourkoutasSoftmaxFlex(1e-2, schedulers={"beta1": lambda t: 0.9})


def test_a_layer_key_fn_that_is_no_function_is_refused():
    with pytest.raises(TypeError, match="`layer_key_fn` must be None or a callable of a parameter; got 'shape'"):
        paper.KourkoutasSoftmaxFlex(1e-2, layer_key_fn="shape")


def test_snapshots_give_the_history_of_sun_and_the_newest_values_by_name():
    optimizer = paper.KourkoutasSoftmaxFlex(1e-2, diagnostics=True)
    assert optimizer.snapshot_sunspike_history() == {}
    assert optimizer.snapshot_diagnostics() == {}
    advance(optimizer, 3)
    history = optimizer.snapshot_sunspike_history()
    # A constant norm n has r = (1-αᵗ)·n, so sun = 1 / (2 - αᵗ).
    np.testing.assert_allclose(history["b"], [1 / (2 - 0.93**t) for t in (1, 2, 3)], rtol=1e-5)
    newest = optimizer.snapshot_diagnostics()["b"]
    assert newest["sun"] == history["b"][-1]
    assert newest["beta2"] == pytest.approx(0.999 - 0.119 * newest["sun"], abs=1e-6)
    assert newest["ema"] == pytest.approx(1 - 0.93**3, rel=1e-5)


def test_a_history_goes_on_over_many_snapshots_and_starts_anew_with_a_loaded_state():
    optimizer = paper.KourkoutasSoftmaxFlex(1e-2, diagnostics=True)
    advance(optimizer, WINDOW - 1)
    optimizer.snapshot_sunspike_history()
    advance(optimizer, 5)
    assert len(optimizer.snapshot_sunspike_history()["w"]) == WINDOW + 4
    other = paper.KourkoutasSoftmaxFlex(1e-2, diagnostics=True)
    advance(other, 2)
    optimizer.state = other.state
    advance(optimizer, 1)
    assert len(optimizer.snapshot_sunspike_history()["w"]) == 3


def test_snapshots_without_diagnostics_are_refused():
    with pytest.raises(ValueError, match="diagnostics=True"):
        paper.KourkoutasSoftmaxFlex(1e-2).snapshot_diagnostics()
