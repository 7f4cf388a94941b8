"""With a fixed β2 and the extras off, Kourkoutas-β is Adam."""

import functools
import itertools

import pytest
import torch

from kourkoutas.torch import KourkoutasBeta
from tests.torch_frontend.routes import on

BUCKETS = {kind: kind for kind in ("parameter", "module", "shape", "global")} | {"custom": lambda name, p: p.ndim}


def mlp(dtype):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(dtype)
    x, y = torch.randn(32, 6, dtype=dtype), torch.randn(32, 1, dtype=dtype)
    return model, lambda: (model(x) - y).square().mean()


def least_squares(dtype):
    """Convex, so that rounding differences do not grow: what is compared is the optimizers."""
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1).to(dtype)
    x, y = torch.randn(128, 16, dtype=dtype), torch.randn(128, 1, dtype=dtype)
    return model, lambda: 0.5 * (model(x) - y).square().mean()


def train(make, problem, steps: int = 1000, dtype=torch.float32):
    model, loss = problem(dtype)
    optimizer = make(model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def fixed(model, beta2=0.999, **options):
    return KourkoutasBeta(model.named_parameters(), lr=1e-3, beta2_min=beta2, beta2_max=beta2, **options)


def adam_without_correction(model):
    state = {p: (torch.zeros_like(p), torch.zeros_like(p)) for p in model.parameters()}

    class Adam:
        def zero_grad(self):
            model.zero_grad()

        @torch.no_grad()
        def step(self):
            for p, (m, v) in state.items():
                m.mul_(0.9).add_(p.grad, alpha=0.1)
                v.mul_(0.999).addcmul_(p.grad, p.grad, value=1 - 0.999)
                p.sub_(1e-3 * m / (v.sqrt() + 1e-8))

    return Adam()


@functools.cache
def adam(bias_correction: bool = True) -> torch.Tensor:
    """What 1,000 steps of Adam make of the least squares."""
    if not bias_correction:
        return train(adam_without_correction, least_squares)
    return train(lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, betas=(0.9, 0.999)), least_squares)


def each_route_and_each_bucket_kind(*routes):
    """Every route with one bucket per parameter and with one for all, and every kind of bucket on the first route."""
    pairs = [*itertools.product(routes, ("parameter", "global")), *((routes[0], kind) for kind in BUCKETS)]
    return pytest.mark.parametrize(("route", "buckets"), list(dict.fromkeys(pairs)), indirect=["route"])


@each_route_and_each_bucket_kind("plain", "foreach", "kernel", "host", "capturable")
def test_fixed_beta2_equals_torch_adam_with_any_buckets(route, buckets):
    got = train(lambda m: fixed(m, buckets=BUCKETS[buckets], **route), least_squares)
    torch.testing.assert_close(got, adam(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("buckets", ["parameter", "global"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_fused_route_gives_the_bits_of_fused_adamw(buckets, weight_decay, dtype):
    options = {"weight_decay": weight_decay, "fused": True}
    want = train(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, **options), mlp, 100, dtype)
    got = train(lambda m: fixed(m, buckets=buckets, **options), mlp, 100, dtype)
    assert torch.equal(got, want)


def test_the_fused_route_gives_the_bits_of_fused_amsgrad():
    want = train(lambda m: torch.optim.Adam(m.parameters(), lr=1e-3, amsgrad=True, fused=True), mlp, 100)
    assert torch.equal(train(lambda m: fixed(m, decay=1, fused=True), mlp, 100), want)


@on("plain", "foreach")
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}], ids=["adam", "adamw"])
def test_the_plain_and_foreach_routes_give_the_bits_of_adam(route, options):
    foreach = bool(route["foreach"])
    want = train(
        lambda m: torch.optim.AdamW(m.parameters(), 1e-3, foreach=foreach, **{"weight_decay": 0.0, **options}), mlp
    )
    assert torch.equal(train(lambda m: fixed(m, **options, **route), mlp), want)


@pytest.mark.parametrize("bias_correction", ["beta2max", "exact"])
def test_exact_and_beta2max_agree_when_beta2_is_fixed(bias_correction):
    want = train(lambda m: torch.optim.Adam(m.parameters(), lr=1e-3), mlp, 200, torch.float64)
    got = train(lambda m: fixed(m, bias_correction=bias_correction), mlp, 200, torch.float64)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@each_route_and_each_bucket_kind("plain", "foreach", "kernel", "host")
def test_without_bias_correction_it_is_adam_without_bias_correction(route, buckets):
    got = train(lambda m: fixed(m, bias_correction="none", buckets=BUCKETS[buckets], **route), least_squares)
    torch.testing.assert_close(got, adam(bias_correction=False), rtol=0, atol=1e-6)


def test_dynamic_beta2_is_not_adam():
    want = train(lambda m: torch.optim.Adam(m.parameters(), lr=1e-3), mlp, 50)
    got = train(lambda m: KourkoutasBeta(m.parameters(), lr=1e-3), mlp, 50)
    assert not torch.allclose(got, want, atol=1e-4)
