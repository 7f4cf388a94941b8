"""What a stranger may do to the transformation. Each test is of a defect that was found by trying."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kourkoutas.optax import bucket_names, kourkoutas_beta, pull
from kourkoutas.trace import Trace


@pytest.mark.parametrize("grads", [[jnp.inf, 1.0], [3e38, 3e38], [jnp.nan, 2.0]])
def test_a_fixed_beta2_is_adam_where_the_norm_is_not_finite(grads):
    params = {"w": jnp.ones(2)}
    ours, adam = kourkoutas_beta(0.1, beta2_min=0.999), optax.adam(0.1)
    states, updates = [ours.init(params), adam.init(params)], [jax.jit(ours.update), jax.jit(adam.update)]
    for step in ([1.0, 1.0], grads, [1.0, 1.0]):
        got, states[0] = updates[0]({"w": jnp.array(step)}, states[0], params)
        want, states[1] = updates[1]({"w": jnp.array(step)}, states[1], params)
        np.testing.assert_allclose(got["w"], want["w"], rtol=1e-5)


def test_whole_numbers_are_gradients():
    params = {"w": jnp.ones(2)}
    solver = kourkoutas_beta(0.1)
    updates, _ = jax.jit(solver.update)({"w": jnp.array([1, -2], jnp.int32)}, solver.init(params), params)
    want, _ = jax.jit(solver.update)({"w": jnp.array([1.0, -2.0])}, solver.init(params), params)
    np.testing.assert_array_equal(updates["w"], want["w"])


def test_a_complex_gradient_of_a_real_parameter_is_refused():
    params = {"w": jnp.ones(2)}
    solver = kourkoutas_beta(0.1)
    with pytest.raises(TypeError, match="'w' is complex and the parameter is real"):
        solver.update({"w": jnp.ones(2, jnp.complex64)}, solver.init(params), params)


@pytest.mark.parametrize("beta2_min", [0.88, 0.999])
def test_moments_and_count_of_adam_go_on_with_exact_correction(beta2_min):
    params, grads = {"w": jnp.zeros(1)}, {"w": jnp.ones(1)}
    adam = optax.adam(1.0)
    update = jax.jit(adam.update)
    saved = adam.init(params)
    for _ in range(2000):
        _, saved = update(grads, saved, params)
    solver = kourkoutas_beta(1.0, bias_correction="exact", beta2_min=beta2_min)
    state = optax.tree.set(solver.init(params), mu=saved[0].mu, nu=saved[0].nu, count=saved[0].count)
    for _ in range(2):
        updates, state = jax.jit(solver.update)(grads, state, params)
        np.testing.assert_allclose(updates["w"], -1.0, rtol=1e-4)


def test_two_paths_of_one_dotted_name_do_not_change_the_buckets_of_others():
    x = jnp.ones(2)
    tree = {"a.b": x, "a": {"b": x}, "enc": {"w": x, "b": x}, "dec": {"w": x, "b": x}}
    assert bucket_names(tree, "module") == ("a", "dec", "enc")
    assert set(bucket_names(tree)) == {"a.b", "a.b#2", "enc.w", "enc.b", "dec.w", "dec.b"}


@pytest.mark.parametrize("grads", [{"w": jnp.ones(2), "b": jnp.ones(1)}, {"w": jnp.ones(2), "b": None}])
def test_finite_gradients_pass_a_search_for_nan(grads):
    params = {"w": jnp.ones(2), "b": jnp.ones(1)}
    solver = kourkoutas_beta(0.1, nonfinite="skip")
    with jax.debug_nans(True):
        solver.update(grads, solver.init(params), params)


def test_parameters_of_eight_bits_are_trained():
    params = {"w": jnp.ones(4, jnp.float8_e4m3fn)}
    solver = kourkoutas_beta(0.5)
    updates, state = jax.jit(solver.update)({"w": jnp.ones(4, jnp.float8_e4m3fn)}, solver.init(params), params)
    assert updates["w"].dtype == jnp.float8_e4m3fn
    assert (updates["w"].astype(jnp.float32) < 0).all()
    assert state[0].ema.dtype == jnp.float32


def test_a_trace_of_many_states_side_by_side_says_what_to_do():
    params = {"w": jnp.ones((3, 2))}
    solver = kourkoutas_beta(0.1, diagnostics=True)
    state = jax.vmap(solver.init)(params)
    with pytest.raises(ValueError, match="pull each by itself"):
        pull(Trace(["w"]), state)
