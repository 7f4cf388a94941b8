"""The lean step without the native kernel: when it is taken, and that it holds on to nothing.

That it is right is for the conformance table, whose route "fused-adam" takes it whenever every gradient is there.
"""

import gc
import weakref

import pytest
import torch

from kbeta.torch import KourkoutasBeta, folded, native


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
