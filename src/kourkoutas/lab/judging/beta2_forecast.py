"""Which memory would have predicted a bucket's gradient norms best?

Adam's v is a forecast: the mean square of the gradients so far, for the gradient to come. β2 says how much of the past
it counts. So recorded norms can tell, without another training run, which β2 would have forecast them best.

For each β, the forecast of n_t² is the moving average of the squares before it, with its start corrected:

    s_t = Σ_{i<t} β^(t-1-i)·(1-β)·n_i² / (1 - β^(t-1))

and its loss is QLIKE, ℓ_t = log s_t + n_t²/s_t (Patton 2011). Its expectation is smallest for the true mean square, and
a forecast of half the true value costs more than one of twice the value. The loss is averaged over a stretch of
training; what a memory loses against the best one is its `excess`.

NOTE: a norm of more than ten times its forecast counts as ten times. Without that, one step decided: a norm of 300
times the one before it, which no memory sees coming, costs 1e5 nats, more than all other steps of a long stretch.

A step at which a bucket had no gradient, or was skipped, is not there for its memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

BETAS = (0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
STRETCHES = 4
FARTHEST = 10.0  # of n/√s

Array = NDArray[np.float64]


def losses(norms: ArrayLike, betas: Sequence[float] = BETAS, floor: float = 1e-9) -> Array:
    """ℓ of every step, bucket and memory, (steps, buckets, memories); NaN without a norm or a past.

    Args:
      norms: (steps, buckets), consecutive steps; NaN where a bucket had no gradient.
      betas: the memories.
      floor: added to the root of a forecast, as `tiny_spike` in the rule, so that norms of zero have a loss.

    Example:
      >>> round(float(losses([[1.0], [1.0], [1.0]], [0.9])[2, 0, 0]), 6)  # log 1 + 1
      1.0
    """
    from scipy.signal import lfilter

    n = np.asarray(norms, np.float64)
    if n.ndim != 2:
        raise ValueError(f"`norms` must have the shape (steps, buckets); got {n.shape}")
    found = np.full((*n.shape, len(betas)), np.nan)
    for b in range(n.shape[1]):
        there = np.flatnonzero(np.isfinite(n[:, b]))
        if there.size < 2:
            continue
        largest = n[there, b].max() + floor  # squares of norms in this unit do not overflow
        square, count = (n[there, b] / largest) ** 2, np.arange(1, there.size)
        for k, beta in enumerate(betas):
            # s before step t, t = 2 …
            average = lfilter([1 - beta], [1, -beta], square[:-1]) / -np.expm1(count * np.log(beta))
            forecast = np.sqrt(average) * largest + floor
            found[there[1:], b, k] = 2 * np.log(forecast) + np.minimum(n[there[1:], b] / forecast, FARTHEST) ** 2
    return found


@dataclass(frozen=True)
class Forecasts:
    """How well each memory predicted, by stretch of training and bucket.

    Attributes:
      names: of the buckets.
      betas: the memories.
      edges: the stretches: from step edges[i] to before edges[i + 1].
      excess: mean loss less that of the best memory, (stretches, buckets, memories); NaN without norms.
    """

    names: tuple[str, ...]
    betas: tuple[float, ...]
    edges: tuple[int, ...]
    excess: Array

    @property
    def best(self) -> Array:
        """The β that predicted best, (stretches, buckets); NaN without norms."""
        return _at_best(self.betas, self.excess)

    @property
    def pooled(self) -> Array:
        """Excess when every bucket counts alike, (stretches, memories)."""
        return _less_best(_mean(self.excess, axis=1))

    @property
    def pooled_best(self) -> Array:
        """The one β for all buckets that would have predicted best, per stretch."""
        return _at_best(self.betas, self.pooled)

    def to_json(self) -> dict[str, Any]:
        def listed(x: Array) -> Any:
            return [listed(row) for row in x] if x.ndim > 1 else [None if np.isnan(v) else float(v) for v in x]

        return {
            "betas": list(self.betas),
            "edges": list(self.edges),
            "buckets": list(self.names),
            "best": listed(self.best),
            "excess": listed(self.excess),
            "pooled_best": listed(self.pooled_best),
            "pooled_excess": listed(self.pooled),
        }


def examine(
    names: Sequence[str],
    steps: ArrayLike,
    norms: ArrayLike,
    betas: Sequence[float] = BETAS,
    stretches: int = STRETCHES,
) -> Forecasts:
    """Which memory would have predicted best, in each of `stretches` equally long parts of training.

    Args:
      names: of the buckets.
      steps: the steps of the rows of `norms`, without a gap: a memory of 100 steps must have seen 100 steps.
      norms: (steps, buckets).
      betas: the memories, each in (0, 1).
      stretches: into how many parts training is cut.
    """
    at = np.asarray(steps, np.int64)
    if at.size < 2 or np.any(np.diff(at) != 1):
        raise ValueError(
            f"`steps` must be consecutive, at least two; got {at.size} from {at.min(initial=0)} to "
            f"{at.max(initial=0)}: record every step (`--set trace_every=1`)"
        )
    for beta in betas:
        if not 0 < beta < 1:
            raise ValueError(f"`betas` must lie between 0 and 1; got {beta!r}")
    if not 1 <= stretches < at.size:
        raise ValueError(f"`stretches` must be from 1 to {at.size - 1} for {at.size} steps; got {stretches!r}")
    loss = losses(norms, betas)
    edges = np.linspace(at[0], at[-1] + 1, stretches + 1).round().astype(int)
    parts = [_mean(loss[(at >= low) & (at < high)], axis=0) for low, high in itertools.pairwise(edges)]
    return Forecasts(tuple(names), tuple(betas), tuple(edges.tolist()), _less_best(np.stack(parts)))


def over_runs(found: Sequence[Forecasts]) -> Forecasts:
    """The mean excess over runs of the same problem."""
    first = found[0]
    if any((m.names, m.betas, m.edges) != (first.names, first.betas, first.edges) for m in found):
        raise ValueError("runs that differ in buckets or steps cannot be averaged: look at them one by one")
    excess = _mean(np.stack([m.excess for m in found]), axis=0)
    return Forecasts(first.names, first.betas, first.edges, _less_best(excess))


def _mean(x: Array, axis: int) -> Array:
    """The mean without NaN; NaN where there is nothing else."""
    there = np.isfinite(x)
    count = there.sum(axis)
    return np.where(count > 0, np.where(there, x, 0).sum(axis) / np.maximum(count, 1), np.nan)


def _less_best(x: Array) -> Array:
    lowest = np.nan_to_num(x, nan=np.inf).min(-1, keepdims=True)
    return x - np.where(np.isinf(lowest), np.nan, lowest)


def _at_best(betas: Sequence[float], excess: Array) -> Array:
    best = np.asarray(betas)[np.argmin(np.nan_to_num(excess, nan=np.inf), axis=-1)]
    return np.where(np.isnan(excess).all(-1), np.nan, best)
