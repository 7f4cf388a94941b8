"""The Kourkoutas-β rule: hyper-parameters and the scalar recurrence of one bucket.

Everything here is framework-free. The functions use only arithmetic and the three calls `expm1`, `log1p` and `where`
of an array namespace `xp` (numpy, torch, jax.numpy, mlx.core), so each front end runs the same lines on its own arrays,
one entry per bucket or per parameter.

Symbols, as in the paper:

    n      pooled gradient norm of a bucket        norm
    r      moving average of n                     ema
    sun    n / (r + tiny_spike), squashed to [0,1) sun
    1-β2   how fast the second moment forgets      c2
    a1,b2  bias corrections of m and v             a1, b2

NOTE: `c2 = 1 - β2` is carried instead of β2. It is formed as (1-β2_max) + (β2_max-β2_min)·sun, which keeps all its
digits in float32, where 1 - 0.999 would lose four of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

BIAS_CORRECTIONS = ("none", "beta2max", "exact")
NONFINITE = ("propagate", "skip", "raise")

Buckets = str | Callable[[str, Any], Any]


class NonFiniteGradient(ArithmeticError):
    """Raised by `nonfinite="raise"` before anything has changed."""

    def __init__(self, bucket: str) -> None:
        super().__init__(
            f"the gradient norm of bucket {bucket!r} is not finite and `nonfinite` is 'raise'; nothing was changed: "
            "lower the learning rate, clip gradients, or use nonfinite='skip'"
        )
        self.bucket = bucket


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _check(name: str, value: Any, ok: Callable[[float], bool], remedy: str) -> None:
    """Raise unless `value` is a number that is `ok`; a framework's array may be traced and passes unchecked."""
    if _is_number(value):
        if not ok(value):
            raise ValueError(f"`{name}` {remedy}; got {value!r}")
    elif not hasattr(value, "dtype"):
        raise TypeError(f"`{name}` {remedy}; got {value!r}")


def check_learning_rate(value: Any, name: str = "lr") -> None:
    """Raise ValueError unless `value` is a finite learning rate ≥ 0 (framework arrays pass)."""
    _check(name, value, lambda x: math.isfinite(x) and x >= 0, "must be a finite number >= 0, for example 1e-3")


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """Hyper-parameters of Kourkoutas-β, the same names and defaults in every front end.

    Args:
      beta1: first-moment decay β1, in [0, 1).
      beta2_min: β2 under the strongest spike, in [0, beta2_max].
      beta2_max: β2 when norms vanish against their average, in [beta2_min, 1).
      alpha: decay of the moving average of the pooled norm, in (0, 1).
      eps: added to the denominator, ≥ 0.
      tiny_spike: added to the moving average under the norm, > 0.
      tiny_denom: size of the adaptive-tiny term, ≥ 0.
      decay: None (no v_max), 1 (AMSGrad), in (0, 1) (leaky AMSGrad), 0 (never a v_max, also with max_ratio).
      max_ratio: None, or the bound on |Δθ| in units of the learning rate, > 0. With `decay=None` it turns on AMSGrad,
        as in the paper; use `decay=0` to clip only.
      adaptive_tiny: add tiny_denom·max(⟨|p|⟩, 1) to the denominator.
      bias_correction: "none", "beta2max" or "exact".
      warmup_steps: steps of a bucket during which β2 stays at ½(β2_min + β2_max), ≥ 0.
      weight_decay: decoupled weight decay, ≥ 0.
      nonfinite: what a non-finite pooled norm does: "propagate", "skip" the bucket, or "raise".
    """

    beta1: float = 0.9
    beta2_min: float = 0.88
    beta2_max: float = 0.999
    alpha: float = 0.93
    eps: float = 1e-8
    tiny_spike: float = 1e-9
    tiny_denom: float = 1e-8
    decay: float | None = None
    max_ratio: float | None = None
    adaptive_tiny: bool = False
    bias_correction: Literal["none", "beta2max", "exact"] = "beta2max"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    nonfinite: Literal["propagate", "skip", "raise"] = "propagate"

    def __post_init__(self) -> None:
        _check("beta1", self.beta1, lambda x: 0 <= x < 1, "must be in [0, 1), for example 0.9")
        _check("beta2_max", self.beta2_max, lambda x: 0 <= x < 1, "must be in [0, 1), for example 0.999")
        _check("beta2_min", self.beta2_min, lambda x: 0 <= x < 1, "must be in [0, 1), for example 0.88")
        if _is_number(self.beta2_min) and _is_number(self.beta2_max) and self.beta2_min > self.beta2_max:
            raise ValueError(
                f"`beta2_min` must not exceed `beta2_max`; got beta2_min={self.beta2_min!r}, "
                f"beta2_max={self.beta2_max!r}: swap them, or set both to one value for a fixed β2"
            )
        _check("alpha", self.alpha, lambda x: 0 < x < 1, "must be in (0, 1), for example 0.93")
        for name in ("eps", "tiny_denom", "weight_decay"):
            _check(name, getattr(self, name), lambda x: math.isfinite(x) and x >= 0, "must be a finite number >= 0")
        _check("tiny_spike", self.tiny_spike, lambda x: math.isfinite(x) and x > 0, "must be > 0, for example 1e-9")
        if self.decay is not None:
            _check(
                "decay",
                self.decay,
                lambda x: 0 <= x <= 1,
                "must be None (no v_max), 1 (AMSGrad), in (0, 1) (leaky AMSGrad) or 0 (clip only)",
            )
        if self.max_ratio is not None:
            _check("max_ratio", self.max_ratio, lambda x: math.isfinite(x) and x > 0, "must be None or > 0")
        _check(
            "warmup_steps",
            self.warmup_steps,
            lambda x: x >= 0 and float(x).is_integer(),
            "must be a whole number >= 0, for example 0 or 350",
        )
        if not isinstance(self.adaptive_tiny, bool):
            raise TypeError(f"`adaptive_tiny` must be True or False; got {self.adaptive_tiny!r}")
        for name, allowed in (("bias_correction", BIAS_CORRECTIONS), ("nonfinite", NONFINITE)):
            value = getattr(self, name)
            if value not in allowed:
                choices = ", ".join(f'"{a}"' for a in allowed)
                raise ValueError(f"`{name}` must be one of {choices}; got {value!r}")

    @classmethod
    def pick(cls, options: Mapping[str, Any]) -> Hyper:
        """The Hyper made of those entries of `options` that are hyper-parameters."""
        return cls(**{name: options[name] for name in HYPER_NAMES if name in options})

    @property
    def leak(self) -> float | None:
        """δ in v_max ← max(δ·v_max, v), or None when v̂ = v and no v_max is kept.

        | decay  | max_ratio | δ     |
        |--------|-----------|-------|
        | None   | None      | None  |
        | None   | > 0       | 1     |
        | 0      | any       | None  |
        | (0, 1] | any       | decay |
        """
        if self.decay is None:
            return None if self.max_ratio is None else 1.0
        return None if _is_number(self.decay) and self.decay == 0 else self.decay

    @property
    def fixed(self) -> bool:
        """Whether β2 never moves (beta2_min == beta2_max), so that only the extras differ from Adam."""
        return _is_number(self.beta2_min) and _is_number(self.beta2_max) and self.beta2_min == self.beta2_max


HYPER_NAMES = tuple(f.name for f in fields(Hyper))


def moving_average(hyper: Hyper, ema: Any, norm: Any) -> Any:
    """r_t = α·r_{t-1} + (1-α)·n_t."""
    return hyper.alpha * ema + (1 - hyper.alpha) * norm


def sunspike(hyper: Hyper, ema: Any, norm: Any, step: Any, xp: Any) -> Any:
    """sun_t of buckets whose moving average is already r_t.

    raw = n / (r + tiny_spike), sun = raw / (1 + raw) = n / (n + r + tiny_spike); zero while step ≤ warmup_steps.
    """
    sun = norm / (norm + ema + hyper.tiny_spike)
    if isinstance(hyper.warmup_steps, int) and hyper.warmup_steps == 0:
        return sun
    return xp.where(step > hyper.warmup_steps, sun, xp.zeros_like(sun))


def forgetting(hyper: Hyper, sun: Any, step: Any, xp: Any) -> Any:
    """c2 = 1 - β2_t, with β2_t = β2_max - (β2_max - β2_min)·sun, or ½(β2_min + β2_max) while step ≤ warmup_steps."""
    c2 = (1 - hyper.beta2_max) + (hyper.beta2_max - hyper.beta2_min) * sun
    if isinstance(hyper.warmup_steps, int) and hyper.warmup_steps == 0:
        return c2
    middle = 1 - (hyper.beta2_min + hyper.beta2_max) / 2
    return xp.where(step > hyper.warmup_steps, c2, xp.zeros_like(c2) + middle)


def _one_minus_power(beta: Any, step: Any, xp: Any) -> Any:
    """1 - β^t as -expm1(t·log β), which keeps its digits in float32 when β is near 1."""
    if isinstance(beta, (int, float, np.number)):
        return -xp.expm1(step * (math.log(beta) if beta > 0 else -math.inf))
    return -xp.expm1(step * xp.log(beta))


def bias_corrections(hyper: Hyper, step: Any, log_beta2: Any, xp: Any) -> tuple[Any, Any]:
    """(a1, b2) of parameters that have taken `step` ≥ 1 steps.

    a1 = 1 - β1^t;  b2 = 1 - β2_max^t ("beta2max") or 1 - Π β2 = -expm1(Σ log β2) ("exact"); both 1 for "none".
    `log_beta2` is Σ log β2 over the steps of each parameter and is only read for "exact".
    """
    if hyper.bias_correction == "none":
        one = xp.zeros_like(step) + 1.0
        return one, one
    a1 = _one_minus_power(hyper.beta1, step, xp)
    if hyper.bias_correction == "exact":
        return a1, -xp.expm1(log_beta2)
    return a1, _one_minus_power(hyper.beta2_max, step, xp)
