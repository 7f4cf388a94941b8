"""A second moment in relative units: the family of rules that docs/relative-memory-protocol.md screens, as prototypes.

A bucket is a parameter. n is the norm of its gradient, and

    r ← α·r + (1-α)·n,     r̂ = r/(1-α^t)                       scale="norm"
    q ← γ·q + (1-γ)·n²,    r̂ = √(q/(1-γ^t))                    scale="square"; the signal keeps the r̂ of "norm"
    sun = max(0, (n - r̂)/(n + r̂)),  c2 = (1-β2_max) + (β2_max-β2_min)·sun         signal="centred"
    v ← (1-c2)·(r̂_t/r̂_{t-1})²·v + c2·g²,    m ← m + (1-β1)·(g - m)
    θ ← θ - lr·√(1-warm^t) · (m/(1-β1^t)) / (√(v/(1-Πβ2)) + ε)

In other words v = r̂²·u, where u is an average of (g/r̂)² with weights c2·Πβ2, which add up to 1-Πβ2: the exact bias
correction is that of u, whatever r̂ does. scale="off" leaves the factor out, signal="off" has c2 = 1-β2_max, and with
both it is Adam.

Two more choices, each an answer to something that the plain rule gets wrong:

    unit="own"       v ← (1-c2)·(r̂_t/r̂_{t-1})²·v + c2·(r̂_t/n)²·g²
        u averages (g/n)², a shape whose entries add up to 1. A spike moves the scale; it cannot raise u, which would
        keep steps small for as long as u remembers.

    memory="noise"   x = min(1, |log(⟨‖m‖²/ρ⟩ / ⟨n²⟩)| / log WIDTH)
                     c2 of a calm bucket = (1-β2_max)^(1-x)·(1-beta2_calm)^x
        The memory is long only if gradients look like independent noise. If they are, ‖m‖² is ρ·n² on average, where ρ
        is the sum of the squared weights in m; it is more when gradients keep their direction, and less when they swing
        to and fro. ⟨⟩ is a moving average over about 1/(1-SLOW) steps.

NOTE: r̂_t/r̂_{t-1} is never below about α, but it can be as large as the jump of a norm. A factor that float32 does not
hold would make 0·inf of an entry of v that has underflowed, so it ends at `LARGEST`.
"""

# Annotations stay objects here (no `from __future__ import annotations`): Optax's own checks read them.
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

BETA1, EPS, TINY = 0.9, 1e-8, 1e-9
LARGEST = 1e37
SLOW, WIDTH = 0.99, 4.0
SCALES = ("off", "norm", "square")
SIGNALS = ("off", "centred")
UNITS = ("scale", "own")
MEMORIES = ("fixed", "noise")


def one_minus_power(beta: float, t: int) -> float:
    """1 - β^t."""
    return -math.expm1(t * math.log(beta)) if beta > 0 else 1.0


def noise(t: int) -> float:
    """E‖m‖²/E n² of independent gradients with mean 0 after t steps, m without bias correction: (1-β1)²·Σ β1^2k."""
    return (1 - BETA1) / (1 + BETA1) * one_minus_power(BETA1**2, t)


class Relative(torch.optim.Optimizer):
    """The family for PyTorch on a CPU; see the module.

    Args:
      params: tensors; each is a bucket.
      lr: learning rate.
      scale: what v is measured in: "norm", "square", or "off".
      signal: "centred", or "off" for a fixed β2.
      beta2_max, beta2_min: β2 of a calm bucket, and the bound of a spike.
      alpha: decay of r.
      gamma: decay of q.
      warm: the learning rate is multiplied by √(1-warm^t); 0 for no warmup.
      unit: what a gradient is divided by before it enters u: "scale" (r̂) or "own" (n).
      memory: "fixed" (β2_max of a calm bucket), or "noise".
      beta2_calm: β2 of a calm bucket whose gradients do not look like noise; `beta2_min` by default.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        *,
        scale: str = "norm",
        signal: str = "centred",
        beta2_max: float = 0.999,
        beta2_min: float = 0.88,
        alpha: float = 0.93,
        gamma: float = 0.9,
        warm: float = 0.999,
        unit: str = "scale",
        memory: str = "fixed",
        beta2_calm: float = 0.88,
    ) -> None:
        named = (
            ("scale", scale, SCALES),
            ("signal", signal, SIGNALS),
            ("unit", unit, UNITS),
            ("memory", memory, MEMORIES),
        )
        for name, value, choices in named:
            if value not in choices:
                raise ValueError(f"`{name}` must be one of {', '.join(choices)}; got {value!r}")
        self._scale, self._signal, self._unit, self._memory = scale, signal, unit, memory
        self._longest, self._calm, self._shortest = 1 - beta2_max, 1 - beta2_calm, 1 - beta2_min
        self._alpha, self._gamma, self._warm = alpha, gamma, warm
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._move(p, p.grad, group["lr"])
        return loss

    def _move(self, p: Tensor, g: Tensor, lr: float) -> None:
        s = self.state[p]
        if not s:
            s.update(
                t=0,
                r=0.0,
                q=0.0,
                was=0.0,
                log_beta2=0.0,
                kept=0.0,
                seen=0.0,
                m=torch.zeros_like(p),
                v=torch.zeros_like(p),
            )
        s["t"] += 1
        t, n = s["t"], float(torch.linalg.vector_norm(g, dtype=torch.float64))
        c2, keep, take = self._scalars(s, n)
        s["log_beta2"] += math.log1p(-c2)
        # v = (1-c2)·(r̂_t/r̂_{t-1})²·v + c2·g²
        s["m"].lerp_(g, 1 - BETA1)
        s["v"].mul_(keep).addcmul_(g, g, value=take)
        if self._memory == "noise":
            size = float(torch.linalg.vector_norm(s["m"], dtype=torch.float64))
            s["kept"] = SLOW * s["kept"] + (1 - SLOW) * size**2 / noise(t)
            s["seen"] = SLOW * s["seen"] + (1 - SLOW) * n * n
        root = math.sqrt(-math.expm1(s["log_beta2"]))
        rate = lr * root / one_minus_power(BETA1, t) * math.sqrt(one_minus_power(self._warm, t))
        p.addcdiv_(s["m"], s["v"].sqrt().add_(EPS * root), value=-rate)

    def _scalars(self, s: dict[str, Any], n: float) -> tuple[float, float, float]:
        """(c2, the factor of v, the factor of g²) of a bucket whose norm is n."""
        t = s["t"]
        s["r"] = self._alpha * s["r"] + (1 - self._alpha) * n
        mean = s["r"] / one_minus_power(self._alpha, t)
        sun = max(0.0, (n - mean) / (n + mean + TINY)) if self._signal == "centred" else 0.0
        longest = self._longest
        if self._memory == "noise" and s["kept"] > 0 and s["seen"] > 0:
            x = min(1.0, abs(math.log(s["kept"] / s["seen"])) / math.log(WIDTH))
            longest *= (self._calm / longest) ** x
        c2 = longest + (self._shortest - longest) * sun
        if self._scale == "off":
            return c2, 1 - c2, c2
        scale = mean
        if self._scale == "square":
            s["q"] = self._gamma * s["q"] + (1 - self._gamma) * n * n
            scale = math.sqrt(s["q"] / one_minus_power(self._gamma, t))
        was, s["was"] = s["was"], scale
        factor = min(scale / was, LARGEST**0.5) ** 2 if was > 0 else 1.0
        share = min(scale / n, LARGEST**0.5) ** 2 if self._unit == "own" and n > 0 else 1.0
        return c2, (1 - c2) * factor, c2 * share


class RelativeState(NamedTuple):
    t: Any
    r: Any
    q: Any
    was: Any
    log_beta2: Any
    kept: Any
    seen: Any
    m: Any
    v: Any


def relative(
    learning_rate: Any,
    *,
    scale: str = "norm",
    signal: str = "centred",
    beta2_max: float = 0.999,
    beta2_min: float = 0.88,
    alpha: float = 0.93,
    gamma: float = 0.9,
    warm: float = 0.999,
    unit: str = "scale",
    memory: str = "fixed",
    beta2_calm: float = 0.88,
) -> Any:
    """The same as an Optax transformation, in float32."""
    import jax
    import jax.numpy as jnp
    import optax

    shortest = 1 - beta2_min

    def init(params: Any) -> RelativeState:
        # NOTE: every leaf is an array of its own, as the buffers of a step may be donated.
        scalars = (jax.tree.map(lambda _: jnp.zeros(()), params) for _ in range(6))
        return RelativeState(jnp.zeros(()), *scalars, *(jax.tree.map(jnp.zeros_like, params) for _ in range(2)))

    def grown(beta: float, t: Any) -> Any:
        return -jnp.expm1(t * math.log(beta)) if beta > 0 else 1.0

    def one(t: Any, g: Any, r: Any, q: Any, was: Any, log_beta2: Any, kept: Any, seen: Any, m: Any, v: Any) -> Any:
        n = jnp.sqrt(jnp.sum(jnp.square(g)))
        r = alpha * r + (1 - alpha) * n
        mean = r / grown(alpha, t)
        sun = jnp.maximum(0.0, (n - mean) / (n + mean + TINY)) if signal == "centred" else jnp.zeros(())
        longest = jnp.asarray(1 - beta2_max)
        if memory == "noise":
            known = (kept > 0) & (seen > 0)
            far = jnp.abs(jnp.log(jnp.where(known, kept, 1.0) / jnp.where(known, seen, 1.0)))
            longest = longest * ((1 - beta2_calm) / longest) ** jnp.minimum(1.0, far / math.log(WIDTH))
        c2 = longest + (shortest - longest) * sun
        keep, take = 1 - c2, c2
        if scale != "off":
            q = gamma * q + (1 - gamma) * n * n
            size = mean if scale == "norm" else jnp.sqrt(q / grown(gamma, t))
            keep = keep * jnp.where(was > 0, jnp.minimum(jnp.square(size / jnp.where(was > 0, was, 1.0)), LARGEST), 1.0)
            if unit == "own":
                take = take * jnp.where(n > 0, jnp.minimum(jnp.square(size / jnp.where(n > 0, n, 1.0)), LARGEST), 1.0)
            was = size
        log_beta2 = log_beta2 + jnp.log1p(-c2)
        m = m + (1 - BETA1) * (g - m)
        v = keep * v + take * jnp.square(g)
        kept = SLOW * kept + (1 - SLOW) * jnp.sum(jnp.square(m)) / ((1 - BETA1) / (1 + BETA1) * grown(BETA1**2, t))
        seen = SLOW * seen + (1 - SLOW) * n * n
        root = jnp.sqrt(-jnp.expm1(log_beta2))
        rate = learning_rate * root / grown(BETA1, t) * jnp.sqrt(grown(warm, t))
        return -rate * m / (jnp.sqrt(v) + EPS * root), r, q, was, log_beta2, kept, seen, m, v

    def update(grads: Any, state: RelativeState, params: Any = None) -> tuple[Any, RelativeState]:
        leaves, tree = jax.tree.flatten(grads)
        columns = [tree.flatten_up_to(part) for part in state[1:]]
        rows = [one(state.t + 1, *row) for row in zip(leaves, *columns, strict=True)]
        updates, *new = (tree.unflatten(column) for column in zip(*rows, strict=True))
        return updates, RelativeState(state.t + 1, *new)

    return optax.GradientTransformation(init, update)
