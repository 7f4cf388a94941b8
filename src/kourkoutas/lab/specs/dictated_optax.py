"""The controls of `kourkoutas.lab.specs.dictated` for Optax: Adam with exact bias correction and a dictated β2.

NOTE: the rule takes β2_min = β2_max as one number for each bucket as well, which is how β2 is dictated here.
"""

# Annotations stay objects here (no `from __future__ import annotations`): Optax's own checks read them.
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from kourkoutas import signals
from kourkoutas.optax import kourkoutas_beta
from kourkoutas.rule import Hyper


class ShuffledState(NamedTuple):
    """The inner solver's state, the signal's r and memory, and the β2 of the last `window` steps, (window, leaves)."""

    seen: jax.Array
    ema: jax.Array
    memory: jax.Array | None
    past: jax.Array
    inner: Any


def shuffled(
    learning_rate: Any,
    *,
    signal: str,
    window: int = 200,
    beta1: float = Hyper.beta1,
    beta2_min: float = Hyper.beta2_min,
    beta2_max: float = Hyper.beta2_max,
    alpha: float = Hyper.alpha,
) -> optax.GradientTransformation:
    """Adam with the β2 that a signal had at a random one of the last `window` steps, for each leaf."""
    hyper = Hyper(signal=signal, beta2_min=beta2_min, beta2_max=beta2_max, alpha=alpha)  # type: ignore[arg-type]
    kept = signals.MEMORY[signal]

    def inner(beta2: Any) -> optax.GradientTransformation:
        return kourkoutas_beta(learning_rate, beta1=beta1, beta2_min=beta2, beta2_max=beta2, bias_correction="exact")

    def init(params: Any) -> ShuffledState:
        n = len(jax.tree.leaves(params))
        memory = jnp.zeros((n, kept)) if kept else None
        zero = jnp.zeros((), jnp.int32)
        return ShuffledState(zero, jnp.zeros(n), memory, jnp.zeros((window, n)), inner(beta2_max).init(params))

    def update(updates: Any, state: ShuffledState, params: Any = None) -> tuple[Any, ShuffledState]:
        norm = jnp.stack([jnp.linalg.norm(g.ravel()) for g in jax.tree.leaves(updates)])
        c2, _, ema, memory = signals.forgetting(hyper, norm, state.ema, state.memory, jnp)
        past = state.past.at[state.seen % window].set(1 - c2)
        key = jax.random.fold_in(jax.random.key(0), state.seen)
        drawn = jax.random.randint(key, norm.shape, 0, jnp.minimum(state.seen + 1, window))
        beta2 = past[drawn, jnp.arange(norm.size)]
        updates, new = inner(beta2).update(updates, state.inner, params)
        return updates, ShuffledState(state.seen + 1, ema, memory, past, new)

    return optax.GradientTransformation(init, update)


class AdafactorState(NamedTuple):
    seen: jax.Array
    inner: Any


def adafactor(
    learning_rate: Any, *, power: float = 0.8, beta1: float = Hyper.beta1, eps: float = Hyper.eps
) -> optax.GradientTransformation:
    """Adam with β2 = 1 - t^-power."""

    def inner(beta2: Any) -> optax.GradientTransformation:
        return kourkoutas_beta(
            learning_rate, beta1=beta1, beta2_min=beta2, beta2_max=beta2, eps=eps, bias_correction="exact"
        )

    def init(params: Any) -> AdafactorState:
        return AdafactorState(jnp.zeros((), jnp.int32), inner(0.9).init(params))

    def update(updates: Any, state: AdafactorState, params: Any = None) -> tuple[Any, AdafactorState]:
        beta2 = 1 - (state.seen + 1.0) ** -power
        updates, new = inner(beta2).update(updates, state.inner, params)
        return updates, AdafactorState(state.seen + 1, new)

    return optax.GradientTransformation(init, update)
