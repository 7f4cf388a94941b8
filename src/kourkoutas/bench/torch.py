"""PyTorch's contestants."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch

from kourkoutas.bench.shapes import FULL, Shape
from kourkoutas.bench.timing import Contestant
from kourkoutas.torch import KourkoutasBeta, kernel

VERSION = torch.__version__
LR = 1e-7  # so small that thousands of steps leave parameters as large as those of a network: see `adaptive_tiny`


def tensors(shapes: list[Shape], dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(0.1 * torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    for p in params:
        p.grad = torch.full_like(p, 1e-3)
    return params


def contestant(optimizer: torch.optim.Optimizer, baseline: str, with_kernel: bool = True) -> Contestant:
    """`optimizer` after its first step; `with_kernel` False keeps the C kernel out of it."""

    def steps(k: int) -> float:
        ours = kernel.extension
        if not with_kernel:
            kernel.extension = None
        step: Callable[[], Any] = optimizer.step
        gc.disable()
        start = time.perf_counter()
        for _ in range(k):
            step()
        elapsed = time.perf_counter() - start
        gc.enable()
        kernel.extension = ours
        return elapsed

    steps(1)
    state = {id(x): x for s in optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor)}
    return Contestant(steps, baseline, sum(x.numel() * x.element_size() for x in state.values()))


def contestants(shapes: list[Shape], threads: int) -> dict[str, Contestant]:
    """Parameters and gradients are shared as far as possible: what differs is the step."""
    torch.set_num_threads(threads)
    params = tensors(shapes)
    names = [(f"p{i}", p) for i, p in enumerate(params)]
    base = "Adam fused"
    out = {
        base: contestant(torch.optim.Adam(params, LR, fused=True), base),
        "Adam foreach": contestant(torch.optim.Adam(params, LR, foreach=True), base),
        "AMSGrad fused": contestant(torch.optim.Adam(params, LR, fused=True, amsgrad=True), base),
    }
    if kernel.extension is not None:
        out["K-β"] = contestant(KourkoutasBeta(names, LR), base)
        out["K-β full"] = contestant(KourkoutasBeta(names, LR, **FULL), base)
        out["K-β traced"] = contestant(KourkoutasBeta(names, LR, diagnostics=True), "K-β")
    out["K-β, no kernel"] = contestant(KourkoutasBeta(names, LR), base, with_kernel=False)
    return out
