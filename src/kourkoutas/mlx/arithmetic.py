"""The arithmetic of a step, compiled: pooled norms before `rule.step`, the elementwise update after it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from kourkoutas import rule
from kourkoutas.mlx.layout import Members, precision
from kourkoutas.rule import Hyper


def _trim(x: mx.array, k: int) -> tuple[mx.array, list[mx.array]]:
    """x without as many of its last entries as k to divide its size takes, and these entries."""
    tail = x.size % k
    if not tail:
        return x, []
    x = x.reshape(-1)
    return x[:-tail], [x[-tail:]]


def _fold(f: Callable[[mx.array], mx.array], x: mx.array) -> mx.array:
    """A vector of some 1024 entries at most, whose sum is Σ f(x).

    NOTE: one pass of `mx.sum` over n entries on the CPU adds serially and loses percents at n = 10⁷. Folding n entries
    into rows of about √n and adding the rows stays within 1e-6, and runs twice as fast since it adds many at a time.

    NOTE: a large x is first folded eight times in the kernel that computes f: to write f(x) to memory takes longer
    than all the rest.
    """
    rest: list[mx.array] = []
    if x.size < 1 << 18:
        x = f(x)
    else:
        x, tail = _trim(x, 8)
        rest += [f(t) for t in tail]
        x = functools.reduce(operator.add, [f(part) for part in mx.split(x.reshape(-1), 8)])
    while x.size > 1024:
        width = 1 << (x.size.bit_length() // 2)
        x, tail = _trim(x, width)
        rest += tail
        x = mx.sum(x.reshape(-1, width), axis=0)
    return mx.concatenate([x.reshape(-1), *rest]) if rest else x.reshape(-1)


def _sums(f: Callable[[mx.array], mx.array], arrays: list[mx.array]) -> mx.array:
    """Σ f(x) of each array; those of one size together, as every operation has its price."""
    groups: dict[tuple[int, bool], list[int]] = {}
    vectors = []
    for i, x in enumerate(arrays):
        small = x.size <= 1024
        vectors.append(x.reshape(-1) if small else _fold(f, x))
        groups.setdefault((vectors[i].size, small), []).append(i)
    sums = []
    for (size, small), group in groups.items():
        rows = mx.concatenate([vectors[i] for i in group]).reshape(len(group), size)
        sums.append(mx.sum(f(rows) if small else rows, axis=1))
    order = [i for group in groups.values() for i in group]
    if order == sorted(order):
        return mx.concatenate(sums)
    return mx.concatenate(sums)[mx.array(np.argsort(order).astype(np.int32))]


def widest() -> mx.Dtype:
    """The dtype in which squares are summed: float64 where the device has it."""
    return mx.float64 if mx.default_device() == mx.Device(mx.cpu) else mx.float32


@functools.lru_cache(maxsize=256)
def compiled_measure(hyper: Hyper, members: Members, dtype: mx.Dtype, wide: mx.Dtype) -> Callable[..., Any]:
    """(norm of each bucket, norm of each parameter, ⟨|p|⟩ of each parameter), of those with a gradient, in `dtype`.

    What the settings do not need is None.

    NOTE: Σ g² of finite gradients may overflow float32 where its root does not. float64 has room for it. Without
    float64, Σ (g/s)² is used where Σ g² overflows, with s = 2⁶⁴ the root of float32's largest number: it overflows only
    where n itself does.
    """
    s = 2.0**64

    def root(squares: mx.array, scaled: mx.array | None) -> mx.array:
        norm = mx.sqrt(squares)
        if scaled is not None:
            norm = mx.where(mx.isinf(squares), mx.sqrt(scaled) * s, norm)
        return norm.astype(dtype)

    def measure(grads: list[mx.array], params: list[mx.array]) -> tuple[mx.array, mx.array | None, mx.array | None]:
        # n = sqrt(Σ_p Σ_i g_i²)
        squares = _sums(lambda g: mx.square(g.astype(wide)), grads)
        scaled = None
        if wide != mx.float64:
            scaled = _sums(lambda g: mx.square(g.astype(wide) * (1 / s)), grads)
        pooled = root(members.total(squares), None if scaled is None else members.total(scaled))
        each = None if hyper.basis is None else root(squares, scaled)
        if not hyper.adaptive_tiny:
            return pooled, each, None
        magnitude = _sums(lambda p: mx.abs(p.astype(dtype)), params)
        return pooled, each, magnitude / mx.array([max(p.size, 1) for p in params], dtype)

    return mx.compile(measure)


def _entry(x: mx.array, i: int) -> mx.array:
    """x[i] of a vector as a 0-d array, in one operation where indexing takes two."""
    return mx.as_strided(x, (), (), i)


def coefficients(k: rule.Coefficients) -> dict[str, Any]:
    """The coefficients that the update reads, by name; it has β1 in its code."""
    return {name: x for name, x in k._asdict().items() if x is not None and name != "c1"}


def own_coefficients(k: dict[str, mx.array], i: int, dtype: mx.Dtype) -> dict[str, mx.array]:
    """The coefficients of parameter i."""
    return {name: (_entry(x, i) if x.ndim else x).astype(dtype) for name, x in k.items()}


def moved(
    hyper: Hyper, g: mx.array, moments: Sequence[mx.array], k: dict[str, mx.array]
) -> tuple[mx.array, tuple[mx.array, ...]]:
    """(Δθ without weight decay, the moments afterwards) of one parameter."""
    m, v, *rest = moments
    # m = β1·m + (1-β1)·g,  v = β2·v + (1-β2)·g²
    m = hyper.beta1 * m + (1 - hyper.beta1) * g
    v = (1 - k["c2"]) * v + k["c2"] * mx.square(g)
    # v̂ = v, or v_max = max(δ·v_max, v)
    v_hat = v if hyper.leak is None else mx.maximum(k["leak"] * rest[0], v)
    # Δθ = rate·m / (sqrt(v̂) + floor), clipped to ±limit
    delta = k["rate"] * m / (mx.sqrt(v_hat) + k["floor"])
    if hyper.max_ratio is not None:
        delta = mx.minimum(mx.maximum(delta, -k["limit"]), k["limit"])
    return delta, (m, v) if hyper.leak is None else (m, v, v_hat)


def subtracted(hyper: Hyper, theta: mx.array, delta: mx.array, k: dict[str, mx.array]) -> mx.array:
    """θ - (fade·θ + Δθ)"""
    return theta - (k["fade"] * theta + delta if hyper.weight_decay else delta)


def chosen(updated: mx.array | None, i: int, new: Sequence[mx.array], old: Sequence[mx.array]) -> list[mx.array]:
    """What is kept of parameter i: `new` in the dtypes of `old`, or `old` if the parameter is not updated."""
    cast = [x.astype(y.dtype) for x, y in zip(new, old, strict=True)]
    if updated is None:
        return cast
    return [mx.where(_entry(updated, i), x, y) for x, y in zip(cast, old, strict=True)]


@functools.lru_cache(maxsize=256)
def compiled_update(hyper: Hyper, members: Members) -> Callable[..., Any]:
    """The elementwise part of a step, compiled: (parameters, moments) of all parameters that have a gradient.

    `members` is part of the key only: other parameters have another compiled step, and few of them are kept.

    NOTE: the coefficients come in as 0-d entries of arrays, and not as constants in the code: MLX then fuses one kernel
    per parameter, and builds the same kernel for every value of the hyper-parameters.
    """

    def update(
        k: dict[str, mx.array],
        updated: mx.array | None,
        grads: list[mx.array],
        params: list[mx.array],
        slots: list[list[mx.array]],
    ) -> list[list[mx.array]]:
        out = []
        for i, (g, p, *old) in enumerate(zip(grads, params, *slots, strict=True)):
            dtype = precision([p])
            own = own_coefficients(k, i, dtype)
            delta, moments = moved(hyper, g.astype(dtype), [slot.astype(dtype) for slot in old], own)
            theta = subtracted(hyper, p.astype(dtype), delta, own)
            out.append(chosen(updated, i, [theta, *moments], [p, *old]))
        return [list(arrays) for arrays in zip(*out, strict=True)]

    return mx.compile(update)
