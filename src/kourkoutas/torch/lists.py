"""The step by torch's own operations, for tensors of any device, dtype and layout.

Scalars are vectors on the device, and no value is read back, so that nothing waits for an accelerator and tracers see
every operation. Plain tensors on the CPU may take a short cut: NumPy does their scalars, in the same memory, and
torch's fused Adam kernel the elementwise part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kourkoutas import rule
from kourkoutas.rule import Coefficients, Hyper
from kourkoutas.torch.options import LOW_PRECISION, Options
from kourkoutas.torch.routes import Route
from kourkoutas.torch.sharding import Shard

NO_FLOAT64 = ("mps",)
_SMALL = 65_536
_LATE = torch.tensor(1e30, device="cpu")  # a step count at which Adam's bias correction is 1; its kernel only reads it
_TYPES = {Tensor, torch.nn.Parameter}
_WIDE = (torch.float32, torch.float64)
_WORD = 0xFFFFFFFF


class Work(NamedTuple):
    """What one group's step reads and writes: lists of tensors, an entry per parameter that has a gradient.

    The last six are those of `state.Selection`.
    """

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]
    max_exp_avg_sqs: list[Tensor]  # empty when no v_max is kept
    step: list[Tensor]  # these four: the group's vector, or empty where the options need none
    norm_ema: list[Tensor]
    log_beta2: list[Tensor]
    skipped: list[Tensor]
    shards: list[Shard]  # what lies on this rank of each parameter; empty if all of it
    places: list[int]
    buckets: list[int]
    place_index: list[Tensor]
    bucket_index: list[Tensor]
    bucket_of: list[Tensor]
    sizes: list[Tensor]


# NOTE: a plain function, as torch.compile of torch 2.7 and 2.8 does not read the properties of a named tuple.
def moments(work: Work) -> dict[str, list[Tensor]]:
    """m, v and, if it is kept, v_max under their names in the state."""
    found = {"exp_avg": work.exp_avgs, "exp_avg_sq": work.exp_avg_sqs}
    return {**found, "max_exp_avg_sq": work.max_exp_avg_sqs} if work.max_exp_avg_sqs else found


class Members:
    """Parameters and buckets of a step for `rule.step`."""

    def __init__(self, index: Tensor, count: int, latest: Tensor | None = None) -> None:
        self.index, self.count, self.latest = index, count, latest

    def spread(self, x: Tensor) -> Tensor:
        return x.index_select(0, self.index)

    def largest(self, x: Tensor) -> Tensor:
        if self.latest is not None:  # of members on other ranks, too
            return self.latest.to(x)
        return x.new_zeros(self.count).scatter_reduce_(0, self.index, x, "amax")


class ArrayMembers:
    """The same for NumPy's arrays."""

    def __init__(self, members: Members) -> None:
        self.index, self.count, self.latest = members.index.numpy(), members.count, members.latest

    def spread(self, x: NDArray[Any]) -> NDArray[Any]:
        return x[self.index]  # type: ignore[no-any-return]

    def largest(self, x: NDArray[Any]) -> NDArray[Any]:
        if self.latest is not None:
            return self.latest.numpy()
        out = np.zeros(self.count)
        np.maximum.at(out, self.index, x)
        return out


class ListStep:
    """One group's step, in the stages that `kourkoutas.torch` lists."""

    def __init__(self, options: Options, group: dict[str, Any], work: Work, route: Route) -> None:
        if not route.fused:  # for which they have been looked at
            check_tensors(work)
        self.hyper, self.group, self.work, self.fused = options.hyper, group, work, route.fused
        self.device = work.step[0].device
        self.dtype = torch.float32 if self.device.type in NO_FLOAT64 else torch.float64
        self.grads = [g.resolve_conj() if g.is_complex() else g for g in work.grads]
        lr = group["lr"]
        self.lr = lr.reshape(()) if isinstance(lr, Tensor) else lr
        if isinstance(lr, Tensor) and not lr.is_cpu:  # of the CPU, one number goes with tensors of any device
            self.lr = self.lr.to(self.device)
        self.members = Members(work.bucket_of[0], len(work.buckets)) if work.bucket_of else None
        self.squares: Tensor | None = None
        self.has_grad: Tensor | None = None

    def measure(self) -> None:
        """||g|| of each parameter, and ⟨|θ|⟩ where it is needed."""
        self.local = norms(self.grads, 2, self.dtype, self.device, quick=self.fused)
        self.mean_abs = None
        if self.hyper.adaptive_tiny:
            self.mean_abs = norms(self.work.params, 1, self.dtype, self.device) / self.work.sizes[0]

    def sums(self) -> Tensor:
        """This rank's part of Σ g² and ⟨|θ|⟩ of each parameter of the group, for `sharding`."""
        squares = self.local.double().square()
        rows = torch.stack([squares] if self.mean_abs is None else [squares, self.mean_abs.double()])
        if not self.work.place_index:
            return rows
        return rows.new_zeros(len(rows), len(self.group["params"])).index_copy(1, self.work.place_index[0], rows)

    def latest(self) -> Tensor:
        """Per bucket: the most steps that a member with a gradient has taken, this one included; 0 without any."""
        steps = self._pick(self.work.step[0], self.work.place_index) + 1
        return steps if self.members is None else self.members.largest(steps)

    def take(self, squares: Tensor, means: Tensor | None, latest: Tensor | None) -> None:
        """Use the sums over all ranks instead: Σ g² per bucket, ⟨|θ|⟩ per parameter, and `latest`."""
        self.squares = self._pick(squares, self.work.bucket_index, squares.dtype)
        if means is not None:
            self.mean_abs = self._pick(means, self.work.place_index)
        if latest is not None:
            index = self.work.bucket_of[0] if self.work.bucket_of else torch.arange(len(latest), device=self.device)
            self.members, self.has_grad = Members(index, len(latest), latest), latest > 0

    def first_bad(self) -> str | None:
        """The name of the first bucket whose norm is not finite; this reads the norms."""
        bad = (~self._norm().isfinite()).nonzero().flatten().tolist()
        return self.group["bucket_names"][self.work.buckets[bad[0]]] if bad else None

    def apply(self) -> None:
        """Move the scalar state and the tensors."""
        self.found = self._apply_arrays() if self.fused else self._apply_tensors()

    def _apply_tensors(self) -> rule.Step:
        work, pick = self.work, self._pick
        state = rule.State(
            ema=pick(work.norm_ema[0], work.bucket_index),
            step=pick(work.step[0], work.place_index),
            log_beta2=pick(work.log_beta2[0], work.place_index) if work.log_beta2 else None,
            skipped=pick(work.skipped[0], work.bucket_index, torch.int64) if work.skipped else None,
        )
        also: dict[str, Any] = {"members": self.members, "mean_abs": self.mean_abs, "has_grad": self.has_grad}
        new = rule.step(self.hyper, self.lr, self._norm(), state, torch, **also)
        for vectors, values, index in (
            (work.norm_ema, new.state.ema, work.bucket_index),
            (work.step, new.state.step, work.place_index),
            (work.log_beta2, new.state.log_beta2, work.place_index),
            (work.skipped, new.state.skipped, work.bucket_index),
        ):
            for vector in vectors:
                whole = vector.index_copy(0, index[0], values.to(vector.dtype)) if index else values
                torch._foreach_copy_([vector], [whole])
        if self.grads:
            self._update(new.k, new.updated_each)
        return new

    def _apply_arrays(self) -> rule.Step:
        """The same with NumPy on the memory of the vectors, and torch's fused Adam kernel."""
        work = self.work
        each = work.place_index[0].numpy() if work.place_index else ...
        bucket = work.bucket_index[0].numpy() if work.bucket_index else ...
        ema, step = work.norm_ema[0].numpy(), work.step[0].numpy()
        log_beta2 = work.log_beta2[0].numpy() if work.log_beta2 else None
        skipped = work.skipped[0].numpy() if work.skipped else None
        state = rule.State(
            ema=ema[bucket].astype(np.float64),
            step=step[each].astype(np.float64),
            log_beta2=None if log_beta2 is None else log_beta2[each].astype(np.float64),
            skipped=None if skipped is None else skipped[bucket],
        )
        members = None if self.members is None else ArrayMembers(self.members)
        mean_abs = None if self.mean_abs is None else self.mean_abs.numpy()
        with np.errstate(all="ignore"):  # a NaN norm is the caller's to see
            new = rule.step(
                self.hyper, float(self.lr), self._norm().numpy(), state, np, members=members, mean_abs=mean_abs
            )
            ema[bucket], step[each] = new.state.ema, new.state.step
            if log_beta2 is not None:
                log_beta2[each] = new.state.log_beta2
            if skipped is not None:
                skipped[bucket] = new.state.skipped
        self._update_by_adam(new.k, new.updated_each)
        return new

    def rows(self) -> Tensor:
        """sun, β2 and n of every bucket of the group, after `apply`; NaN for those at rest."""
        rows = torch.stack([torch.as_tensor(x) for x in (self.found.sun, self.found.beta2, self.found.norm)])
        if not self.work.bucket_index:
            return rows
        nothing = rows.new_full((len(rows), len(self.group["bucket_names"])), torch.nan)
        return nothing.index_copy(1, self.work.bucket_index[0], rows)

    def _norm(self) -> Tensor:
        """n = √Σ ||g||² of each bucket, in units of its largest ||g||."""
        if self.squares is not None:
            return self.squares.sqrt().to(self.dtype)
        if self.members is None:
            return self.local
        largest = self.members.largest(self.local)
        unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
        shares = (self.local / self.members.spread(unit)).square()
        return unit * torch.zeros_like(unit).index_add_(0, self.members.index, shares).sqrt()

    def _pick(self, vector: Tensor, index: list[Tensor], dtype: torch.dtype | None = None) -> Tensor:
        """The entries of the step's parameters or buckets, for arithmetic."""
        return (vector.index_select(0, index[0]) if index else vector).to(dtype or self.dtype)

    def _update_by_adam(self, k: Coefficients, updated: NDArray[np.bool_] | None) -> None:
        """The update by torch's fused Adam kernel, tensor by tensor.

        It computes θ ← θ - γ'·m/(√v̂ + ε') once a huge step count has made its own bias correction 1. With γ' = rate
        and ε' = floor that is the update of `rule.Coefficients`, apart from the clip, and from weight decay, of which
        it would round 1 - γλ.
        """
        work, leak = self.work, self.hyper.leak
        n = len(work.params)
        beta2, rate, floor, fade = (_floats(x, n) for x in (1 - k.c2, k.rate, k.floor, k.fade))
        options: dict[str, Any] = {"beta1": self.hyper.beta1, "weight_decay": 0.0, "amsgrad": leak is not None}
        options["maximize"] = self.group["maximize"]
        going = range(n) if updated is None else np.flatnonzero(updated).tolist()
        for i in going:
            p, v_max = work.params[i], work.max_exp_avg_sqs[i : i + 1]
            if not p.numel():
                continue
            if leak not in (None, 1):
                v_max[0].mul_(leak)
            if fade[i]:
                p.add_(p, alpha=-fade[i])
            tensors = ([p], [self.grads[i]], [work.exp_avgs[i]], [work.exp_avg_sqs[i]], v_max, [_LATE])
            torch._fused_adamw_(*tensors, lr=rate[i], beta2=beta2[i], eps=floor[i], **options)

    def _update(self, k: Coefficients, updated: Tensor | None) -> None:
        """The update of `rule.Coefficients` by lists of one device and dtype each, or tensor by tensor."""
        work, grads = self.work, self.grads
        if updated is not None:
            each = zip(updated.unbind(), grads, strict=True)
            grads = [torch.where(ok.to(g.device), g, 0) for ok, g in each]
        tensors = [[real(t) for t in ts] for ts in (work.params, grads, *moments(work).values())]
        foreach = self.group["foreach"]
        together = foreach or (foreach is None and tensors[0][0].device.type != "cpu")
        kinds: dict[Any, list[int]] = {}
        for i in range(len(grads)):
            key = (tensors[0][i].device, *(ts[i].dtype for ts in tensors)) if together else i
            kinds.setdefault(key, []).append(i)
        for chosen in kinds.values():
            old = [[ts[i] for i in chosen] for ts in tensors]
            new = [[wide(t) for t in ts] for ts in old]
            *picked, beta2 = _picked([*k, 1 - k.c2], chosen, new[0][0], len(grads))
            _update(new, Coefficients(*picked), beta2, self.group["maximize"])
            (theta, _, *state), (new_theta, _, *new_state) = old, new
            if new_theta[0] is not theta[0]:
                torch._foreach_copy_(theta, new_theta)
            if new_state[0][0] is state[0][0]:
                continue
            if self.group["state_dtype"] is torch.bfloat16 and state[0][0].dtype is torch.bfloat16:
                self._store_with_noise(chosen, state, new_state)
            else:
                for targets, values in zip(state, new_state, strict=True):
                    torch._foreach_copy_(targets, values)

    def _store_with_noise(self, chosen: list[int], state: list[list[Tensor]], values: list[list[Tensor]]) -> None:
        """Round m, v and v_max stochastically: m by the low half of the hash, v and v_max by the high half."""
        for j, i in enumerate(chosen):
            place = self.work.places[i]
            shard = self.work.shards[i] if self.work.shards else None
            noise = noise_bits(self.work.step[0].select(0, place), place, state[0][j], shard)
            for number, (targets, new) in enumerate(zip(state, values, strict=True)):
                targets[j].copy_(rounded(new[j], (noise if number == 0 else noise >> 16) & 0xFFFF))


def fused_takes(work: Work, hyper: Hyper) -> bool:
    """Whether torch's fused Adam kernel reads these tensors rightly: plain, on the CPU, without gaps and lazy signs.

    Low precision must be rounded only once, which it is not where θ or v_max moves before the kernel is called.
    """
    twice = hyper.weight_decay != 0 or hyper.leak not in (None, 1)
    dtypes = _WIDE if twice else (*_WIDE, *LOW_PRECISION)
    for p, *others in zip(work.params, work.grads, *moments(work).values(), strict=True):
        dtype, shape = p.dtype, p.shape
        if dtype not in dtypes:
            return False
        for t in (p, *others):
            if type(t) not in _TYPES or t.dtype is not dtype or t.shape != shape or not t.is_cpu:
                return False
            if not t.is_contiguous() or t.is_neg() or not (t.data_ptr() or not t.numel()):
                return False
    return True


def check_tensors(work: Work) -> None:
    """Raise if a gradient or a state is not like its parameter or cannot be written, before anything has moved."""
    eager = not torch.compiler.is_compiling()  # asking for the bits would break a graph in two

    def kind(x: Tensor) -> tuple[Any, ...]:
        return x.shape, x.device, torch.float32 if x.dtype in LOW_PRECISION else x.dtype

    def fixed(x: Tensor) -> bool:
        return x.is_neg() or (x.is_inference() and not torch.is_inference_mode_enabled())

    wanted = [kind(p) for p in work.params]
    for name, tensors in {"param": work.params, "grad": work.grads, **moments(work)}.items():
        for place, x, like in zip(work.places, tensors, wanted, strict=True) if tensors else ():
            if kind(x) != like or (eager and name != "grad" and fixed(x)):
                what = f"`{name}`" if name in ("param", "grad") else f"`{name}` in the state"
                raise RuntimeError(
                    f"{what} of parameter {place} has another shape, dtype or device than the parameter, is negated "
                    "lazily, or was made in inference mode: set it anew, or load another state"
                )


def _floats(x: Any, n: int) -> list[float]:
    """One float per parameter; 0 for what there is nothing of."""
    if isinstance(x, np.ndarray) and x.ndim:
        return x.tolist()  # type: ignore[no-any-return]
    return [0.0 if x is None else float(x)] * n


def _picked(xs: list[Any], chosen: list[int], like: Tensor, count: int) -> list[Any]:
    """Coefficients of some parameters: numbers as they are, vectors as 0-dim tensors of device and dtype of `like`."""
    vectors = [x.to(like.device).expand(count) for x in xs if isinstance(x, Tensor)]
    cells = torch.cat(vectors).to(like.dtype).unbind() if vectors else ()
    starts = iter(range(0, len(cells), count))
    return [[cells[at + i] for at in (next(starts),) for i in chosen] if isinstance(x, Tensor) else x for x in xs]


def _update(tensors: list[list[Tensor]], k: Coefficients, beta2: Any, maximize: bool) -> None:
    """The update of `rule.Coefficients` on θ, g, m, v and, if it is kept, v_max, in place."""
    theta, g, m, v, *rest = tensors
    if maximize:
        g = list(torch._foreach_neg(g))
    if isinstance(k.fade, list):
        # θ ← θ - fade·θ
        torch._foreach_sub_(theta, torch._foreach_mul(theta, k.fade))
    elif k.fade is not None:
        torch._foreach_add_(theta, theta, alpha=-k.fade)
    # m ← m + c1·(g - m)
    torch._foreach_lerp_(m, g, k.c1)
    # v ← β2·v + c2·g²
    torch._foreach_mul_(v, beta2)
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
    delta = torch._foreach_div(m, denom)
    torch._foreach_mul_(delta, k.rate)
    if k.limit is not None:
        torch._foreach_clamp_max_(delta, k.limit)
        torch._foreach_clamp_min_(delta, [-x for x in k.limit] if isinstance(k.limit, list) else -k.limit)
    torch._foreach_sub_(theta, delta)


def norms(tensors: list[Tensor], order: int, dtype: torch.dtype, device: torch.device, quick: bool = False) -> Tensor:
    """||x|| of each tensor, which does not overflow before it must: see the note on norms in `kourkoutas.rule`.

    In float64, which takes no longer on an accelerator; where there is none, tensors are divided by their largest
    entry. `quick`: plain tensors on the CPU, whose sums are first tried in their own dtype.
    """
    if not tensors:
        return torch.zeros(0, dtype=dtype, device=device)
    tensors = [real(t) for t in tensors]
    if quick:
        found = _quick_norms([wide(t) for t in tensors])
        if math.isfinite(sum(found)):
            return torch.from_numpy(np.array(found))
    if dtype is torch.float64:
        found_each: Sequence[Tensor] = torch._foreach_norm(tensors, order, dtype=dtype)
    else:
        largest = [wide(t).abs().amax() if t.numel() else t.new_ones((), dtype=dtype) for t in tensors]
        units = [torch.where((x > 0) & x.isfinite(), x, 1.0) for x in largest]
        found_each = torch._foreach_norm(torch._foreach_div([wide(t) for t in tensors], units), order)
        found_each = torch._foreach_mul(found_each, units)
    return torch.stack([x.to(device) for x in found_each]).to(dtype)


def _quick_norms(tensors: list[Tensor]) -> list[float]:
    """One call is faster for many small tensors, and dot products for large ones."""
    if sum(map(Tensor.numel, tensors)) < _SMALL * len(tensors) and len({t.dtype for t in tensors}) == 1:
        return [x.item() for x in torch._foreach_norm(tensors)]
    flat = [t.reshape(-1) for t in tensors]
    return [math.sqrt(x.dot(x).item()) for x in flat]


def wide(x: Tensor) -> Tensor:
    """`x` in the dtype of its arithmetic: float32 for float16 and bfloat16."""
    return x.float() if x.dtype in LOW_PRECISION else x


def real(x: Tensor) -> Tensor:
    """A complex tensor as pairs of reals."""
    return torch.view_as_real(x) if x.is_complex() else x


def _mixed(h: Tensor) -> Tensor:
    """A hash of 32 bits held in int64; _native/step.c has the same."""
    h = (h ^ h >> 16) * 0x45D9F3B5 & _WORD
    h = (h ^ h >> 13) * 0x3C6EF373 & _WORD
    return h ^ h >> 16


def noise_bits(step: Tensor, place: int, like: Tensor, shard: Shard | None = None) -> Tensor:
    """32 bits for every element of `like`, as int64: a hash of step, place and element, alike on all routes.

    `place` is the parameter's number in its group. Elements are counted in the order of memory, as the kernel does;
    those of a shard as in the whole tensor.
    """
    seed = _mixed(_mixed(step.to(torch.int64)) + place & _WORD)
    if shard is None or shard.strides is None:
        count = torch.arange(like.numel(), device=like.device).as_strided(like.shape, like.stride())
    else:
        count = torch.zeros(like.shape, dtype=torch.int64, device=like.device)
        for d, (n, stride) in enumerate(zip(like.shape, shard.strides, strict=True)):
            along = torch.arange(n, device=like.device) * stride
            count = count + along.view([n if e == d else 1 for e in range(like.ndim)])
    if shard is not None:
        count = count + shard.first
    return _mixed(count * 0x1E3779B1 + seed.to(like.device) & _WORD)


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """float32 → bfloat16, up with the probability of what is cut off; `bits` are 16 random ones per element."""
    up = x.view(torch.int32) + bits.to(torch.int32) & -0x10000
    return torch.where(x.isfinite(), up.view(torch.float32), x).bfloat16()
