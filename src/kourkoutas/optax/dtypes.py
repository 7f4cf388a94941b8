"""In which dtype a leaf is computed, and back to the one it is kept in."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def as_real(x: Any) -> jax.Array:
    """x in at least float32; complex numbers as pairs along a new last axis."""
    a = x if isinstance(x, jax.Array) else jnp.asarray(x)
    if jnp.iscomplexobj(a):
        return jnp.stack([jnp.real(a), jnp.imag(a)], -1)
    return cast(a, jnp.promote_types(a.dtype, jnp.float32))


def from_real(x: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `as_real`."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return lax.complex(x[..., 0], x[..., 1]).astype(dtype)
    return cast(x, dtype)


def cast(x: jax.Array, dtype: Any) -> jax.Array:
    return x if x.dtype == dtype else x.astype(dtype)


def stack(scalars: Sequence[jax.Array], dtype: Any) -> jax.Array:
    return jnp.stack([cast(x, dtype) for x in scalars]) if scalars else jnp.zeros(0, dtype)
