"""The Triton kernel, interpreted on the CPU (see conftest.py): what it takes, what it leaves, what it promises."""

import pytest
import torch

from kourkoutas.torch import KourkoutasBeta

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("interpreted")]
OPTIONS = {
    "default": {},
    "full": {"decay": 0.98, "max_ratio": 3.0, "adaptive_tiny": True},
    "amsgrad-decay": {"decay": 1, "weight_decay": 0.1},
    "clip-maximize": {"decay": 0, "max_ratio": 0.01, "maximize": True},
    "exact-skip": {"bias_correction": "exact", "nonfinite": "skip", "buckets": "shape"},
}


@pytest.fixture
def launches(interpreted, monkeypatch):
    from kourkoutas.torch import gpu

    made = []

    class Counting:
        def __getitem__(self, grid):
            def launch(*args, **options):
                made.append(args[0])
                return real[grid](*args, **options)

            return launch

    real = gpu._update
    monkeypatch.setattr(gpu, "_update", Counting())
    return made


def train(steps=5, dtype=torch.float32, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(7, 5), (1500,), (3, 4, 5, 6), ()]
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    params[2].data = params[2].data.to(memory_format=torch.channels_last)
    optimizer = KourkoutasBeta(params, lr=0.05, capturable=True, **{"fused": True, **options})
    for _ in range(steps):
        for p in params:
            g = torch.randn(p.shape, generator=generator).to(dtype)
            p.grad = g.to(memory_format=torch.channels_last) if p.dim() == 4 else g
        optimizer.step()
    return params, optimizer


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_triton_gives_what_torch_gives(launches, options, dtype):
    # The interpreter cuts to bfloat16 where a GPU rounds: one unit in the last place, at every step.
    steps = 1 if dtype is torch.bfloat16 else 5
    ours, optimizer = train(steps, dtype, **options)
    assert len(launches) == steps * len(ours)
    theirs, other = train(steps, dtype, fused=None, foreach=True, **options)
    assert len(launches) == steps * len(ours)
    tolerance = {"rtol": max(2 * torch.finfo(dtype).eps, 1e-6), "atol": 1e-6}
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, **tolerance)
        for name, x in optimizer.state[p].items():
            torch.testing.assert_close(x, other.state[q][name], **tolerance)


def test_triton_leaves_small_strided_and_double_tensors_to_torch(launches, monkeypatch):
    from kourkoutas.torch import gpu

    train(dtype=torch.float64)
    assert not launches
    monkeypatch.setattr(gpu, "SMALL", 1000)
    train()
    assert [p.numel() for p in launches] == [1500] * 5
    pair = [torch.nn.Parameter(torch.ones(40, 50)) for _ in range(2)]
    for p, options in zip(pair, ({"fused": True}, {"foreach": False}), strict=True):
        p.grad = torch.arange(2000.0).view(50, 40).T
        KourkoutasBeta([p], lr=0.1, capturable=True, **options).step()
    assert len(launches) == 5
    assert torch.equal(*pair)


def test_triton_is_used_only_when_it_was_asked_for(launches):
    train(fused=None)
    train(fused=False)
    train(state_dtype=torch.bfloat16)
    assert not launches


def test_triton_bumps_the_versions_of_what_it_writes(launches):
    params, optimizer = train(steps=1)
    versions = [
        t._version for p in params for t in (p, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"])
    ]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    now = [t._version for p in params for t in (p, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"])]
    assert all(b > a for a, b in zip(versions, now, strict=True))
