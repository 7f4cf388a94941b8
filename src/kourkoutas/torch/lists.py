"""The update on lists of tensors, of any device, dtype and layout; and the step with its scalars on the device.

`DeviceStep` never reads a value back, so that nothing waits for an accelerator and tracers see every operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.adam import adam

from kourkoutas import rule
from kourkoutas.rule import Coefficients, Hyper
from kourkoutas.torch import noise
from kourkoutas.torch.pooling import Pooled
from kourkoutas.torch.routes import Route, watched
from kourkoutas.torch.work import Members, Options, Work, one_each, plain, sizes, wide

GPUS = ("cuda",)  # devices on which fused=True is Triton
NO_FLOAT64 = ("mps",)


class DeviceStep:
    """One group's step, in the stages that `kourkoutas.torch` lists."""

    def __init__(self, options: Options, group: dict[str, Any], work: Work, route: Route) -> None:
        self.hyper, self.group, self.work, self.adam = options.hyper, group, work, route.name == "adam"
        self.present, self.device = work.present, work.norm_emas[0].device
        self.dtype = torch.float32 if self.device.type in NO_FLOAT64 else torch.float64
        self.grads = resolved(work.grads)
        self.pooled: Pooled | None = None
        lr = group["lr"]
        self.lr = lr.reshape(()).to(self.device) if isinstance(lr, Tensor) else lr
        self.members = None
        if not one_each(work):
            index = torch.tensor(work.bucket_of, dtype=torch.int64, device=self.device)
            zeros = torch.zeros(len(self.present), device=self.device)
            self.members = Members(index, lambda x: zeros.to(x).scatter_reduce_(0, index, x, "amax"))

    def measure(self) -> None:
        """||g|| of each parameter, and ⟨|θ|⟩ where it is needed."""
        self.local = self._vector(_norms(self.grads, 2, self.dtype))
        self.mean_abs = None
        if self.hyper.adaptive_tiny:
            sums = self._vector(_norms(self.work.params, 1, self.dtype))
            self.mean_abs = sums / torch.tensor(sizes(self.work), dtype=self.dtype, device=self.device)

    def sums(self) -> Tensor:
        """This rank's part of Σ g² and ⟨|θ|⟩ of each parameter with a gradient, for `pooling`."""
        squares = self.local.double().square()
        return torch.stack([squares] if self.mean_abs is None else [squares, self.mean_abs.double()])

    def latest(self) -> Tensor:
        """Per bucket: the most steps that a member with a gradient has taken, this one included; 0 without any."""
        steps = self._vector(self.work.steps) + 1
        return steps if self.members is None else self.members.largest(steps)

    def take(self, pooled: Pooled) -> None:
        """Use complete sums instead."""
        self.pooled = pooled
        if pooled.means is not None:
            self.mean_abs = pooled.means[self.work.places].to(self.dtype)

    def norms(self) -> Tensor:
        """n = √Σ ||g||² of each bucket, in units of its largest ||g||."""
        self.norm = self.local
        if self.pooled is not None:
            self.norm = self.pooled.squares[self.present].sqrt().to(self.dtype)
        elif self.members is not None:
            largest = self.members.largest(self.local)
            unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
            shares = (self.local / self.members.spread(unit)).square()
            self.norm = unit * torch.zeros_like(unit).index_add_(0, self.members.index, shares).sqrt()
        return self.norm

    def apply(self) -> tuple[Tensor, Tensor, Tensor]:
        """Move the scalar state and the tensors; returns sun, β2 and n of the buckets that have a gradient."""
        work, vector = self.work, self._vector
        logs = vector(work.log_beta2s) if work.log_beta2s else None
        skipped = torch.stack(work.skipped).to(self.device) if work.skipped else None
        state = rule.State(vector(work.norm_emas), vector(work.steps), logs, skipped)
        members, has_grad = self.members, None
        if self.pooled is not None and (latest := self.pooled.latest) is not None:
            # Buckets with members on other ranks: theirs count, too.
            index = torch.tensor(work.bucket_of, dtype=torch.int64, device=self.device)
            members, has_grad = Members(index, lambda t: latest.to(t)), latest > 0
        arguments = (self.hyper, self.lr, self.norm, state, torch)
        new = rule.step(*arguments, members=members, mean_abs=self.mean_abs, has_grad=has_grad)
        kept = (work.norm_emas, work.steps, work.log_beta2s, work.skipped)
        for targets, values in zip(kept, new.state, strict=True):
            if targets and not (self.adam and targets is work.steps):
                values = [x.to(t.device) for x, t in zip(values.unbind(), targets, strict=True)]
                torch._foreach_copy_(targets, values)
        grads, going = self.grads, range(len(self.grads))
        if new.updated_each is not None:
            fine = new.updated_each.unbind()
            grads = [torch.where(ok.to(g.device), g, 0) for ok, g in zip(fine, grads, strict=True)]
        if grads:
            (update_by_adam if self.adam else update)(self.hyper, self.group, work, grads, new.k, going)
        return new.sun, new.beta2, new.norm

    def _vector(self, xs: Sequence[Tensor]) -> Tensor:
        if not xs:
            return torch.zeros(0, dtype=self.dtype, device=self.device)
        return torch.stack([x.to(self.device) if not x.ndim else x.to(self.device).reshape(()) for x in xs]).to(
            self.dtype
        )


def update_by_adam(
    hyper: Hyper, group: dict[str, Any], work: Work, grads: list[Tensor], k: Coefficients, going: Sequence[int]
) -> None:
    """torch's own Adam, as torch.optim.AdamW would call it; it counts the steps.

    Its fused kernel for the CPU reads tensors as if they had no gaps, so that others go without it.
    """
    options = {name: group[name] for name in ("foreach", "fused", "maximize")}
    if options["fused"] or (options["fused"] is None and options["foreach"] is None):
        on_cpu = all(p.is_cpu for p in work.params)
        options["fused"] = plain(work) or None if on_cpu else options["fused"]
    options |= {"weight_decay": hyper.weight_decay, "decoupled_weight_decay": True, "eps": hyper.eps}
    options |= {"amsgrad": hyper.leak is not None, "has_complex": any(p.is_complex() for p in work.params)}
    adam(work.params, grads, *work[2:6], lr=float(group["lr"]), beta1=hyper.beta1, beta2=hyper.beta2_max, **options)


def update(
    hyper: Hyper, group: dict[str, Any], work: Work, grads: list[Tensor], k: Coefficients, going: Sequence[int]
) -> None:
    """The update of `rule.Coefficients` by lists of one device and dtype each, or tensor by tensor."""
    lists = (work.params, grads, work.exp_avgs, work.exp_avg_sqs, work.max_exp_avg_sqs)
    tensors = [[real(t) for t in ts] for ts in lists if ts]
    device, noisy = tensors[0][0].device.type, group["state_dtype"] is torch.bfloat16
    if group["fused"] and device in GPUS and not (noisy or watched()):
        from kourkoutas.torch import gpu

        going = gpu.update(tensors, k, group["maximize"])
    together = group["foreach"] or (group["foreach"] is None and device != "cpu")
    kinds: dict[Any, list[int]] = {}
    for i in going:
        key = (tensors[0][i].device, *(ts[i].dtype for ts in tensors)) if together else i
        kinds.setdefault(key, []).append(i)
    for chosen in kinds.values():
        old = [[ts[i] for i in chosen] for ts in tensors]
        new = [[wide(t) for t in ts] for ts in old]
        *picked, beta2 = _picked([*k, 1 - k.c2], chosen, new[0][0], len(grads))
        _update(new, Coefficients(*picked), beta2, group["maximize"])
        if new[0][0] is not old[0][0]:
            torch._foreach_copy_(old[0], new[0])
        if new[2][0] is not old[2][0]:
            seeds = [(work.steps[i], work.places[i], work.parts[i] if work.parts else None) for i in chosen]
            noise.store(old[2:], new[2:], seeds if noisy and old[2][0].dtype is torch.bfloat16 else None)


def _picked(xs: list[Any], chosen: list[int], like: Tensor, count: int) -> list[Any]:
    """Coefficients of some parameters: a number, numbers, or 0-dim tensors with the device and dtype of `like`."""
    moved = [x.to(like.device) for x in xs if isinstance(x, Tensor)]
    vectors = [x if x.ndim else x.expand(count) for x in moved]
    cells = torch.cat(vectors).to(like.dtype).unbind() if vectors else ()
    starts = iter(range(0, len(cells), count))
    picked = []
    for x in xs:
        if isinstance(x, Tensor):
            start = next(starts)
            x = [cells[start + i] for i in chosen]
        elif isinstance(x, np.ndarray) and x.ndim:
            x = [float(x[i]) for i in chosen]
        picked.append(x)
    return picked


def _update(tensors: list[list[Tensor]], k: Coefficients, beta2: Any, maximize: bool) -> None:
    """The update of `rule.Coefficients` on θ, g, m, v and, if it is kept, v_max, in place."""
    theta, g, m, v, *rest = tensors
    if maximize:
        g = list(torch._foreach_neg(g))
    if k.fade is not None:
        # θ ← θ - fade·θ
        if isinstance(k.fade, list):
            torch._foreach_sub_(theta, torch._foreach_mul(theta, k.fade))
        else:
            torch._foreach_add_(theta, theta, alpha=-k.fade)
    # m ← m + c1·(g - m)
    torch._foreach_lerp_(m, g, k.c1)
    # v ← β2·v + c2·g²
    numbers = not isinstance(k.c2[0] if isinstance(k.c2, list) else k.c2, Tensor)
    torch._foreach_mul_(v, beta2)
    if numbers:
        torch._foreach_addcmul_(v, g, g, k.c2)
    else:
        squares = torch._foreach_mul(g, g)
        torch._foreach_mul_(squares, k.c2)
        torch._foreach_add_(v, squares)
        del squares
    v_hat = v
    if rest:
        # v̂ = v_max ← max(leak·v_max, v)
        v_hat = rest[0]
        torch._foreach_mul_(v_hat, k.leak)
        torch._foreach_maximum_(v_hat, v)
    # θ ← θ - Δ with Δ = rate·m / (√v̂ + floor), clipped to ±limit
    denom = torch._foreach_sqrt(v_hat)
    torch._foreach_add_(denom, k.floor)
    if numbers and k.limit is None:
        torch._foreach_addcdiv_(theta, m, denom, [-x for x in k.rate] if isinstance(k.rate, list) else -k.rate)
        return
    delta = torch._foreach_div(m, denom)
    torch._foreach_mul_(delta, k.rate)
    if k.limit is not None:
        torch._foreach_clamp_max_(delta, k.limit)
        torch._foreach_clamp_min_(delta, [-x for x in k.limit] if isinstance(k.limit, list) else -k.limit)
    torch._foreach_sub_(theta, delta)


def _norms(tensors: list[Tensor], order: int, dtype: torch.dtype) -> Sequence[Tensor]:
    """||x|| of each tensor, which does not overflow before it must: see the note on norms in `kourkoutas.rule`.

    In float64, which takes no longer on an accelerator; where there is none, tensors are divided by their largest
    entry.
    """
    tensors = [real(t) for t in tensors]
    if not tensors:
        return []
    if dtype is torch.float64:
        return torch._foreach_norm(tensors, order, dtype=dtype)
    largest = [wide(t).abs().amax() if t.numel() else t.new_ones((), dtype=dtype) for t in tensors]
    units = [torch.where((x > 0) & x.isfinite(), x, 1.0) for x in largest]
    norms = torch._foreach_norm(torch._foreach_div([wide(t) for t in tensors], units), order)
    return torch._foreach_mul(norms, units)


def real(x: Tensor) -> Tensor:
    """A complex tensor as pairs of reals."""
    return torch.view_as_real(x) if x.is_complex() else x


def resolved(grads: list[Tensor]) -> list[Tensor]:
    """Gradients without lazy conjugation, which can be viewed as pairs of reals."""
    return [g.resolve_conj() if g.is_complex() else g for g in grads]
