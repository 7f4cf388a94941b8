"""What a stranger may do to the optimizer. Each test is of a defect that was found by trying."""

import mlx.core as mx
import mlx.optimizers
import numpy as np
import pytest

from kourkoutas.mlx import KourkoutasBeta
from kourkoutas.paper import KourkoutasSoftmaxFlex


def tree(*sizes):
    return {name: mx.ones(size) for name, size in zip("abc", sizes, strict=False)}


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_learning_rate_of_one_element_is_one_number(shape, scheduled):
    lr = mx.full(shape, 0.1)
    params = tree(2, 3, 2)
    got = KourkoutasBeta((lambda _: lr) if scheduled else lr).apply_gradients(params, params)
    want = KourkoutasBeta(0.1).apply_gradients(params, params)
    for name in params:
        np.testing.assert_array_equal(np.array(got[name]), np.array(want[name]))


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_learning_rate_of_two_elements_is_refused_before_anything_moves(scheduled):
    lr = mx.array([0.1, 0.2])
    optimizer = KourkoutasBeta((lambda _: lr) if scheduled else lr)
    with pytest.raises(ValueError, match=r"`learning_rate` must be one number; got an array of shape \(2,\)"):
        optimizer.apply_gradients(tree(2), tree(2))
    assert optimizer.state["step"].item() == 0


@pytest.mark.parametrize("grads", [[mx.inf, 1.0], [3e38, 3e38], [mx.nan, 2.0]])
def test_a_fixed_beta2_is_adam_where_the_norm_is_not_finite(grads):
    ours = KourkoutasBeta(0.1, beta2_min=0.999)
    adam = mlx.optimizers.Adam(0.1, betas=[0.9, 0.999], bias_correction=True)
    got = want = {"w": mx.ones(2)}
    for step in ([1.0, 1.0], grads, [1.0, 1.0]):
        got, want = (o.apply_gradients({"w": mx.array(step)}, p) for o, p in ((ours, got), (adam, want)))
        np.testing.assert_allclose(np.array(got["w"]), np.array(want["w"]), rtol=1e-5)


def test_two_parameters_of_one_path_are_refused():
    params = {"a.b": mx.ones(2), "a": {"b": mx.zeros(2)}}
    for act in (KourkoutasBeta(0.1).init, lambda p: KourkoutasBeta(0.1).apply_gradients(p, p)):
        with pytest.raises(ValueError, match=r"two parameters have the path 'a\.b'"):
            act(params)


def test_a_parameter_of_another_shape_than_its_state_is_refused_before_anything_moves():
    optimizer = KourkoutasBeta(0.1)
    optimizer.apply_gradients(tree(2), tree(2))
    r = optimizer.state["ema"].item()
    with pytest.raises(ValueError, match="the state of 'a' has another shape"):
        optimizer.apply_gradients(tree(3), tree(3))
    assert optimizer.state["step"].item() == 1
    assert optimizer.state["ema"].item() == r


@pytest.mark.parametrize("slot", ["v", "v_max"])
def test_a_state_that_lacks_moments_is_refused_with_their_name(slot):
    optimizer = KourkoutasBeta(0.1, decay=1.0)
    optimizer.apply_gradients(tree(2, 2), tree(2, 2))
    optimizer.state = {name: x for name, x in optimizer.state.items() if name != slot}
    with pytest.raises(ValueError, match=f"the state has no '{slot}' of 'a'"):
        optimizer.apply_gradients(tree(2, 2), tree(2, 2))


def test_a_new_state_brings_its_own_buckets():
    optimizer = KourkoutasBeta(0.1, buckets="shape")
    optimizer.apply_gradients(tree(2, 3), tree(2, 3))
    other = KourkoutasBeta(0.1, buckets="shape")
    other.apply_gradients(tree(2, 2), tree(2, 2))
    optimizer.state = dict(other.state)
    optimizer.apply_gradients(tree(2, 2), tree(2, 2))
    assert optimizer.bucket_names == ("(2,)",)


def test_the_state_of_another_optimizer_is_refused_when_it_is_set():
    adam, optimizer = mlx.optimizers.Adam(0.1), KourkoutasBeta(0.1)
    adam.apply_gradients(tree(2), tree(2))
    with pytest.raises(ValueError, match="`state` has no 'alpha'"):
        optimizer.state = adam.state
    optimizer.apply_gradients(tree(2), tree(2))


def test_a_name_may_hold_any_digit():
    params = {"²": mx.ones(2), "10": mx.ones(2), "9": mx.ones(2)}
    optimizer = KourkoutasBeta(0.1)
    optimizer.apply_gradients(params, params)
    assert optimizer.bucket_names == ("9", "10", "²")


def test_a_float64_parameter_that_comes_later_makes_the_statistics_float64():
    with mx.stream(mx.cpu):
        optimizer = KourkoutasBeta(0.1)
        params = {"a": mx.ones(2)}
        optimizer.apply_gradients(params, params)
        params = {"a": mx.ones(2), "b": mx.ones(2, mx.float64)}
        optimizer.apply_gradients(params, params)
    assert optimizer.state["ema"].dtype == mx.float64


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: KourkoutasBeta(1e-3, betas=[0.9, 0.999]), r"`betas`; got \[0\.9, 0\.999\]: .*write for example beta1"),
        (lambda: KourkoutasBeta(1e-3, [0.9, 0.999]), r"only `learning_rate` by position; got also \[0\.9, 0\.999\]"),
        (lambda: KourkoutasBeta(1e-3, amsgrad=True), "`amsgrad`; got True: write decay=1 for AMSGrad"),
        (lambda: KourkoutasBeta(lr=1e-3), r"`lr`; got 0\.001: write learning_rate=0\.001"),
        (lambda: KourkoutasSoftmaxFlex(betas=[0.9, 0.999]), r"KourkoutasSoftmaxFlex\(\) has no argument `betas`"),
    ],
)
def test_what_users_of_mlx_adam_type_is_refused_in_one_line_with_the_remedy(call, message):
    with pytest.raises(TypeError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_bias_correction_that_is_true_or_false_as_in_mlx_adam_names_the_choices(wanted):
    with pytest.raises(ValueError, match=f'`bias_correction` must be one of "none", "beta2max", "exact"; got {wanted}'):
        KourkoutasBeta(1e-3, bias_correction=wanted)
