"""The update itself: three ways through it for the same coefficients.

`single_tensor` is the one to read. `multi_tensor` does the same on lists, and `fused` folds it into torch's fused Adam
kernel. Coefficients are Python floats, or 0-dim tensors where reading them back would cost a sync.

NOTE: with floats, each way makes the calls of torch.optim.Adam in Adam's order, so that a fixed β2 gives Adam's bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kbeta.rule import Hyper

LOW_PRECISION = (torch.float16, torch.bfloat16)

Scalars = Sequence[float | Tensor]

_LATE = torch.tensor(1e30)  # a step count at which bias correction is 1; kernels only read it


class Tensors(NamedTuple):
    """The tensors of one step, parallel lists; `v_max` is empty when none is kept."""

    theta: list[Tensor]
    g: list[Tensor]
    m: list[Tensor]
    v: list[Tensor]
    v_max: list[Tensor]

    def pick(self, chosen: Sequence[int]) -> Tensors:
        return Tensors(*([xs[i] for i in chosen] if xs else [] for xs in self))


class Coefficients(NamedTuple):
    """The scalars of one step, per parameter."""

    c1: Scalars  # 1 - β1; zero marks a skipped bucket
    c2: Scalars  # 1 - β2
    root: Scalars  # √b2
    eps: Scalars  # ε, with the adaptive-tiny term
    gain: Scalars  # γ/a1
    limit: Scalars  # γ·max_ratio
    keep: Scalars  # 1 - γλ
    leak: Scalars  # δ

    def pick(self, chosen: Sequence[int]) -> Coefficients:
        return Coefficients(*([x[i] for i in chosen] for x in self))


def wide(x: Tensor) -> Tensor:
    """`x` in the dtype of its arithmetic: float32 for float16 and bfloat16."""
    return x.float() if x.dtype in LOW_PRECISION else x


def _cast(x: float | Tensor, p: Tensor) -> Any:
    """A coefficient for arithmetic with `p`: a float passes, a tensor takes its device and wide dtype."""
    if isinstance(x, Tensor):
        return x.to(device=p.device, dtype=torch.float32 if p.dtype in LOW_PRECISION else p.dtype)
    return x


def single_tensor(x: Tensors, k: Coefficients, hyper: Hyper, maximize: bool) -> None:
    """The update, one tensor at a time."""
    for i, p in enumerate(x.theta):
        c1, c2, root, eps, gain, limit, keep, leak = (_cast(scalars[i], p) for scalars in k)
        theta, g, m, v = (wide(xs[i]) for xs in x[:4])
        if maximize:
            g = -g

        if hyper.weight_decay:
            theta.mul_(keep)
        # m ← β1·m + (1-β1)·g
        m.lerp_(g, c1)
        # v ← β2·v + (1-β2)·g²
        if isinstance(c2, float):
            v.mul_(1 - c2).addcmul_(g, g, value=c2)
        else:
            v.lerp_(g * g, c2)
        v_hat = v
        if hyper.leak is not None:
            # v̂ = v_max ← max(δ·v_max, v)
            v_hat = torch.maximum(wide(x.v_max[i]) * leak, v)
            x.v_max[i].copy_(v_hat)
        # θ ← θ - Δ with Δ = γ/a1 · m / (√(v̂/b2) + ε), clipped to ±γ·max_ratio
        denom = (v_hat.sqrt() / root).add_(eps)
        if hyper.max_ratio is None and isinstance(gain, float):
            theta.addcdiv_(m, denom, value=-gain)
        else:
            delta = m / denom * gain
            theta.sub_(delta if hyper.max_ratio is None else delta.clamp_(-limit, limit))

        if p.dtype in LOW_PRECISION:
            for new, kept in ((theta, p), (m, x.m[i]), (v, x.v[i])):
                kept.copy_(new)


def multi_tensor(x: Tensors, k: Coefficients, hyper: Hyper, maximize: bool) -> None:
    """The update of `single_tensor` on lists, one list per device and dtype."""
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, p in enumerate(x.theta):
        kinds.setdefault((p.device, p.dtype), []).append(i)
    for chosen in kinds.values():
        part = x.pick(chosen)
        c1, c2, root, eps, gain, limit, keep, leak = (
            [_cast(s, p) for s, p in zip(scalars, part.theta, strict=True)] for scalars in k.pick(chosen)
        )
        theta, g, m, v, v_max = ([wide(t) for t in ts] for ts in part)
        if maximize:
            g = list(torch._foreach_neg(g))

        if hyper.weight_decay:
            torch._foreach_mul_(theta, keep)
        torch._foreach_lerp_(m, g, c1)
        floats = isinstance(c2[0], float)
        if floats:
            torch._foreach_mul_(v, [1 - c for c in c2])
            torch._foreach_addcmul_(v, g, g, c2)
        else:
            torch._foreach_lerp_(v, torch._foreach_mul(g, g), c2)
        if v_max:
            torch._foreach_mul_(v_max, leak)
            torch._foreach_maximum_(v_max, v)
        denom = torch._foreach_sqrt(v_max or v)
        torch._foreach_div_(denom, root)
        torch._foreach_add_(denom, eps)
        if hyper.max_ratio is None and floats:
            torch._foreach_addcdiv_(theta, m, denom, [-x for x in gain])
        else:
            delta = torch._foreach_div(m, denom)
            torch._foreach_mul_(delta, gain)
            if hyper.max_ratio is not None:
                torch._foreach_clamp_max_(delta, limit)
                torch._foreach_clamp_min_(delta, [-bound for bound in limit])
            torch._foreach_sub_(theta, delta)

        if part.theta[0].dtype in LOW_PRECISION:
            for new, kept in ((theta, part.theta), (m, part.m), (v, part.v), (v_max, part.v_max)):
                if kept:
                    torch._foreach_copy_(kept, new)


def fused(x: Tensors, k: Coefficients, hyper: Hyper, maximize: bool, steps: list[Tensor], lr: float) -> None:
    """The update folded into torch's fused Adam kernel on the CPU: one pass over memory per tensor.

    The kernel computes θ ← (1 - γ'λ')·θ - γ'·m/(√v̂ + ε') once a huge step count has made its own bias correction 1.
    With γ' = γ√b2/a1, ε' = ε√b2 and λ' = λγ/γ' that is our update. It has no clip and takes contiguous tensors; what it
    does not take goes the plain way. With a fixed β2 it is called just as Adam calls it, and gives Adam's bits.
    """
    as_adam = hyper.fixed and hyper.bias_correction == "beta2max" and not hyper.adaptive_tiny
    plain: list[int] = []
    calls: dict[tuple[Any, ...], list[int]] = {}
    clipped = hyper.max_ratio is not None
    for i, (p, g, c1, *key) in enumerate(zip(x.theta, x.g, k.c1, k.c2, k.root, k.eps, k.gain, strict=True)):
        if c1 == 0 or not p.numel():
            continue
        dtype = p.dtype
        if clipped or dtype is not g.dtype or not (p.is_contiguous() and g.is_contiguous()):
            plain.append(i)
        else:
            calls.setdefault((dtype,) if as_adam else (dtype, *key), []).append(i)
    if plain:
        single_tensor(x.pick(plain), k.pick(plain), hyper, maximize)

    fade = 1.0 if hyper.leak is None else hyper.leak
    theta, grad, m, v, v_max = x
    for chosen in calls.values():
        i, *more = chosen
        c2, root, eps = float(k.c2[i]), float(k.root[i]), float(k.eps[i])
        rate = float(k.gain[i]) * root
        kept = [v_max[j] for j in chosen] if v_max else []
        if kept and fade != 1:
            torch._foreach_mul_(kept, fade)
        torch._fused_adamw_(
            [theta[j] for j in chosen] if more else [theta[i]],
            [grad[j] for j in chosen] if more else [grad[i]],
            [m[j] for j in chosen] if more else [m[i]],
            [v[j] for j in chosen] if more else [v[i]],
            kept,
            [steps[j] for j in chosen] if as_adam else [_LATE] * len(chosen),
            amsgrad=hyper.leak is not None,
            lr=lr if as_adam else rate,
            beta1=hyper.beta1,
            beta2=hyper.beta2_max if as_adam else 1 - c2,
            weight_decay=hyper.weight_decay * (1.0 if as_adam or not rate else lr / rate),
            eps=eps if as_adam else eps * root,
            maximize=maximize,
        )
