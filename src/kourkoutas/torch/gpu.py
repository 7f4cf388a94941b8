"""The update on a GPU in one pass over memory, by Triton: on request, with `fused=True`.

Coefficients are read on the device: no sync, and fit for CUDA graphs. One launch per tensor, so that small tensors are
left to torch's lists of tensors.

NOTE: this module needs Triton. It was tested in Triton's interpreter and, so far, on no GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kourkoutas.rule import Coefficients

SMALL = 1 << 16
BLOCK = 1024
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _update(  # type: ignore[no-untyped-def]
    theta_at,
    g_at,
    m_at,
    v_at,
    v_max_at,
    k_at,
    i,
    count,
    n,
    LEAK: tl.constexpr,
    CLIP: tl.constexpr,
    FADE: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one tensor; row r of the coefficients, in the order of `Coefficients`, is k[r·count + i]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    c1 = tl.load(k_at + i)
    c2 = tl.load(k_at + count + i)
    rate = tl.load(k_at + 2 * count + i)
    floor = tl.load(k_at + 3 * count + i)
    theta = tl.load(theta_at + at, mask=here, other=0.0).to(tl.float32)
    g = tl.load(g_at + at, mask=here, other=0.0).to(tl.float32)
    m = tl.load(m_at + at, mask=here, other=0.0).to(tl.float32)
    v = tl.load(v_at + at, mask=here, other=0.0).to(tl.float32)
    if MAXIMIZE:
        g = -g
    # m ← m + c1·(g - m),  v ← (1 - c2)·v + c2·g²
    m = m + c1 * (g - m)
    v = (1 - c2) * v + c2 * (g * g)
    tl.store(m_at + at, m, mask=here)
    tl.store(v_at + at, v, mask=here)
    if LEAK:
        # v̂ = v_max ← max(leak·v_max, v), NaN if either is
        leak = tl.load(k_at + 6 * count + i)
        old = leak * tl.load(v_max_at + at, mask=here, other=0.0).to(tl.float32)
        v = tl.where((old > v) | (old != old), old, v)
        tl.store(v_max_at + at, v, mask=here)
    # θ ← θ - (fade·θ + Δ) with Δ = rate·m / (√v̂ + floor), clipped to ±limit
    delta = tl.div_rn(m, tl.sqrt_rn(v) + floor) * rate
    if CLIP:
        limit = tl.load(k_at + 4 * count + i)
        delta = tl.where(delta > limit, limit, tl.where(delta < -limit, -limit, delta))
    if FADE:
        delta = tl.load(k_at + 5 * count + i) * theta + delta
    tl.store(theta_at + at, theta - delta, mask=here)


def _suits(tensors: tuple[Tensor, ...], k: Tensor) -> bool:
    """Whether the kernel can read these tensors of one parameter: large, without gaps, and laid out alike."""
    theta = tensors[0]
    layouts = (torch.contiguous_format, torch.channels_last) if theta.dim() == 4 else (torch.contiguous_format,)
    return (
        theta.numel() >= SMALL
        and all(t.dtype in _DTYPES and t.device == k.device for t in tensors)
        and any(all(t.is_contiguous(memory_format=layout) for t in tensors) for layout in layouts)
    )


def update(tensors: list[list[Tensor]], k: Coefficients, maximize: bool) -> list[int]:
    """Update what the kernel can; returns the numbers of the other parameters.

    Args:
      tensors: θ, g, m, v and, if it is kept, v_max.
    """
    zero = torch.zeros_like(k.c2, dtype=torch.float32)
    rows = torch.stack([zero if x is None else zero + x for x in k])
    rest, written = [], []
    for i, (theta, *others) in enumerate(zip(*tensors, strict=True)):
        if not _suits((theta, *others), rows):
            rest.append(i)
            continue
        options = {"LEAK": k.leak is not None, "CLIP": k.limit is not None, "FADE": k.fade is not None}
        launch = _update[(triton.cdiv(theta.numel(), BLOCK),)]
        with torch.cuda.device_of(theta):
            arguments = (theta, *others[:3], others[-1], rows, i, len(zero), theta.numel())
            launch(*arguments, **options, MAXIMIZE=maximize, BLOCK=BLOCK)
        written += [theta, *others[1:]]
    torch.autograd.graph.increment_version(written)
    return rest
