"""Torch's operations as they run on an accelerator, where launches are saved, tried on the CPU."""

import contextlib
import copy

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kourkoutas.torch import KourkoutasBeta, group, lists
from tests.conformance.table import CASES, CORE, EXTRA, check
from tests.torch_frontend.test_conformance import run

PLAIN = [case for case in CASES if "basis" not in case.options]
CHOSEN = [case for case in PLAIN if case.id in CORE and (case.dtype == "float32" or case.id.rsplit("-", 1)[0] in EXTRA)]
SIZES = [(3,), (4, 5), ()]


@pytest.fixture(autouse=True)
def _as_on_an_accelerator(monkeypatch):
    monkeypatch.setattr(group, "HOST", ())
    monkeypatch.setattr(lists, "HOST", ())


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.id)
def test_agrees_with_the_oracle(case, capturable):
    check(case, run(case, foreach=True, capturable=capturable))


def parameters():
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES]


def set_grads(params, t, absent=()):
    generator = torch.Generator().manual_seed(t)
    for i, p in enumerate(params):
        g = torch.randn(p.shape, generator=generator)
        p.grad = None if i in absent else g


def taken(optimizer):
    """How many steps the host knows of, and how many the device has counted."""
    known = optimizer._groups[0].taken
    return None if known is None else known.steps, optimizer._groups[0].scalars.step.tolist()


def train(optimizer, params, steps, absent=(), first=0):
    for t in range(first, first + steps):
        set_grads(params, t, absent)
        optimizer.step()


def test_steps_are_counted_beside_the_device_while_parameters_step_together():
    params = parameters()
    optimizer = KourkoutasBeta(params, foreach=True)
    train(optimizer, params, 3)
    assert taken(optimizer) == (3, [3, 3, 3])


def test_a_step_of_fewer_parameters_ends_the_counting_beside_the_device():
    params = parameters()
    optimizer = KourkoutasBeta(params, foreach=True)
    train(optimizer, params, 2)
    train(optimizer, params, 1, absent=[1])
    assert taken(optimizer) == (None, [3, 2, 3])
    train(optimizer, params, 1)
    assert taken(optimizer) == (None, [4, 3, 4])


def test_parameters_that_never_step_do_not_hinder_the_counting():
    params = parameters()
    optimizer = KourkoutasBeta(params, foreach=True)
    train(optimizer, params, 3, absent=[1])
    assert taken(optimizer) == (3, [3, 0, 3])


def test_a_count_that_somebody_wrote_is_seen():
    params = parameters()
    optimizer = KourkoutasBeta(params, foreach=True)
    train(optimizer, params, 2)
    optimizer.state[params[0]]["step"].fill_(7)
    train(optimizer, params, 1)
    assert taken(optimizer) == (None, [8, 3, 3])


def test_a_captured_step_is_not_counted_here_as_its_replays_are_not_seen():
    params = parameters()
    optimizer = KourkoutasBeta(params, foreach=True, capturable=True)
    train(optimizer, params, 2)
    assert taken(optimizer) == (None, [2, 2, 2])


def test_a_step_that_a_cuda_graph_captures_is_not_counted_here_whatever_the_options(monkeypatch):
    params = parameters()
    optimizer = KourkoutasBeta(params, foreach=True)
    train(optimizer, params, 2)
    with monkeypatch.context() as patch:
        patch.setattr(group, "is_capturing", lambda device: True)
        train(optimizer, params, 1)
    train(optimizer, params, 1)  # the graph may have taken any number of steps in between
    assert taken(optimizer) == (None, [4, 4, 4])


def test_a_state_of_fake_or_meta_tensors_is_not_read():
    for device, mode in (("cuda", FakeTensorMode()), ("meta", contextlib.nullcontext())):
        with mode:
            p = torch.nn.Parameter(torch.empty(3, device=device))
            p.grad = torch.empty(3, device=device)
            optimizer = KourkoutasBeta([p], foreach=True)
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
            assert optimizer._groups[0].taken is None


def test_a_loaded_state_is_counted_on_and_resumes_bit_for_bit():
    params = parameters()
    optimizer = KourkoutasBeta(params, foreach=True)
    train(optimizer, params, 3)
    others = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = KourkoutasBeta(others, foreach=True)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert taken(resumed) == (3, [3, 3, 3])
    for each, own in ((optimizer, params), (resumed, others)):
        train(each, own, 2, first=3)
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


def test_a_loaded_state_of_different_counts_is_not_counted_beside_the_device():
    params = parameters()
    optimizer = KourkoutasBeta(params, foreach=True)
    train(optimizer, params, 1)
    train(optimizer, params, 1, absent=[0])
    resumed = KourkoutasBeta(params, foreach=True)
    resumed.load_state_dict(optimizer.state_dict())
    assert taken(resumed) == (None, [1, 2, 2])


def test_a_skipped_step_is_not_counted():
    params = parameters()
    optimizer = KourkoutasBeta(params, foreach=True, nonfinite="skip")
    train(optimizer, params, 1)
    params[1].grad[0, 0] = torch.nan
    optimizer.step()
    assert taken(optimizer) == (None, [2, 1, 2])


@pytest.mark.parametrize("size", [1e20, 1e19])
def test_a_second_moment_that_overflowed_stays_infinite_as_on_the_cpu(size, monkeypatch):
    results = []
    for host in ((), ("cpu",)):
        monkeypatch.setattr(lists, "HOST", host)
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = KourkoutasBeta([p], lr=0.1, foreach=True)
        for g in ([1.0, size, 1.0], [1.0, 1.0, 1.0], [0.0, size, 2.0], [1.0, 1.0, 1.0]):
            p.grad = torch.tensor(g)
            optimizer.step()
        results.append((p.detach(), optimizer.state[p]["exp_avg_sq"]))
    assert results[0][1].isinf().any() == (size == 1e20)
    for accelerated, plain in zip(*results, strict=True):
        np.testing.assert_allclose(accelerated, plain, rtol=1e-5)


@pytest.mark.parametrize("lr", [0.0, 1e-30, torch.tensor(1e-2)], ids=str)
def test_learning_rates_that_cannot_be_divided_by_are_multiplied_with(lr):
    params = parameters()
    before = [p.detach().clone() for p in params]
    optimizer = KourkoutasBeta(params, lr=lr, foreach=True, bias_correction="exact")
    train(optimizer, params, 1)
    for p, x in zip(params, before, strict=True):
        assert p.isfinite().all()
        torch.testing.assert_close(p.detach(), x, rtol=0, atol=1.5 * float(lr))
