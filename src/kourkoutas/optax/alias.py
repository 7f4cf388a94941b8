"""`scale_by_kourkoutas_beta`, and `kourkoutas_beta`, which adds weight decay and a learning rate."""

# Annotations stay objects here (no `from __future__ import annotations`): Optax's own checks read them.
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from kourkoutas.optax.axes import AxisName
from kourkoutas.optax.state import steps_taken
from kourkoutas.optax.transform import transformation
from kourkoutas.optax.trees import PyTree, align
from kourkoutas.rule import Buckets, Hyper, check_learning_rate, warmup

Scalar = float | jax.Array

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
      weight_decay: decoupled weight decay λ, multiplied with the learning rate as in `optax.adamw`.
      mask: a tree of booleans with the structure of the parameters, or a callable that makes one from them: where
        weight decay applies.
      nonfinite: as below; a bucket that is skipped is not decayed either.
      lr_warmup: multiply the learning rate of a parameter by √(1 - β2_max^t), t its steps, which
        `bias_correction="beta2max"` does unasked.

    All other arguments are those of `scale_by_kourkoutas_beta`.

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
    hyper = Hyper.pick(locals())
    if not callable(learning_rate):
        check_learning_rate(learning_rate, "learning_rate")
    # NOTE: `identity` does not read the parameters, and keeps the state's structure the same as with an injected zero.
    still = isinstance(weight_decay, (int, float)) and weight_decay == 0
    decayed = optax.identity() if still else optax.add_decayed_weights(weight_decay)
    if mask is not None:
        decayed = optax.masked(decayed, mask)
    scale = transformation(replace(hyper, lr_warmup=False), buckets, diagnostics, axis_name)
    chain = optax.chain(scale, decayed, optax.scale_by_learning_rate(learning_rate))

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        updates, new_state = chain.update(updates, state, params, **extra_args)
        before, after = state[0], new_state[0]
        us, rebuild = align(updates, before.mu, "gradients")
        if hyper.lr_warmup:
            factors = warmup(beta2_max, steps_taken(after)[1].astype(after.ema.dtype), jnp)
            us = [None if u is None else u * f.astype(jnp.real(u).dtype) for u, f in zip(us, factors, strict=True)]
        if hyper.nonfinite == "skip":
            skipped = after.missed > before.missed
            us = [None if u is None else jnp.where(s, jnp.zeros_like(u), u) for u, s in zip(us, skipped, strict=True)]
        # NOTE: zeros for a missing gradient, as `optax.apply_updates` cannot add None to an array.
        ms = jax.tree.leaves(before.mu)
        return rebuild([jnp.zeros_like(m) if u is None else u for u, m in zip(us, ms, strict=True)]), new_state

    return optax.GradientTransformationExtraArgs(chain.init, update_fn)


def scale_by_kourkoutas_beta(
    beta1: Scalar = _DEFAULT.beta1,
    beta2_min: Scalar = _DEFAULT.beta2_min,
    beta2_max: Scalar = _DEFAULT.beta2_max,
    alpha: Scalar = _DEFAULT.alpha,
    eps: Scalar = _DEFAULT.eps,
    tiny_spike: Scalar = _DEFAULT.tiny_spike,
    tiny_denom: Scalar = _DEFAULT.tiny_denom,
    *,
    decay: Scalar | None = _DEFAULT.decay,
    max_ratio: Scalar | None = _DEFAULT.max_ratio,
    adaptive_tiny: bool = _DEFAULT.adaptive_tiny,
    bias_correction: str = _DEFAULT.bias_correction,
    warmup_steps: int | jax.Array = _DEFAULT.warmup_steps,
    buckets: Buckets = "parameter",
    nonfinite: str = _DEFAULT.nonfinite,
    diagnostics: bool = False,
    axis_name: AxisName = None,
) -> optax.GradientTransformation:
    r"""Rescale updates according to the Kourkoutas-β algorithm.

    Per bucket, with pooled gradient norm :math:`n_t` and its moving average :math:`r_t`:

    .. math::
        r_t &= α r_{t-1} + (1-α)\, n_t \\
        \mathrm{sun}_t &= \frac{n_t}{n_t + r_t + \mathrm{tiny\_spike}} \\
        β_{2,t} &= β_{2,max} - (β_{2,max} - β_{2,min})\, \mathrm{sun}_t

    Per parameter of the bucket:

    .. math::
        m_t &= β_1 m_{t-1} + (1-β_1)\, g_t \\
        v_t &= β_{2,t} v_{t-1} + (1-β_{2,t})\, g_t^2 \\
        \hat v_t &= \max(δ \hat v_{t-1}, v_t) \text{ or } v_t \\
        u_t &= \mathrm{clip}\Big(\frac{m_t / a_1}{\sqrt{\hat v_t / b_2} + ε
               + \mathrm{tiny\_denom} \max(⟨|θ|⟩, 1)},\ \pm \mathrm{max\_ratio}\Big)

    NOTE: `optax.inject_hyperparams` takes every number as it is. A callable `buckets` must be named in its
    `static_args`, as it would be taken for a schedule; with 16-bit parameters pass `hyperparam_dtype=jnp.float32`,
    as β2_max = 0.999 would round to 1.

    Args:
      beta1: first-moment decay β1, in [0, 1).
      beta2_min: β2 under the strongest spike, in [0, beta2_max].
      beta2_max: β2 when the norm is far below its moving average, in [beta2_min, 1).
      alpha: decay of the moving average of the pooled norm, in (0, 1).
      eps: added to the denominator.
      tiny_spike: added to the moving average that the norm is divided by.
      tiny_denom: size of the adaptive-tiny term.
      decay: None (no v_max), 1 (AMSGrad), in (0, 1) (leaky AMSGrad), 0 (never a v_max, also with max_ratio).
      max_ratio: None, or the bound on an update's entries before the learning rate. With `decay=None` it turns on
        AMSGrad; use `decay=0` to clip only.
      adaptive_tiny: add tiny_denom·max(⟨|θ|⟩, 1) to the denominator; `update` then needs `params`.
      bias_correction: "none", "beta2max" or "exact", see `kourkoutas.rule.Hyper`.
      warmup_steps: steps of a bucket during which β2 stays at ½(β2_min + β2_max).
      buckets: "parameter", "module", "shape", "global", or a callable of a parameter's dotted name and of an object
        with its shape and dtype.
      nonfinite: what a non-finite pooled norm does: "propagate", "skip" the bucket (zero update, state unchanged,
        counted in `skipped`) or "raise" (only outside of jit).
      diagnostics: record sun, β2 and n of every bucket and step; read them with `pull`.
      axis_name: inside `shard_map`, the mesh axes over which parameters are sharded: names or a PartitionSpec for all
        of them, a tree of these like the parameters, or a callable of name and array; see `kourkoutas.optax.axes`.
        Norms are then those of whole parameters. Leave it None under `jit`, where XLA sums over all devices by itself.

    Returns:
      The corresponding `optax.GradientTransformation`.

    Example:
      >>> params = {"w": jnp.array([1.0, 2.0])}
      >>> solver = optax.chain(scale_by_kourkoutas_beta(), optax.scale(-0.1))
      >>> updates, state = solver.update(params, solver.init(params), params)
      >>> updates["w"].shape
      (2,)

    References:
      Kassinos, Kourkoutas-β: A Sunspike-Driven Adam Optimizer with Desert Flair, 2025.
    """
    return transformation(Hyper.pick(locals()), buckets, diagnostics, axis_name)
