"""The lean step without the native kernel: when it is taken, and that it holds on to nothing.

That it is right is for the conformance table, whose route "fused-adam" takes it whenever every gradient is there.
"""

import gc
import weakref

import pytest
import torch

from kourkoutas.torch import KourkoutasBeta, folded, native


@pytest.fixture
def taken(monkeypatch):
    """Whether each group of each step was folded."""
    monkeypatch.setattr(native, "kernel", None)
    seen = []
    apply = folded.Folded.apply
    monkeypatch.setattr(folded.Folded, "apply", lambda self, *args: seen.append(True) or apply(self, *args))
    return seen


def parameters(*shapes, dtype=torch.float32):
    params = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]
    for p in params:
        p.grad = torch.full_like(p, 0.5)
    return params


@pytest.mark.parametrize("options", [{}, {"buckets": "global"}, {"weight_decay": 0.1, "warmup_steps": 3}], ids=str)
def test_the_usual_step_is_folded_once_its_state_is_there(taken, options):
    optimizer = KourkoutasBeta(parameters((3,), (2, 2)), **options)
    for _ in range(3):
        optimizer.step()
    assert len(taken) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"max_ratio": 3.0},
        {"adaptive_tiny": True},
        {"bias_correction": "exact"},
        {"nonfinite": "skip"},
        {"foreach": True},
        {"fused": False},
        {"capturable": True},
        {"diagnostics": True},
        {"beta2_min": 0.999},
    ],
    ids=str,
)
def test_other_options_go_the_general_way(taken, options):
    optimizer = KourkoutasBeta(parameters((3,), (2, 2)), **options)
    optimizer.step()
    optimizer.step()
    assert not taken


def test_waves_cover_all_tensors_in_order():
    size = folded._WAVE
    assert folded.waves([1, 2, 3]) == [(0, 3)]
    assert folded.waves([size, 1, 2]) == [(0, 1), (1, 3)]
    assert folded.waves([1, size, 2 * size]) == [(0, 2), (2, 3)]


@pytest.mark.parametrize("buckets", ["parameter", "shape"])
def test_waves_do_not_change_the_result(taken, monkeypatch, buckets):
    def train(steps=3):
        generator = torch.Generator().manual_seed(0)
        params = parameters((3,), (2, 2), (4,), (3,), (5,))
        optimizer = KourkoutasBeta(params, lr=0.1, buckets=buckets)
        for _ in range(steps):
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
            optimizer.step()
        return params, [optimizer.state[p]["norm_ema"] for p in params]

    one, one_ema = train()
    monkeypatch.setattr(folded, "_WAVE", 5)
    many, many_ema = train()
    assert len(taken) == 4
    torch.testing.assert_close(one, many, rtol=1e-6, atol=0)
    torch.testing.assert_close(one_ema, many_ema, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["missing", "transposed"])
def test_unusual_tensors_go_the_general_way_and_back(taken, name):
    params, others = parameters((3,), (2, 3)), parameters((3,), (2, 3))
    ours, plain = KourkoutasBeta(params), KourkoutasBeta(others, fused=False)
    for t in range(4):
        for ps in (params, others):
            for p in ps:
                p.grad = torch.full_like(p, 0.5 + t)
            if t == 2 and name == "missing":
                ps[0].grad = None
            if t == 2 and name == "transposed":
                ps[1].grad = torch.full((3, 2), 0.5 + t).t()
        ours.step()
        plain.step()
    assert len(taken) == 2
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_one_unusual_group_sends_all_the_general_way(taken):
    first, second = parameters((3,)), parameters((4,))
    optimizer = KourkoutasBeta([{"params": first}, {"params": second, "max_ratio": 2.0}])
    optimizer.step()
    optimizer.step()
    assert not taken


def test_no_gradient_outlives_its_step(taken):
    params = parameters((3,), (2, 2))
    optimizer = KourkoutasBeta(params)
    optimizer.step()
    optimizer.step()
    kept = [weakref.ref(p.grad) for p in params]
    optimizer.zero_grad()
    gc.collect()
    assert taken
    assert all(grad() is None for grad in kept)
