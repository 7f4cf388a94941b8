"""The elementwise update: from the scalars of `rule.step` to parameters and moments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from kourkoutas import rule
from kourkoutas.mlx.plan import Plan, precision


def _entry(x: mx.array, i: int) -> mx.array:
    """x[i] of a vector as a 0-d array, in one operation where indexing takes two."""
    return mx.as_strided(x, (), (), i)


def numbers(k: rule.Coefficients) -> list[tuple[str, Any]]:
    """What the update reads; β1 is a number in its code."""
    return [(name, x) for name, x in k._asdict().items() if x is not None and name != "c1"]


@functools.lru_cache(maxsize=256)
def compiled_update(plan: Plan) -> Callable[..., Any]:
    """The elementwise part of a step, compiled: (parameters, moments) of all parameters that have a gradient.

    NOTE: the scalars come in as entries of vectors, 0-d, and not as numbers in the code: MLX then fuses one kernel per
    parameter, and builds the same kernel for every value of the hyper-parameters.
    """
    hyper = plan.hyper

    def update_one(
        g: mx.array, p: mx.array, slots: list[mx.array], scalars: dict[str, mx.array]
    ) -> tuple[mx.array, ...]:
        dtype = precision(p)
        x = {name: value.astype(dtype) for name, value in scalars.items()}
        theta, g = p.astype(dtype), g.astype(dtype)
        m, v, *rest = (slot.astype(dtype) for slot in slots)
        # m = β1·m + (1-β1)·g,  v = β2·v + (1-β2)·g²
        m = hyper.beta1 * m + (1 - hyper.beta1) * g
        v = (1 - x["c2"]) * v + x["c2"] * mx.square(g)
        # v̂ = v, or v_max = max(δ·v_max, v)
        v_hat = v if hyper.leak is None else mx.maximum(x["leak"] * rest[0], v)
        # Δθ = rate·m / (sqrt(v̂) + floor), clipped to ±limit
        delta = x["rate"] * m / (mx.sqrt(v_hat) + x["floor"])
        if hyper.max_ratio is not None:
            delta = mx.minimum(mx.maximum(delta, -x["limit"]), x["limit"])
        # θ ← θ - (fade·θ + Δθ)
        if hyper.weight_decay:
            delta = x["fade"] * theta + delta
        new = (theta - delta, m, v) if hyper.leak is None else (theta - delta, m, v, v_hat)
        return tuple(value.astype(old.dtype) for value, old in zip(new, (p, *slots), strict=True))

    def update(
        k: dict[str, mx.array],
        updated: mx.array | None,
        grads: list[mx.array],
        params: list[mx.array],
        slots: list[list[mx.array]],
    ) -> list[list[mx.array]]:
        out = []
        for i, (g, p, *old) in enumerate(zip(grads, params, *slots, strict=True)):
            new = update_one(g, p, old, {name: _entry(x, i) if x.ndim else x for name, x in k.items()})
            if updated is not None:
                new = tuple(mx.where(_entry(updated, i), x, y) for x, y in zip(new, (p, *old), strict=True))
            out.append(new)
        return [list(arrays) for arrays in zip(*out, strict=True)]

    return mx.compile(update)
