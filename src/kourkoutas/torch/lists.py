"""The step on lists of tensors: any device, dtype and layout, with the scalars of the step as vectors on the device.

Nothing here reads a value back, so that nothing waits for a device, and tracers see every operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from kourkoutas import rule
from kourkoutas.rule import Coefficients
from kourkoutas.torch import noise
from kourkoutas.torch.parts import Part
from kourkoutas.torch.pooling import Pooled
from kourkoutas.torch.routes import Route, watched
from kourkoutas.torch.work import LOW_PRECISION, Members, Options, Work, largest

GPUS = ("cuda",)  # devices on which fused=True is Triton
NO_FLOAT64 = ("mps",)

Lists = list[list[Tensor]]  # θ, g, m, v and, if it is kept, v_max


class ListStep:
    """One group's step, in the stages that `kourkoutas.torch` lists."""

    def __init__(
        self, options: Options, group: dict[str, Any], work: Work, route: Route, parts: list[Part] | None
    ) -> None:
        self.hyper, self.group, self.work, self.adam = options.hyper, group, work, route.name == "adam"
        self.places, self.parts = work.places, parts
        self.pooled: Pooled | None = None
        self.present, self.device = work.present, work.norm_emas[0].device
        self.dtype = torch.float32 if self.device.type in NO_FLOAT64 else torch.float64
        self.members = Members.of(work, work.norm_emas[0])
        self.grads = [g.resolve_conj() if g.is_complex() else g for g in work.grads]
        self.watched = watched()
        # A host that may look need not be careful at first: see `_norms`.
        self.looks = self.device.type == "cpu" and not (group["capturable"] or self.watched)
        lr = group["lr"]
        self.lr = lr.reshape(()).to(self.device) if isinstance(lr, Tensor) else lr

    def measure(self) -> None:
        """||g|| of each parameter, and ⟨|θ|⟩ where it is needed."""
        work = self.work
        self.local = self._vector(_norms([_real(g) for g in self.grads], 2, self.dtype, self.looks))
        self.mean_abs = None
        if self.hyper.adaptive_tiny:
            sums = self._vector(_norms([_real(p) for p in work.params], 1, self.dtype, self.looks))
            sizes = [p.numel() for p in work.params] if self.parts is None else [self.parts[i].size for i in self.places]
            counts = [max(n * (2 if p.is_complex() else 1), 1) for n, p in zip(sizes, work.params, strict=True)]
            self.mean_abs = sums / torch.tensor(counts, dtype=self.dtype, device=self.device)

    def sums(self) -> Tensor:
        """This rank's part of Σ g² and ⟨|θ|⟩ of each parameter with a gradient, for `pooling`."""
        squares = self.local.double().square()
        return torch.stack([squares] if self.mean_abs is None else [squares, self.mean_abs.double()])

    def latest(self) -> Tensor:
        """Per bucket of the group: the most steps that a member with a gradient has taken, this one included."""
        index = torch.tensor(self.work.bucket_of, dtype=torch.int64, device=self.device)
        return largest(index, len(self.present), self._vector(self.work.steps) + 1)

    def take(self, pooled: Pooled) -> None:
        """Use complete sums instead."""
        self.pooled = pooled
        if pooled.means is not None:
            self.mean_abs = pooled.means[self.places].to(self.dtype)

    def norms(self) -> Tensor:
        """n = √Σ ||g||² of each bucket."""
        if self.pooled is not None:
            self.norm = self.pooled.squares[self.present].sqrt().to(self.dtype)
        elif self.members is None:
            self.norm = self.local
        elif self.dtype is torch.float64:
            squares = self.local.new_zeros(len(self.work.present))
            self.norm = squares.index_add_(0, self.members.index, self.local.square()).sqrt()
        else:
            largest = self.members.largest(self.local)
            unit = torch.where(largest > 0, largest, 1.0)
            squares = torch.zeros_like(unit)
            squares.index_add_(0, self.members.index, (self.local / self.members.spread(unit)).square())
            self.norm = unit * squares.sqrt()
        return self.norm

    def apply(self) -> Tensor:
        """Move the scalar state and the tensors; returns (sun, β2), shape (2, buckets with gradients)."""
        work, hyper = self.work, self.hyper
        state = rule.State(
            self._vector(work.norm_emas),
            self._vector(work.steps),
            self._vector(work.log_beta2s) if work.log_beta2s else None,
            torch.stack(work.skipped).to(self.device) if work.skipped else None,
        )
        members, live = self.members, None
        if self.pooled is not None and (latest := self.pooled.latest) is not None:
            live = latest > 0
            members = Members(torch.tensor(work.bucket_of, dtype=torch.int64, device=self.device), lambda t: latest)
        new = rule.step(hyper, self.lr, self.norm, state, torch, members=members, mean_abs=self.mean_abs, live=live)
        _store(work.norm_emas, new.state.ema)
        if new.state.log_beta2 is not None:
            _store(work.log_beta2s, new.state.log_beta2)
        if new.state.skipped is not None:
            _store(work.skipped, new.state.skipped)
        if self.adam:
            self._adam()
        else:
            _store(work.steps, new.state.step)
            grads = self.grads
            if new.fine_each is not None:
                fine = new.fine_each.unbind()
                grads = [torch.where(ok.to(g.device), g, 0) for ok, g in zip(fine, grads, strict=True)]
            self._update(grads, new.k)
        return torch.stack([new.sun, new.beta2])

    def _vector(self, xs: Sequence[Tensor]) -> Tensor:
        if not xs:
            return torch.zeros(0, dtype=self.dtype, device=self.device)
        return torch.stack([x.to(self.device) for x in xs]).to(self.dtype)

    def _adam(self) -> None:
        """torch's own Adam, as torch.optim.AdamW would call it."""
        group, hyper, work = self.group, self.hyper, self.work
        fused = group["fused"]
        if fused is None and group["foreach"] is None and self.device.type == "cpu":
            fused = all(p.is_floating_point() and p.is_cpu for p in work.params)
        adam(
            *work[:6],
            foreach=group["foreach"],
            fused=fused,
            has_complex=any(p.is_complex() for p in work.params),
            decoupled_weight_decay=True,
            amsgrad=hyper.leak is not None,
            beta1=hyper.beta1,
            beta2=hyper.beta2_max,
            lr=float(group["lr"]),
            weight_decay=hyper.weight_decay,
            eps=hyper.eps,
            maximize=group["maximize"],
        )

    def _update(self, grads: list[Tensor], k: Coefficients) -> None:
        """Hand over lists of one device and dtype each, or single tensors, with their coefficients."""
        group, work = self.group, self.work
        tensors = [[_real(t) for t in ts] for ts in (work.params, grads, *work[2:5]) if ts]
        rest: Sequence[int] = range(len(grads))
        noisy = group["state_dtype"] is torch.bfloat16
        if group["fused"] and self.device.type in GPUS and not (noisy or self.watched):
            from kourkoutas.torch import gpu

            rest = gpu.update(tensors, k, group["maximize"])
        kinds: dict[Any, list[int]] = {}
        together = group["foreach"] or (group["foreach"] is None and self.device.type != "cpu")
        for i in rest:
            key = (tensors[0][i].device, *(ts[i].dtype for ts in tensors)) if together else i
            kinds.setdefault(key, []).append(i)
        for chosen in kinds.values():
            picked = [[ts[i] for i in chosen] for ts in tensors]
            old = picked[2:]
            wide = [[_wide(t) for t in ts] for ts in picked]
            _update(wide, _Picked(k, chosen, wide[0][0], len(grads)), group["maximize"])
            if wide[0][0] is not picked[0][0]:
                torch._foreach_copy_(picked[0], wide[0])
            if wide[2][0] is old[0][0]:
                continue
            if noisy and old[0][0].dtype is torch.bfloat16:
                whose = [work.places[i] for i in chosen]
                seeds = [(work.steps[i], place) for i, place in zip(chosen, whose, strict=True)]
                noise.store(old, wide[2:], seeds, None if self.parts is None else [self.parts[i] for i in whose])
            else:
                torch._foreach_copy_([t for ts in old for t in ts], [t for ts in wide[2:] for t in ts])


class _Picked:
    """The coefficients of some parameters: numbers, or lists of 0-dim tensors of the device and dtype of `like`."""

    def __init__(self, k: Coefficients, chosen: list[int], like: Tensor, count: int) -> None:
        self._k, self._chosen, self._like, self._count = k, chosen, like, count

    def __getattr__(self, name: str) -> Any:
        return self.cast(getattr(self._k, name))

    def cast(self, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        values = x.to(device=self._like.device, dtype=self._like.dtype).expand(self._count).unbind()
        return list(values) if len(self._chosen) == self._count else [values[i] for i in self._chosen]


def _update(tensors: Lists, k: _Picked, maximize: bool) -> None:
    """The update of `rule.Coefficients` on lists of one device and dtype, in place."""
    theta, g, m, v, *rest = tensors
    if maximize:
        g = list(torch._foreach_neg(g))
    if (shrink := k.shrink) is not None:
        torch._foreach_mul_(theta, shrink)
    # m ← m + c1·(g - m)
    torch._foreach_lerp_(m, g, k.c1)
    # v ← (1 - c2)·v + c2·g²
    squares = torch._foreach_mul(g, g)
    torch._foreach_mul_(squares, k.c2)
    torch._foreach_mul_(v, k.cast(1 - k._k.c2))
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
    delta = torch._foreach_div(m, denom)
    torch._foreach_mul_(delta, k.rate)
    if (limit := k.limit) is not None:
        torch._foreach_clamp_max_(delta, limit)
        torch._foreach_clamp_min_(delta, [-x for x in limit] if isinstance(limit, list) else -limit)
    torch._foreach_sub_(theta, delta)


def _norms(tensors: list[Tensor], order: int, dtype: torch.dtype, looks: bool) -> Sequence[Tensor]:
    """||x|| of each tensor, which does not overflow before it must: see the note on norms in `kourkoutas.rule`.

    In float64, which takes no longer on an accelerator. On a host, where the cast takes long, float32 is tried first.
    On a device without float64, tensors are divided by their largest entry.
    """
    if not tensors:
        return []
    if looks:
        kinds = {t.dtype for t in tensors}
        narrow = torch.float32 if kinds & set(LOW_PRECISION) and torch.float64 not in kinds else None
        tried = torch._foreach_norm(tensors, order, dtype=narrow if len(kinds) == 1 else None)
        if len(kinds) == 1 and bool(torch.stack(tried).isfinite().all()):
            return tried
    if dtype is torch.float64:
        return torch._foreach_norm(tensors, order, dtype=dtype)
    largest = [t.abs().amax().float() if t.numel() else t.new_ones((), dtype=dtype) for t in tensors]
    units = [torch.where(x > 0, x, 1.0) for x in largest]
    return torch._foreach_mul(
        torch._foreach_norm(torch._foreach_div([t.float() for t in tensors], units), order), units
    )


def _real(x: Tensor) -> Tensor:
    """A complex tensor as pairs of reals."""
    return torch.view_as_real(x) if x.is_complex() else x


def _wide(x: Tensor) -> Tensor:
    """`x` in the dtype of its arithmetic: float32 for float16 and bfloat16."""
    return x.float() if x.dtype in LOW_PRECISION else x


def _store(targets: list[Tensor], values: Tensor) -> None:
    if targets:
        torch._foreach_copy_(targets, [x.to(t.device) for x, t in zip(values.unbind(), targets, strict=True)])
