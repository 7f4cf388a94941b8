"""States that only a stranger would save. Each test is of a defect that was found by trying."""

import jax
import jax.numpy as jnp
import mlx.core as mx
import numpy as np
import optax
import pytest
import torch

from kourkoutas.mlx import KourkoutasBeta as MlxBeta
from kourkoutas.optax import kourkoutas_beta
from kourkoutas.state import mlx as mlx_state
from kourkoutas.state import optax as optax_state
from kourkoutas.state import read
from kourkoutas.state import torch as torch_state
from kourkoutas.torch import KourkoutasBeta


def test_exact_correction_asked_for_later_travels_with_the_steps_taken(tmp_path):
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = KourkoutasBeta([("w", p)], lr=1.0, beta2_min=0.999, decay=1.0)
    p.grad = torch.ones(1)
    for _ in range(50):
        optimizer.step()
    optimizer.param_groups[0]["bias_correction"] = "exact"
    torch_state.save(optimizer, tmp_path / "s")
    assert read(tmp_path / "s").scalars["log_beta2"] == pytest.approx(50 * np.log(0.999))
    solver = kourkoutas_beta(1.0, beta2_min=0.999, decay=1.0, bias_correction="exact")
    params = {"w": jnp.zeros(1)}
    state = optax_state.load(tmp_path / "s", solver.init(params))
    updates, _ = solver.update({"w": jnp.ones(1)}, state, params)
    assert updates["w"].item() == pytest.approx(-1, rel=1e-4)


def test_float64_moments_reach_mlx_with_all_their_digits(tmp_path):
    params = {"w": mx.array([1 / 3, 2 / 3], mx.float64)}
    with mx.stream(mx.cpu):
        one, other = (MlxBeta(mx.array(0.1, mx.float64)) for _ in range(2))
        one.apply_gradients({"w": mx.array([1 / 7, 1 / 9], mx.float64)}, params)
        mlx_state.save(one, tmp_path / "s")
        mlx_state.load(tmp_path / "s", other, params)
        np.testing.assert_array_equal(np.array(one.state["m"]["w"]), np.array(other.state["m"]["w"]))


def test_what_stands_beside_the_state_of_kourkoutas_stays(tmp_path):
    params = {"count": jnp.ones(3), "w": jnp.ones(2)}
    solver = optax.chain(kourkoutas_beta(optax.linear_schedule(0.1, 0.01, 10)), optax.ema(0.9))
    state = solver.init(params)
    for _ in range(2):
        _, state = jax.jit(solver.update)(params, state, params)
    optax_state.save(state, tmp_path / "s")
    fresh = solver.init(params)
    loaded = optax_state.load(tmp_path / "s", fresh)
    assert jax.tree.structure(loaded) == jax.tree.structure(fresh)
    assert loaded[1].count == 0
    assert loaded[1].ema["count"].shape == (3,)
    assert (loaded[0][0].count, loaded[0][2].count) == (2, 0)  # of Kourkoutas-β and of its schedule


def test_a_state_of_numpy_arrays_is_saved(tmp_path):
    params = {"w": jnp.ones(2)}
    solver = kourkoutas_beta(0.1)
    _, state = jax.jit(solver.update)(params, solver.init(params), params)
    optax_state.save(jax.tree.map(np.asarray, state), tmp_path / "s")
    np.testing.assert_array_equal(read(tmp_path / "s").moments["m"]["w"], state[0].mu["w"])


def test_a_state_without_parameters_is_read_back(tmp_path):
    solver = kourkoutas_beta(0.1, decay=1.0)
    optax_state.save(solver.init({}), tmp_path / "s")
    optax_state.load(tmp_path / "s", solver.init({}))
