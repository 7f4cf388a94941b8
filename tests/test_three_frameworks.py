"""One training, written three times in each framework's own terms, from the same NumPy numbers."""

import numpy as np
import pytest

from kourkoutas.oracle import Oracle
from kourkoutas.rule import Hyper

STEPS = 200
SIZES = [(8, 16), (16, 16), (16, 1)]


def numbers():
    rng = np.random.default_rng(0)
    params = {}
    for i, (n, m) in enumerate(SIZES):
        params[f"w{i}"] = (rng.normal(size=(n, m)) / np.sqrt(n)).astype(np.float32)
        params[f"b{i}"] = np.zeros(m, np.float32)
    x = rng.normal(size=(64, 8)).astype(np.float32)
    y = np.tanh(x[:, :1] - x[:, 1:2]).astype(np.float32)
    y[:4] *= 8  # outliers, for gradients that spike when their mini-batch comes up
    return params, x, y


def batches(x, y):
    for t in range(STEPS):
        rows = slice(16 * (t % 4), 16 * (t % 4) + 16)
        yield x[rows], y[rows]


def torch_losses(options):
    import torch

    from kourkoutas.torch import KourkoutasBeta

    start, x, y = numbers()
    params = {name: torch.nn.Parameter(torch.from_numpy(p.copy())) for name, p in start.items()}
    optimizer = KourkoutasBeta(params.items(), lr=1e-2, **options)
    losses = []
    for xs, ys in batches(torch.from_numpy(x), torch.from_numpy(y)):
        h = torch.tanh(xs @ params["w0"] + params["b0"])
        h = torch.tanh(h @ params["w1"] + params["b1"])
        loss = (h @ params["w2"] + params["b2"] - ys).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def jax_losses(options):
    import jax
    import jax.numpy as jnp
    import optax

    from kourkoutas.optax import kourkoutas_beta

    params, x, y = numbers()
    solver = kourkoutas_beta(1e-2, **options)

    def loss_fn(p, xs, ys):
        h = jnp.tanh(xs @ p["w0"] + p["b0"])
        h = jnp.tanh(h @ p["w1"] + p["b1"])
        return jnp.square(h @ p["w2"] + p["b2"] - ys).mean()

    @jax.jit
    def step(params, state, xs, ys):
        loss, grads = jax.value_and_grad(loss_fn)(params, xs, ys)
        updates, state = solver.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state = solver.init(params)
    losses = []
    for xs, ys in batches(x, y):
        params, state, loss = step(params, state, xs, ys)
        losses.append(float(loss))
    return losses


def mlx_losses(options):
    import mlx.core as mx

    from kourkoutas.mlx import KourkoutasBeta

    start, x, y = numbers()
    params = {name: mx.array(p) for name, p in start.items()}
    optimizer = KourkoutasBeta(1e-2, **options)

    def loss_fn(p, xs, ys):
        h = mx.tanh(xs @ p["w0"] + p["b0"])
        h = mx.tanh(h @ p["w1"] + p["b1"])
        return mx.square(h @ p["w2"] + p["b2"] - ys).mean()

    losses = []
    for xs, ys in batches(mx.array(x), mx.array(y)):
        loss, grads = mx.value_and_grad(loss_fn)(params, xs, ys)
        params = optimizer.apply_gradients(grads, params)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "options",
    [{}, {"buckets": "shape", "decay": 0.98, "max_ratio": 3, "adaptive_tiny": True, "warmup_steps": 10}],
    ids=["default", "full"],
)
def test_torch_jax_and_mlx_follow_the_same_losses(options):
    reference = np.array(torch_losses(options))
    assert reference[-40:].mean() < 0.8 * reference[:40].mean()
    for losses in (jax_losses(options), mlx_losses(options)):
        np.testing.assert_allclose(losses, reference, rtol=1e-4)


def complex_torch(start, grads, options):
    import torch

    from kourkoutas.torch import KourkoutasBeta

    z = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = KourkoutasBeta([("z", z)], lr=1e-2, **options)
    for g in grads:
        z.grad = torch.from_numpy(g)
        optimizer.step()
    return z.detach().numpy()


def complex_jax(start, grads, options):
    import jax
    import jax.numpy as jnp
    import optax

    from kourkoutas.optax import kourkoutas_beta

    solver = kourkoutas_beta(1e-2, **options)
    tree = {"z": jnp.asarray(start)}
    state, update = solver.init(tree), jax.jit(solver.update)
    for g in grads:
        updates, state = update({"z": jnp.asarray(g)}, state, tree)
        tree = optax.apply_updates(tree, updates)
    return np.asarray(tree["z"])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"beta2_min": 0.95, "beta2_max": 0.95}, id="fixed"),
        pytest.param({"max_ratio": 0.3, "decay": 0.0}, id="max_ratio bounds each part"),
        pytest.param({"decay": 0.98, "adaptive_tiny": True, "tiny_denom": 1e-2}, id="full"),
    ],
)
@pytest.mark.parametrize(("module", "train"), [("torch", complex_torch), ("optax", complex_jax)])
def test_a_complex_parameter_is_a_pair_of_real_ones(module, train, options):
    pytest.importorskip(module)
    rng = np.random.default_rng(2)
    start, *grads = [rng.normal(size=(3, 2)).astype(np.float32) for _ in range(41)]
    oracle = Oracle({"z": start}, Hyper(**options), lr=1e-2)
    for g in grads:
        oracle.step({"z": g})
    got = train(start.view(np.complex64)[:, 0], [g.view(np.complex64)[:, 0] for g in grads], options)
    np.testing.assert_allclose(np.stack([got.real, got.imag], -1), oracle.params["z"], rtol=0, atol=1e-6)


def test_a_fixed_beta2_on_complex_numbers_is_torchs_adam_and_not_optaxs():
    torch, optax = pytest.importorskip("torch"), pytest.importorskip("optax")
    rng = np.random.default_rng(2)
    start, *grads = [rng.normal(size=(3, 2)).astype(np.float32).view(np.complex64)[:, 0] for _ in range(41)]
    ours = complex_jax(start, grads, {"beta2_min": 0.999, "beta2_max": 0.999})
    z = torch.nn.Parameter(torch.from_numpy(start.copy()))
    adam = torch.optim.Adam([z], lr=1e-2)
    for g in grads:
        z.grad = torch.from_numpy(g)
        adam.step()
    np.testing.assert_allclose(ours, z.detach().numpy(), rtol=0, atol=1e-6)
    solver = optax.adam(1e-2)
    theirs, state = start, solver.init(start)
    for g in grads:
        updates, state = solver.update(g, state)
        theirs = optax.apply_updates(theirs, updates)
    assert np.abs(np.asarray(theirs) - ours).max() > 1e-3
