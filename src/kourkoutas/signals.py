"""What moves β2: the signals, each a function from a bucket's pooled norm n to 1-β2.

A signal sees one number per bucket and step, and keeps a few scalars per bucket. Nothing here is done per parameter.

`sunspike`, the paper's: r is a moving average of n, and a norm above it shortens the memory.

    r ← α·r + (1-α)·n,   sun = n / (n + r + tiny_spike),   β2 = β2_max - (β2_max-β2_min)·sun

A calm bucket (n = r) has sun = ½, and falling norms lengthen the memory.

`centred`: calm is zero, so that only a norm above its average shortens the memory. w is the weight that r has gathered.

    w ← α·w + (1-α),   r̂ = r/w,   sun = max(0, (n - r̂) / (n + r̂ + tiny_spike)),   β2 as above

`predictive`: the memory that would have predicted the norms best. K forgetting rates c_k lie evenly in ratio between
1-β2_max and 1-β2_min. Each has a moving average of n², the forecast of the next n², and is scored by the loss under
which the best forecast of a variance is its mean (QLIKE, Patton 2011); old scores fade.

    x_k = n² / s_k,   L_k ← discount·L_k + (log s_k + x_k),   s_k ← s_k + c_k·(n² - s_k)
    weight_k ∝ exp(-L_k/2),   log(1-β2) = Σ weight_k·log c_k

and sun is where log(1-β2) stands between log(1-β2_max), 0, and log(1-β2_min), 1.

NOTE: β2 stays in [β2_min, β2_max] for every signal, so that equal bounds give Adam.

NOTE: units. Squares of norms leave float32 above 1e19. The moving averages are kept as their roots q_k = √s_k, in
units of n, and L_k up to a number that is the same for all k, which the weights do not feel.
"""

from __future__ import annotations

import math
from typing import Any

SIGNALS = ("sunspike", "centred", "predictive")
FORECASTS = 8
DISCOUNT = 0.998
LARGEST = 1e37  # of n: float32 holds a little more than 3e38, and 1/n as a normal number below 8e37
FARTHEST = 1e3  # of n/q: a spike counts against every forecast, and must not end in inf
MEMORY = {"sunspike": 0, "centred": 1, "predictive": 1 + 2 * FORECASTS}
"""Scalars that a signal keeps per bucket beside r: none; w; the count of norms, then q_k, then L_k."""


def forgetting(hyper: Any, norm: Any, ema: Any, memory: Any, xp: Any) -> tuple[Any, Any, Any, Any]:
    """(1-β2, sun, r, memory) of each bucket after it saw `norm`.

    Args:
      hyper: the hyper-parameters; `hyper.signal` chooses.
      norm: n, one entry per bucket.
      ema: r before the step.
      memory: what else the signal keeps, (buckets, MEMORY[signal]); None for "sunspike".
      xp: the array namespace.
    """
    # r = α·r + (1-α)·n
    r = hyper.alpha * ema + (1 - hyper.alpha) * norm
    c2, sun, memory = _signalled(hyper, norm, r, memory, xp)
    if hyper.fixed:  # whatever the norm, which need not be finite
        c2 = xp.zeros_like(norm) + (1 - hyper.beta2_max)
    return c2, sun, r, memory


def _signalled(hyper: Any, norm: Any, r: Any, memory: Any, xp: Any) -> tuple[Any, Any, Any]:
    """(1-β2, sun, memory) by the signal."""
    if hyper.signal == "predictive":
        return _predictive(hyper, norm, memory, xp)
    if hyper.signal == "centred":
        # w = α·w + (1-α),  sun = max(0, (n - r/w) / (n + r/w + tiny_spike))
        memory = hyper.alpha * memory + (1 - hyper.alpha)
        mean = r / memory[..., 0]
        sun = (norm - mean) / (norm + mean + hyper.tiny_spike)
        sun = xp.where(sun < 0, 0 * sun, sun)
    else:
        # raw = n / (r + tiny_spike),  sun = raw / (1 + raw) = n / (n + r + tiny_spike)
        sun = norm / (norm + r + hyper.tiny_spike)
    # β2 = β2_max - (β2_max - β2_min)·sun
    return (1 - hyper.beta2_max) + (hyper.beta2_max - hyper.beta2_min) * sun, sun, memory


def _predictive(hyper: Any, norm: Any, memory: Any, xp: Any) -> tuple[Any, Any, Any]:
    seen, q, score, n = memory[..., :1], memory[..., 1 : 1 + FORECASTS], memory[..., 1 + FORECASTS :], norm[..., None]
    n = xp.where(n > LARGEST, 0 * n + LARGEST, n)
    # place_k = 0 … 1 and c_k = (1-β2_max)·((1-β2_min)/(1-β2_max))^place_k
    zero = xp.zeros_like(seen)
    place = xp.concatenate([zero + k / (FORECASTS - 1) for k in range(FORECASTS)], -1)
    c = _rate(hyper, place, xp)

    # q̂_k = √(s_k / (1 - (1-c_k)^seen)): a forecast from `seen` norms; before the first there is none
    gathered = -xp.expm1(seen * xp.log1p(-c))
    forecast = q / xp.sqrt(xp.where(seen > 0, gathered, gathered + 1)) + hyper.tiny_spike
    far = n / forecast
    x = xp.where(far < FARTHEST, far, 0 * n + FARTHEST) ** 2  # NaN only where n is no number
    # L_k ← discount·L_k + log(s_k/s_0) + x_k, then less the smallest
    score = xp.where(seen > 0, DISCOUNT * score + 2 * xp.log(forecast / forecast[..., :1]) + x, score)
    score = score - (xp.amin if hasattr(xp, "amin") else xp.min)(score, -1)[..., None]
    weight = math.e ** (-score / 2)  # NOTE: MLX's exp has the digits of float32 only, in float64 too
    sun = (weight * place).sum(-1) / weight.sum(-1)

    # s_k ← s_k + c_k·(n² - s_k), divided by the larger of the two
    largest = xp.where(q < n, n + 0 * q, q) + hyper.tiny_spike
    q = largest * xp.sqrt((1 - c) * (q / largest) ** 2 + c * (n / largest) ** 2)
    return _rate(hyper, sun, xp), sun, xp.concatenate((seen + 1, q, score), -1)


def _rate(hyper: Any, place: Any, xp: Any) -> Any:
    """(1-β2_max)·((1-β2_min)/(1-β2_max))^place, which rounding must not carry past 1-β2_min."""
    shortest, longest = 1 - hyper.beta2_min, 1 - hyper.beta2_max
    c = longest * (shortest / longest) ** place
    return xp.where(c < shortest, c, 0 * c + shortest)
