"""Gradients and parameters laid out at random: the process survives, and every route gives what the lists give.

A case is a handful of tiny tensors whose parameter and gradient have each been cut, turned, expanded, negated or
conjugated at random; what the C kernel or torch's fused Adam kernel does not understand must reach the lists.
"""

import random

import pytest
import torch

from kourkoutas.torch import KourkoutasBeta
from tests.torch_frontend.routes import on

TENSORS = 4
DTYPES = [torch.float32] * 4 + [torch.float64, torch.bfloat16, torch.float16, torch.complex64]
SHAPES = [(), (1,), (5,), (0,), (0, 3), (2, 3), (1, 4), (3, 1, 2), (2, 3, 2, 2), (1, 3, 2, 2)]
OPTIONS = [
    {},
    {"buckets": "shape", "decay": 0.98, "max_ratio": 3.0, "adaptive_tiny": True},
    {"bias_correction": "exact", "weight_decay": 0.1, "buckets": "global"},
    {"nonfinite": "skip", "maximize": True, "warmup_steps": 1},
]


def values(shape, dtype, generator):
    real = dtype.to_real() if dtype.is_complex else dtype
    x = torch.randn(shape, generator=generator).to(real)
    return torch.complex(x, torch.randn(shape, generator=generator)) if dtype.is_complex else x


def laid_out(shape, dtype, rng, generator, gradient):
    """A tensor of that shape, and the name of its layout."""
    kinds = ["plain", "transposed", "strided", "flipped axes"]
    if len(shape) == 4:
        kinds.append("channels last")
    if gradient:
        kinds += ["expanded", "negated", "zero tensor", "offset"]
        kinds += ["conjugated"] if dtype.is_complex else []
    kind = rng.choice(kinds)
    x = values(shape, dtype, generator)
    if kind == "transposed" and len(shape) > 1:
        x = values(shape[::-1], dtype, generator).permute(*reversed(range(len(shape))))
    elif kind == "strided" and shape:
        x = values((*shape[:-1], 2 * shape[-1]), dtype, generator)[..., ::2]
    elif kind == "flipped axes" and len(shape) > 2:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif kind == "channels last":
        x = x.to(memory_format=torch.channels_last)
    elif kind == "expanded" and shape:
        x = values((1,) * len(shape), dtype, generator).expand(shape)
    elif kind == "negated" and not dtype.is_complex and dtype in (torch.float32, torch.float64):
        pair = torch.complex(x, values(shape, dtype, generator))
        x = pair.conj().imag
    elif kind == "zero tensor":
        x = torch._efficientzerotensor(shape, dtype=dtype)
    elif kind == "offset" and shape:
        x = values((shape[0] + 1, *shape[1:]), dtype, generator)[1:]
    elif kind == "conjugated":
        x = x.conj()
    return x


def copied(x):
    """A plain tensor with the same numbers."""
    zeros = torch.zeros(x.shape, dtype=x.dtype)
    return zeros if x._is_zerotensor() else zeros.copy_(x)


def run_case(seed, route):
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    options = rng.choice(OPTIONS)
    ours, theirs = [], []
    for _ in range(rng.randint(1, TENSORS)):
        x = laid_out(rng.choice(SHAPES), rng.choice(DTYPES), rng, generator, gradient=False)
        ours.append(torch.nn.Parameter(x))
        theirs.append(torch.nn.Parameter(x.detach().clone(memory_format=torch.preserve_format)))
    one = KourkoutasBeta(ours, lr=0.1, eps=1e-3, **options, **route)
    other = KourkoutasBeta(theirs, lr=0.1, eps=1e-3, fused=False, **options)
    for _ in range(2):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = None if rng.random() < 0.1 else laid_out(p.shape, p.dtype, rng, generator, gradient=True)
            q.grad = None if p.grad is None else copied(p.grad)
        one.step()
        other.step()
    names = {"kernel" if way.name == "kernel" else "fused" if way.fused else "foreach" for way in one.route()}
    for p, q in zip(ours, theirs, strict=True):
        tolerance = {torch.bfloat16: 2e-2, torch.float16: 3e-3}.get(p.dtype, 1e-5)
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance, msg=lambda text: f"seed {seed}: {text}")
    return names


def check(seeds, route):
    names = set()
    for seed in seeds:
        names |= run_case(seed, route)
    return names


@on("kernel", "fused")
def test_a_thousand_random_layouts_agree_with_the_lists(route, request):
    names = check(range(500), route)
    assert names >= {request.node.callspec.params["route"], "foreach"}  # both ways were taken


@pytest.mark.slow
@on("kernel", "fused", "plain")
def test_ten_thousand_random_layouts_agree_with_the_lists(route):
    check(range(500, 3500), route)
