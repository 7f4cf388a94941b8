"""Long horizons: step counts where float32 and int32 end, many buckets, and settings at their limits."""

import gc
import math
import os
import time

import numpy as np
import pytest

from kourkoutas import rule
from kourkoutas.rule import Hyper, State


def walk(hyper, steps, norm, xp=np, start=0):
    state = State(norm(0) * 0, start + norm(0) * 0, norm(0) * 0 if hyper.bias_correction == "exact" else None)
    for t in range(steps):
        step = rule.step(hyper, 1e-3, norm(t), state, xp)
        state = step.state
    return step


def long_run(steps):
    hyper = Hyper(bias_correction="exact", warmup_steps=10)
    step = walk(hyper, steps, lambda t: 1.0 + (t % 7))
    assert step.state.step == steps
    # r is an average of norms in [1, 7], sun and β2 stay in their ranges, and all bias has gone
    assert 1 <= step.state.ema <= 7
    assert hyper.beta2_min <= step.beta2 <= hyper.beta2_max
    assert rule.bias_corrections(hyper, steps, step.state.log_beta2, np) == (1.0, 1.0)
    assert step.k.rate == 1e-3
    # Σ log β2 has taken every step: it lies between steps·log β2_min and steps·log β2_max
    assert steps * math.log(hyper.beta2_min) <= step.state.log_beta2 <= (steps - 10) * math.log(hyper.beta2_max)


def test_fifty_thousand_steps_of_the_scalar_rule():
    long_run(50_000)


@pytest.mark.slow
def test_ten_million_steps_of_the_scalar_rule():
    long_run(10_000_000)


@pytest.mark.parametrize("start", [2**24 - 2, 2**31 - 2, 2**53 - 2])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bias_correction", rule.BIAS_CORRECTIONS)
def test_counts_past_what_a_dtype_holds_leave_the_update_as_it_is(start, dtype, bias_correction):
    """A float32 count stays at 2²⁴; every bias correction is 1 by then, so that nothing depends on it any more."""
    hyper = Hyper(bias_correction=bias_correction, warmup_steps=5)
    one = np.ones(2, dtype)
    state = State(one, np.full(2, start, dtype), one * -1e4 if bias_correction == "exact" else None)
    rates = []
    for _ in range(6):
        step = rule.step(hyper, 1e-3, 2 * one, state, np)
        state = step.state
        rates.append(np.asarray(step.k.rate, dtype).max())
        assert np.isfinite(step.k.c2).all()
        assert (step.sun > 0).all()  # the warmup is over and stays so
    assert len(set(rates)) == 1
    assert rates[0] == np.asarray(1e-3, dtype)


def test_torch_counts_past_two_to_the_24():
    torch = pytest.importorskip("torch")
    from kourkoutas.torch import KourkoutasBeta

    ends = []
    for count in (1e6, 2.0**24 - 1, 2.0**24, 2.0**31):
        w = torch.nn.Parameter(torch.ones(3))
        optimizer = KourkoutasBeta([("w", w)], lr=0.1)
        w.grad = torch.tensor([1.0, 2.0, 3.0])
        optimizer.step()
        state = optimizer.state_dict()
        state["state"][0]["step"].fill_(count)
        optimizer.load_state_dict(state)
        for _ in range(3):
            optimizer.step()
        assert torch.isfinite(w).all()
        ends.append(w.detach().clone())
    assert all(torch.equal(end, ends[0]) for end in ends)


def test_optax_counts_up_to_the_end_of_int32_and_stays_there():
    pytest.importorskip("optax")
    import jax
    import jax.numpy as jnp
    import optax

    from kourkoutas.optax import kourkoutas_beta

    solver, params = kourkoutas_beta(0.1), {"w": jnp.ones(3)}
    g, update = {"w": jnp.array([1.0, 2.0, 3.0])}, jax.jit(solver.update)
    ends = []
    for count in (10**6, 2**24, 2**31 - 3):
        _, state = update(g, solver.init(params), params)
        state = optax.tree.set(state, count=jnp.asarray(count, jnp.int32))
        for _ in range(4):
            updates, state = update(g, state, params)
        assert int(optax.tree.get(state, "count")) == min(count + 4, 2**31 - 1)
        ends.append(np.asarray(updates["w"]))
    assert np.isfinite(ends[0]).all()
    for end in ends[1:]:
        np.testing.assert_allclose(end, ends[0], rtol=1e-6)


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("count", [2**24, 2**31 - 3])
def test_mlx_counts_up_to_the_end_of_int32_and_stays_there(count, nonfinite):
    mx = pytest.importorskip("mlx.core")
    from kourkoutas.mlx import KourkoutasBeta

    def end(count):
        optimizer, params = KourkoutasBeta(0.1, nonfinite=nonfinite), {"w": mx.ones(3)}
        g = {"w": mx.array([1.0, 2.0, 3.0])}
        params = optimizer.apply_gradients(g, params)
        optimizer.state["t"] = mx.full(optimizer.state["t"].shape, count, mx.int32)
        for _ in range(4):
            params = optimizer.apply_gradients(g, params)
        assert optimizer.state["t"].min().item() == min(count + 4, 2**31 - 1)
        return np.array(params["w"])

    np.testing.assert_array_equal(end(count), end(10**6))


def test_ten_thousand_buckets_of_one_element():
    torch = pytest.importorskip("torch")
    from kourkoutas.oracle import Oracle
    from kourkoutas.torch import KourkoutasBeta

    rng = np.random.default_rng(0)
    start, grads = rng.normal(size=10_000), rng.normal(size=(3, 10_000))
    params = [(f"p{i}", torch.nn.Parameter(torch.tensor([x]))) for i, x in enumerate(start)]
    optimizer = KourkoutasBeta(params, lr=1e-2)
    few = range(0, 10_000, 997)
    oracle = Oracle({f"p{i}": start[i : i + 1] for i in few}, lr=1e-2)
    for g in grads:
        for (_, p), x in zip(params, g, strict=True):
            p.grad = torch.tensor([x])
        optimizer.step()
        oracle.step({f"p{i}": g[i : i + 1] for i in few})
    assert len(optimizer.bucket_names) == 10_000
    for i in few:
        assert params[i][1].item() == pytest.approx(oracle.params[f"p{i}"].item(), rel=1e-12)


# Soaks: a million small steps, or as many as five minutes take, with flat memory and at a flat pace.

SECONDS, MILLION, BLOCK = 300.0, 1_000_000, 2000


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(step):
    """Steps for at most five minutes; neither memory nor the processor time of a step may grow.

    The pace of a quarter of the run is that of its fastest block of steps: other programs on the machine slow blocks
    down, and make none faster.
    """
    for t in range(BLOCK):
        step(t)
    gc.collect()
    before, began, t, paces = resident(), time.perf_counter(), 0, []
    while t < MILLION and time.perf_counter() - began < SECONDS:
        start = time.process_time()
        for _ in range(BLOCK):
            step(t)
            t += 1
        paces.append((time.process_time() - start) / BLOCK)
    gc.collect()
    grown, quarter = resident() - before, max(1, len(paces) // 4)
    first, last = min(paces[:quarter]), min(paces[-quarter:])
    print(f"{t} steps, {grown / 2**20:.1f} MiB more, {first * 1e6:.1f} µs a step at first, {last * 1e6:.1f} at the end")
    assert t >= 20_000
    assert grown < 32 * 2**20
    assert last < 1.2 * first


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads memory from /proc")
def test_soak_torch():
    torch = pytest.importorskip("torch")
    from kourkoutas.torch import KourkoutasBeta

    w = torch.nn.Parameter(torch.ones(8))
    optimizer = KourkoutasBeta([("w", w)], lr=1e-3, decay=0.98, bias_correction="exact", diagnostics=True)
    g = torch.linspace(-1, 1, 8)

    def step(t):
        w.grad = g
        optimizer.step()

    soak(step)
    assert torch.isfinite(w).all()


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads memory from /proc")
def test_soak_optax():
    pytest.importorskip("optax")
    import jax
    import jax.numpy as jnp

    from kourkoutas.optax import kourkoutas_beta

    solver = kourkoutas_beta(1e-3, decay=0.98, bias_correction="exact", diagnostics=True)
    g, held = {"w": jnp.linspace(-1, 1, 8)}, {}
    held["state"], update = solver.init(g), jax.jit(lambda s: solver.update(g, s, g)[1])

    def step(t):
        held["state"] = update(held["state"])

    soak(step)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(held["state"][0].mu))


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads memory from /proc")
def test_soak_mlx():
    mx = pytest.importorskip("mlx.core")
    from kourkoutas.mlx import KourkoutasBeta

    optimizer = KourkoutasBeta(1e-3, decay=0.98, bias_correction="exact", diagnostics=True)
    g, held = {"w": mx.linspace(-1, 1, 8)}, {"w": mx.ones(8)}

    def step(t):
        held.update(optimizer.apply_gradients(g, {"w": held["w"]}))
        mx.eval(held, optimizer.state)

    soak(step)
    assert bool(mx.isfinite(held["w"]).all())
