"""What Optax asks of its own optimizers: they reach the minimum, keep their types, and work inside every wrapper.

With a fixed β2 K-β is Adam, so inside a wrapper it must do what Adam does inside it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kourkoutas.optax import kourkoutas_beta, scale_by_kourkoutas_beta

FULL = {
    "decay": 0.98,
    "max_ratio": 3.0,
    "adaptive_tiny": True,
    "bias_correction": "exact",
    "warmup_steps": 2,
    "buckets": "module",
    "nonfinite": "skip",
    "diagnostics": True,
}
PARAMS = {"enc": {"w": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "b": jnp.array([0.1, -0.2])}, "gain": jnp.array(1.5)}
MASK = {"enc": {"w": True, "b": False}, "gain": True}


def parabola(dtype):
    goal = jnp.array([1.0, -1.0, 1.0], dtype) * (1 + 1j if jnp.issubdtype(dtype, jnp.complexfloating) else 1)
    return jnp.array([-1.0, 10.0, 1.0], dtype), goal, lambda x: jnp.sum(jnp.abs(x - goal) ** 2)


def rosenbrock(dtype):
    a = 1 + 1j if jnp.issubdtype(dtype, jnp.complexfloating) else 1
    goal = jnp.array([a, a * a], dtype)
    return jnp.zeros(2, dtype), goal, lambda x: jnp.abs(a - x[0]) ** 2 + 100 * jnp.abs(x[1] - x[0] ** 2) ** 2


def descend(solver, params, objective, steps, read=lambda state, params: params, **extra):
    """`steps` steps in one scan, the gradient conjugated as descent on complex numbers needs."""

    def step(carry, _):
        params, state = carry
        value, grads = jax.value_and_grad(objective)(params)
        given = {"value": value} if extra.get("value") else {}
        updates, state = solver.update(jax.tree.map(jnp.conj, grads), state, params, **given)
        return (optax.apply_updates(params, updates), state), None

    (params, state), _ = jax.jit(lambda carry: jax.lax.scan(step, carry, length=steps))((params, solver.init(params)))
    return read(state, params)


UNCLIPPED = {**FULL, "max_ratio": None}


@pytest.mark.parametrize(
    ("dtype", "target", "options"),
    [
        (jnp.float32, parabola, {}),
        (jnp.float32, rosenbrock, UNCLIPPED),
        (jnp.complex64, parabola, UNCLIPPED),
        (jnp.complex64, rosenbrock, {}),
    ],
)
def test_it_finds_the_minimum(dtype, target, options):
    start, goal, objective = target(dtype)
    got = descend(kourkoutas_beta(1e-2, **options), start, objective, 10_000)
    np.testing.assert_allclose(got, goal, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("options", [{}, FULL], ids=["default", "full"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
def test_shapes_dtypes_and_weak_types_of_the_state_are_the_same_after_a_step(dtype, options):
    with jax.enable_x64(dtype in ("float64", "complex128")):
        start, _, objective = parabola(jnp.dtype(dtype))
        solver = kourkoutas_beta(1e-2, **options)
        state = solver.init(start)

        def either(params, state, go):
            grads = jax.grad(objective)(params)
            return jax.lax.cond(go, lambda: solver.update(grads, state, params), lambda: (grads, state))

        updates, after = jax.eval_shape(either, start, state, True)
        assert updates.dtype == start.dtype
        for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
            assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)


def test_arguments_of_others_in_the_chain_are_passed_on():
    solver = kourkoutas_beta(1e-2)
    updates, _ = jax.jit(lambda p, s: solver.update(p, s, p, value=1.0, somebody_elses=2))(PARAMS, solver.init(PARAMS))
    assert jax.tree.structure(updates) == jax.tree.structure(PARAMS)


def loss(params):
    return jnp.sum((params["gain"] * jnp.tanh(params["enc"]["w"] @ params["enc"]["b"]) - 1.0) ** 2)


def chained(make, **options):
    return optax.chain(optax.clip_by_global_norm(0.5), make(1e-2, **options))


WRAPPERS = {
    "schedule_free": lambda make: optax.contrib.schedule_free(make(1e-2), 1e-2, b1=0.9),
    "mechanize": lambda make: optax.contrib.mechanize(make(1.0)),
    "reduce_on_plateau": lambda make: optax.chain(make(1e-1), optax.contrib.reduce_on_plateau(patience=3)),
    "MultiSteps": lambda make: optax.MultiSteps(make(1e-2), 3).gradient_transformation(),
    "apply_if_finite": lambda make: optax.apply_if_finite(make(1e-2), 2),
    "inject_hyperparams": lambda make: optax.inject_hyperparams(make)(optax.linear_schedule(1e-2, 1e-3, 20)),
    "masked": lambda make: optax.chain(
        optax.masked(make(1e-2), MASK), optax.masked(optax.set_to_zero(), jax.tree.map(lambda on: not on, MASK))
    ),
    "partition": lambda make: optax.partition(
        {True: make(1e-2), False: optax.sgd(1e-1)}, {"enc": {"w": True, "b": False}, "gain": True}
    ),
    "selective": lambda make: optax.transforms.selective_transform(make(1e-2), freeze_mask=MASK),
    "conditionally_mask": lambda make: optax.transforms.conditionally_mask(make(1e-2), lambda step: step > 2),
    "flatten": lambda make: optax.flatten(make(1e-2)),
    "chain": chained,
    "named_chain": lambda make: optax.named_chain(("clip", optax.clip(0.1)), ("step", make(1e-2))),
    "sam": lambda make: optax.contrib.sam(make(1e-2), optax.sgd(1e-2), sync_period=2),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_inside_a_wrapper_a_fixed_beta2_is_adam_inside_it(name):
    fixed = functools.partial(kourkoutas_beta, beta2_min=0.999, beta2_max=0.999)
    value = name == "reduce_on_plateau"
    with jax.enable_x64(True):
        start = jax.tree.map(lambda x: x.astype("float64"), PARAMS)
        want = descend(WRAPPERS[name](optax.adam), start, loss, 40, value=value)
        got = descend(WRAPPERS[name](fixed), start, loss, 40, value=value)
        assert not np.allclose(want["gain"], start["gain"]) or name == "selective"
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9)


# Those that keep, copy, or take apart the state of what they wrap; the others pass it on, and are slow here.
OF_STATES = ("schedule_free", "MultiSteps", "apply_if_finite", "inject_hyperparams", "partition", "sam")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in OF_STATES else [pytest.mark.slow]) for name in WRAPPERS]
)
def test_inside_a_wrapper_every_option_trains(name):
    if name == "inject_hyperparams":
        solver = WRAPPERS[name](lambda learning_rate: kourkoutas_beta(learning_rate, **FULL))
    else:
        solver = WRAPPERS[name](functools.partial(kourkoutas_beta, **FULL))
    got = descend(solver, PARAMS, loss, 60, value=name == "reduce_on_plateau")
    assert float(loss(got)) < float(loss(PARAMS))


def test_schedule_free_reaches_the_minimum_in_its_evaluation_parameters():
    start, goal, objective = parabola(jnp.float32)
    solver = optax.contrib.schedule_free(kourkoutas_beta(1e-1, beta1=0.0), 1e-1, b1=0.9)
    got = descend(solver, start, objective, 2000, read=optax.contrib.schedule_free_eval_params)
    np.testing.assert_allclose(got, goal, rtol=3e-2, atol=3e-2)


def test_mechanize_tunes_the_learning_rate_itself():
    start, goal, objective = parabola(jnp.float32)
    got = descend(optax.contrib.mechanize(kourkoutas_beta(1e-1), weight_decay=0.0), start, objective, 3000)
    np.testing.assert_allclose(got, goal, rtol=3e-2, atol=3e-2)


def test_apply_if_finite_leaves_the_state_alone_after_a_nan():
    solver = optax.apply_if_finite(kourkoutas_beta(1e-2, **{**FULL, "nonfinite": "propagate"}), 5)
    _, state = jax.jit(solver.update)(PARAMS, solver.init(PARAMS), PARAMS)
    bad = {**PARAMS, "gain": jnp.array(jnp.nan)}
    updates, after = jax.jit(solver.update)(bad, state, PARAMS)
    assert not any(np.any(u) for u in jax.tree.leaves(updates))
    for a, b in zip(jax.tree.leaves(after.inner_state), jax.tree.leaves(state.inner_state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert after.notfinite_count == 1


def test_lookahead_steps_its_fast_parameters():
    solver = optax.lookahead(kourkoutas_beta(1e-1), sync_period=2, slow_step_size=0.5)
    params = optax.LookaheadParams.init_synced(jnp.array([2.0, -1.0]))
    state, update = solver.init(params), jax.jit(solver.update)
    for _ in range(300):
        updates, state = update(2 * params.fast, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(params.slow, 0, atol=1e-2)


def test_a_transformation_alone_takes_keys_of_any_kind():
    params = [jnp.ones(2), (jnp.ones(3), {"a": jnp.ones(())})]
    solver = scale_by_kourkoutas_beta(buckets="shape")
    updates, _ = jax.jit(solver.update)(params, solver.init(params))
    assert jax.tree.structure(updates) == jax.tree.structure(params)
