"""The step of one param group for every option: its tensors, the pooled norms, and the update.

`on_device` keeps the scalars of the step on the device, as 0-dim tensors. `on_host` has them as floats, on the CPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kourkoutas import rule
from kourkoutas.rule import Hyper
from kourkoutas.torch.host import Scalars
from kourkoutas.torch.update import Coefficients, Noise, Tensors, fused, multi_tensor, single_tensor, wide

GPUS = ("cuda",)


class Work(NamedTuple):
    """What one group has to do in one step: lists per parameter, and per bucket that has a gradient."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]
    steps: list[Tensor]
    log_beta2s: list[Tensor]
    norm_emas: list[Tensor]  # per bucket
    skipped: list[Tensor]  # per bucket
    bucket_of: list[int]  # per parameter: the place of its bucket in `norm_emas`
    present: list[int]  # per bucket: its number in the group
    places: list[int]  # per parameter: its number in the group


def _noise(group: dict[str, Any], work: Work) -> Noise | None:
    return Noise(work.steps, work.places) if group["state_dtype"] is torch.bfloat16 else None


def pooled_norms(work: Work) -> Tensor:
    """n = √Σ_p ||g(p)||² per bucket, in float64 where that costs nothing."""
    device = work.norm_emas[0].device
    dtype = torch.float64 if device.type == "cpu" else max((e.dtype for e in work.norm_emas), key=lambda d: d.itemsize)
    squares = torch.stack([square_sum(g).to(device=device, dtype=dtype) for g in work.grads])
    if len(work.present) == len(work.bucket_of):
        return squares.sqrt()
    index = torch.tensor(work.bucket_of, device=device)
    return torch.zeros(len(work.present), dtype=dtype, device=device).index_add_(0, index, squares).sqrt()


def square_sum(g: Tensor) -> Tensor:
    """||g||² in at least float32."""
    if g.dtype is not torch.float32:
        g = wide(torch.view_as_real(g) if g.is_complex() else g)
    # A dot product is several times faster than a norm on large tensors, but wants a flat view.
    if g.is_contiguous():
        flat = g if g.dim() == 1 else g.view(-1)
        return flat.dot(flat)
    norm: Tensor = torch.linalg.vector_norm(g)
    return norm.square()


def _mean_abs(p: Tensor) -> Tensor:
    """⟨|p|⟩ in at least float32; 0 for an empty tensor."""
    p = wide(torch.view_as_real(p) if p.is_complex() else p)
    total: Tensor = torch.linalg.vector_norm(p, 1)
    return total / max(p.numel(), 1)


def _real(work: Work, grads: list[Tensor]) -> Tensors:
    """The tensors of the update, complex ones as pairs of reals."""
    x = Tensors(work.params, grads, work.exp_avgs, work.exp_avg_sqs, work.max_exp_avg_sqs)
    if any(p.is_complex() for p in work.params):
        x = Tensors(*([torch.view_as_real(t) if t.is_complex() else t for t in ts] for ts in x))
    return x


def on_device(group: dict[str, Any], hyper: Hyper, work: Work, norm: Tensor) -> Tensor:
    """Move one group's bucket statistics and parameters; returns its (sun, β2), shape (2, buckets with gradients).

    Scalars stay on the device, as 0-dim tensors.
    """
    index = None if len(work.present) == len(work.bucket_of) else torch.tensor(work.bucket_of, device=norm.device)

    def gather(xs: list[Tensor]) -> Tensor:
        return torch.stack([x.to(norm) for x in xs])

    def spread(x: Tensor) -> Tensor:
        return x if index is None else x[index]

    ema, step = gather(work.norm_emas), gather(work.steps) + 1
    bucket_step = step
    if index is not None and hyper.warmup_steps:
        bucket_step = torch.zeros_like(norm).scatter_reduce_(0, index, step, "amax")

    c2, sun, r = rule._memory(hyper, norm, ema, bucket_step, torch)
    stats = torch.stack([sun, 1 - c2])
    c2 = spread(c2)
    log_beta2 = gather(work.log_beta2s) + torch.log1p(-c2) if work.log_beta2s else None
    a1, b2 = rule.bias_corrections(hyper, step, log_beta2, torch)

    lr = group["lr"]
    one = torch.ones_like(step)
    a1, b2 = a1 * one, b2 * one
    c1, gain, keep = (1 - hyper.beta1) * one, lr / a1, one - lr * hyper.weight_decay
    leak = (1.0 if hyper.leak is None else hyper.leak) * one
    limit = lr * (hyper.max_ratio or 0.0) * one
    eps = hyper.eps * one
    if hyper.adaptive_tiny:
        eps = eps + hyper.tiny_denom * gather([_mean_abs(p) for p in work.params]).clamp(min=1)
    grads = work.grads

    # NOTE: a skipped bucket runs with zero rates on a cleaned gradient, which leaves every bit of m, v and θ as it was.
    if hyper.nonfinite == "skip":
        fine = norm.isfinite()
        good = spread(fine)
        r = torch.where(fine, r, ema)
        stats = torch.where(fine, stats, torch.nan)
        step = torch.where(good, step, step - 1)
        if log_beta2 is not None:
            log_beta2 = torch.where(good, log_beta2, gather(work.log_beta2s))
        c1, c2, gain = (torch.where(good, x, 0.0) for x in (c1, c2, gain))
        b2, keep, leak = (torch.where(good, x, 1.0) for x in (b2, keep, leak))
        grads = [torch.where(ok.to(g.device), g, 0) for ok, g in zip(good.unbind(), grads, strict=True)]
        _store(work.skipped, torch.stack(work.skipped) + (~fine).long())

    _store(work.norm_emas, r)
    _store(work.steps, step)
    if log_beta2 is not None:
        _store(work.log_beta2s, log_beta2)

    vectors = (c1, c2, b2.sqrt(), eps, gain, limit, keep, leak)
    k = Coefficients(*(x.unbind() for x in vectors))
    x, noise = _real(work, grads), _noise(group, work)
    if group["foreach"] is None and group["fused"] is None and noise is None and (gpu := _gpu(norm)) is not None:
        rest = gpu.update(x, vectors, hyper, group["maximize"])
        x, k = x.pick(rest), k.pick(rest)
    if group["foreach"] or (group["foreach"] is None and norm.device.type != "cpu"):
        multi_tensor(x, k, hyper, group["maximize"], noise)
    else:
        single_tensor(x, k, hyper, group["maximize"], noise)
    return stats


def _gpu(norm: Tensor) -> Any:
    """`kourkoutas.torch.gpu`, if the step runs on a GPU and Triton is there."""
    if norm.device.type not in GPUS or torch.compiler.is_compiling():
        return None
    try:
        from kourkoutas.torch import gpu
    except ImportError:
        return None
    return gpu


def on_host(
    group: dict[str, Any], hyper: Hyper, work: Work, scalars: Scalars, norm: Any, traced: bool
) -> Tensor | None:
    """The same with floats for scalars; it returns (sun, β2) only if they are traced."""
    lr = float(group["lr"])
    means = [_mean_abs(p).item() for p in work.params] if hyper.adaptive_tiny else []
    k, stats, good = scalars.move(hyper, lr, norm, work.skipped, means, traced)
    grads = work.grads
    if good is not None:
        grads = [g if ok else torch.zeros_like(g) for ok, g in zip(good, grads, strict=True)]
    x = _real(work, grads)
    noise = _noise(group, work)
    if group["fused"] is not False and not group["foreach"]:
        fused(x, k, hyper, group["maximize"], work.steps, lr, noise)
    elif group["foreach"]:
        multi_tensor(x, k, hyper, group["maximize"], noise)
    else:
        single_tensor(x, k, hyper, group["maximize"], noise)
    return None if stats is None else torch.from_numpy(stats)


def _store(targets: list[Tensor], values: Tensor) -> None:
    torch._foreach_copy_(targets, [x.to(t) for x, t in zip(values.unbind(), targets, strict=True)])
