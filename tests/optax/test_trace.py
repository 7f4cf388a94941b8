"""Reading sun and β2 out of an optimizer state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kourkoutas.optax import bucket_names, kourkoutas_beta, pull, scale_by_kourkoutas_beta
from kourkoutas.oracle import Oracle
from kourkoutas.rule import Hyper
from kourkoutas.trace import WINDOW, Trace
from tests.conformance.table import CASES

CASE = next(case for case in CASES if case.buckets == "module" and case.options["warmup_steps"] == 7)


def test_rows_are_the_oracles_with_nan_where_a_bucket_had_no_gradient():
    params = CASE.params()
    solver = kourkoutas_beta(CASE.lr, buckets="module", diagnostics=True, **CASE.options)
    state = solver.init(params)
    trace = Trace(bucket_names(params, "module"))
    oracle = Oracle(params, Hyper(**CASE.options), buckets="module", lr=CASE.lr)
    rows = []
    for t, grads in enumerate(CASE.grads()):
        updates, state = solver.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        oracle.step(grads)
        live = {oracle.bucket_of[name] for name, g in grads.items() if g is not None}
        rows.append([[d[b] if b in live else np.nan for b in trace.names] for d in (oracle.sun, oracle.beta2)])
        if t % 10 == 3:
            pull(trace, state)
    pull(trace, state)
    want = np.array(rows)
    assert np.isnan(want).any()
    np.testing.assert_allclose(trace.sun, want[:, 0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(trace.beta2, want[:, 1], rtol=1e-5)


def test_rows_lost_between_pulls_are_counted():
    params = {"w": jnp.ones(3)}
    solver = scale_by_kourkoutas_beta(diagnostics=True)

    def body(state, t):
        return solver.update({"w": jnp.full(3, 1.0 + t)}, state, params)[1], None

    state, _ = jax.lax.scan(body, solver.init(params), jnp.arange(WINDOW + 6))
    trace = Trace(bucket_names(params))
    pull(trace, state)
    assert trace.lost == 6
    assert trace.steps.tolist() == list(range(7, WINDOW + 7))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda make: optax.chain(optax.clip(1.0), make(1e-2, diagnostics=True)),
        lambda make: optax.inject_hyperparams(make)(1e-2, diagnostics=True),
        lambda make: optax.MultiSteps(make(1e-2, diagnostics=True), 1),
    ],
    ids=["chain", "inject", "multisteps"],
)
def test_the_trace_is_found_inside_other_states(wrap):
    params = {"w": jnp.ones(3)}
    solver = wrap(kourkoutas_beta)
    _, state = jax.jit(solver.update)(params, solver.init(params), params)
    trace = Trace(bucket_names(params))
    pull(trace, state)
    # First step: r = 0.07 n, so sun = 1 / 1.07.
    assert trace.snapshot()["w"]["sun"] == pytest.approx(1 / 1.07)
    assert trace.snapshot()["w"]["beta2"] == pytest.approx(0.999 - 0.119 / 1.07)


def test_a_state_without_a_trace_says_how_to_get_one():
    params = {"w": jnp.ones(3)}
    trace = Trace(bucket_names(params))
    with pytest.raises(ValueError, match="diagnostics=True"):
        pull(trace, kourkoutas_beta(1e-2).init(params))
    with pytest.raises(ValueError, match="found 0"):
        pull(trace, optax.adam(1e-2).init(params))


def test_tracing_changes_no_update():
    params = {"w": jnp.linspace(-1, 1, 5)}
    plain, traced = kourkoutas_beta(1e-2), kourkoutas_beta(1e-2, diagnostics=True)
    a, _ = jax.jit(plain.update)(params, plain.init(params), params)
    b, _ = jax.jit(traced.update)(params, traced.init(params), params)
    assert np.array_equal(a["w"], b["w"])


def test_the_trace_of_a_resumed_state_goes_on_counting():
    params = {"w": jnp.ones(3)}
    solver = kourkoutas_beta(1e-2, diagnostics=True)
    state = solver.init(params)
    for _ in range(4):
        _, state = solver.update(params, state, params)
    leaves, treedef = jax.tree.flatten(state)
    resumed = jax.tree.unflatten(treedef, [jnp.asarray(np.array(x)) for x in leaves])
    _, resumed = solver.update(params, resumed, params)
    trace = Trace(bucket_names(params))
    pull(trace, resumed)
    assert trace.steps.tolist() == [1, 2, 3, 4, 5]
