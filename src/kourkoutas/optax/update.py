"""The elementwise update: from the scalars of `rule.step` to the moments and the update of one parameter."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kourkoutas.rule import Coefficients, Hyper


class Leaf(NamedTuple):
    """One parameter after the step."""

    u: Any
    m: Any
    v: Any
    v_max: Any


def as_real(x: Any) -> jax.Array:
    """x in at least float32; complex numbers as pairs along a new last axis."""
    a = jnp.asarray(x)
    if jnp.iscomplexobj(a):
        return jnp.stack([jnp.real(a), jnp.imag(a)], -1)
    return a if a.dtype == jnp.float64 else a.astype(jnp.float32)


def from_real(x: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `as_real`."""
    return (lax.complex(x[..., 0], x[..., 1]) if jnp.issubdtype(dtype, jnp.complexfloating) else x).astype(dtype)


def each_parameter(k: Coefficients, size: int, dtype: Any) -> list[Coefficients]:
    """The coefficients of a step, parameter by parameter, 0-d.

    NOTE: 1-β1 goes with the scalars that wait for the norms, and the barrier hides that it is a constant: XLA on the
    CPU would update every m first, and read all gradients from memory once more for v.
    """
    stacked = jnp.stack([jnp.broadcast_to(x, size).astype(dtype) for x in (k.c1, k.c2, k.rate, k.floor)])
    rows = [jnp.unstack(row) for row in lax.optimization_barrier(stacked)]
    return [k._replace(c1=c1, c2=c2, rate=rate, floor=floor) for c1, c2, rate, floor in zip(*rows, strict=True)]


def update_leaf(hyper: Hyper, k: Coefficients, updated: Any, g: Any, m: Any, v: Any, v_max: Any) -> Leaf:
    """The step of one parameter, without a learning rate, which later parts of the chain apply.

    `updated` is a 0-d boolean, or None where no parameter can be skipped.
    """
    x = as_real(g)
    c1, c2, rate, floor = (each.astype(x.dtype) for each in (k.c1, k.c2, k.rate, k.floor))

    # NOTE: u is made of the m and v that are returned, skipped or not: for anything else XLA would copy m and v.
    def unless_skipped(new: Any, old: Any) -> Any:
        return new if updated is None else jnp.where(updated, new, as_real(old))

    # m = β1·m + (1-β1)·g,  v = β2·v + (1-β2)·g²
    m_new = unless_skipped(hyper.beta1 * as_real(m) + c1 * x, m)
    v_new = v_hat = unless_skipped((1 - c2) * as_real(v) + c2 * (x * x), v)
    # v̂ = v, or v_max = max(δ·v_max, v)
    if hyper.leak is not None:
        v_hat = unless_skipped(jnp.maximum(hyper.leak * as_real(v_max), v_new), v_max)
    # u = rate·m / (√v̂ + floor), clipped to ±max_ratio
    u = unless_skipped(rate * m_new / (jnp.sqrt(v_hat) + floor), jnp.zeros_like(x))
    if hyper.max_ratio is not None:
        u = jnp.clip(u, -hyper.max_ratio, hyper.max_ratio)
    return Leaf(
        from_real(u, jnp.result_type(g) if jnp.issubdtype(jnp.result_type(g), jnp.inexact) else m.dtype),
        from_real(m_new, m.dtype),
        from_real(v_new, v.dtype),
        None if v_max is None else from_real(v_hat, v_max.dtype),
    )
