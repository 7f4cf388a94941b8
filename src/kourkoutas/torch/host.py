"""The step on plain CPU tensors without the C kernel: scalars in NumPy, the update in torch's fused Adam kernel.

The kernel computes θ ← (1 - γ'λ')·θ - γ'·m/(√v̂ + ε') once a huge step count has made its own bias correction 1. With
γ' = rate, ε' = floor and λ' = γλ/rate that is the update of `rule.Coefficients`. It has no clip and takes contiguous
tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kourkoutas import rule
from kourkoutas.torch.parts import Part
from kourkoutas.torch.pooling import Pooled
from kourkoutas.torch.work import LOW_PRECISION, Members, Options, Work

_TYPES = {Tensor, torch.nn.Parameter}
_DTYPES = (torch.float32, torch.float64, *LOW_PRECISION)
_LATE = torch.tensor(1e30)  # a step count at which bias correction is 1; the kernel only reads it


def takes(work: Work) -> bool:
    """Whether every tensor is plain, stored, contiguous and on the CPU, and those of a parameter share a dtype."""
    for p, g, m, v in zip(*work[:4], strict=True):
        dtype = p.dtype
        if not (dtype is g.dtype is m.dtype is v.dtype and dtype in _DTYPES):
            return False
    tensors = [t for ts in work[:9] for t in ts]
    return set(map(type, tensors)) <= _TYPES and all(map(_plain, tensors))


def _plain(x: Tensor) -> bool:
    return x.is_cpu and x.layout is torch.strided and x.is_contiguous() and not x.is_neg() and _stored(x)


def _stored(x: Tensor) -> bool:
    return not x.numel() or x.data_ptr() != 0


class HostStep:
    """One group's step, in the stages that `kourkoutas.torch` lists."""

    device = torch.device("cpu")

    def __init__(self, options: Options, group: dict[str, Any], work: Work, parts: list[Part] | None) -> None:
        self.hyper, self.group, self.work = options.hyper, group, work
        self.places = work.places
        self.sizes = [p.numel() for p in work.params] if parts is None else [parts[i].size for i in work.places]
        self.lr, self.present = float(group["lr"]), work.present
        self.lone = len(work.params) == 1
        self.pooled: list[float] | None = None
        self.members = None
        if not work.one_each:
            index, buckets = np.asarray(work.bucket_of), len(work.present)
            self.members = Members(index, lambda x: _largest(index, buckets, x))

    def measure(self) -> None:
        """||g||² of each parameter, and ⟨|θ|⟩ where it is needed."""
        self.local = [square_sum(g) for g in self.work.grads]
        self.mean_abs: Any = None
        if self.hyper.adaptive_tiny:
            sums = [torch.linalg.vector_norm(_wide(p), 1).item() for p in self.work.params]
            self.mean_abs = self._vector([x / max(size, 1) for x, size in zip(sums, self.sizes, strict=True)])

    def sums(self) -> Tensor:
        """This rank's part of Σ g² and ⟨|θ|⟩ of each parameter with a gradient, for `pooling`."""
        rows = [self.local] if self.mean_abs is None else [self.local, np.atleast_1d(self.mean_abs).tolist()]
        return torch.tensor(rows, dtype=torch.float64)

    def take(self, pooled: Pooled) -> None:
        """Use complete sums instead."""
        squares = pooled.squares[self.work.present].tolist()
        self.pooled = squares
        if pooled.means is not None:
            self.mean_abs = self._vector(pooled.means[self.places].tolist())

    def norms(self) -> Any:
        """n = √Σ ||g||² of each bucket."""
        if self.pooled is not None:
            self.norm: Any = math.sqrt(self.pooled[0]) if self.lone else np.sqrt(self.pooled)
        elif self.members is not None:
            self.norm = np.sqrt(np.bincount(self.members.index, self.local, len(self.work.present)))
        else:
            self.norm = math.sqrt(self.local[0]) if self.lone else np.sqrt(self.local)
        return self.norm

    def apply(self) -> NDArray[Any]:
        """Move the scalar state and the tensors; returns (sun, β2), shape (2, buckets with gradients)."""
        work = self.work
        steps = [t.item() for t in work.steps]
        # Mostly all have taken the same number of steps, and share their bias corrections.
        shared = steps.count(steps[0]) == len(steps)
        state = rule.State(
            self._vector([t.item() for t in work.norm_emas]),
            steps[0] if shared else np.array(steps),
            self._vector([t.item() for t in work.log_beta2s]) if work.log_beta2s else None,
        )
        xp = rule.Floats if self.lone else np
        with np.errstate(all="ignore"):  # a NaN norm is the caller's to see
            new = rule.step(self.hyper, self.lr, self.norm, state, xp, members=self.members, mean_abs=self.mean_abs)
        going: Sequence[int] = range(len(steps))
        if new.fine is not None:
            going = np.flatnonzero(np.broadcast_to(new.fine_each, len(steps))).tolist()
            for t, fine in zip(work.skipped, np.atleast_1d(new.fine).tolist(), strict=True):
                t.add_(not fine)
        if going:
            torch._foreach_add_([work.steps[i] for i in going], 1)
        _write(work.norm_emas, new.state.ema)
        if work.log_beta2s:
            _write(work.log_beta2s, new.state.log_beta2)
        self._update(new.k, going)
        return np.array([new.sun, new.beta2]).reshape(2, -1)

    def _vector(self, xs: list[float]) -> Any:
        """An array, or a float for a lone parameter."""
        return xs[0] if self.lone else np.array(xs)

    def _update(self, k: rule.Coefficients, going: Sequence[int]) -> None:
        work, hyper, maximize = self.work, self.hyper, self.group["maximize"]
        n = len(work.params)
        beta2s, rates, floors = _listed(1 - k.c2, n), _listed(k.rate, n), _listed(k.floor, n)
        decay, leak, v_max = self.lr * hyper.weight_decay, hyper.leak, list[Tensor]()
        late, beta1, amsgrad = [_LATE], hyper.beta1, leak is not None
        params, grads, ms, vs, v_maxs = work[:5]
        for i in going:
            if not params[i].numel():
                continue
            if leak is not None:
                v_max = [v_maxs[i]]
                if leak != 1:
                    v_max[0].mul_(leak)
            rate = rates[i]
            torch._fused_adamw_(
                [params[i]],
                [grads[i]],
                [ms[i]],
                [vs[i]],
                v_max,
                late,
                amsgrad=amsgrad,
                lr=rate,
                beta1=beta1,
                beta2=beta2s[i],
                weight_decay=decay / rate if decay else 0.0,
                eps=floors[i],
                maximize=maximize,
            )


def _largest(index: NDArray[Any], buckets: int, x: Any) -> Any:
    if not isinstance(x, np.ndarray):
        return x
    out = np.zeros(buckets)
    np.maximum.at(out, index, x)
    return out


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in LOW_PRECISION else x


def square_sum(g: Tensor) -> float:
    """||g||² of a contiguous tensor as a float; a dot product is several times faster than a norm.

    A float32 sum that has overflowed is formed once more from g / max|g|: see the note on norms in `kourkoutas.rule`.
    """
    flat = _wide(g).view(-1)
    square: float = flat.dot(flat).item()
    if not math.isfinite(square):
        largest = flat.abs().amax().item()
        if math.isfinite(largest):
            flat = flat / largest
            square = largest * largest * flat.dot(flat).item()
    return square


def _listed(x: Any, n: int) -> list[float]:
    """One float per entry of an array, or a number n times."""
    return x.tolist() if isinstance(x, np.ndarray) and x.ndim else [float(x)] * n


def _write(targets: list[Tensor], values: Any) -> None:
    for t, x in zip(targets, _listed(values, len(targets)), strict=True):
        t.fill_(x)
