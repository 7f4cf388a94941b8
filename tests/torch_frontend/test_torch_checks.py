"""The properties that PyTorch's own optimizer tests ask of Adam, asked of Kourkoutas-β.

The configurations are Adam's, read from torch.testing._internal.common_optimizers where that is installed with torch;
amsgrad=True is decay=1 here, and Adam's betas are beta1 and beta2_max.
"""

import pytest
import torch

from kourkoutas.torch import KourkoutasBeta


def adam_configurations():
    from torch.testing._internal.common_optimizers import optim_inputs_func_adam

    for entry in optim_inputs_func_adam("cpu"):
        options = dict(entry.kwargs)
        if options.pop("amsgrad", False):
            options["decay"] = 1
        if "betas" in options:
            options["beta1"], options["beta2_max"] = options.pop("betas")
        yield pytest.param(options, id=entry.desc)
    yield pytest.param({"decay": 0.98, "max_ratio": 3, "adaptive_tiny": True, "warmup_steps": 3}, id="full")
    yield pytest.param({"bias_correction": "exact", "buckets": "shape"}, id="exact, shape")
    yield pytest.param({"buckets": "global", "nonfinite": "skip"}, id="global, skip")


CONFIGURATIONS = list(adam_configurations())


def model(dtype):
    torch.manual_seed(1)
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 10), torch.nn.Linear(10, 10), torch.nn.Sigmoid(), torch.nn.Linear(10, 1), torch.nn.Sigmoid()
    ).to(dtype)
    net.register_parameter("last", torch.nn.Parameter(torch.tensor(0.5, dtype=dtype)))
    return net


def run(dtype, **options):
    """Seven steps: a missing gradient at step 2, a frozen layer at steps 3 to 5, a 0-dim last parameter."""
    net = model(dtype)
    x = torch.linspace(-1, 1, 6, dtype=dtype)
    optimizer = KourkoutasBeta(net.named_parameters(), **options)
    frozen = net[1]
    for i in range(7):
        optimizer.zero_grad()
        frozen.requires_grad_(not 3 <= i <= 5)
        (net(x) * net.last).sum().backward()
        if i == 2:
            next(net.parameters()).grad = None
        optimizer.step()
    return net, optimizer


@pytest.mark.parametrize("options", CONFIGURATIONS)
@pytest.mark.parametrize("route", [{"foreach": True}, {"fused": True}], ids=["foreach", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_foreach_and_fused_equal_plain_for_parameters_and_every_state_tensor(options, route, dtype):
    net, plain = run(dtype, foreach=False, fused=False, **options)
    other, optimizer = run(dtype, **route, **options)
    tolerance = {"rtol": 1e-2, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-7}
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, **tolerance)
        a, b = plain.state[p], optimizer.state[q]
        assert a.keys() == b.keys()
        for name in a:
            torch.testing.assert_close(a[name], b[name], **tolerance)


@pytest.mark.parametrize("options", CONFIGURATIONS)
def test_the_step_leaves_the_gradients_as_they_were(options):
    net = model(torch.float32)
    for route in ({"foreach": False, "fused": False}, {"foreach": True}, {"fused": True}):
        optimizer = KourkoutasBeta(net.named_parameters(), **options, **route)
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        assert all(torch.equal(p.grad, torch.ones_like(p)) for p in net.parameters())


def test_zero_learning_rate_changes_no_parameter():
    net = model(torch.float32)
    before = [p.detach().clone() for p in net.parameters()]
    optimizer = KourkoutasBeta(net.parameters(), lr=0.0, weight_decay=0.5)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
