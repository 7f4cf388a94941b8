"""The step by torch's own operations, for tensors of any device, dtype and layout.

Scalars are vectors on the device, and no value is read back, so that nothing waits for an accelerator and tracers see
every operation. Plain tensors on the CPU may take a short cut, `FusedStep`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kourkoutas import rule
from kourkoutas.rule import Coefficients
from kourkoutas.torch import private, rounding, sharding
from kourkoutas.torch.group import HOST, Collected, Group, Tensors
from kourkoutas.torch.options import LOW_PRECISION
from kourkoutas.torch.recorder import Row

NO_FLOAT64 = ("mps",)  # devices
_LATE = torch.tensor(1e30, device="cpu")  # a step count at which Adam's bias correction is 1; its kernel only reads it
_PIECE = 1 << 18  # elements
_TYPES = {Tensor, torch.nn.Parameter}
_WIDE = (torch.float32, torch.float64)


class ListStep:
    """One group's step, in the stages that `kourkoutas.torch` lists.

    A further kind of step that only differs in what it does with the coefficients overrides `update`.

    Attributes:
      tensors: of the parameters that have a gradient, what lies on this rank.
      scalars: those of the whole group, as vectors.
      members: who is in which bucket.
      norms: ||g|| of each parameter, after `measure`.
      mean_abs: ⟨|θ|⟩ of each parameter, after `measure`, with adaptive_tiny.
      found: the `rule.Step`, after `apply`.
    """

    def __init__(self, own: Group, collected: Collected) -> None:
        self.own, self.hyper, self.group = own, own.hyper, own.group
        self.tensors, self.scalars, self.members = collected
        if own.shards is not None:
            sharding.localize(self.tensors)
        grads = [g.resolve_conj() if g.is_complex() else g for g in self.tensors.grads]
        self.tensors = self.tensors._replace(grads=grads)
        self.device = self.scalars.step.device
        self.dtype = torch.float32 if self.device.type in NO_FLOAT64 else torch.float64
        self.lr = own.group["lr"]
        if isinstance(self.lr, Tensor):  # of the CPU, one number goes with tensors of any device
            self.lr = self.lr.reshape(()) if self.lr.is_cpu else self.lr.reshape(()).to(self.device)
        self.norms: Any = None
        self.mean_abs: Any = None
        self.squares: Any = None  # Σ g² of each bucket, known only where parts lie on several ranks
        self.has_grad: Any = None  # the same
        self.starts: Any = None  # which parameters only make their basis: see `kourkoutas.torch.eigenbasis`
        self.found: Any = None

    def check(self) -> None:
        """Raise if a gradient or a state is not like its parameter or cannot be written, before anything has moved."""
        self._compare("`param`", self.tensors.params)
        self._compare("`grad`", self.tensors.grads, written=False)
        for name, moments in self.tensors.moments():
            self._compare(f"`{name}` in the state", moments)
        if self.own.noisy_states:
            rounding.check_shards(self.own)

    def _compare(self, what: str, tensors: list[Tensor], *, written: bool = True) -> None:
        for place, x, p in zip(self.members.places, tensors, self.tensors.params, strict=True):
            alike = x.shape == p.shape and x.device == p.device and arithmetic_dtype(x) == arithmetic_dtype(p)
            if not alike or (written and cannot_be_written(x)):
                raise RuntimeError(
                    f"{what} of parameter {place} has another shape, dtype or device than the parameter, is "
                    "negated lazily, or was made in inference mode: set it anew, or load another state"
                )

    def measure(self) -> None:
        """||g|| of each parameter, and ⟨|θ|⟩ where it is needed."""
        self.norms = norms(self.tensors.grads, 2, self.dtype, self.device)
        if self.hyper.adaptive_tiny:
            self.mean_abs = norms(self.tensors.params, 1, self.dtype, self.device) / self.members.sizes

    def sums(self) -> Tensor:
        """This rank's part of Σ g² and ⟨|θ|⟩ of each parameter of the group, for `sharding`."""
        rows = [torch.as_tensor(self.norms, device=self.device) ** 2]
        if self.mean_abs is not None:
            rows.append(self.mean_abs)
        table = torch.stack(rows).double()
        index = self.members.place_index
        if index is None:
            return table
        return table.new_zeros(len(rows), len(self.group["params"])).index_copy(1, index, table)

    def latest(self) -> Tensor:
        """Per bucket: the most steps that a member with a gradient has taken, this one included; 0 without any."""
        steps = pick(self.scalars.step, self.members.place_index, self.dtype) + 1
        return self.members.largest(steps)  # type: ignore[no-any-return]

    def take(self, squares: Tensor, means: Tensor | None, latest: Tensor | None) -> None:
        """Use the sums over all ranks instead: Σ g² per bucket, ⟨|θ|⟩ per parameter, and `latest`."""
        self.squares = pick(squares, self.members.bucket_index, squares.dtype)
        if means is not None:
            self.mean_abs = pick(means, self.members.place_index, self.dtype)
        if latest is not None:
            self.members = self.members._replace(latest=latest)
            self.has_grad = latest > 0

    def first_bad(self) -> str | None:
        """The name of the first bucket whose norm is not finite; this reads the norms."""
        bad = (~self.pooled_norm().isfinite()).nonzero().flatten().tolist()
        return self.members.bucket_names[bad[0]] if bad else None

    def pooled_norm(self) -> Any:
        """n = √Σ ||g||² of each bucket, in units of its largest ||g||."""
        if self.squares is not None:
            return self.squares.sqrt().to(self.dtype)
        each = torch.as_tensor(self.norms, device=self.device)
        members = self.members
        if members.bucket_of is None:
            return each
        if self.device.type not in HOST and not any(is_wide(g) for g in self.tensors.grads):
            return members.total(each * each).sqrt()  # squares of float32's fit into float64
        largest = members.largest(each)
        unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
        return unit * members.total((each / members.spread(unit)) ** 2).sqrt()

    def apply(self, row: Row | None = None) -> None:
        """Move the scalar state and the tensors; write sun, β2 and n into the row of the trace."""
        vectors = self.moving()
        taken = self._steps_taken()
        read: list[Any] = [pick(x, index, self.dtype) for x, index in vectors if x is not self.scalars.step]
        step = float(taken) if taken is not None else pick(self.scalars.step, self.members.place_index, self.dtype)
        state = rule.State(read[0], step, *read[1:])
        self.found = rule.step(
            self.hyper,
            self.lr,
            self.pooled_norm(),
            state,
            torch,
            members=self.members,
            mean_abs=self.mean_abs,
            has_grad=self.has_grad,
            starts=self.starts,
        )
        self._store_scalars(vectors)
        if not torch.compiler.is_compiling():
            self.own.note_steps(None if taken is None else taken + 1, self.members.places)
        if self.tensors.params:
            self.update(self.found.k, self.found.updated_each)
        if row is not None:
            row.write(self.rows())

    def _steps_taken(self) -> int | None:
        """How many steps all parameters have taken, if the host knows; then their scalars are computed here."""
        depends = self.has_grad is not None or self.hyper.nonfinite == "skip" or bool(self.hyper.warmup_steps != 0)
        depends = depends or self.hyper.basis is not None  # a parameter's first gradient is no step
        return None if depends or torch.compiler.is_compiling() else self.own.steps_taken(self.members.places)

    def _store_scalars(self, vectors: list[tuple[Any, Any]]) -> None:
        """Write the scalars that `rule.step` found; those of the whole group in one operation."""
        whole: list[tuple[Tensor, Tensor]] = []
        for (vector, index), values in zip(vectors, self.found.state, strict=True):
            if vector is None:
                continue
            if isinstance(values, float):
                vector.fill_(values) if index is None else vector.index_fill_(0, index, values)
            elif index is None:
                whole.append((vector, values))
            else:
                vector.index_copy_(0, index, values.to(vector.dtype))
        if whole:
            # FakeTensorMode does this without a GPU, unlike `copy_`.
            torch._foreach_copy_([vector for vector, _ in whole], [values for _, values in whole])

    def moving(self) -> list[tuple[Any, Any]]:
        """The scalars in the order of `rule.State`, each with the index of the entries that move; None: all."""
        parameters, buckets = self.members.place_index, self.members.bucket_index
        return [
            (self.scalars.ema, buckets),
            (self.scalars.step, parameters),
            (self.scalars.log_beta2, parameters),
            (self.scalars.skipped, buckets),
        ]

    def rows(self) -> Tensor:
        """sun, β2 and n of every bucket of the group, after `apply`; NaN for those at rest."""
        found = self.found.sun, self.found.beta2, self.found.norm
        rows = torch.stack([torch.as_tensor(x, device=self.device).view(-1) for x in found])
        if self.members.bucket_index is None:
            return rows
        nothing = rows.new_full((len(rows), len(self.own.bucket_names)), torch.nan)
        return nothing.index_copy(1, self.members.bucket_index, rows)

    def update(self, k: Coefficients, updated: Tensor | None) -> None:
        """The update of `rule.Coefficients` by lists of one device and dtype each, or tensor by tensor.

        Args:
          k: the coefficients, one entry per parameter or one number for all.
          updated: which parameters move; None: all.
        """
        grads = self.tensors.grads
        if updated is not None:
            grads = [torch.where(ok.to(g.device), g, 0) for ok, g in zip(updated.unbind(), grads, strict=True)]
        stored = Tensors(*([real(x) for x in each] for each in self.tensors._replace(grads=grads)))
        for chosen in self._lists(stored):
            old = Tensors(*([each[i] for i in chosen if each] for each in stored))
            new = Tensors(*([wide(x) for x in each] for each in old))
            picked = pick_coefficients(k, chosen, len(grads), new.params[0], self.lr)
            update_lists(new, picked, self.group["maximize"])
            self._store(chosen, old, new)

    def _lists(self, tensors: Tensors) -> list[list[int]]:
        """The parameters that torch's foreach operations take at once, by their numbers in the lists."""
        foreach = self.group["foreach"]
        together = foreach or (foreach is None and tensors.params[0].device.type != "cpu")
        if not together:
            return [[i] for i in range(len(tensors.params))]
        kinds: dict[Any, list[int]] = {}
        for i, p in enumerate(tensors.params):
            dtypes = tuple(each[i].dtype for each in tensors if each)
            kinds.setdefault((p.device, dtypes), []).append(i)
        return list(kinds.values())

    def _store(self, chosen: list[int], old: Tensors, new: Tensors) -> None:
        """Write back what was computed in another dtype than it is kept in."""
        noisy: list[tuple[str, list[Tensor], list[Tensor]]] = []
        for (name, targets), (_, values) in zip(old.written(), new.written(), strict=True):
            if values[0] is targets[0]:
                continue
            if targets[0].dtype is torch.bfloat16 and self._rounds_with_noise(name):
                noisy.append((name, targets, values))
            else:
                torch._foreach_copy_(targets, values)
        if not noisy:
            return
        for number, i in enumerate(chosen):  # one by one: the bits take eight bytes an element
            bits = self.noise_bits(self.members.places[i], old.m[number])
            for name, targets, values in noisy:
                targets[number].copy_(rounding.rounded(values[number], rounding.noise_of(name, bits)))

    def _rounds_with_noise(self, name: str) -> bool:
        if name == "param":
            return bool(self.group["stochastic_rounding"])
        return self.own.noisy_states

    def noise_bits(self, place: int, like: Tensor) -> Tensor:
        shard = None if self.own.shards is None else self.own.shards[place]
        return rounding.noise_bits(self.scalars.step.select(0, place), place, like, shard)


class FusedStep(ListStep):
    """The same, where it `takes` the tensors: NumPy does the scalars, and torch's fused Adam kernel the update.

    NumPy works in the memory of the vectors and takes a tenth of the time. Where a norm is not finite, which it would
    warn of, torch computes.
    """

    def takes(self) -> bool:
        """Whether this is right: plain tensors on the CPU, each its own bucket; no clip and no leak."""
        if private.fused_adamw is None:
            return False
        if self.hyper.max_ratio is not None or self.hyper.adaptive_tiny or self.hyper.leak not in (None, 1):
            return False
        if self.members.bucket_of is not None or not self.tensors.params:
            return False
        return all(self._is_plain(each) for each in self.tensors)

    def _is_plain(self, tensors: list[Tensor]) -> bool:
        """Whether tensors have storage on the CPU that is laid out without gaps, and are of the parameters' dtype."""
        for x, p in zip(tensors, self.tensors.params, strict=False):
            if type(x) not in _TYPES or x.dtype not in _WIDE or x.dtype is not p.dtype or x.shape != p.shape:
                return False
            has_storage = x.data_ptr() != 0 or not x.numel()
            if not x.is_cpu or not x.is_contiguous() or x.is_neg() or not has_storage:
                return False
        return True

    def measure(self) -> None:
        """||g|| by sums in the gradients' own dtype, unless these overflow."""
        found = [math.sqrt(_square_sum(g)) for g in self.tensors.grads]
        if math.isfinite(sum(found)):
            self.norms = np.array(found)
        else:
            super().measure()

    def apply(self, row: Row | None = None) -> None:
        norm = np.asarray(self.norms if self.squares is None else self.squares.sqrt())
        if not math.isfinite(sum(norm.tolist())):
            super().apply(row)
            return
        arrays: list[Any] = []
        entries: list[Any] = []
        before: list[Any] = []
        for vector, index in self.moving():
            array = None if vector is None else vector.numpy()
            moving = ... if index is None else index.numpy()
            arrays.append(array)
            entries.append(moving)
            before.append(None if array is None else array[moving].astype(np.float64))
        if len(norm) == 1:  # Python computes faster with numbers than NumPy with arrays of one
            norm, before = norm.item(), [None if x is None else x.item() for x in before]
        elif (before[1] == before[1][0]).all():
            before[1] = before[1].item(0)  # t, one number for all
        self.found = rule.step(self.hyper, float(self.lr), norm, rule.State(*before), np)
        for array, moving, values in zip(arrays, entries, self.found.state, strict=True):
            if array is not None:
                array[moving] = values
        self.update(self.found.k, self.found.updated_each)
        if row is not None:
            row.write(self.rows())

    def update(self, k: Coefficients, updated: Any) -> None:
        """The update of `rule.Coefficients` tensor by tensor.

        Adam's kernel computes θ ← θ - γ'·m/(√v̂ + ε') once a huge step count has made its own bias correction 1. With
        γ' = rate and ε' = floor that is our update, apart from the clip and from weight decay. For the latter it moves
        zeros, which gives -Δ, so that θ is rounded once, as on the other routes; piece by piece, so that the zeros stay
        in cache.
        """
        count = len(self.tensors.params)
        moves = _floats(True if updated is None else updated, count)
        beta2, rate, floor, fade = (_floats(x, count) for x in (1 - k.c2, k.rate, k.floor, k.fade))
        for i, p in enumerate(self.tensors.params):
            if not moves[i] or not p.numel():
                continue
            each = [tensors[i] for tensors in self.tensors if tensors]  # θ, g, m, v and, if it is kept, v_max
            pieces: Any = [each]
            if fade[i] and p.numel() > _PIECE:
                pieces = zip(*(x.view(-1).split(_PIECE) for x in each), strict=True)
            for theta, g, m, v, *v_max in pieces:
                moved = torch.zeros_like(theta) if fade[i] else theta
                private.fused_adamw(
                    [moved],
                    [g],
                    [m],
                    [v],
                    v_max,
                    [_LATE],
                    lr=rate[i],
                    beta1=self.hyper.beta1,
                    beta2=beta2[i],
                    weight_decay=0.0,
                    eps=floor[i],
                    amsgrad=bool(v_max),
                    maximize=self.group["maximize"],
                )
                if fade[i]:
                    # θ ← θ - (fade·θ + Δ)
                    theta.add_(moved.add_(theta, alpha=-fade[i]))


def _square_sum(g: Tensor) -> float:
    """Σ g² in the dtype of g; piece by piece, as one long sum would lose digits. NumPy is faster with small ones."""
    if 0 < g.numel() <= 1 << 14:
        x = g.numpy()
        return float(np.vdot(x, x))
    return float(sum(x.dot(x).item() for x in g.view(-1).split(_PIECE)))


def _floats(x: Any, n: int) -> list[float]:
    """One float per parameter; 0 for what there is nothing of."""
    return x.tolist() if getattr(x, "ndim", 0) else [float(x or 0)] * n


def cannot_be_written(x: Tensor) -> bool:
    if torch.compiler.is_compiling():  # asking for the bits would break a graph in two
        return False
    return x.is_neg() or (x.is_inference() and not torch.is_inference_mode_enabled())


def pick(vector: Any, index: Tensor | None, dtype: torch.dtype) -> Any:
    """Entries of a vector, for arithmetic: numbers in `dtype`, counts as they are."""
    if vector is None:
        return None
    picked = vector if index is None else vector.index_select(0, index)
    return picked.to(dtype) if vector.is_floating_point() else picked


class Picked(NamedTuple):
    """Coefficients for lists of tensors: numbers, or lists of 0-dim tensors; None where there is nothing to do.

    NOTE: on an accelerator an operation with a list of 0-dim tensors is a launch per tensor. There β2 is None, see
    `_move_second_moment`, and rate is None where both rate and floor would be lists:

        Δ = rate·m / (√v̂ + floor) = m / (scale·√v̂ + scale·floor)   with scale = 1/rate
    """

    k: Coefficients
    beta2: Any
    scale: Any = None


def pick_coefficients(k: Coefficients, chosen: list[int], count: int, like: Tensor, lr: Any) -> Picked:
    """The coefficients of the chosen ones of `count` parameters, of device and dtype of `like`.

    All vectors go there in one piece: each operation is a launch.
    """
    beta2, scale = None, None
    if like.device.type in HOST:
        beta2 = 1 - k.c2
    elif is_vector(k.rate) and is_vector(k.floor) and isinstance(lr, float) and lr > 1e-20:
        scale = k.rate.reciprocal()
        k = k._replace(rate=None, floor=k.floor * scale)
    values = [*k, beta2, scale]
    vectors = [x.to(like.device).expand(count) for x in values if isinstance(x, Tensor)]
    cells = torch.cat(vectors).to(like.dtype).unbind() if vectors else ()
    picked: list[Any] = []
    start = 0
    for x in values:
        if not isinstance(x, Tensor):  # one number for all, or None
            picked.append(x)
            continue
        picked.append([cells[start + i] for i in chosen])
        start += count
    return Picked(Coefficients(*picked[:-2]), *picked[-2:])


def _move_second_moment(v: list[Tensor], g: list[Tensor], c2: Any, beta2: Any) -> None:
    """v ← β2·v + c2·g², in place.

    Without β2 one list of 0-dim tensors is enough: v ← v - c2·(v - g²). An infinite v, of a g² that overflowed, stays
    infinite: in the bracket it is the largest number.
    """
    if beta2 is None:
        change = torch._foreach_clamp_max(v, torch.finfo(v[0].dtype).max)
        torch._foreach_addcmul_(change, g, g, value=-1)
        torch._foreach_mul_(change, c2)
        torch._foreach_sub_(v, change)
        return
    torch._foreach_mul_(v, beta2)
    squares = torch._foreach_mul(g, g)
    torch._foreach_mul_(squares, c2)
    torch._foreach_add_(v, squares)


def update_lists(tensors: Tensors, picked: Picked, maximize: bool) -> None:
    """The update of `rule.Coefficients`, in place."""
    theta, g, m, v, v_max = tensors
    k = picked.k
    if maximize:
        g = list(torch._foreach_neg(g))
    # m ← m + c1·(g - m)
    torch._foreach_lerp_(m, g, k.c1)
    _move_second_moment(v, g, k.c2, picked.beta2)
    v_hat = v
    if v_max:
        # v̂ = v_max ← max(leak·v_max, v)
        v_hat = v_max
        torch._foreach_mul_(v_hat, k.leak)
        torch._foreach_maximum_(v_hat, v)
    # Δ = rate·m / (√v̂ + floor), clipped to ±limit
    denom = torch._foreach_sqrt(v_hat)
    if picked.scale is None:
        torch._foreach_add_(denom, k.floor)
    else:
        denom = torch._foreach_addcmul(k.floor, picked.scale, denom)
    delta = torch._foreach_div(m, denom)
    del denom
    if k.rate is not None:
        torch._foreach_mul_(delta, k.rate)
    if k.limit is not None:
        torch._foreach_clamp_max_(delta, k.limit)
        torch._foreach_clamp_min_(delta, [-x for x in k.limit] if isinstance(k.limit, list) else -k.limit)
    # θ ← θ - (fade·θ + Δ), which rounds θ once, as the kernel does
    if isinstance(k.fade, list):
        torch._foreach_add_(delta, torch._foreach_mul(theta, k.fade))
    elif k.fade is not None:
        torch._foreach_add_(delta, theta, alpha=k.fade)
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


def is_vector(x: Any) -> bool:
    """Whether a coefficient has an entry per parameter."""
    return isinstance(x, Tensor) and x.ndim > 0


def arithmetic_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a tensor is computed with: float32 for float16 and bfloat16."""
    return torch.float32 if x.dtype in LOW_PRECISION else x.dtype


def wide(x: Tensor) -> Tensor:
    """`x` in the dtype of its arithmetic."""
    return x.float() if x.dtype in LOW_PRECISION else x


def real(x: Tensor) -> Tensor:
    """A complex tensor as pairs of reals."""
    return torch.view_as_real(x) if x.is_complex() else x


def is_wide(x: Tensor) -> bool:
    """Whether a tensor holds numbers of 64 bits."""
    return x.dtype in (torch.float64, torch.complex128)
