"""The update on a GPU in one pass over memory, by Triton.

The update of `kourkoutas.torch.update.single_tensor`, with its coefficients read on the device: no sync, and fit for
CUDA graphs. One launch per tensor, so that small tensors are left to torch's lists of tensors.

NOTE: this module needs Triton and is imported when a step first finds its tensors on a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kourkoutas.rule import Hyper
from kourkoutas.torch.update import Tensors

SMALL = 1 << 16
BLOCK = 1024
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_works = True


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
    DECAY: tl.constexpr,
    MAXIMIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of one tensor; row r of the coefficients, in the order of `Coefficients`, is k[r·count + i]."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < n
    c1 = tl.load(k_at + i)
    c2 = tl.load(k_at + count + i)
    root = tl.load(k_at + 2 * count + i)
    eps = tl.load(k_at + 3 * count + i)
    gain = tl.load(k_at + 4 * count + i)
    theta = tl.load(theta_at + at, mask=here, other=0.0).to(tl.float32)
    g = tl.load(g_at + at, mask=here, other=0.0).to(tl.float32)
    m = tl.load(m_at + at, mask=here, other=0.0).to(tl.float32)
    v = tl.load(v_at + at, mask=here, other=0.0).to(tl.float32)
    if MAXIMIZE:
        g = -g
    # m ← β1·m + (1-β1)·g,  v ← β2·v + (1-β2)·g²
    m = m + c1 * (g - m)
    v = v + c2 * (g * g - v)
    tl.store(m_at + at, m, mask=here)
    tl.store(v_at + at, v, mask=here)
    if LEAK:
        # v̂ = v_max ← max(δ·v_max, v), NaN if either is
        leak = tl.load(k_at + 7 * count + i)
        old = leak * tl.load(v_max_at + at, mask=here, other=0.0).to(tl.float32)
        v = tl.where((old > v) | (old != old), old, v)
        tl.store(v_max_at + at, v, mask=here)
    # θ ← θ - Δ with Δ = γ/a1 · m / (√(v̂/b2) + ε), clipped to ±γ·max_ratio
    delta = tl.div_rn(m, tl.div_rn(tl.sqrt_rn(v), root) + eps) * gain
    if CLIP:
        limit = tl.load(k_at + 5 * count + i)
        delta = tl.where(delta > limit, limit, tl.where(delta < -limit, -limit, delta))
    if DECAY:
        theta = theta * tl.load(k_at + 6 * count + i)
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


def update(x: Tensors, vectors: Sequence[Tensor], hyper: Hyper, maximize: bool) -> list[int]:
    """Update what the kernel can; returns the numbers of the other parameters.

    Args:
      vectors: `kourkoutas.torch.update.Coefficients`, with one entry per parameter.
    """
    global _works
    k = torch.stack([vector.float() for vector in vectors])
    rest, written = [], []
    for i, tensors in enumerate(zip(*(ts for ts in x if ts), strict=True)):
        if not (_works and _suits(tensors, k)):
            rest.append(i)
            continue
        theta, g, m, v = tensors[:4]
        n = theta.numel()
        try:
            with torch.cuda.device_of(theta):
                _update[(triton.cdiv(n, BLOCK),)](
                    theta,
                    g,
                    m,
                    v,
                    tensors[-1],
                    k,
                    i,
                    k.shape[1],
                    n,
                    LEAK=hyper.leak is not None,
                    CLIP=hyper.max_ratio is not None,
                    DECAY=bool(hyper.weight_decay),
                    MAXIMIZE=maximize,
                    BLOCK=BLOCK,
                )
        except Exception as error:  # whatever a compiler for an unknown device may raise; nothing was launched
            _works = False
            warnings.warn(
                f"Triton cannot build the update here ({error!r}); torch's own kernels are used", stacklevel=2
            )
            rest.append(i)
            continue
        written += [theta, m, v, *x.v_max[i : i + 1]]
    torch.autograd.graph.increment_version(written)
    return rest
