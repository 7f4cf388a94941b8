"""The Kourkoutas-β rule: hyper-parameters, and the scalars of one step as one function, `step`.

Everything here is framework-free: `step` uses only arithmetic and a few calls of an array namespace `xp` (numpy, torch,
jax.numpy, mlx.core), so each front end runs the same lines on its own arrays. A front end adds three
things: the pooled norms before it, the elementwise update after it, and where the state is kept.

Symbols, as in the paper, but for the learning rate, its ρ, which is γ everywhere here:

    n      pooled gradient norm of a bucket        norm
    r      moving average of n                     ema
    sun    n / (r + tiny_spike), squashed to [0,1) sun
    1-β2   how fast the second moment forgets      c2
    a1,b2  bias corrections of m and v             a1, b2
    γ, λ   learning rate, weight decay             lr, hyper.weight_decay

NOTE: `c2 = 1 - β2` is carried instead of β2. It is formed as (1-β2_max) + (β2_max-β2_min)·sun, which keeps all its
digits in float32, where 1 - 0.999 would lose four of them.

NOTE: norms. n of float32 gradients is finite whenever they are, as far as n itself fits: a million entries of 1e18 have
n = 1e21, but Σ g² = 1e42 overflows float32, and a NaN would spread to the whole bucket where Adam goes on. So a front
end sums squares in float64, or sums (g/s)² with s the largest |g| and multiplies the root by s. Squares that underflow
may be lost: next to `tiny_spike` they are nothing. float64 gradients may overflow their sum from 1e154 on.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

BIAS_CORRECTIONS = ("none", "beta2max", "exact")
NONFINITE = ("propagate", "skip", "raise")
BASES = (None, "eigen")

Buckets = str | Callable[[str, Any], Any]


class NonFiniteGradient(ArithmeticError):
    """Raised by `nonfinite="raise"` before anything has changed."""

    def __init__(self, bucket: str) -> None:
        super().__init__(
            f"the gradient norm of bucket {bucket!r} is not finite and `nonfinite` is 'raise'; nothing was changed: "
            "lower the learning rate, clip gradients, or use nonfinite='skip'"
        )
        self.bucket = bucket

    def __reduce__(self) -> tuple[type, tuple[str]]:  # of the bucket, not of the text made of it
        return type(self), (self.bucket,)


_NUMBERS = (int, float, np.integer, np.floating)


def _is_number(value: object) -> bool:
    return isinstance(value, _NUMBERS) and not isinstance(value, bool)


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


def check_basis(every: Any, memory: Any, limit: Any, prefix: str = "") -> None:
    """Raise unless the settings of `basis="eigen"` are right; `prefix` begins their names (framework arrays pass)."""
    _check(f"{prefix}memory", memory, lambda x: 0 <= x < 1, "must be in [0, 1), for example 0.95")
    for name, value, example in (("every", every, 10), ("limit", limit, 1024)):
        whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
        is_array = hasattr(value, "dtype") and not isinstance(value, np.generic)
        if not is_array and not (whole and value >= 1):
            raise ValueError(f"`{prefix}{name}` must be a whole number >= 1, for example {example}; got {value!r}")


DEFAULTS: dict[str | None, dict[str, Any]] = {
    None: {"beta1": 0.9, "bias_correction": "beta2max"},
    "eigen": {"beta1": 0.95, "bias_correction": "exact"},
}
"""`basis` → what is meant by None: the paper's values, and those that were better in the eigenbasis."""


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """Hyper-parameters of Kourkoutas-β, the same names and defaults in every front end.

    Args:
      beta1: first-moment decay β1, in [0, 1); None: 0.9, and 0.95 with a basis.
      beta2_min: β2 under the strongest spike, in [0, beta2_max].
      beta2_max: β2 when the norm is far below its moving average, in [beta2_min, 1).
      alpha: decay of the moving average of the pooled norm, in (0, 1).
      eps: added to the denominator, ≥ 0.
      tiny_spike: added to the moving average that the norm is divided by, > 0.
      tiny_denom: size of the adaptive-tiny term, ≥ 0.
      decay: None (no v_max), 1 (AMSGrad), in (0, 1) (leaky AMSGrad), 0 (never a v_max, also with max_ratio).
      max_ratio: None, or the bound on |Δθ| in units of the learning rate, > 0; of a complex θ on each part. With
        `decay=None` it turns on AMSGrad, as in the paper; use `decay=0` to clip only.
      adaptive_tiny: add tiny_denom·max(⟨|p|⟩, 1) to the denominator.
      bias_correction: v is divided by 1 - β2_max^t ("beta2max", the paper's; early steps are smaller than Adam's),
        by 1 - Π β2, the weight that v really holds ("exact"), or neither m nor v is corrected ("none"). None:
        "beta2max", and "exact" with a basis.
      warmup_steps: steps of a bucket during which β2 stays at ½(β2_min + β2_max), ≥ 0.
      weight_decay: decoupled weight decay, ≥ 0.
      lr_warmup: multiply the learning rate by √(1 - β2_max^t). Refused with bias_correction="beta2max", whose division
        has the same effect.
      nonfinite: what happens to a bucket whose norm is not finite, for which one NaN or infinite entry of a gradient is
        enough. "propagate": all its parameters become NaN, and stay so, since β2 and r of the bucket do; Adam, and K-β
        with beta2_min = beta2_max, lose that entry only. "skip": its parameters and state stay as they are, and the
        skip is counted. "raise": `NonFiniteGradient`. If such entries may occur, use "skip"; if the rest of the
        bucket is to move all the same, put zeros in their place before the step.
      basis: where m and v live: None, in the parameter's own coordinates, or "eigen", in the eigenbasis of the factors
        of its gradients, as in SOAP; see `kourkoutas.eigenbasis`. The next three are for "eigen" only.
      basis_every: after how many steps the basis turns, ≥ 1.
      basis_memory: decay μ of the factors, in [0, 1).
      basis_limit: the longest axis that gets a factor, ≥ 1; memory and time grow with its square and its cube.
    """

    beta1: float = None  # type: ignore[assignment]  # never None once it is made: see DEFAULTS
    beta2_min: float = 0.88
    beta2_max: float = 0.999
    alpha: float = 0.93
    eps: float = 1e-8
    tiny_spike: float = 1e-9
    tiny_denom: float = 1e-8
    decay: float | None = None
    max_ratio: float | None = None
    adaptive_tiny: bool = False
    bias_correction: Literal["none", "beta2max", "exact"] = None  # type: ignore[assignment]  # the same
    warmup_steps: int = 0
    weight_decay: float = 0.0
    nonfinite: Literal["propagate", "skip", "raise"] = "propagate"
    lr_warmup: bool = False
    basis: Literal["eigen"] | None = None
    basis_every: int = 10
    basis_memory: float = 0.95
    basis_limit: int = 1024

    def __post_init__(self) -> None:
        if self.basis not in BASES:
            raise ValueError(f'`basis` must be None or "eigen"; got {self.basis!r}')
        for name, value in DEFAULTS[self.basis].items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
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
        check_basis(self.basis_every, self.basis_memory, self.basis_limit, prefix="basis_")
        for name in ("adaptive_tiny", "lr_warmup"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"`{name}` must be True or False; got {getattr(self, name)!r}")
        for name, allowed in (("bias_correction", BIAS_CORRECTIONS), ("nonfinite", NONFINITE)):
            value = getattr(self, name)
            if value not in allowed:
                choices = ", ".join(f'"{a}"' for a in allowed)
                raise ValueError(f"`{name}` must be one of {choices}; got {value!r}")
        if self.lr_warmup and self.bias_correction == "beta2max":
            raise ValueError(
                "`lr_warmup` is True, but bias_correction='beta2max' has the same warmup in it already: "
                "use bias_correction='exact' with lr_warmup=True, or leave lr_warmup out"
            )

    @classmethod
    def pick(cls, options: Mapping[str, Any]) -> Hyper:
        """The Hyper made of those entries of `options` that are hyper-parameters."""
        return cls(**{name: options[name] for name in HYPER_NAMES if name in options})

    def with_alpha(self, alpha: Any) -> Hyper:
        """The same with the α of one step, an array: nothing is checked again."""
        new = copy.copy(self)
        object.__setattr__(new, "alpha", alpha)
        return new

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


class State(NamedTuple):
    """The scalars that a step moves; what the options do not need is None."""

    ema: Any  # r, per bucket
    step: Any  # t, the steps taken: per parameter, or one number that all share
    log_beta2: Any = None  # Σ log β2 over a parameter's steps, for bias_correction="exact"
    skipped: Any = None  # per bucket, for nonfinite="skip"


class Coefficients(NamedTuple):
    """The scalars of the update, one entry per parameter or one number for all; None where there is nothing to do.

    m ← m + c1·(g - m),  v ← v + c2·(g² - v),  v̂ = v_max ← max(leak·v_max, v) or v̂ = v,
    θ ← θ - (fade·θ + Δ)  with  Δ = rate·m / (√v̂ + floor), clipped to ±limit

    NOTE: the paper's Δ = γ/a1 · m / (√(v̂/b2) + ε) multiplied out with √b2, which leaves one division per element.

    NOTE: `fade = γλ` is carried instead of 1 - γλ, which float32 rounds by up to 3e-8: multiplied into θ at every step,
    that would move parameters by 1e-5 of their size in 400 steps.
    """

    c1: Any  # 1 - β1
    c2: Any  # 1 - β2
    rate: Any  # γ√b2/a1
    floor: Any  # (ε + tiny_denom·max(⟨|θ|⟩, 1))·√b2, the second term with adaptive_tiny
    limit: Any  # γ·max_ratio, or None
    fade: Any  # γλ, or None
    leak: Any  # δ, or None when no v_max is kept


class Step(NamedTuple):
    """What `step` makes of the scalars."""

    state: State
    k: Coefficients
    sun: Any  # per bucket; NaN where it was not updated
    beta2: Any  # per bucket; NaN where it was not updated
    norm: Any  # n, per bucket; NaN where it was not updated
    updated: Any  # which buckets were updated; None: all
    updated_each: Any  # which parameters were updated; None: all


class Members(Protocol):
    """The parameters of a step and their buckets, for arrays of one framework.

    Attributes:
      bucket_names: one name per bucket.
      bucket_of: for each parameter, the number of its bucket.

    NOTE: a front end that knows which parameters have a gradient lists these only, and only their buckets.
    """

    @property
    def bucket_names(self) -> Sequence[str]: ...

    @property
    def bucket_of(self) -> Sequence[int]: ...

    def spread(self, x: Any) -> Any:
        """From an entry per bucket to one per parameter."""

    def largest(self, x: Any) -> Any:
        """From an entry per parameter to one per bucket: the largest of its members."""

    def total(self, x: Any) -> Any:
        """From an entry per parameter to one per bucket: the sum over its members."""


def step(
    hyper: Hyper,
    lr: Any,
    norm: Any,
    state: State,
    xp: Any,
    *,
    members: Members | None = None,
    mean_abs: Any = None,
    has_grad: Any = None,
    starts: Any = None,
) -> Step:
    """The scalars of one step: from pooled norms to the coefficients of the update and the state afterwards.

    Args:
      hyper: hyper-parameters; numbers, or arrays with one element.
      lr: the learning rate γ.
      norm: n, per bucket.
      state: before the step.
      xp: the array namespace.
      members: None when every bucket has one parameter, in the same order.
      mean_abs: ⟨|θ|⟩ per parameter, for adaptive_tiny.
      has_grad: which buckets have a gradient; None: all. Only for buckets that lie on several ranks: a front end that
        knows which parameters have a gradient passes the entries of these only.
      starts: which parameters only make their basis in this step (`basis="eigen"`); None: none. They stay where they
        are and do not count the step; their bucket's moving average moves all the same.

    NOTE: a bucket is not updated if it has no gradient, or if its norm is not finite and `nonfinite` is "skip". It then
    keeps its state, and its coefficients leave m, v, v_max and θ as they are to the bit, if its gradient is replaced by
    zeros and θ is finite.
    """
    t = state.step + 1
    t_bucket = t if members is None or _is_zero(hyper.warmup_steps) else members.largest(t)
    c2, sun, r = _memory(hyper, norm, state.ema, t_bucket, xp)
    c2_each = c2 if members is None else members.spread(c2)
    # Σ log β2 ← Σ log β2 + log β2
    log_beta2 = state.log_beta2 if state.log_beta2 is None else state.log_beta2 + xp.log1p(-c2_each)
    a1, b2 = bias_corrections(hyper, _real(t, norm), log_beta2, xp)
    root = _sqrt(b2, xp)
    if hyper.lr_warmup:
        # γ_t = γ·√(1 - β2_max^t)
        lr = lr * warmup(hyper.beta2_max, _real(t, norm), xp)

    eps: Any = hyper.eps
    if mean_abs is not None:
        # ε + tiny_denom·max(⟨|θ|⟩, 1)
        eps = eps + hyper.tiny_denom * xp.clip(mean_abs, 1.0, math.inf)
    k = Coefficients(
        c1=1 - hyper.beta1,
        c2=c2_each,
        rate=lr * root / a1,
        floor=eps * root,
        limit=None if hyper.max_ratio is None else lr * hyper.max_ratio,
        fade=None if _is_zero(hyper.weight_decay) else lr * hyper.weight_decay,
        leak=hyper.leak,
    )
    new = State(r, t, log_beta2, state.skipped)
    if has_grad is None and starts is None and hyper.nonfinite != "skip":
        return Step(new, k, sun, 1 - c2, norm, None, None)

    # `updated` is None where every bucket is, as in `Step`.
    updated = has_grad
    if hyper.nonfinite == "skip":
        finite = xp.isfinite(norm)
        updated = _and(has_grad, finite)
        if state.skipped is not None:
            new = new._replace(skipped=xp.where(finite, state.skipped, state.skipped + 1))
    each = updated if members is None or updated is None else members.spread(updated)
    if starts is not None:
        each = _and(each, ~starts)
    new = new._replace(
        ema=r if updated is None else xp.where(updated, r, state.ema),
        step=xp.where(each, t, state.step),
        log_beta2=None if log_beta2 is None else xp.where(each, log_beta2, state.log_beta2),
    )
    k = _held(k, each, xp)
    beta2 = 1 - c2
    if updated is not None:
        # NOTE: a NaN as a number, not as an array, which a search for NaNs (jax.debug_nans) would find at every step.
        sun, beta2, norm = [xp.where(updated, x, math.nan) for x in (sun, beta2, norm)]
    return Step(new, k, sun, beta2, norm, updated, each)


def _and(these: Any, those: Any) -> Any:
    """Both masks at once; None is a mask that holds everywhere."""
    return those if these is None else these & those


def _held(k: Coefficients, moves: Any, xp: Any) -> Coefficients:
    """The coefficients, with those that change nothing where a parameter does not move."""
    zero = xp.zeros_like(k.c2)

    def still(x: Any, value: float) -> Any:
        return None if x is None else xp.where(moves, x + zero, zero + value)

    return Coefficients(
        c1=still(k.c1, 0),
        c2=still(k.c2, 0),
        rate=still(k.rate, 0),
        floor=still(k.floor, 1),
        limit=k.limit,
        fade=still(k.fade, 0),
        leak=still(k.leak, 1),
    )


def _memory(hyper: Hyper, norm: Any, ema: Any, t: Any, xp: Any) -> tuple[Any, Any, Any]:
    """(1-β2, sun, r) of each bucket; `t` counts its steps, this one included."""
    # r = α·r + (1-α)·n
    r = hyper.alpha * ema + (1 - hyper.alpha) * norm
    # raw = n / (r + tiny_spike),  sun = raw / (1 + raw) = n / (n + r + tiny_spike)
    sun = norm / (norm + r + hyper.tiny_spike)
    if hyper.fixed:  # whatever the norm, which need not be finite
        c2 = xp.zeros_like(norm) + (1 - hyper.beta2_max)
    else:
        # β2 = β2_max - (β2_max - β2_min)·sun
        c2 = (1 - hyper.beta2_max) + (hyper.beta2_max - hyper.beta2_min) * sun
    if _is_zero(hyper.warmup_steps):
        return c2, sun, r
    # While t ≤ warmup_steps: sun = 0 and β2 = ½(β2_min + β2_max)
    middle, zero = 1 - (hyper.beta2_min + hyper.beta2_max) / 2, xp.zeros_like(sun)
    warm = t > hyper.warmup_steps
    return xp.where(warm, c2, zero + middle), xp.where(warm, sun, zero), r


def _is_zero(x: Any) -> bool:
    return _is_number(x) and x == 0


def _sqrt(x: Any, xp: Any) -> Any:
    return math.sqrt(x) if isinstance(x, float) else xp.sqrt(x)


def _real(x: Any, like: Any) -> Any:
    """A count as a number of the dtype of `like`."""
    return x.astype(like.dtype) if hasattr(x, "astype") and hasattr(like, "dtype") else x


def _log(beta: Any, xp: Any) -> Any:
    if not _is_number(beta):
        return xp.log(beta)
    return math.log(beta) if beta > 0 else -math.inf


def _one_minus_power(beta: Any, step: Any, xp: Any) -> Any:
    """1 - β^t as -expm1(t·log β), which keeps its digits in float32 when β is near 1."""
    exponent = step * _log(beta, xp)
    return -math.expm1(exponent) if isinstance(exponent, float) else -xp.expm1(exponent)


def warmup(beta2_max: Any, step: Any, xp: Any) -> Any:
    """√(1 - β2_max^t), the factor of the learning rate with lr_warmup."""
    return _sqrt(_one_minus_power(beta2_max, step, xp), xp)


def bias_corrections(hyper: Hyper, step: Any, log_beta2: Any, xp: Any) -> tuple[Any, Any]:
    """(a1, b2) of parameters that have taken `step` ≥ 1 steps.

    a1 = 1 - β1^t;  b2 = 1 - β2_max^t ("beta2max") or 1 - Π β2 = -expm1(Σ log β2) ("exact"); both 1 for "none".
    `log_beta2` is Σ log β2 over the steps of each parameter and is only read for "exact".
    """
    if hyper.bias_correction == "none":
        return 1.0, 1.0
    a1 = _one_minus_power(hyper.beta1, step, xp)
    if hyper.bias_correction == "exact":
        return a1, -xp.expm1(log_beta2)
    return a1, _one_minus_power(hyper.beta2_max, step, xp)


def adam_log_beta2(beta2: Any, step: Any, xp: Any) -> Any:
    """Σ log β2 of parameters that took `step` steps with one β2, as for the moments of an Adam.

    Zero for a parameter that took none, also where β2 = 0 and the logarithm is -inf.
    """
    return xp.where(step > 0, xp.where(step > 0, step, 1) * _log(beta2, xp), 0.0)
