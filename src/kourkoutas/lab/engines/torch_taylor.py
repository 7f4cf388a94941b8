"""`taylor_layer` and `taylor_squares` for PyTorch.

`taylor_squares` is a C kernel on the CPU (`kourkoutas._native.taylor`), which takes blocks of rows through the whole
network and back while they are in cache. `taylor_layer` serves everywhere else: the backward pass is written by hand,
and both passes are fused where a C++ compiler is at hand.

NOTE: only x, w, z = x·w and b are kept for the backward pass, where autograd of the plain formula keeps nine arrays of
the size of the values. What is fused is the two elementwise parts, not the network: all layers share them, so that they
are compiled once, in seconds, however deep the network is.
"""

from __future__ import annotations

import functools
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kourkoutas import _native
from kourkoutas.lab.engines import Squares
from kourkoutas.lab.engines.taylor import Counts, rows, taylor_silu

Passes = tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor, Tensor], Tensor]]


def pull_back(counts: Counts, z: Tensor, b: Tensor, G: Tensor) -> Tensor:
    """∂loss/∂z from G = ∂loss/∂(taylor_silu of z and b); see `kourkoutas.lab.engines.taylor` for the names."""
    n, m, _ = counts
    end = rows(counts)
    a = z[: end[0]] + b
    a1, a2, a3, La = z[end[0] : end[1]], z[end[1] : end[2]], z[end[2] : end[3]], z[end[3] :]
    G0, G1, G2, G3, GL = G[: end[0]], G[end[0] : end[1]], G[end[1] : end[2]], G[end[2] : end[3]], G[end[3] :]
    s = torch.sigmoid(a)
    u = s * (1 - s)
    f1 = s + a * u
    # Points with all five channels:
    #   a   ← f' G + f'' (Σ a_i G_i + L a · GL) + f''' Σ a_i² GL
    #   a_i ← f' G_i + 2 f'' a_i GL
    #   L a ← f' GL
    A, S, U, F = a[:n], s[:n], u[:n], f1[:n]
    r = 1 - 2 * S
    f2 = U * (2 + A * r)
    f3 = U * (r * (3 + A * r) - 2 * A * U)
    twice = 2 * f2 * GL
    inner = a1[:n] * G1[:n] + a2 * G2 + a3 * G3 + La * GL
    squares = a1[:n] * a1[:n] + a2 * a2 + a3 * a3
    full = F * G0[:n] + f2 * inner + f3 * squares * GL
    # Points with one slope: a ← f' G + f'' a_1 G_1
    one = slice(n, n + m)
    sloped = f1[one] * G0[one] + u[one] * (2 + a[one] * (1 - 2 * s[one])) * a1[n:] * G1[n:]
    return torch.cat(
        [
            full,
            sloped,
            f1[n + m :] * G0[n + m :],
            F * G1[:n] + twice * a1[:n],
            f1[one] * G1[n:],
            F * G2 + twice * a2,
            F * G3 + twice * a3,
            F * GL,
        ]
    )


def has_compiler() -> bool:
    """Whether torch.compile finds a C++ compiler for the CPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++", "cl") if name)


def compiled(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`f` through torch.compile, or as it is, with a warning, where there is no compiler."""
    if has_compiler():
        return torch.compile(f, dynamic=False)
    warnings.warn(
        "no C++ compiler found, so torch.compile cannot fuse the steps of this testbed: they take up to twice as long. "
        "Install g++ or clang++, or use --engine jax",
        stacklevel=2,
    )
    return f


@functools.lru_cache(maxsize=16)
def passes(counts: Counts, fused: bool) -> Passes:
    """The elementwise parts of a layer: (z, b) → h and (z, b, G) → ∂loss/∂z."""
    from kourkoutas.lab.engines.torch import ENGINE

    forward = functools.partial(taylor_silu, ENGINE, counts=counts)
    backward = functools.partial(pull_back, counts)
    if not fused:
        return forward, backward
    return compiled(forward), compiled(backward)


class TaylorLayer(torch.autograd.Function):
    """(x, w, b) → taylor_silu(x·w, b), with its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor, counts: Counts, fused: bool) -> Tensor:  # type: ignore[override]
        z = x @ w
        ctx.save_for_backward(x, w, z, b)
        ctx.counts, ctx.fused = counts, fused
        return passes(counts, fused)[0](z, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None, None]:
        x, w, z, b = ctx.saved_tensors
        g = passes(ctx.counts, ctx.fused)[1](z, b, grads[0].contiguous())
        values = g[: rows(ctx.counts)[0]]
        return g @ w.T if ctx.needs_input_grad[0] else None, x.T @ g, values.sum(0), None, None


def suits(tensors: Sequence[Tensor]) -> bool:
    """Whether the C kernel was built and can read these."""
    return _native.taylor is not None and all(
        t.dtype is torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors
    )


class TaylorSquares(torch.autograd.Function):
    """(x, targets, squares, parameters) → loss; the gradient is found with it, as both need the same block in cache."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, targets: Tensor, squares: Squares, *params: Tensor) -> Tensor:  # type: ignore[override]
        grads = [torch.empty_like(p) for p in params] if any(ctx.needs_input_grad) else None
        value = _native.taylor.loss(
            x.numpy(),
            targets.numpy(),
            squares,
            [p.detach().numpy() for p in params],
            None if grads is None else [g.numpy() for g in grads],
            torch.get_num_threads(),
            _native.taylor.VARIANTS[0],
        )
        ctx.grads = grads
        return torch.tensor(value, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, None, *torch._foreach_mul(ctx.grads, outer[0]))
