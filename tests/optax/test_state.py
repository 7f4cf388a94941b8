"""What the state holds: dtypes, missing and non-finite gradients, saving and resuming."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest

from kourkoutas.optax import KourkoutasBetaState, bucket_names, kourkoutas_beta, scale_by_kourkoutas_beta
from kourkoutas.oracle import Oracle
from kourkoutas.rule import Hyper, NonFiniteGradient

FULL = {"decay": 0.98, "max_ratio": 3.0, "adaptive_tiny": True, "bias_correction": "exact", "warmup_steps": 2}


def tree(dtype, seed=0):
    rng = np.random.default_rng(seed)
    return {"w": jnp.asarray(rng.normal(size=(4, 3)), dtype), "b": jnp.asarray(rng.normal(size=4), dtype)}


def bits(x):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(x)]


def dtypes(x):
    return [leaf.dtype for leaf in jax.tree.leaves(x)]


def test_the_default_state_is_two_moments_and_three_small_arrays():
    state = scale_by_kourkoutas_beta().init(tree("float32"))
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == [(), (4,), (4, 3), (4,), (4, 3), (2,), (2,)]
    assert state.nu_max is state.log_beta2 is state.skipped is state.ring is state.rows is None


@pytest.mark.parametrize(
    ("options", "held"),
    [({"decay": 0, "max_ratio": 3.0}, False), ({"max_ratio": 3.0}, True), ({"decay": 1}, True), ({"decay": 0.5}, True)],
)
def test_v_max_is_held_only_where_it_is_used(options, held):
    state = scale_by_kourkoutas_beta(**options).init(tree("float32"))
    assert (state.nu_max is not None) == held


@pytest.mark.parametrize("options", [{}, {**FULL, "nonfinite": "skip", "diagnostics": True}], ids=["default", "full"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "complex64"])
def test_moments_keep_the_parameters_dtype_and_norms_are_at_least_float32(dtype, options):
    with jax.enable_x64(dtype == "float64"):
        params = tree(dtype)
        solver = kourkoutas_beta(1e-2, **options)
        state = solver.init(params)
        updates, new = jax.jit(solver.update)(params, state, params)
        assert dtypes(new) == dtypes(state)
        assert set(dtypes((updates, new[0].mu, new[0].nu))) == {jnp.dtype(dtype)}
        assert new[0].ema.dtype == ("float64" if dtype == "float64" else "float32")


@pytest.mark.parametrize("of_grads", ["bfloat16", "float16", "float32", "float64", "int32"])
@pytest.mark.parametrize("of_params", ["bfloat16", "float16", "float32", "float64", "complex64"])
def test_an_update_has_the_dtype_that_optax_adam_gives_it(of_params, of_grads):
    with jax.enable_x64(True):
        params = tree(of_params)
        grads = jax.tree.map(lambda x: jnp.ones(x.shape, of_grads), params)
        adam, ours = optax.adam(1e-2), kourkoutas_beta(1e-2)
        want, _ = jax.eval_shape(lambda: adam.update(grads, adam.init(params), params))
        got, state = jax.eval_shape(lambda: ours.update(grads, ours.init(params), params))
        assert dtypes(got) == dtypes(want)
        assert dtypes(state[0].mu) == dtypes(state[0].nu) == dtypes(params)
        assert dtypes(jax.eval_shape(optax.apply_updates, params, got)) == dtypes(params)


@pytest.mark.parametrize("of_grads", ["bfloat16", "float16"])
def test_a_sixteen_bit_gradient_of_a_float32_parameter_gives_the_bits_of_that_gradient_in_float32(of_grads):
    params, solver = tree("float32"), kourkoutas_beta(1e-2)
    grads = jax.tree.map(lambda x: x.astype(of_grads), tree("float32", seed=1))
    got = solver.update(grads, solver.init(params), params)
    want = solver.update(jax.tree.map(lambda x: x.astype("float32"), grads), solver.init(params), params)
    assert bits(got) == bits(want)


def test_a_real_gradient_of_a_complex_parameter_is_one_without_an_imaginary_part():
    params, solver = tree("complex64"), kourkoutas_beta(1e-2)
    got = solver.update(tree("float32", seed=1), solver.init(params), params)
    want = solver.update(tree("complex64", seed=1), solver.init(params), params)
    assert bits(got) == bits(want)


@pytest.mark.parametrize(("of_params", "of_grads"), [("float8_e4m3fn", "float32"), ("float32", "float8_e4m3fn")])
def test_where_one_of_gradient_and_parameter_has_eight_bits_the_update_has_the_other_dtype(of_params, of_grads):
    params, solver = {"w": jnp.ones(4, of_params)}, kourkoutas_beta(0.5)
    updates, state = solver.update({"w": jnp.ones(4, of_grads)}, solver.init(params), params)
    assert updates["w"].dtype == "float32"
    assert state[0].mu["w"].dtype == of_params


def test_mixed_dtypes_live_in_one_tree():
    with jax.enable_x64(True):
        params = {"a": jnp.ones(3, "bfloat16"), "b": jnp.ones(3, "float32"), "c": jnp.ones(3, "float64")}
        solver = kourkoutas_beta(1e-2, buckets="global", **FULL)
        updates, state = jax.jit(solver.update)(params, solver.init(params), params)
        assert dtypes(updates) == dtypes(params) == dtypes(state[0].mu)
        assert state[0].ema.dtype == "float64"


def test_half_precision_norms_do_not_overflow():
    # 4 entries of 300: n = 600, while n² = 360,000 is over float16's largest number.
    params = {"w": jnp.ones(4, "float16")}
    solver = scale_by_kourkoutas_beta(alpha=0.5)
    _, state = jax.jit(solver.update)({"w": jnp.full(4, 300, "float16")}, solver.init(params), params)
    np.testing.assert_allclose(state.ema, [300.0])


def test_bfloat16_steps_are_float32_steps_rounded_once():
    params = tree("bfloat16")
    solver = scale_by_kourkoutas_beta(**FULL)
    wide = jax.tree.map(lambda x: x.astype("float32"), params)
    got, narrow_state = jax.jit(solver.update)(params, solver.init(params), params)
    want, wide_state = jax.jit(solver.update)(wide, solver.init(wide), wide)
    rounded = jax.tree.map(lambda x: x.astype("bfloat16"), (want, wide_state.mu, wide_state.nu))
    assert bits((got, narrow_state.mu, narrow_state.nu)) == bits(rounded)


def test_complex_parameters_are_pairs_of_real_ones():
    with jax.enable_x64(True):
        rng = np.random.default_rng(5)
        pairs = [rng.normal(size=(3, 2)) for _ in range(5)]
        solver = kourkoutas_beta(1e-2, **FULL)

        def run(convert):
            params = convert(pairs[0])
            state, update = solver.init(params), jax.jit(solver.update)
            for g in pairs[1:]:
                updates, state = update(convert(g), state, params)
                params = optax.apply_updates(params, updates)
            return params

        real = run(jnp.asarray)
        joined = run(lambda x: jnp.asarray(x[:, 0] + 1j * x[:, 1]))
        np.testing.assert_allclose(joined, real[:, 0] + 1j * real[:, 1], rtol=1e-14)


def test_weakly_typed_parameters_do_not_change_the_states_type():
    params = {"gain": jnp.asarray(2.0)}
    assert params["gain"].weak_type
    solver = kourkoutas_beta(1e-2, **FULL)
    update = jax.jit(solver.update)
    state = solver.init(params)
    for _ in range(2):
        _, state = update(params, state, params)
    assert update._cache_size() == 1


def test_scalar_and_empty_parameters_are_accepted():
    params = {"gain": jnp.asarray(2.0), "none": jnp.zeros((0, 3))}
    solver = kourkoutas_beta(1e-2, **FULL)
    updates, state = jax.jit(solver.update)(params, solver.init(params), params)
    assert updates["none"].shape == (0, 3)
    assert np.isfinite(updates["gain"])
    assert bool(jnp.all(jnp.isfinite(state[0].ema)))


def test_a_missing_gradient_leaves_its_parameter_alone():
    params = tree("float32")
    solver = kourkoutas_beta(1e-2, weight_decay=0.1, **FULL)
    update = jax.jit(solver.update)
    _, state = update(params, solver.init(params), params)
    updates, new = update({"w": params["w"], "b": None}, state, params)
    assert bits(optax.apply_updates(params, updates)["b"]) == bits(params["b"])
    assert bits((new[0].mu["b"], new[0].nu["b"])) == bits((state[0].mu["b"], state[0].nu["b"]))
    assert (int(new[0].count), new[0].missed.tolist()) == (2, [1, 0])
    assert new[0].ema[0] == state[0].ema[0]
    assert jax.tree.structure(new) == jax.tree.structure(state)


def test_a_missing_gradient_is_a_missing_update_inside_a_chain():
    params = tree("float32")
    solver = scale_by_kourkoutas_beta()
    updates, _ = jax.jit(solver.update)({"w": params["w"], "b": None}, solver.init(params), params)
    assert updates["b"] is None


def test_none_in_the_parameters_is_no_parameter():
    params = {"w": jnp.ones(3), "static": None}
    solver = kourkoutas_beta(1e-2)
    updates, state = jax.jit(solver.update)(params, solver.init(params), params)
    assert updates["static"] is None
    assert state[0].missed.shape == (1,)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("buckets", ["parameter", "module"])
def test_skip_agrees_with_the_oracle(buckets, bad):
    rng = np.random.default_rng(2)
    names = {"enc.w": (4, 3), "enc.b": (4,), "dec.w": (2, 4)}
    params = {name: rng.normal(size=shape) for name, shape in names.items()}
    steps = [{name: rng.normal(size=shape) for name, shape in names.items()} for _ in range(6)]
    steps[0]["enc.b"][1] = bad
    steps[3]["enc.b"][0] = bad
    options = {**FULL, "weight_decay": 0.1, "nonfinite": "skip"}
    oracle = Oracle(params, Hyper(**options), buckets=buckets, lr=1e-2)
    with jax.enable_x64(True):
        solver = kourkoutas_beta(1e-2, buckets=buckets, **options)
        theta = {name: jnp.asarray(p) for name, p in params.items()}
        state = solver.init(theta)
        update = jax.jit(solver.update)
        for grads in steps:
            oracle.step(grads)
            updates, state = update(grads, state, theta)
            theta = optax.apply_updates(theta, updates)
        skipped = dict(zip(bucket_names(theta, buckets), state[0].skipped.tolist(), strict=True))
        assert skipped == oracle.skipped
        for name, p in oracle.params.items():
            np.testing.assert_allclose(theta[name], p, rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [{}, FULL, {"nonfinite": "skip"}, {**FULL, "nonfinite": "skip"}], ids=str)
def test_a_jitted_step_with_donated_buffers_copies_no_moment(options):
    optimizer = kourkoutas_beta(1e-2, **options)
    params = {"w": jnp.ones((64, 48)), "b": jnp.ones(48)}

    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, optimizer.init(params), params).compile()
    assert not re.findall(r"= f32\[64,48\]\S* copy\(", compiled.as_text())


def test_skip_leaves_the_bucket_bitwise_as_it_was():
    params = tree("float32")
    solver = kourkoutas_beta(1e-2, weight_decay=0.1, nonfinite="skip", **FULL)
    update = jax.jit(solver.update)
    _, state = update(params, solver.init(params), params)
    updates, new = update({"w": params["w"], "b": params["b"].at[0].set(jnp.nan)}, state, params)

    def pick(s):
        return s.mu["b"], s.nu["b"], s.nu_max["b"], s.ema[0], s.count - s.missed[0], s.log_beta2[0]

    assert bits(pick(new[0])) == bits(pick(state[0]))
    assert not np.any(updates["b"])
    assert np.all(updates["w"])
    assert new[0].skipped.tolist() == [1, 0]


def test_propagate_loses_the_whole_bucket_to_one_nan_where_adam_loses_the_entry():
    params = tree("float32")
    grads = {"w": params["w"], "b": params["b"].at[0].set(jnp.nan)}

    def lost(solver):
        """How many entries of the update are NaN after one more step, with gradients that are finite again."""
        _, state = solver.update(grads, solver.init(params), params)
        updates, _ = solver.update(params, state, params)
        return {name: int(np.isnan(u).sum()) for name, u in updates.items()}

    assert lost(optax.adam(1e-2)) == {"w": 0, "b": 1}
    assert lost(kourkoutas_beta(1e-2)) == {"w": 0, "b": 4}
    # What to use instead, or a fixed β2, which is Adam.
    assert lost(kourkoutas_beta(1e-2, nonfinite="skip")) == {"w": 0, "b": 0}
    assert lost(optax.chain(optax.zero_nans(), kourkoutas_beta(1e-2))) == {"w": 0, "b": 0}
    assert lost(kourkoutas_beta(1e-2, beta2_min=0.999, beta2_max=0.999)) == {"w": 0, "b": 1}


def test_raise_names_the_bucket_and_refuses_to_be_traced():
    params = tree("float32")
    solver = kourkoutas_beta(1e-2, nonfinite="raise")
    state = solver.init(params)
    updates, _ = solver.update(params, state, params)
    assert np.all(np.isfinite(updates["w"]))
    with pytest.raises(NonFiniteGradient, match="'b'"):
        solver.update({"w": params["w"], "b": params["b"] * jnp.inf}, state, params)
    with pytest.raises(ValueError, match="`nonfinite` is 'raise', which cannot raise while JAX is tracing"):
        jax.jit(solver.update)(params, state, params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {**FULL, "nonfinite": "skip", "diagnostics": True}], ids=["default", "full"])
def test_a_run_saved_with_orbax_resumes_bit_for_bit(tmp_path, dtype, options):
    solver = kourkoutas_beta(optax.linear_schedule(1e-2, 1e-3, 10), **options)

    @jax.jit
    def step(params, state, t):
        grads = jax.tree.map(lambda p: (p * jnp.cos(t) + jnp.sin(3 * t)).astype(p.dtype), params)
        updates, state = solver.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    run = (tree(dtype), solver.init(tree(dtype)))
    for t in range(5):
        run = step(*run, t)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", run)
        checkpointer.wait_until_finished()
        fresh = (tree(dtype, seed=9), solver.init(tree(dtype, seed=9)))
        loaded = checkpointer.restore(tmp_path / "run", jax.eval_shape(lambda: fresh))
    assert isinstance(loaded[1][0], KourkoutasBetaState)
    assert bits(loaded) == bits(run)
    for t in range(5, 10):
        run, loaded = step(*run, t), step(*loaded, t)
    assert bits(loaded) == bits(run)
