"""Adam with Adafactor's β2: it is Adam with exact bias correction and the β2 of the schedule."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("pydantic")

import torch

from kourkoutas.lab.optimizers import recipes

SHAPES = ((3, 2), (4,))


def grads(t):
    rng = np.random.default_rng(t)
    return [rng.normal(size=shape).astype(np.float32) * (20 if t % 9 == 5 else 1) for shape in SHAPES]


def plain_adam(beta2_of, steps, lr=0.01):
    """Adam by its equations in float64; β2 of leaf i at step t from `beta2_of(i, t)`."""
    theta = [np.ones(shape) for shape in SHAPES]
    m, v, product = [0.0] * 2, [0.0] * 2, [1.0] * 2
    for t in range(1, steps + 1):
        for i, g in enumerate(grads(t)):
            beta2 = beta2_of(i, t)
            m[i] = 0.9 * m[i] + 0.1 * g
            v[i] = beta2 * v[i] + (1 - beta2) * g.astype(np.float64) ** 2
            product[i] *= beta2
            theta[i] = theta[i] - lr * m[i] / (1 - 0.9**t) / (np.sqrt(v[i] / (1 - product[i])) + 1e-8)
    return theta


def by_torch(label, steps, lr=0.01, reload_at=None):
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    named = [(str(i), p) for i, p in enumerate(params)]
    recipe = recipes.recipe(label)
    optimizer = recipe.torch(named)
    for t in range(1, steps + 1):
        if t == reload_at:
            saved = optimizer.state_dict()
            optimizer = recipe.torch(named)
            optimizer.load_state_dict(saved)
        for group in optimizer.param_groups:
            group["lr"] = lr
        for p, g in zip(params, grads(t), strict=True):
            p.grad = torch.from_numpy(g)
        optimizer.step()
    return [p.detach().numpy() for p in params], optimizer


def by_optax(label, steps, lr=0.01):
    jax = pytest.importorskip("jax")
    optax = pytest.importorskip("optax")
    solver = recipes.recipe(label).optax()(lr)
    params = [jax.numpy.ones(shape) for shape in SHAPES]
    state = solver.init(params)
    update = jax.jit(solver.update)
    for t in range(1, steps + 1):
        updates, state = update([jax.numpy.asarray(g) for g in grads(t)], state, params)
        params = optax.apply_updates(params, updates)
    return [np.asarray(p) for p in params], state


@pytest.mark.parametrize("engine", [by_torch, by_optax])
def test_adafactors_schedule_is_one_minus_a_power_of_the_step(engine):
    got, _ = engine("adafactor-beta2", 40)
    for a, b in zip(got, plain_adam(lambda i, t: 1 - t**-0.8, 40), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_it_resumes_to_the_bit():
    there, _ = by_torch("adafactor-beta2", 20)
    again, _ = by_torch("adafactor-beta2", 20, reload_at=11)
    for a, b in zip(there, again, strict=True):
        np.testing.assert_array_equal(a, b)


def test_warmed_it_has_the_factor_of_a_warmed_adam():
    t = np.arange(1, 50)
    assert recipes.recipe("adafactor-beta2-warm").family == "adafactor-beta2"
    want = recipes.recipe("adam999-warm").lr_factor(t)
    np.testing.assert_array_equal(recipes.recipe("adafactor-beta2-warm").lr_factor(t), want)
