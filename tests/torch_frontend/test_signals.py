"""Signals in PyTorch: their state is saved, loaded and refused, on every route."""

import copy

import pytest
import torch

from kourkoutas import signals
from kourkoutas.torch import KourkoutasBeta

ROUTES = [{}, {"fused": False}, {"foreach": True}, {"capturable": True}]


def made(signal, route, dtype=torch.float32, **options):
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(n, 3, generator=generator, dtype=dtype)) for n in (2, 4, 1)]
    named = list(zip(("a.x", "a.y", "b.x"), params, strict=True))
    return params, KourkoutasBeta(named, lr=0.05, signal=signal, buckets="module", **route, **options)


def train(params, optimizer, first, last):
    for t in range(first, last):
        generator = torch.Generator().manual_seed(100 + t)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype) * (50 if t % 7 == 0 else 1)
        optimizer.step()


@pytest.mark.parametrize("route", ROUTES, ids=str)
@pytest.mark.parametrize("signal", signals.SIGNALS[1:])
def test_a_resumed_run_goes_on_to_the_bit(signal, route):
    params, optimizer = made(signal, route, bias_correction="exact", lr_warmup=True)
    train(params, optimizer, 0, 10)
    others, again = made(signal, route, bias_correction="exact", lr_warmup=True)
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p.data)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(params, optimizer, 10, 20)
    train(others, again, 10, 20)
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)
    first, second = (optimizer.state[params[0]]["memory"], optimizer.state[params[1]]["memory"])
    assert first is second
    assert first.shape == (signals.MEMORY[signal],)


def test_the_published_signal_keeps_nothing_more():
    params, optimizer = made("sunspike", {})
    train(params, optimizer, 0, 2)
    assert "memory" not in optimizer.state[params[0]]


@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_the_memory_of_another_signal_is_refused_before_anything_moves(route):
    params, optimizer = made("centred", route)
    train(params, optimizer, 0, 3)
    optimizer.param_groups[0]["signal"] = "predictive"
    before = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError, match="`memory` in the state is not that of signal='predictive'"):
        train(params, optimizer, 3, 4)
    for p, q in zip(params, before, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("signal", signals.SIGNALS)
def test_a_fixed_beta2_is_adam_whatever_the_signal(signal):
    params, optimizer = made(signal, {}, beta2_min=0.999)
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    adam = torch.optim.Adam(others, lr=0.05, fused=True)
    train(params, optimizer, 0, 12)
    train(others, adam, 0, 12)
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # raised by torch's own imports
@pytest.mark.parametrize("signal", signals.SIGNALS[1:])
def test_a_compiled_step_has_the_signal_too(signal):
    params, optimizer = made(signal, {}, dtype=torch.float64)
    others, plain = made(signal, {}, dtype=torch.float64)
    compiled = torch.compile(optimizer.step, backend="eager")
    for t in range(4):
        for a, b in zip(params, others, strict=True):
            a.grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(t), dtype=a.dtype)
            b.grad = a.grad.clone()
        compiled()
        plain.step()
    for a, b in zip(params, others, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
