"""The step on the CPU with its scalars in NumPy, where reading them back is free; a lone parameter has floats.

Three updates share these scalars: torch's fused Adam kernel, here; lists of tensors and torch's own Adam, in lists.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kourkoutas import rule
from kourkoutas.torch import lists
from kourkoutas.torch.pooling import Pooled
from kourkoutas.torch.routes import Route
from kourkoutas.torch.work import LOW_PRECISION, Members, Options, Work, one_each, plain, sizes, wide

_WIDE = ({torch.float32}, {torch.float64})
_SMALL = 65_536
_LATE = torch.tensor(1e30, device="cpu")  # a step count at which bias correction is 1; the kernel only reads it


def takes(work: Work, hyper: rule.Hyper) -> bool:
    """Whether torch's fused Adam kernel gives the update of these tensors; low precision must be rounded only once."""
    twice = hyper.weight_decay != 0 or hyper.leak not in (None, 1)
    return plain(work) and not (twice and any(p.dtype in LOW_PRECISION for p in work.params))


class Cells:
    """The numbers in a list of 0-dim tensors, through NumPy views: a tenth of the time of torch's calls.

    Views are kept from step to step, and made anew when a tensor or its address is another.
    """

    def __init__(self) -> None:
        self._at: list[int] = []
        self._tensors: list[Tensor] = []
        self._views: list[NDArray[Any]] = []

    def read(self, tensors: list[Tensor]) -> list[float]:
        at = list(map(Tensor.data_ptr, tensors))
        if at != self._at or not all(map(is_, tensors, self._tensors)):
            try:
                self._views = [t.detach().numpy() for t in tensors]
            except (TypeError, RuntimeError) as error:
                raise RuntimeError(f"a number in the state cannot be read ({error}): load another state") from None
            self._at, self._tensors = at, list(tensors)
        return [view.item() for view in self._views]

    def write(self, values: Any) -> None:
        for view, x in zip(self._views, listed(values, len(self._views)), strict=True):
            view[()] = x


class HostStep:
    """One group's step, in the stages that `kourkoutas.torch` lists; `cells` are those of r, t and Σ log β2."""

    device = torch.device("cpu")

    def __init__(
        self, options: Options, group: dict[str, Any], work: Work, route: Route, cells: tuple[Cells, Cells, Cells]
    ) -> None:
        self.hyper, self.group, self.work, self.route, self.cells = options.hyper, group, work, route, cells
        self.lr, self.present, self.lone = float(group["lr"]), work.present, len(work.params) == 1
        self.pooled: list[float] | None = None
        self.grads = work.grads if route.name == "host" else lists.resolved(work.grads)
        ema, count, log = cells
        self.ema, self.steps, self.logs = ema.read(work.norm_emas), count.read(work.steps), log.read(work.log_beta2s)
        self.members = None
        if not one_each(work):
            index, buckets = np.asarray(work.bucket_of), len(work.present)
            self.members = Members(index, lambda x: _largest(index, buckets, x))

    def measure(self) -> None:
        """||g||² of each parameter, and ⟨|θ|⟩ where it is needed."""
        self.local = square_sums(self.grads, self.route.name == "host")
        self.mean_abs: Any = None
        if self.hyper.adaptive_tiny:
            sums = [torch.linalg.vector_norm(wide(lists.real(p)), 1).item() for p in self.work.params]
            self.mean_abs = self._vector([x / n for x, n in zip(sums, sizes(self.work), strict=True)])

    def sums(self) -> Tensor:
        """This rank's part of Σ g² and ⟨|θ|⟩ of each parameter with a gradient, for `pooling`."""
        rows = [self.local] if self.mean_abs is None else [self.local, np.atleast_1d(self.mean_abs).tolist()]
        return torch.tensor(rows, dtype=torch.float64)

    def take(self, pooled: Pooled) -> None:
        """Use complete sums instead."""
        self.pooled = pooled.squares[self.present].tolist()
        if pooled.means is not None:
            self.mean_abs = self._vector(pooled.means[self.work.places].tolist())

    def norms(self) -> Any:
        """n = √Σ ||g||² of each bucket."""
        if self.pooled is not None:
            self.norm: Any = math.sqrt(self.pooled[0]) if self.lone else np.sqrt(self.pooled)
        elif self.members is not None:
            self.norm = np.sqrt(np.bincount(self.members.index, self.local, len(self.work.present)))
        else:
            self.norm = math.sqrt(self.local[0]) if self.lone else np.sqrt(self.local)
        return self.norm

    def apply(self) -> tuple[Any, Any, Any]:
        """Move the scalar state and the tensors; returns sun, β2 and n of the buckets that have a gradient."""
        work, (ema, count, log) = self.work, self.cells
        steps = self.steps
        # Mostly all have taken the same number of steps, and share their bias corrections.
        state = rule.State(
            self._vector(self.ema),
            steps[0] if steps.count(steps[0]) == len(steps) else np.array(steps),
            self._vector(self.logs) if self.logs else None,
        )
        arguments = (self.hyper, self.lr, self.norm, state)
        if self.lone:
            new = rule.step(*arguments, rule.Floats, mean_abs=self.mean_abs)
        else:
            with np.errstate(all="ignore"):  # a NaN norm is the caller's to see
                new = rule.step(*arguments, np, members=self.members, mean_abs=self.mean_abs)
        going: Sequence[int] = range(len(steps))
        if new.updated is not None:
            going = np.flatnonzero(np.broadcast_to(new.updated_each, len(steps))).tolist()
            for t, fine in zip(work.skipped, np.atleast_1d(new.updated).tolist(), strict=True):
                t.add_(not fine)
        if self.route.name != "adam":  # which counts by itself
            count.write(new.state.step)
        ema.write(new.state.ema)
        if work.log_beta2s:
            log.write(new.state.log_beta2)
        _UPDATES[self.route.name](self.hyper, self.group, work, self.grads, new.k, going)
        return new.sun, new.beta2, new.norm

    def _vector(self, xs: list[float]) -> Any:
        """An array, or a float for a lone parameter."""
        return xs[0] if self.lone else np.array(xs)


def _update(
    hyper: rule.Hyper,
    group: dict[str, Any],
    work: Work,
    grads: list[Tensor],
    k: rule.Coefficients,
    going: Sequence[int],
) -> None:
    """The update by torch's fused Adam kernel.

    It computes θ ← θ - γ'·m/(√v̂ + ε') once a huge step count has made its own bias correction 1. With γ' = rate and
    ε' = floor that is the update of `rule.Coefficients`, apart from the clip, and from weight decay, of which it would
    round 1 - γλ.
    """
    n, leak, v_max, late = len(grads), hyper.leak, list[Tensor](), [_LATE]
    beta2s, rates, floors = listed(1 - k.c2, n), listed(k.rate, n), listed(k.floor, n)
    fades = [0.0] * n if k.fade is None else listed(k.fade, n)
    params, ms, vs, v_maxs = work.params, work.exp_avgs, work.exp_avg_sqs, work.max_exp_avg_sqs
    common = {"beta1": hyper.beta1, "weight_decay": 0.0, "amsgrad": leak is not None, "maximize": group["maximize"]}
    for i in going:
        if not params[i].numel():
            continue
        if leak is not None:
            v_max = [v_maxs[i]]
            if leak != 1:
                v_max[0].mul_(leak)
        if fades[i]:
            params[i].add_(params[i], alpha=-fades[i])
        tensors = ([params[i]], [grads[i]], [ms[i]], [vs[i]], v_max, late)
        torch._fused_adamw_(*tensors, lr=rates[i], beta2=beta2s[i], eps=floors[i], **common)  # type: ignore[call-overload]


_UPDATES: dict[str, Callable[..., None]] = {"host": _update, "lists": lists.update, "adam": lists.update_by_adam}


def square_sums(grads: list[Tensor], plain: bool) -> list[float]:
    """||g||² of each gradient; `plain` ones may go together.

    One call is faster for many small tensors, and dot products for large ones. A float32 sum that has overflowed is
    formed once more from g / max|g|: see the note on norms in `kourkoutas.rule`.
    """
    small = len(grads) > 1 and sum(map(Tensor.numel, grads)) < _SMALL * len(grads)
    if plain and small and {g.dtype for g in grads} in _WIDE:
        squares: list[float] = [norm.item() ** 2 for norm in torch._foreach_norm(grads)]
        if math.isfinite(sum(squares)):
            return squares
    return [_square_sum(g) for g in grads]


def _square_sum(g: Tensor) -> float:
    g = wide(lists.real(g)) if g.dtype is not torch.float32 else g
    flat = g if g.dim() == 1 else g.reshape(-1)
    square: float = flat.dot(flat).item()
    if not math.isfinite(square):
        largest = flat.abs().amax().item()
        if math.isfinite(largest):
            flat = flat / largest
            square = largest * largest * flat.dot(flat).item()
    return square


def _largest(index: NDArray[Any], buckets: int, x: Any) -> Any:
    if not isinstance(x, np.ndarray):
        return x
    out = np.zeros(buckets)
    np.maximum.at(out, index, x)
    return out


def listed(x: Any, n: int) -> list[float]:
    """One float per entry of an array, or a number n times."""
    return x.tolist() if isinstance(x, np.ndarray) else [x] * n
