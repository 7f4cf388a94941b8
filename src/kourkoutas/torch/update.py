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

from kourkoutas.rule import Hyper

LOW_PRECISION = (torch.float16, torch.bfloat16)

Scalars = Sequence[float | Tensor]

LATE = torch.tensor(1e30)  # a step count at which bias correction is 1; kernels only read it


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


class Noise(NamedTuple):
    """What the noise of stochastic rounding comes from, per parameter: so it is the same on every route and machine."""

    steps: Sequence[Tensor]
    places: Sequence[int]  # in the param group

    def pick(self, chosen: Sequence[int]) -> Noise:
        return Noise([self.steps[i] for i in chosen], [self.places[i] for i in chosen])

    def bits(self, i: int, like: Tensor) -> Tensor:
        """32 bits for every element of `like`, as int64."""
        seed = _mixed(_mixed(self.steps[i].to(torch.int64)) + self.places[i] & _WORD)
        # Elements are counted in the order of memory, as the native kernel does.
        count = torch.arange(like.numel(), device=like.device).as_strided(like.shape, like.stride())
        return _mixed(count * 0x1E3779B1 + seed.to(like.device) & _WORD)


_WORD = 0xFFFFFFFF


def _mixed(h: Tensor) -> Tensor:
    """A hash of 32 bits held in int64; _native/step.c has the same."""
    h = (h ^ h >> 16) * 0x45D9F3B5 & _WORD
    h = (h ^ h >> 13) * 0x3C6EF373 & _WORD
    return h ^ h >> 16


def round_noisily(x: Tensor, bits: Tensor) -> Tensor:
    """float32 → bfloat16, up with the probability of what is cut off; `bits` are 16 random ones per element."""
    up = x.view(torch.int32) + bits.to(torch.int32) & -0x10000
    return torch.where(x.isfinite(), up.view(torch.float32), x).bfloat16()


def _keep(x: Tensors, i: int, m: Tensor, v: Tensor, v_max: Tensor | None, noise: Noise | None) -> None:
    """Write back what `wide` made copies of, rounded as the group asks."""
    bits = noise.bits(i, x.m[i]) if noise is not None and x.m[i].dtype is torch.bfloat16 else None
    for new, kept, shift in ((m, x.m[i], 0), (v, x.v[i], 16), (v_max, x.v_max[i] if x.v_max else None, 16)):
        if new is not None and kept is not None and kept is not new:
            kept.copy_(new if bits is None else round_noisily(new, bits >> shift & 0xFFFF))


def wide(x: Tensor) -> Tensor:
    """`x` in the dtype of its arithmetic: float32 for float16 and bfloat16."""
    return x.float() if x.dtype in LOW_PRECISION else x


def _cast(x: float | Tensor, p: Tensor) -> Any:
    """A coefficient for arithmetic with `p`: a float passes, a tensor takes its device and wide dtype."""
    if isinstance(x, Tensor):
        return x.to(device=p.device, dtype=torch.float32 if p.dtype in LOW_PRECISION else p.dtype)
    return x


def single_tensor(x: Tensors, k: Coefficients, hyper: Hyper, maximize: bool, noise: Noise | None = None) -> None:
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
        v_hat, v_max = v, None
        if hyper.leak is not None:
            # v̂ = v_max ← max(δ·v_max, v)
            v_hat = v_max = torch.maximum(wide(x.v_max[i]) * leak, v)
        # θ ← θ - Δ with Δ = γ/a1 · m / (√(v̂/b2) + ε), clipped to ±γ·max_ratio
        denom = (v_hat.sqrt() / root).add_(eps)
        if hyper.max_ratio is None and isinstance(gain, float):
            theta.addcdiv_(m, denom, value=-gain)
        else:
            delta = m / denom * gain
            theta.sub_(delta if hyper.max_ratio is None else delta.clamp_(-limit, limit))

        if theta is not p:
            p.copy_(theta)
        _keep(x, i, m, v, v_max, noise)


def multi_tensor(x: Tensors, k: Coefficients, hyper: Hyper, maximize: bool, noise: Noise | None = None) -> None:
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

        if theta[0] is not part.theta[0]:
            torch._foreach_copy_(part.theta, theta)
        if m[0] is part.m[0]:
            continue
        if noise is None:
            torch._foreach_copy_([*part.m, *part.v, *part.v_max], [*m, *v, *v_max])
        else:
            chosen_noise = noise.pick(chosen)
            for i in range(len(chosen)):
                _keep(part, i, m[i], v[i], v_max[i] if v_max else None, chosen_noise)


def fused(
    x: Tensors,
    k: Coefficients,
    hyper: Hyper,
    maximize: bool,
    steps: list[Tensor],
    lr: float,
    noise: Noise | None = None,
) -> None:
    """The update folded into torch's fused Adam kernel on the CPU: one pass over memory per tensor.

    The kernel computes θ ← (1 - γ'λ')·θ - γ'·m/(√v̂ + ε') once a huge step count has made its own bias correction 1.
    With γ' = γ√b2/a1, ε' = ε√b2 and λ' = λγ/γ' that is our update. It has no clip and takes contiguous tensors; what it
    does not take goes the plain way. With a fixed β2 it is called just as Adam calls it, and gives Adam's bits.
    """
    as_adam = hyper.fixed and hyper.bias_correction == "beta2max" and not hyper.adaptive_tiny
    amsgrad, other = hyper.leak is not None, hyper.max_ratio is not None or noise is not None
    beta1, decay = hyper.beta1, hyper.weight_decay
    plain: list[int] = []
    v_max: list[Tensor] = []
    late = [LATE]
    rows = zip(x.theta, x.g, x.m, x.v, k.c1, k.c2, k.root, k.eps, k.gain, strict=True)
    for i, (theta, g, m, v, c1, c2, root, eps, gain) in enumerate(rows):
        if c1 == 0 or not theta.numel():
            continue
        dtype = theta.dtype
        if other or not (dtype is g.dtype is m.dtype and theta.is_contiguous() and g.is_contiguous()):
            plain.append(i)
            continue
        if hyper.leak is not None:
            v_max = [x.v_max[i]]
            if hyper.leak != 1:
                v_max[0].mul_(hyper.leak)
        if as_adam:
            late, rate, beta2, fade = [steps[i]], lr, hyper.beta2_max, decay
        else:
            rate, beta2, eps = gain * root, 1 - c2, eps * root
            fade = decay * lr / rate if decay and rate else 0.0
        torch._fused_adamw_(
            [theta],
            [g],
            [m],
            [v],
            v_max,
            late,
            amsgrad=amsgrad,
            lr=rate,
            beta1=beta1,
            beta2=beta2,
            weight_decay=fade,
            eps=eps,
            maximize=maximize,
        )
    if plain:
        single_tensor(x.pick(plain), k.pick(plain), hyper, maximize, noise and noise.pick(plain))
