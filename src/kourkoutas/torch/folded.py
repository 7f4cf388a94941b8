"""The usual step on the CPU without the native kernel, with as little Python as possible.

What `kourkoutas.torch.update.fused` does for every option, here for the default ones alone: all parameters have a
gradient, are float32 or float64, contiguous, and share a dtype. Anything else goes the general way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kourkoutas.rule import Hyper
from kourkoutas.torch.general import square_sum
from kourkoutas.torch.host import Scalars, listed
from kourkoutas.torch.update import LATE

_SMALL = 65_536
_WAVE = 1 << 20  # entries
_TYPES = {Tensor, torch.nn.Parameter}
_DTYPES = (torch.float32, torch.float64)


def suits(hyper: Hyper, group: Mapping[str, Any]) -> bool:
    """Whether the group's options allow it."""
    elsewhere = group["foreach"] or group["fused"] is False or group["capturable"] or group["diagnostics"]
    extras = hyper.max_ratio is not None or hyper.leak is not None or hyper.adaptive_tiny
    adam = hyper.fixed and hyper.bias_correction == "beta2max"
    usual = hyper.bias_correction != "exact" and hyper.nonfinite == "propagate" and group["state_dtype"] is None
    return usual and not (elsewhere or extras or adam)


def square_sums(grads: list[Tensor], sizes: list[int]) -> list[float]:
    """||g||² of contiguous float32 or float64 gradients of one dtype."""
    # One call for many small tensors; for large ones dot products are several times faster.
    if len(grads) > 1 and sum(sizes) < _SMALL * len(grads):
        return [norm.item() ** 2 for norm in torch._foreach_norm(grads)]
    return [square_sum(g).item() for g in grads]


class Gathered(NamedTuple):
    params: list[Tensor]
    grads: list[Tensor]
    ms: list[Tensor]
    vs: list[Tensor]
    sizes: list[int]

    def part(self, a: int, b: int) -> Gathered:
        return Gathered(self.params[a:b], self.grads[a:b], self.ms[a:b], self.vs[a:b], self.sizes[a:b])


def waves(sizes: list[int]) -> list[tuple[int, int]]:
    """Runs of tensors, first to last, that are long enough to keep a cache busy and short enough to stay in it."""
    out, first, total = [], 0, 0
    for i, size in enumerate(sizes, 1):
        total += size
        if total >= _WAVE:
            out.append((first, i))
            first, total = i, 0
    if total:
        out.append((first, len(sizes)))
    return out


class Folded:
    """The step of one param group, in two parts: nothing has changed before `apply`.

    NOTE: the norm reads a gradient and the update reads it again, so tensors are taken in waves that stay in cache.
    Tensors that share a bucket with others need all norms first, and go in one wave.
    """

    def __init__(self) -> None:
        self._scalars: list[Scalars] = []
        self._waves: list[tuple[int, int]] = []

    def gather(self, group: Mapping[str, Any], state: Mapping[Tensor, Mapping[str, Tensor]]) -> Gathered | None:
        """The group's tensors; None if the step must go another way."""
        params: list[Tensor] = group["params"]
        grads: list[Any] = [p.grad for p in params]
        try:
            states = [state[p] for p in params]
            ms, vs = [s["exp_avg"] for s in states], [s["exp_avg_sq"] for s in states]
            steps, emas = [s["step"] for s in states], [s["norm_ema"] for s in states]
        except KeyError:
            return None
        # A missing gradient is none of these types.
        if not (set(map(type, params)) <= _TYPES and set(map(type, grads)) <= _TYPES):
            return None
        tensors = [*params, *grads, *ms]
        dtype, sizes = params[0].dtype, list(map(Tensor.numel, grads))
        if (
            dtype not in _DTYPES
            or 0 in sizes
            or [x.dtype for x in tensors].count(dtype) < len(tensors)
            or [g.layout for g in grads].count(torch.strided) < len(grads)
            or not (all(map(Tensor.is_contiguous, params)) and all(map(Tensor.is_contiguous, grads)))
        ):
            return None
        index: list[int] = group["bucket_index"]
        if len(group["bucket_names"]) < len(params):
            leaders = dict(zip(index, emas, strict=True))
            emas = [leaders[b] for b in range(len(leaders))]
            self._waves = [(0, len(params))]
        else:
            self._waves = waves(sizes)
        self._scalars += [Scalars() for _ in self._waves[len(self._scalars) :]]
        for scalars, (a, b) in zip(self._scalars, self._waves, strict=False):
            if not scalars.look(index[a:b], emas[a:b], steps[a:b], []):
                return None
        return Gathered(params, grads, ms, vs, sizes)

    def apply(self, x: Gathered, hyper: Hyper, lr: float, maximize: bool) -> None:
        if len(self._waves) == 1:
            _update(self._scalars[0], x, hyper, lr, maximize)
            return
        for scalars, (a, b) in zip(self._scalars, self._waves, strict=False):
            _update(scalars, x.part(a, b), hyper, lr, maximize)


def _update(scalars: Scalars, x: Gathered, hyper: Hyper, lr: float, maximize: bool) -> None:
    """See `kourkoutas.torch.update.fused`."""
    n = len(x.params)
    new = scalars.advance(hyper, scalars.pool(square_sums(x.grads, x.sizes)))
    scalars.write(new)
    root = new.b2**0.5
    beta2s, rates = listed(1 - new.c2, n), listed(lr / new.a1 * root, n)
    epsilons, decays = listed(hyper.eps * root, n), listed(hyper.weight_decay * new.a1 / root, n)
    update, v_max, late, beta1 = torch._fused_adamw_, list[Tensor](), [LATE], hyper.beta1
    for p, g, m, v, beta2, rate, eps, decay in zip(*x[:4], beta2s, rates, epsilons, decays, strict=True):
        update(
            [p],
            [g],
            [m],
            [v],
            v_max,
            late,
            amsgrad=False,
            lr=rate,
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay,
            eps=eps,
            maximize=maximize,
        )
