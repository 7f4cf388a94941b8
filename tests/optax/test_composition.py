"""The transformation inside JAX's and Optax's own transformations."""

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
    "weight_decay": 0.01,
    "buckets": "module",
    "nonfinite": "skip",
    "diagnostics": True,
}
SOLVERS = [pytest.param({}, id="default"), pytest.param(FULL, id="full")]


def init(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "enc": {"w": jnp.asarray(rng.normal(size=(4, 3)), jnp.float32), "b": jnp.zeros(4)},
        "dec": {"w": jnp.asarray(rng.normal(size=(2, 4)), jnp.float32)},
    }


def loss(params, x):
    hidden = jnp.tanh(params["enc"]["w"] @ x + params["enc"]["b"])
    return jnp.sum((params["dec"]["w"] @ hidden - 1.0) ** 2)


def inputs(steps, seed=1):
    x = np.random.default_rng(seed).normal(size=(steps, 3))
    x[steps // 2] *= 50
    return jnp.asarray(x, jnp.float32)


def step(solver, params, state, x):
    updates, state = solver.update(jax.grad(loss)(params, x), state, params)
    return optax.apply_updates(params, updates), state


@functools.cache
def jitted(solver):
    return jax.jit(functools.partial(step, solver))


def loop(solver, params, xs):
    state = solver.init(params)
    for x in xs:
        params, state = jitted(solver)(params, state, x)
    return params, state


def assert_same(got, want, rtol=1e-6, atol=1e-7):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=atol)


def test_scan_equals_a_loop_of_jitted_steps():
    solver, params, xs = kourkoutas_beta(1e-2, **FULL), init(), inputs(20)

    def body(carry, x):
        return step(solver, *carry, x), None

    scanned, _ = jax.lax.scan(body, (params, solver.init(params)), xs)
    assert_same(scanned, loop(solver, params, xs), rtol=1e-5)


def test_vmap_over_seeds_equals_one_run_per_seed():
    solver = kourkoutas_beta(1e-2, **FULL)
    runs = [(init(seed), inputs(6, seed)) for seed in range(2)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *[params for params, _ in runs])
    xs = jnp.stack([x for _, x in runs], axis=1)
    state = jax.vmap(solver.init)(stacked)
    batched = jax.jit(jax.vmap(functools.partial(step, solver)))
    for x in xs:
        stacked, state = batched(stacked, state, x)
    for seed, (params, x) in enumerate(runs):
        got = jax.tree.map(lambda a, seed=seed: a[seed], (stacked, state))
        assert_same(got, loop(solver, params, x), rtol=1e-5, atol=1e-6)


def test_a_step_is_traced_once():
    solver, params = kourkoutas_beta(optax.linear_schedule(1e-2, 1e-3, 5), **FULL), init()
    traces = 0

    @jax.jit
    def counted(params, state, x):
        nonlocal traces
        traces += 1
        return step(solver, params, state, x)

    state = solver.init(params)
    for x in inputs(4):
        params, state = counted(params, state, x)
    assert traces == 1
    assert counted._cache_size() == 1


@pytest.mark.parametrize("options", SOLVERS)
def test_donated_buffers_are_reused_and_the_result_is_the_same(options):
    solver, xs = kourkoutas_beta(1e-2, **options), inputs(5)
    want = loop(solver, init(), xs)
    donated = jax.jit(functools.partial(step, solver), donate_argnums=(0, 1))
    params = init()
    state = solver.init(params)
    for x in xs:
        before = state
        params, state = donated(params, state, x)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before[0].mu))
    assert_same((params, state), want, rtol=0, atol=0)


def test_the_number_of_buckets_does_not_change_the_number_of_traced_operations():
    def equations(buckets):
        params = {f"m{i % 10}.w{i}": jnp.ones(2) for i in range(60)}
        solver = kourkoutas_beta(1e-3, buckets=buckets, warmup_steps=3, bias_correction="exact")
        return len(jax.make_jaxpr(solver.update)(params, solver.init(params), params).eqns)

    assert equations("parameter") <= equations("module") <= equations("parameter") + 20


def test_the_update_is_differentiable():
    solver = kourkoutas_beta(0.1)

    @jax.jit
    def after_one_step(theta):
        params = {"w": theta}
        updates, _ = solver.update({"w": theta**3}, solver.init(params), params)
        return jnp.sum(optax.apply_updates(params, updates)["w"] ** 3)

    with jax.enable_x64(True):
        theta = jnp.array([1.0, -2.0, 0.5])
        slope = jax.grad(after_one_step)(theta)
        h = 1e-6
        for i in range(3):
            bump = h * jnp.eye(3)[i]
            numeric = (after_one_step(theta + bump) - after_one_step(theta - bump)) / (2 * h)
            np.testing.assert_allclose(slope[i], numeric, rtol=1e-5)


NUMBERS = {
    "beta1": 0.8,
    "beta2_min": 0.7,
    "beta2_max": 0.99,
    "alpha": 0.9,
    "eps": 1e-6,
    "tiny_spike": 1e-3,
    "tiny_denom": 1e-3,
    "decay": 0.98,
    "max_ratio": 0.9,
    "warmup_steps": 2,
    "weight_decay": 0.01,
    "basis_every": 3,
    "basis_memory": 0.9,
    "basis_limit": 64,
}


@pytest.mark.parametrize("bias_correction", ["none", "beta2max", "exact"])
def test_every_number_can_be_injected(bias_correction):
    options = {**NUMBERS, "adaptive_tiny": True, "bias_correction": bias_correction, "buckets": "module"}
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: p.astype("float64"), init())
        injected = optax.inject_hyperparams(kourkoutas_beta)(1e-2, **options)
        assert set(injected.init(params).hyperparams) == {"learning_rate", *NUMBERS}
        got, state = loop(injected, params, inputs(6).astype("float64"))
        want, want_state = loop(kourkoutas_beta(1e-2, **options), params, inputs(6).astype("float64"))
        assert_same(got, want, rtol=1e-12, atol=1e-12)
        assert_same(state.inner_state, want_state, rtol=1e-12, atol=1e-12)


def test_defaults_can_be_injected_with_the_same_state_tree():
    params = init()
    injected = optax.inject_hyperparams(kourkoutas_beta)(1e-2)
    plain = kourkoutas_beta(1e-2)
    assert jax.tree.structure(injected.init(params).inner_state) == jax.tree.structure(plain.init(params))
    assert_same(loop(injected, params, inputs(6))[0], loop(plain, params, inputs(6))[0], rtol=1e-4, atol=1e-6)


def test_an_injected_decay_of_zero_clips_only():
    with jax.enable_x64(True):
        params = jax.tree.map(lambda p: p.astype("float64"), init())
        xs = inputs(6).astype("float64")
        got, _ = loop(optax.inject_hyperparams(kourkoutas_beta)(1e-2, decay=0.0, max_ratio=0.5), params, xs)
        want, _ = loop(kourkoutas_beta(1e-2, decay=0, max_ratio=0.5), params, xs)
        assert_same(got, want, rtol=1e-12)


def test_a_changed_hyperparameter_takes_effect_without_a_new_trace():
    solver, params = optax.inject_hyperparams(kourkoutas_beta)(1e-2), init()
    _, state = jitted(solver)(params, solver.init(params), inputs(1)[0])
    state.hyperparams["learning_rate"] = jnp.float32(0)
    still, _ = jitted(solver)(params, state, inputs(1)[0])
    assert_same(still, params, rtol=0, atol=0)
    assert jitted(solver)._cache_size() == 1


def test_alpha_takes_a_schedule_through_inject_hyperparams():
    schedule = optax.linear_schedule(0.5, 0.9, 2)
    solver = optax.inject_hyperparams(scale_by_kourkoutas_beta)(alpha=schedule)
    params = {"w": jnp.ones(4)}
    state = solver.init(params)
    ema = 0.0
    for alpha in (0.5, 0.7, 0.9):
        _, state = jax.jit(solver.update)(params, state, params)
        ema = alpha * ema + (1 - alpha) * 2.0  # ||(1, 1, 1, 1)|| = 2
        np.testing.assert_allclose(state.inner_state.ema, [ema], rtol=1e-6)


INJECTED = {"b1": "beta1", "b2": "beta2_max", "eps": "eps", "weight_decay": "weight_decay"}


@pytest.mark.parametrize("theirs", INJECTED)
def test_what_adamw_takes_as_a_schedule_through_inject_hyperparams_kourkoutas_beta_takes_too(theirs):
    def schedule(count):  # in float64, where Optax's own schedules give float32
        return 0.5 + 0.1 * jnp.minimum(count, 4).astype("float64")

    options = {INJECTED[theirs]: schedule}
    if theirs == "b2":
        options["beta2_min"] = schedule
    with jax.enable_x64(True):
        params, xs = jax.tree.map(lambda p: p.astype("float64"), init()), inputs(6).astype("float64")
        adamw = optax.inject_hyperparams(optax.adamw)(1e-2, **{"weight_decay": 0.0, theirs: schedule})
        fixed = {"beta2_min": 0.999, "beta2_max": 0.999, **options}
        ours = optax.inject_hyperparams(kourkoutas_beta)(1e-2, **fixed)
        assert_same(loop(ours, params, xs)[0], loop(adamw, params, xs)[0], rtol=1e-9, atol=1e-12)


def test_a_scheduled_weight_decay_is_part_of_the_state_and_goes_on_after_a_pause():
    solver, params, xs = kourkoutas_beta(1e-2, weight_decay=optax.linear_schedule(0.9, 0.0, 8)), init(), inputs(8)
    want = loop(solver, params, xs)
    state = solver.init(params)
    for x in xs:
        saved = jax.tree.map(np.asarray, (params, state))
        params, state = jitted(solver)(*jax.tree.map(jnp.asarray, saved), x)
    assert_same((params, state), want, rtol=0, atol=0)


def test_callable_buckets_are_injected_as_a_static_argument():
    params = init()
    inject = optax.inject_hyperparams(kourkoutas_beta, static_args=("buckets",))
    solver = inject(1e-2, buckets=lambda name, array: array.ndim)
    want = loop(kourkoutas_beta(1e-2, buckets=lambda name, array: array.ndim), params, inputs(4))[0]
    assert_same(loop(solver, params, inputs(4))[0], want, rtol=1e-4, atol=1e-6)


def test_multi_steps_takes_one_step_with_the_mean_gradient():
    params, xs = init(), inputs(4)
    solver = kourkoutas_beta(1e-2)
    multi = optax.MultiSteps(solver, every_k_schedule=4)
    got, _ = loop(multi, params, xs)
    mean = jax.grad(lambda params: jnp.mean(jax.vmap(functools.partial(loss, params))(xs)))
    updates, _ = jax.jit(solver.update)(jax.jit(mean)(params), solver.init(params), params)
    assert_same(got, optax.apply_updates(params, updates), rtol=1e-5)


def test_alias_equals_the_chain_of_its_parts():
    params = init()
    chain = optax.chain(
        scale_by_kourkoutas_beta(max_ratio=0.5, decay=0),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(1e-2),
    )
    alias = kourkoutas_beta(1e-2, max_ratio=0.5, decay=0, weight_decay=0.1)
    assert_same(loop(chain, params, inputs(5)), loop(alias, params, inputs(5)), rtol=0, atol=0)


def test_clipping_before_it_in_a_chain_is_seen_by_the_norm():
    params = {"w": jnp.ones(4)}
    solver = optax.chain(optax.clip_by_global_norm(1.0), scale_by_kourkoutas_beta(alpha=0.5))
    _, state = solver.update({"w": jnp.full(4, 100.0)}, solver.init(params), params)
    np.testing.assert_allclose(state[1].ema, [0.5], rtol=1e-6)


def test_masked_steps_only_where_the_mask_says():
    params = init()
    mask = {"enc": {"w": True, "b": False}, "dec": {"w": True}}
    inner = kourkoutas_beta(1e-2, **FULL)
    solver = optax.masked(inner, mask)
    state = solver.init(params)
    assert state.inner_state[0].missed.shape == (2,)
    grads = jax.grad(loss)(params, inputs(1)[0])
    updates, state = jax.jit(solver.update)(grads, state, params)
    assert_same(updates["enc"]["b"], grads["enc"]["b"])
    kept = {"enc": {"w": params["enc"]["w"]}, "dec": params["dec"]}
    alone = {"enc": {"w": grads["enc"]["w"]}, "dec": grads["dec"]}
    want, _ = jax.jit(inner.update)(alone, inner.init(kept), kept)
    assert_same(updates["enc"]["w"], want["enc"]["w"])


def test_partition_gives_each_group_its_own_optimizer():
    params = init()
    solver = optax.partition(
        {"kbeta": kourkoutas_beta(1e-2, diagnostics=True), "sgd": optax.sgd(1e-1)},
        {"enc": {"w": "kbeta", "b": "sgd"}, "dec": {"w": "kbeta"}},
    )
    grads = jax.grad(loss)(params, inputs(1)[0])
    updates, _ = jax.jit(solver.update)(grads, solver.init(params), params)
    np.testing.assert_allclose(updates["enc"]["b"], -0.1 * grads["enc"]["b"], rtol=1e-6)
    alone = {"w": grads["dec"]["w"]}
    inner = kourkoutas_beta(1e-2)
    want, _ = inner.update(alone, inner.init(alone))
    np.testing.assert_allclose(updates["dec"]["w"], want["w"], rtol=1e-6)


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: optax.MultiSteps(s, 2).gradient_transformation()])
def test_map_params_reaches_every_moment_and_nothing_else(wrap):
    params = init()
    solver = wrap(kourkoutas_beta(1e-2, **FULL))
    state = solver.init(params)
    marked = optax.tree.map_params(
        solver, lambda _: "moment", state, transform_non_params=lambda _: "other", is_leaf=lambda x: x is None
    )
    inner = next(x for x in jax.tree.leaves(marked, is_leaf=lambda x: hasattr(x, "nu_max")) if hasattr(x, "nu_max"))
    for tree in (inner.mu, inner.nu, inner.nu_max):
        assert set(jax.tree.leaves(tree)) == {"moment"}
    assert {inner.count, inner.missed, inner.ema, inner.log_beta2, inner.skipped, inner.ring, inner.rows} == {"other"}


def test_an_empty_tree_of_parameters_is_accepted():
    solver = kourkoutas_beta(1e-2, **FULL)
    updates, _ = jax.jit(solver.update)({}, solver.init({}), {})
    assert updates == {}


def test_a_step_outside_of_jit_compiles_nothing_after_the_first():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    solver = kourkoutas_beta(1e-2)
    params = {"a": jnp.ones((3, 2)), "b": jnp.ones(4)}
    state = solver.init(params)
    counts = []
    for _ in range(3):
        grads = jax.tree.map(jnp.ones_like, params)
        before = len(compiled)
        updates, state = solver.update(grads, state, params)
        counts.append(len(compiled) - before)
        params = optax.apply_updates(params, updates)
    assert counts[1:] == [0, 0], counts
