"""The paper's Algorithm in float64 NumPy, one parameter at a time: the truth that every front end is tested against.

Slow on purpose. It is written from the paper's equations in the paper's order, and shares no arithmetic with
`kourkoutas.rule`, so that a slip in one shows against the other.

Four things the paper leaves open are settled here, for all front ends:

* A parameter without a gradient is left alone and does not count the step: t is a parameter's own step count, as in
  torch.optim.Adam. A bucket without any gradient keeps its moving average.
* The step count of a bucket, which ends its warmup, is the largest count among its members that have a gradient.
* Π β2 for "exact" belongs to the parameter: it holds the β2 of the steps that went into that parameter's v.
* A complex parameter is a pair of real ones, and is given here as such, with one more axis.

`basis="eigen"` is not the paper's; its equations are those of `kourkoutas.eigenbasis`, again written without its code.

When every gradient is there at every step, all of these agree with the paper's single t and per-layer product.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kourkoutas.buckets import partition
from kourkoutas.rule import Buckets, Hyper, NonFiniteGradient, check_learning_rate

Array = NDArray[np.float64]


class Oracle:
    r"""Kourkoutas-β in float64.

    Per bucket ℓ with pooled norm n and moving average r, and per parameter p of ℓ:

    .. math::
        r_t = α r_{t-1} + (1-α) n_t, \quad
        \mathrm{sun} = \frac{raw}{1+raw},\ raw = \frac{n_t}{r_t + ε_{spike}}, \quad
        β_{2,t} = β_{2,max} - (β_{2,max}-β_{2,min})\,\mathrm{sun}

    .. math::
        m_t = β_1 m_{t-1} + (1-β_1) g_t, \quad v_t = β_{2,t} v_{t-1} + (1-β_{2,t}) g_t^2, \quad
        θ_t = θ_{t-1} - \mathrm{clip}\Big(\frac{γ}{a_1} \frac{m_t}{\sqrt{\hat v_t/b_2} + ε + \mathrm{tiny}}\Big)

    Args:
      params: name → array; copied to float64.
      hyper: the hyper-parameters.
      buckets: as in `kourkoutas.buckets`.
      lr: the learning rate γ; may be assigned between steps.

    Example:
      >>> oracle = Oracle({"w": [1.0, -2.0]}, Hyper(), lr=0.1)
      >>> oracle.step({"w": [0.5, 0.5]})
      >>> print(oracle.beta2["w"] < 0.999)
      True
    """

    def __init__(
        self,
        params: Mapping[str, ArrayLike],
        hyper: Hyper | None = None,
        *,
        buckets: Buckets = "parameter",
        lr: float = 1e-3,
    ) -> None:
        check_learning_rate(lr)
        self.hyper = hyper or Hyper()
        self.lr = lr
        self.params: dict[str, Array] = {
            name: np.array(p).astype(np.float64, casting="same_kind") for name, p in params.items()
        }
        parts = partition(buckets, list(self.params), list(self.params.values()))
        self.bucket_of = {name: parts.bucket_names[b] for name, b in zip(self.params, parts.bucket_of, strict=True)}
        self.bucket_names = parts.bucket_names

        self.m = {name: np.zeros_like(p) for name, p in self.params.items()}
        self.v = {name: np.zeros_like(p) for name, p in self.params.items()}
        self.v_max = {name: np.zeros_like(p) for name, p in self.params.items()}
        self.t = dict.fromkeys(self.params, 0)
        self.log_beta2 = dict.fromkeys(self.params, 0.0)
        self.r = dict.fromkeys(self.bucket_names, 0.0)
        self.sun: dict[str, float] = {}
        self.beta2: dict[str, float] = {}
        self.skipped = dict.fromkeys(self.bucket_names, 0)

        # With basis="eigen": for each axis the factor and its eigenvectors, and how many gradients there were.
        self.factors: dict[str, dict[int, Array]] = {name: {} for name in self.params}
        self.bases: dict[str, dict[int, Array]] = {name: {} for name in self.params}
        self.seen = dict.fromkeys(self.params, 0)
        if self.hyper.basis == "eigen":
            for name, p in self.params.items():
                for axis, length in enumerate(p.shape if p.ndim > 1 else ()):
                    if 1 < length <= self.hyper.basis_limit:
                        self.factors[name][axis] = np.zeros((length, length))
                        self.bases[name][axis] = np.eye(length)

    def step(self, grads: Mapping[str, ArrayLike | None]) -> None:
        """One update from name → gradient; None or an absent name means no gradient."""
        g = {name: np.asarray(x, dtype=np.float64) for name, x in grads.items() if x is not None}
        layers = {b: [p for p in g if self.bucket_of[p] == b] for b in self.bucket_names}
        norm = {b: np.sqrt(sum(np.sum(g[p] ** 2) for p in members)) for b, members in layers.items() if members}

        for bucket, n in norm.items():
            if not np.isfinite(n) and self.hyper.nonfinite == "raise":
                raise NonFiniteGradient(bucket)
        for bucket, n in norm.items():
            if not np.isfinite(n) and self.hyper.nonfinite == "skip":
                self.skipped[bucket] += 1
            else:
                self._step_layer(bucket, n, {p: g[p] for p in layers[bucket]})
            for p in layers[bucket]:
                self.seen[p] += 1

    def _step_layer(self, bucket: str, n: float, g: Mapping[str, Array]) -> None:
        h = self.hyper
        t_layer = max(self.t[p] + 1 for p in g)

        # r_t = α r_{t-1} + (1-α) ||g_t||
        r = self.r[bucket] = h.alpha * self.r[bucket] + (1 - h.alpha) * n
        # raw = ||g_t|| / (r_t + tiny_spike),  sun = raw / (1 + raw)
        raw = n / (r + h.tiny_spike)
        sun = raw / (1 + raw)
        # β2 = β2_max - (β2_max - β2_min) sun
        beta2 = h.beta2_max - (h.beta2_max - h.beta2_min) * sun
        if t_layer <= h.warmup_steps:
            sun = 0.0
            beta2 = (h.beta2_min + h.beta2_max) / 2
        self.sun[bucket], self.beta2[bucket] = sun, beta2

        for p in g:
            if h.basis is None:
                self._step_parameter(p, g[p], beta2)
            else:
                self._step_in_basis(p, g[p], beta2)

    def _step_in_basis(self, p: str, g: Array, beta2: float) -> None:
        first = self.seen[p] == 0
        if not first:  # of the first gradient only the basis is made
            self._step_parameter(p, g, beta2)

        # L ← μ L + (1-μ) G Gᵀ along every axis
        mu = self.hyper.basis_memory
        for axis, factor in self.factors[p].items():
            flat = np.moveaxis(g, axis, 0).reshape(g.shape[axis], -1)
            self.factors[p][axis] = mu * factor + (1 - mu) * flat @ flat.T
        if first:
            for axis, factor in self.factors[p].items():
                self.bases[p][axis] = np.linalg.eigh(factor).eigenvectors[:, ::-1]
        elif self.seen[p] % self.hyper.basis_every == 0:
            self._turn(p)

    def _turn(self, p: str) -> None:
        """Sort the columns of the bases, and turn each by one step of orthogonal iteration."""
        m = self._rotated(p, self.m[p], back=True)
        for axis, basis in self.bases[p].items():
            factor = self.factors[p][axis]
            # The eigenvalues as far as the basis knows them, diag(Qᵀ L Q), largest first
            order = np.argsort(-np.diag(basis.T @ factor @ basis), kind="stable")
            self.v[p] = np.take(self.v[p], order, axis)
            self.v_max[p] = np.take(self.v_max[p], order, axis)
            # Q ← qr(L Q)
            self.bases[p][axis] = np.linalg.qr(factor @ basis[:, order]).Q
        self.m[p] = self._rotated(p, m)

    def _rotated(self, p: str, x: Array, back: bool = False) -> Array:
        """Qᵀ x P of a matrix, and the same along every axis of other arrays; Q x Pᵀ on the way back."""
        for axis, basis in self.bases[p].items():
            turned = np.tensordot(basis if back else basis.T, x, axes=(1, axis))
            x = np.moveaxis(turned, 0, axis)
        return x

    def _step_parameter(self, p: str, g: Array, beta2: float) -> None:
        self.t[p] += 1
        h, t, lr = self.hyper, self.t[p], self.lr
        theta = self.params[p]
        g = self._rotated(p, g)
        if h.lr_warmup:
            lr = lr * np.sqrt(1 - h.beta2_max**t)

        # m_t = β1 m_{t-1} + (1-β1) g_t,  v_t = β2 v_{t-1} + (1-β2) g_t²
        m = self.m[p] = h.beta1 * self.m[p] + (1 - h.beta1) * g
        v = self.v[p] = beta2 * self.v[p] + (1 - beta2) * g**2

        # v̂: leaky AMSGrad, AMSGrad, or v itself
        if h.decay is not None and 0 < h.decay < 1:
            v_hat = self.v_max[p] = np.maximum(h.decay * self.v_max[p], v)
        elif h.decay == 1 or (h.decay is None and h.max_ratio is not None):
            v_hat = self.v_max[p] = np.maximum(self.v_max[p], v)
        else:
            v_hat = v

        # a1 = 1 - β1^t,  b2 = 1 - β2_max^t or 1 - Π β2
        if beta2 > 0:
            self.log_beta2[p] += float(np.log(beta2))
        else:
            self.log_beta2[p] = -np.inf
        if h.bias_correction == "none":
            a1 = b2 = 1.0
        elif h.bias_correction == "beta2max":
            a1, b2 = 1 - h.beta1**t, 1 - h.beta2_max**t
        else:
            a1, b2 = 1 - h.beta1**t, float(-np.expm1(self.log_beta2[p]))

        # denom = sqrt(v̂ / b2) + ε + tiny_denom · max(⟨|p|⟩, 1)
        denom = np.sqrt(v_hat / b2) + h.eps
        if h.adaptive_tiny and theta.size:
            denom = denom + h.tiny_denom * max(float(np.mean(np.abs(theta))), 1.0)

        # Δθ = γ/a1 · m / denom, clipped to ±γ·max_ratio
        delta = lr / a1 * m / denom
        if h.max_ratio is not None:
            delta = np.clip(delta, -lr * h.max_ratio, lr * h.max_ratio)
        delta = self._rotated(p, delta, back=True)

        # θ ← (1 - γλ) θ - Δθ   (decoupled, as AdamW)
        self.params[p] = (1 - lr * h.weight_decay) * theta - delta
