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


@each_route_and_each_bucket_kind("plain", "foreach", "kernel", "fused", "capturable")
def test_fixed_beta2_equals_torch_adam_with_any_buckets(route, buckets):
    got = train(lambda m: fixed(m, buckets=BUCKETS[buckets], **route), least_squares)
    torch.testing.assert_close(got, adam(), rtol=0, atol=1e-6)


ADAMS = {
    "adamw": ({"weight_decay": 0.1}, {"weight_decay": 0.1}),
    "amsgrad": ({"decay": 1}, {"amsgrad": True, "weight_decay": 0}),
}


@on("plain", "foreach", "kernel", "fused", "capturable")
@pytest.mark.parametrize("name", ADAMS)
def test_a_fixed_beta2_is_adamw_and_amsgrad_within_a_millionth_after_200_steps(route, name):
    ours, theirs = ADAMS[name]
    want = train(lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, **theirs), least_squares, 200)
    got = train(lambda m: fixed(m, **ours, **route), least_squares, 200)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bias_correction", ["beta2max", "exact"])
def test_exact_and_beta2max_agree_when_beta2_is_fixed(bias_correction):
    want = train(lambda m: torch.optim.Adam(m.parameters(), lr=1e-3), mlp, 200, torch.float64)
    got = train(lambda m: fixed(m, bias_correction=bias_correction), mlp, 200, torch.float64)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@each_route_and_each_bucket_kind("plain", "foreach", "kernel", "fused")
def test_without_bias_correction_it_is_adam_without_bias_correction(route, buckets):
    got = train(lambda m: fixed(m, bias_correction="none", buckets=BUCKETS[buckets], **route), least_squares)
    torch.testing.assert_close(got, adam(bias_correction=False), rtol=0, atol=1e-6)


def test_dynamic_beta2_is_not_adam():
    want = train(lambda m: torch.optim.Adam(m.parameters(), lr=1e-3), mlp, 50)
    got = train(lambda m: KourkoutasBeta(m.parameters(), lr=1e-3), mlp, 50)
    assert not torch.allclose(got, want, atol=1e-4)


# What users of Adam type


def test_betas_are_beta1_and_beta2_max():
    p = torch.nn.Parameter(torch.ones(2))
    for optimizer in (KourkoutasBeta([p], betas=(0.8, 0.99)), KourkoutasBeta([{"params": [p], "betas": (0.8, 0.99)}])):
        assert optimizer.param_groups[0]["betas"] == (0.8, 0.99)
        optimizer.step()
    assert KourkoutasBeta([p]).param_groups[0]["betas"] == (0.9, 0.999)


@pytest.mark.parametrize("other", [{"beta1": 0.8}, {"beta2_max": 0.99}])
def test_betas_beside_beta1_or_beta2_max_are_refused(other):
    p = torch.nn.Parameter(torch.ones(2))
    message = "`betas` and `beta1` or `beta2_max` were given: leave `betas` out"
    with pytest.raises(ValueError, match=message):
        KourkoutasBeta([p], betas=(0.9, 0.999), **other)
    with pytest.raises(ValueError, match=message):
        KourkoutasBeta([{"params": [p], "betas": (0.9, 0.999), **other}])


@pytest.mark.parametrize("betas", [0.9, (0.9,), (0.9, 0.99, 0.999), "ab"])
def test_betas_that_are_no_pair_are_refused(betas):
    with pytest.raises(ValueError, match=r"`betas` must be a pair \(beta1, beta2_max\)"):
        KourkoutasBeta([torch.nn.Parameter(torch.ones(2))], betas=betas)


def test_adams_positional_arguments_mean_what_they_mean_to_adam():
    arguments = (1e-2, (0.8, 0.99), 1e-6, 0.1, True)
    ours, adams = (
        make([torch.nn.Parameter(torch.ones(2))], *arguments) for make in (KourkoutasBeta, torch.optim.AdamW)
    )
    for name in ("lr", "betas", "eps", "weight_decay", "amsgrad"):
        assert ours.param_groups[0][name] == adams.param_groups[0][name]


@pytest.mark.parametrize("in_group", [False, True])
def test_amsgrad_is_decay_1(in_group):
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    options = {"amsgrad": True}
    optimizer = KourkoutasBeta([{"params": [p], **options}]) if in_group else KourkoutasBeta([p], **options)
    optimizer.step()
    assert optimizer.param_groups[0]["decay"] == 1
    assert "max_exp_avg_sq" in optimizer.state[p]


def test_amsgrad_leaves_a_leak_as_it_is_and_is_refused_where_no_v_max_is_wanted():
    p = torch.nn.Parameter(torch.ones(2))
    assert KourkoutasBeta([p], amsgrad=True, decay=0.98).param_groups[0]["decay"] == 0.98
    with pytest.raises(ValueError, match="`amsgrad` is True, but decay=0 keeps no v_max: leave one of them out"):
        KourkoutasBeta([p], amsgrad=True, decay=0)
    with pytest.raises(TypeError, match="`amsgrad` must be True or False; got 1"):
        KourkoutasBeta([p], amsgrad=1)


def test_a_differentiable_step_is_refused_with_the_remedy():
    p = torch.nn.Parameter(torch.ones(2))
    assert KourkoutasBeta([p], differentiable=False).param_groups[0]["differentiable"] is False
    for make in (
        lambda: KourkoutasBeta([p], differentiable=True),
        lambda: KourkoutasBeta([{"params": [p], "differentiable": True}]),
    ):
        with pytest.raises(ValueError, match=r"`differentiable` is True, but .* use torch.optim.Adam"):
            make()


def test_the_groups_of_one_optimizer_make_another():
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    first = KourkoutasBeta([p], decay=0.98, betas=(0.8, 0.99))
    first.step()
    again = KourkoutasBeta(first.param_groups)
    again.step()
    assert again.param_groups[0]["decay"] == 0.98
    assert again.param_groups[0]["betas"] == (0.8, 0.99)
