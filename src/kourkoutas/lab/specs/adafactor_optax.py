"""The rival of `kourkoutas.lab.specs.adafactor` for Optax: Adam with exact bias correction and β2 = 1 - t^-0.8."""

# Annotations stay objects here (no `from __future__ import annotations`): Optax's own checks read them.
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from kourkoutas.optax import kourkoutas_beta
from kourkoutas.rule import Hyper


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
