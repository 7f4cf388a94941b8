"""`kourkoutas_beta`: the transformation with weight decay and a learning rate."""

# Annotations stay objects here (no `from __future__ import annotations`): Optax's own checks read them.
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from kourkoutas.optax.axes import AxisName
from kourkoutas.optax.norms import Members
from kourkoutas.optax.state import steps_taken
from kourkoutas.optax.transform import Scalar, scale_by_kourkoutas_beta
from kourkoutas.optax.trees import PyTree, align, layout_of
from kourkoutas.rule import Buckets, Hyper, check_learning_rate, warmup

_DEFAULT = Hyper()


def kourkoutas_beta(
    learning_rate: optax.ScalarOrSchedule,
    *,
    beta1: Scalar = _DEFAULT.beta1,
    beta2_min: Scalar = _DEFAULT.beta2_min,
    beta2_max: Scalar = _DEFAULT.beta2_max,
    alpha: Scalar = _DEFAULT.alpha,
    eps: Scalar = _DEFAULT.eps,
    tiny_spike: Scalar = _DEFAULT.tiny_spike,
    tiny_denom: Scalar = _DEFAULT.tiny_denom,
    decay: Scalar | None = _DEFAULT.decay,
    max_ratio: Scalar | None = _DEFAULT.max_ratio,
    adaptive_tiny: bool = _DEFAULT.adaptive_tiny,
    bias_correction: str = _DEFAULT.bias_correction,
    warmup_steps: int | jax.Array = _DEFAULT.warmup_steps,
    weight_decay: Scalar = _DEFAULT.weight_decay,
    mask: PyTree | Callable[[optax.Params], PyTree] | None = None,
    buckets: Buckets = "parameter",
    nonfinite: str = _DEFAULT.nonfinite,
    signal: str = _DEFAULT.signal,
    lr_warmup: bool = _DEFAULT.lr_warmup,
    diagnostics: bool = False,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Kourkoutas-β: Adam with a second-moment memory that shortens when gradients spike.

    .. math::
        θ_t = (1 - ρ_t λ)\, θ_{t-1} - ρ_t\, u_t

    with :math:`u_t` from `scale_by_kourkoutas_beta`, learning rate :math:`ρ_t` and weight decay :math:`λ`. With
    `beta2_min == beta2_max` and no extras this is Adam.

    Args:
      learning_rate: a number or a schedule.
      beta1: see `scale_by_kourkoutas_beta`, also for all arguments that are not below.
      beta2_min: idem.
      beta2_max: idem.
      alpha: idem.
      eps: idem.
      tiny_spike: idem.
      tiny_denom: idem.
      decay: idem.
      max_ratio: idem.
      adaptive_tiny: idem.
      bias_correction: idem.
      warmup_steps: idem.
      weight_decay: decoupled weight decay λ, multiplied with the learning rate as in `optax.adamw`.
      mask: a tree of booleans with the structure of the parameters, or a callable that makes one from them: where
        weight decay applies.
      buckets: idem.
      nonfinite: idem; a skipped bucket is not decayed either.
      signal: idem.
      lr_warmup: multiply the learning rate of a parameter by √(1 - β2_max^t), t its steps, which
        `bias_correction="beta2max"` does unasked.
      diagnostics: idem.
      axis_name: idem.

    Returns:
      The corresponding `optax.GradientTransformationExtraArgs`.

    Example:
      >>> def f(x): return jnp.sum(x ** 2)
      >>> solver = kourkoutas_beta(learning_rate=0.1)
      >>> params = jnp.array([1.0, 2.0, 3.0])
      >>> state = solver.init(params)
      >>> for _ in range(200):
      ...     grads = jax.grad(f)(params)
      ...     updates, state = solver.update(grads, state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> print(f(params) < 0.01)
      True

    References:
      Kassinos, Kourkoutas-β: A Sunspike-Driven Adam Optimizer with Desert Flair, 2025.
    """
    Hyper(weight_decay=weight_decay, lr_warmup=lr_warmup, bias_correction=bias_correction)  # type: ignore[arg-type]
    if not callable(learning_rate):
        check_learning_rate(learning_rate, "learning_rate")
    scale = scale_by_kourkoutas_beta(
        beta1=beta1,
        beta2_min=beta2_min,
        beta2_max=beta2_max,
        alpha=alpha,
        eps=eps,
        tiny_spike=tiny_spike,
        tiny_denom=tiny_denom,
        decay=decay,
        max_ratio=max_ratio,
        adaptive_tiny=adaptive_tiny,
        bias_correction=bias_correction,
        warmup_steps=warmup_steps,
        buckets=buckets,
        nonfinite=nonfinite,
        signal=signal,
        diagnostics=diagnostics,
        axis_name=axis_name,
    )
    # NOTE: `identity` does not read the parameters, and keeps the state's structure the same as with an injected zero.
    still = isinstance(weight_decay, (int, float)) and weight_decay == 0
    decayed = optax.identity() if still else optax.add_decayed_weights(weight_decay)
    if mask is not None:
        decayed = optax.masked(decayed, mask)
    chain = _hold_still(optax.chain(scale, decayed, optax.scale_by_learning_rate(learning_rate)), buckets, axis_name)
    return _warmed(chain, beta2_max) if lr_warmup else chain


def _warmed(inner: optax.GradientTransformationExtraArgs, beta2_max: Scalar) -> optax.GradientTransformationExtraArgs:
    """`inner` with the update of each parameter times √(1 - β2_max^t), t its steps, this one included."""

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        updates, new_state = inner.update(updates, state, params, **extra_args)
        factor = warmup(beta2_max, steps_taken(new_state[0])[1].astype(new_state[0].ema.dtype), jnp)
        us, rebuild = align(updates, new_state[0].mu, "gradients")
        # NOTE: a parameter that took no step yet has t = 0 and an update of zero.
        return rebuild([u * f.astype(jnp.real(u).dtype) for u, f in zip(us, factor, strict=True)]), new_state

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def _hold_still(
    inner: optax.GradientTransformation, buckets: Buckets, axis_name: AxisName
) -> optax.GradientTransformationExtraArgs:
    """The chain `inner` with zero updates, weight decay included, wherever its first part took no step.

    NOTE: zeros and not None for a missing gradient, as `optax.apply_updates` cannot add None to an array.
    """

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        updates, new_state = inner.update(updates, state, params, **extra_args)
        before, after = state[0], new_state[0]
        us, rebuild = align(updates, before.mu, "gradients")
        if after.skipped is not None:
            members = Members(layout_of(before.mu, buckets, axis_name).parts)
            skipped = jnp.unstack(members.spread(after.skipped > before.skipped))
            us = [None if u is None else jnp.where(s, jnp.zeros_like(u), u) for u, s in zip(us, skipped, strict=True)]
        elif all(u is not None for u in us):
            return updates, new_state
        ms = jax.tree.leaves(before.mu)
        return rebuild([jnp.zeros_like(m) if u is None else u for u, m in zip(us, ms, strict=True)]), new_state

    return optax.GradientTransformationExtraArgs(inner.init, update_fn)
