"""The eigenbasis: `in_eigenbasis` around Adam is SOAP, and `basis="eigen"` keeps what K-β promises without a basis.

The conformance table compares `basis="eigen"` with the oracle; here is what it leaves out.
"""

import collections
import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest

from kourkoutas.optax import in_eigenbasis, kourkoutas_beta, scale_by_kourkoutas_beta
from kourkoutas.optax.eigenbasis import InEigenbasisState
from kourkoutas.oracle import Oracle
from kourkoutas.rule import Hyper

EIGEN = {"basis": "eigen", "basis_every": 3}
FULL = {
    **EIGEN,
    "decay": 0.98,
    "max_ratio": 3.0,
    "adaptive_tiny": True,
    "bias_correction": "exact",
    "weight_decay": 0.01,
    "buckets": "module",
    "nonfinite": "skip",
    "diagnostics": True,
}
SHAPES = {"enc.w": (4, 4), "enc.b": (4,), "dec.w": (4, 4), "conv.w": (3, 2, 3), "gain": ()}


def soap(learning_rate, **settings):
    """SOAP, of the wrapper and Optax's Adam."""
    adam = optax.scale_by_adam(b1=0.95, b2=0.95)
    return optax.chain(in_eigenbasis(adam, **settings), optax.scale_by_learning_rate(learning_rate))


# Made once, so that tests share what is compiled.
EVERY_KIND = {
    "default": kourkoutas_beta(1e-2, **EIGEN),
    "full": kourkoutas_beta(1e-2, **FULL),
    "soap": soap(1e-2, every=3),
}
SKIPPING = kourkoutas_beta(1e-2, **{**FULL, "buckets": "parameter", "diagnostics": False})
MOST_KINDS = ("full", "soap")  # what "default" does "full" does, too


def tree(shapes=SHAPES, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}


def gradients(params, t):
    """A gradient that depends on the parameters, and jumps now and then."""
    noise = tree({name: p.shape for name, p in params.items()}, "float32", seed=100 + t)
    scale = 30.0 if t % 7 == 4 else 1.0
    return {name: (0.3 * p + scale * noise[name]).astype(p.dtype) for name, p in params.items()}


def step(solver, params, state, grads):
    updates, state = solver.update(grads, state, params)
    return optax.apply_updates(params, updates), state


@functools.cache
def jitted(solver):
    return jax.jit(functools.partial(step, solver))


def run(solver, params, steps, state=None, start=0):
    state = solver.init(params) if state is None else state
    for t in range(start, start + steps):
        params, state = jitted(solver)(params, state, gradients(params, t))
    return params, state


def basis_of(state):
    """The `Eigenbasis` in a solver's state."""
    return next(x for x in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "factors")) if hasattr(x, "factors"))


def bits(x):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(x)]


def assert_orthonormal(state, atol=1e-5):
    for of_axis in basis_of(state).bases.values():
        for q in of_axis.values():
            np.testing.assert_allclose(q.mT @ q, np.broadcast_to(np.eye(q.shape[-1]), q.shape), atol=atol)


# SOAP

SOAP = {"beta1": 0.95, "beta2_min": 0.95, "beta2_max": 0.95, "bias_correction": "exact", "basis": "eigen"}


@pytest.mark.parametrize("limit", [1024, 3])
def test_adam_in_the_eigenbasis_is_soap_and_so_is_a_fixed_beta2(limit):
    # As in the conformance table: no axis with a factor is longer than the others together.
    shapes = {**SHAPES, "table": (4, 2, 2), "other": (1, 6) if limit == 3 else (4, 3, 2)}
    with jax.enable_x64(True):
        params = tree(shapes, "float64")
        oracle = Oracle(params, Hyper(**SOAP, basis_every=3, basis_limit=limit), lr=1e-2)
        ours = kourkoutas_beta(1e-2, **SOAP, basis_every=3, basis_limit=limit)
        theirs = soap(1e-2, every=3, limit=limit)
        got, state = params, theirs.init(params)
        other, other_state = params, ours.init(params)
        for t in range(25):
            grads = {name: g.astype("float64") for name, g in gradients(tree(shapes, "float32", seed=t), t).items()}
            oracle.step(grads)
            got, state = jitted(theirs)(got, state, grads)
            other, other_state = jitted(ours)(other, other_state, grads)
        for name, want in oracle.params.items():
            np.testing.assert_allclose(got[name], want, rtol=0, atol=1e-10, err_msg=name)
            np.testing.assert_allclose(other[name], want, rtol=0, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("make", [soap, lambda lr, every: kourkoutas_beta(lr, **SOAP, basis_every=every)])
def test_a_complex_matrix_is_a_real_one_with_one_more_axis_and_a_complex_vector_stays(make):
    rng = np.random.default_rng(3)
    with jax.enable_x64(True):
        pairs = [{"w": rng.normal(size=(3, 2, 2)), "b": rng.normal(size=(3, 2))} for _ in range(9)]
        solver = make(1e-2, every=3)
        params = {name: jnp.asarray(x[..., 0] + 1j * x[..., 1]) for name, x in pairs[0].items()}
        # The oracle rotates what has two axes: the vector's parts are vectors there.
        parts = {"w": pairs[0]["w"], "re": pairs[0]["b"][:, 0], "im": pairs[0]["b"][:, 1]}
        oracle = Oracle(parts, Hyper(**SOAP, basis_every=3), lr=1e-2)
        state = solver.init(params)
        for x in pairs[1:]:
            oracle.step({"w": x["w"], "re": x["b"][:, 0], "im": x["b"][:, 1]})
            grads = {name: jnp.asarray(g[..., 0] + 1j * g[..., 1]) for name, g in x.items()}
            params, state = jitted(solver)(params, state, grads)
        want = oracle.params
        np.testing.assert_allclose(params["w"], want["w"][..., 0] + 1j * want["w"][..., 1], atol=1e-12)
        np.testing.assert_allclose(params["b"], want["re"] + 1j * want["im"], atol=1e-12)


def test_eigenvectors_that_cross_take_their_second_moments_with_them():
    with jax.enable_x64(True):
        params = {"w": jnp.ones((2, 2), "float64")}
        options = {**EIGEN, "basis_every": 2, "basis_memory": 0.6, "decay": 0.9}
        solver, oracle = kourkoutas_beta(1e-2, **options), Oracle(params, Hyper(**options), lr=1e-2)
        state, orders = solver.init(params), []
        for t in range(20):
            large, small = (3.0, 1.0) if t < 8 else (1.0, 3.0)
            grads = {"w": jnp.array([[large, 0.1 * t], [0.05, small]], "float64")}
            oracle.step(grads)
            params, state = jitted(solver)(params, state, grads)
            orders.append(int(np.argmax(np.abs(basis_of(state).bases["2x2"]["0"][0, :, 0]))))
        assert set(orders) == {0, 1}
        np.testing.assert_allclose(params["w"], oracle.params["w"], atol=1e-12)


@pytest.mark.slow
def test_a_transformation_that_needs_the_parameters_gets_them_in_the_basis():
    inside = in_eigenbasis(optax.chain(optax.scale_by_adam(), optax.add_decayed_weights(0.1)), every=2)
    outside = optax.chain(in_eigenbasis(optax.scale_by_adam(), every=2), optax.add_decayed_weights(0.1))
    params = tree()
    first, second = inside.init(params), outside.init(params)
    for t in range(6):
        grads = gradients(params, t)
        got, first = jax.jit(inside.update)(grads, first, params)
        want, second = jax.jit(outside.update)(grads, second, params)
        for name in params if t else ():  # the first call moves nothing, and decays nothing either
            np.testing.assert_allclose(got[name], want[name], atol=1e-5)


def test_momentum_turns_with_the_basis_so_that_plain_momentum_does_not_notice_it():
    params = tree()
    plain, inside = optax.trace(0.9), in_eigenbasis(optax.trace(0.9), every=2)
    first, second = plain.init(params), inside.init(params)
    _, second = jax.jit(inside.update)(gradients(params, 0), second, params)
    for t in range(1, 9):
        want, first = jax.jit(plain.update)(gradients(params, t), first, params)
        got, second = jax.jit(inside.update)(gradients(params, t), second, params)
        for name in params:
            np.testing.assert_allclose(got[name], want[name], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_kourkoutas_beta_may_stand_inside_the_wrapper():
    params, solver = tree(), in_eigenbasis(scale_by_kourkoutas_beta(decay=1.0), every=2)
    state = solver.init(params)
    for t in range(5):
        updates, state = jax.jit(solver.update)(gradients(params, t), state, params)
    assert all(np.isfinite(u).all() and np.any(u) for u in updates.values())


# The first gradient, and those that are missing


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_the_first_gradient_makes_the_basis_and_moves_nothing(kind):
    solver, params = EVERY_KIND[kind], tree()
    state = solver.init(params)
    after, new = jitted(solver)(params, state, gradients(params, 0))
    assert bits(after) == bits(params)
    assert_orthonormal(new)
    assert not np.allclose(basis_of(new).bases["4x4"]["0"], np.eye(4))
    assert basis_of(new).seen.tolist() == [1] * len(params)
    if kind == "soap":
        assert bits(new[0].inner_state) == bits(state[0].inner_state)
    else:
        assert bits((new[0].mu, new[0].nu, new[0].nu_max)) == bits((state[0].mu, state[0].nu, state[0].nu_max))
        assert new[0].missed.tolist() == [1] * len(params)
        assert np.all(new[0].ema > 0)
    moved, _ = jitted(solver)(after, new, gradients(params, 1))
    assert all(np.any(moved[name] != after[name]) for name in params)


def test_moments_taken_over_from_adam_move_at_once_in_the_coordinates_they_were_made_in():
    params, grads = tree(), gradients(tree(), 0)
    solver, plain = kourkoutas_beta(1e-2, **EIGEN), kourkoutas_beta(1e-2, beta1=0.95, bias_correction="exact")
    got, state = solver.update(grads, optax.tree.set(solver.init(params), count=50), params)
    want, _ = plain.update(grads, optax.tree.set(plain.init(params), count=50), params)
    for name in params:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5)
    assert basis_of(state).seen.tolist() == [1] * len(params)


# Numerics

STRANGE = {
    "rank one": lambda t: np.outer([1.0, 2.0, 3.0, 4.0], [1.0, -1.0, 0.5]),
    "zero": lambda t: np.zeros((4, 3)),
    "zero at first": lambda t: np.zeros((4, 3)) if t < 4 else np.random.default_rng(t).normal(size=(4, 3)),
    "one row": lambda t: np.random.default_rng(t).normal(size=(1, 5)),
    "one column": lambda t: np.random.default_rng(t).normal(size=(5, 1)),
    "one entry": lambda t: np.full((1, 1), 1.0 + t),
    "1e-20": lambda t: 1e-20 * np.random.default_rng(t).normal(size=(4, 3)),
    "1e-38": lambda t: 1e-38 * np.random.default_rng(t).normal(size=(4, 3)),
    "1e20": lambda t: 1e20 * np.random.default_rng(t).normal(size=(4, 3)),
    "both": lambda t: (1e20 if t % 4 == 3 else 1e-20) * np.random.default_rng(t).normal(size=(4, 3)),
}


@pytest.mark.parametrize("kind", MOST_KINDS)
@pytest.mark.parametrize("name", STRANGE)
def test_strange_gradients_leave_parameters_finite_bases_orthonormal_and_factors_with_trace_one(name, kind):
    make, solver = STRANGE[name], EVERY_KIND[kind]
    params = {"w": jnp.ones(make(0).shape)}
    state = solver.init(params)
    for t in range(10):
        params, state = jitted(solver)(params, state, {"w": jnp.asarray(make(t), "float32")})
    assert np.isfinite(params["w"]).all()
    assert_orthonormal(state)
    for of_axis in basis_of(state).factors.values():
        for factor in of_axis.values():
            trace = np.trace(factor[0])
            assert trace == pytest.approx(1, abs=1e-5) or (name in ("zero", "1e-38") and trace == 0)


def test_the_basis_does_not_depend_on_the_scale_of_the_gradients():
    params, solver = tree({"w": (4, 4)}), kourkoutas_beta(1e-2, **EIGEN)

    def bases(scale):
        state = solver.init(params)
        for t in range(8):
            grads = {"w": tree({"w": (4, 4)}, seed=t)["w"] * scale}
            _, state = jitted(solver)(params, state, grads)
        return basis_of(state).bases["4x4"]

    for axis, q in bases(1.0).items():
        for scale in (2.0**-66, 2.0**66):
            np.testing.assert_allclose(np.abs(bases(scale)[axis]), np.abs(q), atol=1e-3)


def test_a_basis_stays_orthonormal_over_thousands_of_turns():
    solver, params = kourkoutas_beta(1e-4, basis="eigen", basis_every=1), tree({"w": (8, 8)})

    def body(carry, key):
        params, state = carry
        scale = jnp.logspace(0, -6, 8)[:, None]
        return step(solver, params, state, {"w": scale * jax.random.normal(key, (8, 8))}), None

    keys = jax.random.split(jax.random.key(0), 5_000)
    (params, state), _ = jax.jit(lambda carry: jax.lax.scan(body, carry, keys))((params, solver.init(params)))
    assert_orthonormal(state, atol=5e-6)
    assert np.isfinite(params["w"]).all()


@pytest.mark.parametrize("before", [0, 3], ids=["the first gradient", "a turn"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_skipped_gradient_leaves_everything_to_the_bit_and_is_counted(bad, before):
    params, state = run(SKIPPING, tree(), before)
    grads = gradients(params, before)
    grads = {**grads, "enc.w": grads["enc.w"].at[1, 2].set(bad)}
    after, new = jitted(SKIPPING)(params, state, grads)
    assert bits(after["enc.w"]) == bits(params["enc.w"])
    old, basis = basis_of(state), basis_of(new)
    number, stack = sorted(params).index("enc.w"), 1  # after dec.w, which has the same shape
    for kept, now in ((old.factors, basis.factors), (old.bases, basis.bases)):
        for axis in ("0", "1"):
            assert bits(kept["4x4"][axis][stack]) == bits(now["4x4"][axis][stack])
            assert bits(kept["4x4"][axis][1 - stack]) != bits(now["4x4"][axis][1 - stack])
    assert basis.scale[number] == old.scale[number]
    assert basis.seen[number] == before + 1
    assert new[0].skipped.tolist() == [int(name == "enc.w") for name in sorted(params)]
    for field in ("mu", "nu", "nu_max"):
        assert bits(getattr(new[0], field)["enc.w"]) == bits(getattr(state[0], field)["enc.w"])


@pytest.mark.parametrize("kind", EVERY_KIND)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_without_skip_a_gradient_that_is_not_finite_does_not_stop_the_program(bad, kind):
    solver = kourkoutas_beta(1e-2, **{**FULL, "nonfinite": "propagate"}) if kind == "full" else EVERY_KIND[kind]
    params = tree({"w": (4, 4), "b": (4,)})
    state = solver.init(params)
    for t in range(8):
        grads = gradients(params, t)
        params, state = jitted(solver)(params, state, {**grads, "w": grads["w"] * (bad if t in (0, 3) else 1)})
    assert np.isfinite(params["b"]).all() or kind == "full"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_parameters_have_float32_factors_and_follow_the_float32_run(dtype):
    narrow, wide = tree({"w": (4, 4), "b": (4,)}, dtype), tree({"w": (4, 4), "b": (4,)}, dtype)
    wide = {name: p.astype("float32") for name, p in wide.items()}
    solver = kourkoutas_beta(1e-2, **EIGEN)
    state, wide_state = solver.init(narrow), solver.init(wide)
    for t in range(8):
        grads = {name: g.astype(dtype) for name, g in gradients(tree({"w": (4, 4), "b": (4,)}, seed=t), t).items()}
        updates, state = jax.jit(solver.update)(grads, state, narrow)
        assert {u.dtype for u in updates.values()} == {jnp.dtype(dtype)}
        narrow = optax.apply_updates(narrow, updates)
        wide, wide_state = jitted(solver)(wide, wide_state, {name: g.astype("float32") for name, g in grads.items()})
    assert state[0].mu["w"].dtype == dtype
    assert {x.dtype for x in jax.tree.leaves((basis_of(state).factors, basis_of(state).bases))} == {
        jnp.dtype("float32")
    }
    # The factors see the same gradients, and eight updates of 0.01 are rounded to three digits each.
    assert bits(basis_of(state).factors) == bits(basis_of(wide_state).factors)
    for name in narrow:
        np.testing.assert_allclose(narrow[name].astype("float32"), wide[name], atol=0.05)


# Inside JAX's and Optax's own transformations


@pytest.mark.parametrize("kind", MOST_KINDS)
def test_nothing_is_traced_again_when_the_basis_is_made_or_turns(kind):
    solver, params, traces = EVERY_KIND[kind], tree(), 0

    @jax.jit
    def counted(params, state, grads):
        nonlocal traces
        traces += 1
        return step(solver, params, state, grads)

    state = solver.init(params)
    shapes = [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(state)]
    for t in range(25):
        params, state = counted(params, state, gradients(params, t))
    assert (traces, counted._cache_size()) == (1, 1)
    assert [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(state)] == shapes


def operations(jaxpr):
    """How often each operation stands in a jaxpr, branches included."""
    found = collections.Counter()
    for equation in jaxpr.eqns:
        found[equation.primitive.name] += 1
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(inner, "eqns"):
                found += operations(getattr(inner, "jaxpr", inner))
    return found


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_more_matrices_of_one_shape_need_no_more_products_and_no_more_decompositions(kind):
    def heavy(count):
        params, solver = {f"w{i}": jnp.ones((4, 4)) for i in range(count)}, EVERY_KIND[kind]
        found = operations(jax.make_jaxpr(functools.partial(step, solver))(params, solver.init(params), params).jaxpr)
        return {name: found[name] for name in ("dot_general", "qr", "eigh", "cond")}

    # Two QRs of a turn, and two where an eigendecomposition does not converge.
    # Six products of a step, L·Q and R·P, and four for m; two for the parameters, which XLA drops if nobody reads them.
    products = 14 if kind == "soap" else 12
    assert heavy(3) == heavy(30) == {**heavy(1), "dot_general": products, "qr": 4, "eigh": 2}


TURNS = """
import jax, numpy as np, optax
from kourkoutas.optax import kourkoutas_beta
shapes = [(128, 3), *[(128, 128)] * 14, (1, 128)]
rng = np.random.default_rng(0)
params = {f"w{i}": rng.normal(size=shape).astype("float32") for i, shape in enumerate(shapes)}
solver = kourkoutas_beta(1e-3, basis="eigen", basis_every=2)
state, update = solver.init(params), jax.jit(solver.update, donate_argnums=1)
for _ in range(200):
    _, state = jax.block_until_ready(update(params, state, params))
"""


@pytest.mark.slow
def test_many_turns_of_several_shapes_never_wait_for_each_other():
    # With more threads OpenBLAS is slow beside JAX's own, which is not what is tested.
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", TURNS], check=True, timeout=200, env=environment)


@pytest.mark.parametrize("kind", MOST_KINDS)
def test_donated_buffers_give_the_same_bits(kind):
    solver, params = EVERY_KIND[kind], tree()
    want = run(solver, params, 8)
    donated = jax.jit(functools.partial(step, solver), donate_argnums=(0, 1))
    params = tree()
    state = solver.init(params)
    for t in range(8):
        before = basis_of(state)
        params, state = donated(params, state, gradients(params, t))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
    assert bits((params, state)) == bits(want)


def test_outside_of_jit_nothing_is_compiled_after_the_first_turns():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    solver, params = kourkoutas_beta(1e-2, basis="eigen", basis_every=2), tree({"w": (3, 3)})
    state = solver.init(params)
    for t in range(9):
        grads = gradients(params, t)
        before = len(compiled)
        updates, state = solver.update(grads, state, params)
        assert len(compiled) == before or t < 4
        params = optax.apply_updates(params, updates)


@pytest.mark.slow
def test_vmap_over_seeds_equals_one_run_per_seed():
    solver, runs = kourkoutas_beta(1e-2, **EIGEN), [tree(seed=seed) for seed in range(2)]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *runs)
    state = jax.vmap(solver.init)(stacked)
    batched = jax.jit(jax.vmap(functools.partial(step, solver)))
    for t in range(5):
        each = [gradients(params, t) for params in runs]
        stacked, state = batched(stacked, state, jax.tree.map(lambda *a: jnp.stack(a), *each))
    for seed, params in enumerate(runs):
        single = solver.init(params)
        start = params
        for t in range(5):
            params, single = jitted(solver)(params, single, gradients(start, t))
        for name in params:
            np.testing.assert_allclose(stacked[name][seed], params[name], rtol=1e-4, atol=1e-5)


MASK = {name: name != "dec.w" for name in SHAPES}
WRAPPERS = {
    "masked": lambda make: optax.masked(make(1e-2), MASK),
    "partition": lambda make: optax.partition({True: make(1e-2), False: optax.sgd(1e-2)}, MASK),
    "MultiSteps": lambda make: optax.MultiSteps(make(1e-2), 2).gradient_transformation(),
    "inject_hyperparams": lambda make: optax.inject_hyperparams(make)(1e-2),
    "chain": lambda make: optax.chain(optax.clip_by_global_norm(1.0), make(1e-2)),
    "apply_if_finite": lambda make: optax.apply_if_finite(make(1e-2), 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize("make", [functools.partial(kourkoutas_beta, **FULL), functools.partial(soap, every=3)])
def test_inside_a_wrapper_of_optax_it_trains(make, name):
    solver, params = WRAPPERS[name](lambda learning_rate: make(learning_rate)), tree()
    got, state = run(solver, params, 12)
    assert all(np.isfinite(p).all() for p in got.values())
    assert all(np.any(got[n] != p) for n, p in params.items())
    assert_orthonormal(state)
    marked = optax.tree.map_params(solver, lambda x: x, state)
    assert jax.tree.structure(marked) == jax.tree.structure(state)


def test_map_params_takes_moments_for_parameters_and_bases_for_something_else():
    solver, params = kourkoutas_beta(1e-2, **FULL), tree()
    marked = optax.tree.map_params(
        solver, lambda _: "moment", solver.init(params), transform_non_params=lambda _: "other"
    )
    assert set(jax.tree.leaves((marked[0].mu, marked[0].nu, marked[0].nu_max))) == {"moment"}
    assert set(jax.tree.leaves(marked[0].basis)) == {"other"}


def test_the_settings_can_be_injected_and_changed():
    solver = optax.inject_hyperparams(kourkoutas_beta)(1e-2, basis="eigen", basis_every=3, basis_memory=0.9)
    plain = kourkoutas_beta(1e-2, basis="eigen", basis_every=3, basis_memory=0.9)
    params = tree()
    got, state = run(solver, params, 8)
    want, _ = run(plain, params, 8)
    for name in params:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-3, atol=1e-4)
    state.hyperparams["basis_every"] = jnp.asarray(1)
    _, new = jitted(solver)(got, state, gradients(got, 8))
    assert bits(basis_of(new).bases) != bits(basis_of(state).bases)
    assert jitted(solver)._cache_size() == 1


def test_without_a_basis_the_state_has_no_basis_and_an_empty_tree_is_accepted():
    params = tree()
    assert kourkoutas_beta(1e-2).init(params)[0].basis is None
    for solver in EVERY_KIND.values():
        updates, state = jax.jit(solver.update)({}, solver.init({}), {})
        assert updates == {}
        assert jax.tree.structure(state) == jax.tree.structure(solver.init({}))


# Saving and going on


@pytest.mark.parametrize("kind", MOST_KINDS)
def test_a_run_saved_with_orbax_resumes_bit_for_bit(tmp_path, kind):
    solver = EVERY_KIND[kind]
    saved = run(solver, tree(), 5)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", saved)
        checkpointer.wait_until_finished()
        fresh = (tree(seed=9), solver.init(tree(seed=9)))
        loaded = checkpointer.restore(tmp_path / "run", jax.eval_shape(lambda: fresh))
    assert bits(loaded) == bits(saved)
    want = run(solver, saved[0], 6, saved[1], start=5)
    got = run(solver, loaded[0], 6, loaded[1], start=5)
    assert bits(got) == bits(want)
    assert kind != "soap" or isinstance(got[1][0], InEigenbasisState)


@pytest.mark.slow
@pytest.mark.parametrize("options", [EIGEN, FULL], ids=["default", "full"])
def test_the_portable_state_goes_on_to_the_bit(tmp_path, options):
    from kourkoutas.state.optax import load, save

    buckets = options.get("buckets", "parameter")
    solver = kourkoutas_beta(1e-2, **{**options, "diagnostics": False})
    params = {**tree(), "z": jnp.array([[1 + 2j, 3], [4j, 5]], "complex64")}
    params, state = run(solver, params, 5)
    save(state, tmp_path / "state", buckets=buckets)
    loaded = load(tmp_path / "state", solver.init(params), buckets=buckets)
    assert bits(loaded[0]) == bits(state[0])
    assert bits(run(solver, params, 6, loaded, start=5)) == bits(run(solver, params, 6, state, start=5))


def test_the_portable_state_names_every_factor_by_parameter_and_axis(tmp_path):
    from kourkoutas.state import read
    from kourkoutas.state.optax import save

    solver = kourkoutas_beta(1e-2, **EIGEN, basis_limit=3)
    _, state = run(solver, tree({"w": (4, 3), "u": (4, 3), "conv": (2, 3, 5), "b": (4,)}), 5)
    save(state, tmp_path / "state")
    kept = read(tmp_path / "state")
    assert {kind: sorted(arrays) for kind, arrays in kept.bases.items()} == {
        "factor_0": ["conv"], "basis_0": ["conv"], "factor_1": ["conv", "u", "w"], "basis_1": ["conv", "u", "w"],
    }  # fmt: skip
    np.testing.assert_array_equal(kept.bases["basis_1"]["w"], state[0].basis.bases["4x3"]["1"][1])
    assert kept.scalars["seen"].tolist() == [5] * 4
    assert kept.scalars["step"].tolist() == [4] * 4
    assert kept.names == ("b", "conv", "u", "w")
    assert kept.scalars["factor_scale"][0] == 0


@pytest.mark.parametrize(
    ("other", "message"),
    [({}, "with, the optimizer without `basis='eigen'`"), ({**EIGEN, "basis_limit": 3}, "use the same `basis_limit`")],
)
def test_a_portable_state_with_other_bases_is_refused(tmp_path, other, message):
    from kourkoutas.state.optax import load, save

    params = tree()
    solver = kourkoutas_beta(1e-2, **EIGEN)
    save(solver.init(params), tmp_path / "state")
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "state", kourkoutas_beta(1e-2, **other).init(params))


# Errors


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kourkoutas_beta(1e-2, basis="shampoo"), "`basis` must be None or \"eigen\"; got 'shampoo'"),
        (
            lambda: kourkoutas_beta(1e-2, basis="eigen", basis_every=0),
            "`basis_every` must be a whole number >= 1.*got 0",
        ),
        (
            lambda: kourkoutas_beta(1e-2, basis="eigen", basis_memory=1.0),
            r"`basis_memory` must be in \[0, 1\).*got 1\.0",
        ),
        (lambda: kourkoutas_beta(1e-2, basis="eigen", basis_limit=2.5), r"`basis_limit` must be a whole.*got 2\.5"),
        (
            lambda: kourkoutas_beta(1e-2, basis="eigen", axis_name="x"),
            "`axis_name` is 'x', and basis='eigen' needs whole parameters.*use basis=None inside shard_map",
        ),
        (lambda: scale_by_kourkoutas_beta(basis="eigen", axis_name="x"), "`axis_name` is 'x'"),
        (lambda: in_eigenbasis(optax.scale_by_adam(), every=0), "`every` must be a whole number >= 1.*got 0"),
        (lambda: in_eigenbasis(optax.scale_by_adam(), memory=-1), r"`memory` must be in \[0, 1\).*got -1"),
        (lambda: in_eigenbasis(optax.scale_by_adam(), limit=True), "`limit` must be a whole number >= 1.*got True"),
        (
            lambda: in_eigenbasis(optax.scale_by_factored_rms(min_dim_size_to_factor=2)).init({"w": jnp.ones((4, 4))}),
            "a transformation that works on each entry by itself",
        ),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line_with_the_remedy(call, message):
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_transformation_that_was_not_called_is_refused():
    with pytest.raises(TypeError, match=r"`inner` must be a gradient transformation; got <function scale_by_adam"):
        in_eigenbasis(optax.scale_by_adam)


def test_a_missing_gradient_inside_the_wrapper_is_refused_with_the_remedy():
    params, solver = tree(), in_eigenbasis(optax.scale_by_adam())
    with pytest.raises(ValueError, match=r"bases of 5 parameters, and the updates have 4 arrays.*give zeros"):
        solver.update({**params, "gain": None}, solver.init(params), params)


def test_a_traced_limit_is_refused_with_the_remedy():
    solver = optax.inject_hyperparams(kourkoutas_beta)(1e-2, basis="eigen")
    with pytest.raises(ValueError, match=r'static_args=\("basis_limit",\)'):
        jax.jit(solver.init)(tree())
    static = optax.inject_hyperparams(kourkoutas_beta, static_args=("basis_limit",))(1e-2, basis="eigen")
    assert basis_of(jax.jit(static.init)(tree())).factors


def test_an_eigendecomposition_that_does_not_converge_leaves_an_orthogonal_basis(monkeypatch):
    def fails(factor):
        return jnp.full(factor.shape[:-1], jnp.nan), jnp.full(factor.shape, jnp.nan)

    monkeypatch.setattr(jnp.linalg, "eigh", fails)
    params = {"w": jnp.ones((6, 6))}
    solver = kourkoutas_beta(1e-2, basis="eigen", basis_every=3)
    state = solver.init(params)
    rng = np.random.default_rng(0)
    for _ in range(8):
        updates, state = solver.update({"w": jnp.asarray(rng.normal(size=(6, 6)), jnp.float32)}, state, params)
        params = optax.apply_updates(params, updates)
    assert jnp.isfinite(params["w"]).all()
    (stack,) = jax.tree.leaves(state[0].basis.bases["6x6"]["0"])
    np.testing.assert_allclose(stack[0].T @ stack[0], np.eye(6), atol=1e-5)
