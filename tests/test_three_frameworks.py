"""One training, written three times in each framework's own terms, from the same NumPy numbers."""

import numpy as np
import pytest

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
