"""The step by torch's own operations, for tensors of any device, dtype and layout.

Scalars are vectors on the device, and no value is read back, so that nothing waits for an accelerator and tracers see
every operation. Plain tensors on the CPU may take a short cut, `FusedStep`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kourkoutas import rule
from kourkoutas.rule import Coefficients
from kourkoutas.torch import sharding
from kourkoutas.torch.options import LOW_PRECISION, MOMENTS
from kourkoutas.torch.sharding import Shard

if TYPE_CHECKING:
    from kourkoutas.torch.optimizer import Group

NO_FLOAT64 = ("mps",)
_LATE = torch.tensor(1e30, device="cpu")  # a step count at which Adam's bias correction is 1; its kernel only reads it
_TYPES = {Tensor, torch.nn.Parameter}
_WIDE = (torch.float32, torch.float64)
_WORD = 0xFFFFFFFF


class Selection(NamedTuple):
    """The parameters and buckets of one step, and their numbers in the group, on the device of the vectors."""

    places: list[int]  # numbers of the parameters that have a gradient
    buckets: list[int]  # numbers of the buckets that are updated
    place_index: Any  # `places`; None if they are all parameters
    bucket_index: Any  # `buckets`; None if they are all buckets, in order
    bucket_of: Any  # per parameter: which of `buckets` it is in; None if each is its own, in order, and whole
    sizes: Any  # real numbers in each parameter, wherever they lie


class Members:
    """Parameters and buckets of a step, for `rule.step` and for the norms of buckets."""

    def __init__(self, index: Tensor, count: int) -> None:
        self.index, self.count = index, count
        self.latest: Tensor | None = None

    def spread(self, x: Tensor) -> Tensor:
        return x.index_select(0, self.index)

    def largest(self, x: Tensor) -> Tensor:
        if self.latest is not None:  # of members on other ranks, too
            return self.latest.to(x)
        return x.new_zeros(self.count).scatter_reduce_(0, self.index, x, "amax")

    def total(self, x: Tensor) -> Tensor:
        return x.new_zeros(self.count).index_add_(0, self.index, x)


class ListStep:
    """One group's step, in the stages that `kourkoutas.torch` lists.

    Attributes:
      lists: θ, g, m, v and, if it is kept, v_max of the parameters that have a gradient: what lies on this rank.
      numbers: those of the whole group, as vectors.
    """

    def __init__(self, own: Group, lists: list[list[Tensor]], numbers: rule.State, chosen: Selection) -> None:
        self.own, self.hyper, self.group = own, own.hyper, own.group
        self.lists, self.numbers, self.chosen = lists, numbers, chosen
        if own.shards is not None:
            sharding.localize(lists)
        self.device = numbers.step.device
        self.dtype = torch.float32 if self.device.type in NO_FLOAT64 else torch.float64
        self.grads = [g.resolve_conj() if g.is_complex() else g for g in lists[1]]
        self.lr = lr = own.group["lr"]
        if isinstance(lr, Tensor):  # of the CPU, one number goes with tensors of any device
            self.lr = lr.reshape(()) if lr.is_cpu else lr.reshape(()).to(self.device)
        self.members: Any = None if chosen.bucket_of is None else Members(chosen.bucket_of, len(chosen.buckets))
        self.squares: Any = None  # known only where parts lie on several ranks
        self.has_grad: Any = None  # the same
        self.mean_abs: Tensor | None = None

    def checked(self) -> ListStep:
        """Raise if a gradient or a state is not like its parameter or cannot be written, before anything has moved."""
        eager = not torch.compiler.is_compiling()  # asking for the bits would break a graph in two

        def kind(x: Tensor) -> tuple[Any, ...]:
            return x.shape, x.device, torch.float32 if x.dtype in LOW_PRECISION else x.dtype

        def fixed(x: Tensor) -> bool:
            return x.is_neg() or (x.is_inference() and not torch.is_inference_mode_enabled())

        whats = ["`param`", "`grad`", *(f"`{name}` in the state" for name in MOMENTS)]
        for what, tensors in zip(whats, self.lists, strict=False):
            for place, x, p in zip(self.chosen.places, tensors, self.lists[0], strict=True):
                if kind(x) != kind(p) or (eager and what != "`grad`" and fixed(x)):
                    raise RuntimeError(
                        f"{what} of parameter {place} has another shape, dtype or device than the parameter, is "
                        "negated lazily, or was made in inference mode: set it anew, or load another state"
                    )
        return self

    def measure(self) -> None:
        """||g|| of each parameter, and ⟨|θ|⟩ where it is needed."""
        self.local: Any = norms(self.grads, 2, self.dtype, self.device)
        if self.hyper.adaptive_tiny:
            self.mean_abs = norms(self.lists[0], 1, self.dtype, self.device) / self.chosen.sizes

    def sums(self) -> Tensor:
        """This rank's part of Σ g² and ⟨|θ|⟩ of each parameter of the group, for `sharding`."""
        squares, index = torch.as_tensor(self.local, device=self.device) ** 2, self.chosen.place_index
        rows = torch.stack([squares] if self.mean_abs is None else [squares, self.mean_abs]).double()
        if index is None:
            return rows
        return rows.new_zeros(len(rows), len(self.group["params"])).index_copy(1, index, rows)

    def latest(self) -> Tensor:
        """Per bucket: the most steps that a member with a gradient has taken, this one included; 0 without any."""
        steps = _pick(self.numbers.step, self.chosen.place_index, self.dtype) + 1
        return self.members.largest(steps)  # type: ignore[no-any-return]

    def take(self, squares: Tensor, means: Tensor | None, latest: Tensor | None) -> None:
        """Use the sums over all ranks instead: Σ g² per bucket, ⟨|θ|⟩ per parameter, and `latest`."""
        self.squares = _pick(squares, self.chosen.bucket_index, squares.dtype)
        if means is not None:
            self.mean_abs = _pick(means, self.chosen.place_index, self.dtype)
        if latest is not None:
            self.members.latest, self.has_grad = latest, latest > 0

    def first_bad(self) -> str | None:
        """The name of the first bucket whose norm is not finite; this reads the norms."""
        bad = (~self._norm().isfinite()).nonzero().flatten().tolist()
        return self.group["bucket_names"][self.chosen.buckets[bad[0]]] if bad else None

    def apply(self) -> None:
        """Move the scalar state and the tensors."""
        vectors = self._vectors()
        state = rule.State(*(_pick(x, index, self.dtype) for x, index in vectors))
        also: dict[str, Any] = {"members": self.members, "mean_abs": self.mean_abs, "has_grad": self.has_grad}
        self.found = new = rule.step(self.hyper, self.lr, self._norm(), state, torch, **also)
        for (vector, index), values in zip(vectors, new.state, strict=True):
            if vector is None:
                continue
            if index is None:
                torch._foreach_copy_([vector], [values])  # FakeTensorMode does without a GPU, unlike `copy_`
            else:
                vector.index_copy_(0, index, values.to(vector.dtype))
        if self.grads:
            self._update(new.k, new.updated_each)

    def rows(self) -> Tensor:
        """sun, β2 and n of every bucket of the group, after `apply`; NaN for those at rest."""
        found = self.found.sun, self.found.beta2, self.found.norm
        rows = torch.stack([torch.as_tensor(x, device=self.device).view(-1) for x in found])
        if self.chosen.bucket_index is None:
            return rows
        nothing = rows.new_full((len(rows), len(self.group["bucket_names"])), torch.nan)
        return nothing.index_copy(1, self.chosen.bucket_index, rows)

    def _vectors(self) -> list[tuple[Any, Any]]:
        """The numbers in the order of `rule.State`, each with the index of the entries that move; None: all."""
        each, bucket = self.chosen.place_index, self.chosen.bucket_index
        return list(zip(self.numbers, (bucket, each, each, bucket), strict=True))

    def _norm(self) -> Any:
        """n = √Σ ||g||² of each bucket, in units of its largest ||g||."""
        if self.squares is not None:
            return self.squares.sqrt().to(self.dtype)
        if self.members is None:
            return torch.as_tensor(self.local, device=self.device)
        largest = self.members.largest(self.local)
        unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
        return unit * self.members.total((self.local / self.members.spread(unit)) ** 2).sqrt()

    def _update(self, k: Coefficients, updated: Tensor | None) -> None:
        """The update of `rule.Coefficients` by lists of one device and dtype each, or tensor by tensor."""
        (params, _, *moments), grads = self.lists, self.grads
        if updated is not None:
            each = zip(updated.unbind(), grads, strict=True)
            grads = [torch.where(ok.to(g.device), g, 0) for ok, g in each]
        tensors = [[real(t) for t in ts] for ts in (params, grads, *moments)]
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
            place = self.chosen.places[i]
            shard = None if self.own.shards is None else self.own.shards[place]
            noise = noise_bits(self.numbers.step.select(0, place), place, state[0][j], shard)
            for number, (targets, new) in enumerate(zip(state, values, strict=True)):
                targets[j].copy_(rounded(new[j], (noise if number == 0 else noise >> 16) & 0xFFFF))


class FusedStep(ListStep):
    """The same, where it `takes` the tensors: NumPy does the scalars, and torch's fused Adam kernel the update.

    NumPy works in the memory of the vectors and takes a tenth of the time. Where a norm is not finite, which it would
    warn of, torch computes.
    """

    def takes(self) -> bool:
        """Whether this is right: plain tensors on the CPU, each its own bucket; no clip and no leak."""
        if self.hyper.max_ratio is not None or self.hyper.adaptive_tiny or self.hyper.leak not in (None, 1):
            return False
        if self.members is not None or not self.grads:
            return False
        for p, *others in zip(*self.lists, strict=True):
            dtype, shape = p.dtype, p.shape
            for t in (p, *others):
                if type(t) not in _TYPES or dtype not in _WIDE or t.dtype is not dtype or t.shape != shape:
                    return False
                if not t.is_cpu or not t.is_contiguous() or t.is_neg() or not (t.data_ptr() or not t.numel()):
                    return False
        return True

    def measure(self) -> None:
        """||g|| by sums in the gradients' own dtype, unless these overflow."""
        found = [math.sqrt(_square_sum(g)) for g in self.grads]
        if math.isfinite(sum(found)):
            self.local = np.array(found)
        else:
            super().measure()

    def apply(self) -> None:
        vectors, norm = self._vectors(), np.asarray(self.local if self.squares is None else self.squares.sqrt())
        if not math.isfinite(sum(norm.tolist())):
            super().apply()
            return
        arrays: list[Any] = [None if x is None else x.numpy() for x, _ in vectors]
        at: list[Any] = [... if index is None else index.numpy() for _, index in vectors]
        before: list[Any] = [None if x is None else x[i].astype(np.float64) for x, i in zip(arrays, at, strict=True)]
        if len(norm) == 1:  # Python computes faster with numbers than NumPy with arrays of one
            norm, before = norm.item(), [None if x is None else x.item() for x in before]
        elif (before[1] == before[1][0]).all():
            before[1] = before[1].item(0)  # t, one number for all
        self.found = new = rule.step(self.hyper, float(self.lr), norm, rule.State(*before), np)
        for array, i, values in zip(arrays, at, new.state, strict=True):
            if array is not None:
                array[i] = values
        self._update(new.k, new.updated_each)

    def _update(self, k: Coefficients, updated: Any) -> None:
        """The update of `rule.Coefficients` tensor by tensor.

        Adam's kernel computes θ ← θ - γ'·m/(√v̂ + ε') once a huge step count has made its own bias correction 1. With
        γ' = rate and ε' = floor that is our update, apart from the clip, and from weight decay, of which it would round
        1 - γλ.
        """
        moves, leak = True if updated is None else updated, self.hyper.leak
        each = (_floats(x, len(self.grads)) for x in (moves, 1 - k.c2, k.rate, k.floor, k.fade))
        options: dict[str, Any] = {"beta1": self.hyper.beta1, "weight_decay": 0.0, "amsgrad": leak is not None}
        options["maximize"] = self.group["maximize"]
        tensors = zip(*self.lists, strict=True)
        for (p, g, m, v, *v_max), move, beta2, rate, floor, fade in zip(tensors, *each, strict=True):
            if not move or not p.numel():
                continue
            if fade:
                p.add_(p, alpha=-fade)
            torch._fused_adamw_([p], [g], [m], [v], v_max, [_LATE], lr=rate, beta2=beta2, eps=floor, **options)


def _square_sum(g: Tensor) -> float:
    """Σ g² in the dtype of g; piece by piece, as one long sum would lose digits. NumPy is faster with small ones."""
    if 0 < g.numel() <= 1 << 14:
        x = g.numpy()
        return float(np.vdot(x, x))
    return float(sum(x.dot(x).item() for x in g.view(-1).split(1 << 18)))


def _floats(x: Any, n: int) -> list[float]:
    """One float per parameter; 0 for what there is nothing of."""
    return x.tolist() if getattr(x, "ndim", 0) else [float(x or 0)] * n


def _pick(vector: Any, index: Tensor | None, dtype: torch.dtype) -> Any:
    """Entries of a vector, for arithmetic: numbers in `dtype`, counts as they are."""
    if vector is None:
        return None
    picked = vector if index is None else vector.index_select(0, index)
    return picked.to(dtype) if vector.is_floating_point() else picked


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


def norms(tensors: list[Tensor], order: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """||x|| of each tensor, which does not overflow before it must: see the note on norms in `kourkoutas.rule`."""
    if not tensors:
        return torch.zeros(0, dtype=dtype, device=device)
    tensors = [real(t) for t in tensors]
    if dtype is torch.float64:
        found: Sequence[Tensor] = torch._foreach_norm(tensors, order, dtype=dtype)
    else:  # in units of the largest entry
        largest = [wide(t).abs().amax() if t.numel() else t.new_ones((), dtype=dtype) for t in tensors]
        units = [torch.where((x > 0) & x.isfinite(), x, 1.0) for x in largest]
        found = torch._foreach_norm(torch._foreach_div([wide(t) for t in tensors], units), order)
        found = torch._foreach_mul(found, units)
    return torch.stack([x.to(device) for x in found]).to(dtype)


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
    first, strides = (0, like.stride()) if shard is None else (shard.first, shard.strides)
    count = torch.full(like.shape, first, dtype=torch.int64, device=like.device)
    for d, (n, stride) in enumerate(zip(like.shape, strides, strict=True)):
        along = torch.arange(n, device=like.device) * stride
        count += along.view([n if e == d else 1 for e in range(like.ndim)])
    return _mixed(count * 0x1E3779B1 + seed.to(like.device) & _WORD)


def rounded(x: Tensor, bits: Tensor) -> Tensor:
    """float32 → bfloat16, up with the probability of what is cut off; `bits` are 16 random ones per element."""
    up = x.view(torch.int32) + bits.to(torch.int32) & -0x10000
    return torch.where(x.isfinite(), up.view(torch.float32), x).bfloat16()
