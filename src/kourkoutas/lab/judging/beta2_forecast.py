"""Which memory would have predicted a bucket's gradient norms best? What `kbeta norms` asks.

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
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike

from kourkoutas.lab.judging.values import Array, to_json

BETAS = (0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999)
STRETCHES = 4
FARTHEST = 10.0  # of n/√s
FLOOR = 1e-9  # added to √s, as `tiny_spike` in the rule, so that norms of zero have a loss


def losses(norms: ArrayLike) -> Array:
    """ℓ of every step, bucket and memory, (steps, buckets, memories); NaN without a norm or a past.

    `norms` are of consecutive steps, (steps, buckets); NaN where a bucket had no gradient.
    """
    from scipy.signal import lfilter

    n = np.asarray(norms, np.float64)
    found = np.full((*n.shape, len(BETAS)), np.nan)
    for b in range(n.shape[1]):
        there = np.flatnonzero(np.isfinite(n[:, b]))
        if there.size < 2:
            continue
        largest = n[there, b].max() + FLOOR  # squares of norms in this unit do not overflow
        square, count = (n[there, b] / largest) ** 2, np.arange(1, there.size)
        for k, beta in enumerate(BETAS):
            # s before step t, t = 2 …
            average = lfilter([1 - beta], [1, -beta], square[:-1]) / -np.expm1(count * np.log(beta))
            forecast = np.sqrt(average) * largest + FLOOR
            found[there[1:], b, k] = 2 * np.log(forecast) + np.minimum(n[there[1:], b] / forecast, FARTHEST) ** 2
    return found


@dataclass(frozen=True)
class Forecasts:
    """How well each memory predicted, by stretch of training and bucket.

    Attributes:
      names: of the buckets.
      edges: the stretches: from step edges[i] to before edges[i + 1].
      excess: mean loss less that of the best memory, (stretches, buckets, memories); NaN without norms.
    """

    names: tuple[str, ...]
    edges: tuple[int, ...]
    excess: Array
    betas: ClassVar = BETAS

    @property
    def best(self) -> Array:
        """The β that predicted best, (stretches, buckets); NaN without norms."""
        return _at_best(self.excess)

    @property
    def pooled(self) -> Array:
        """Excess when every bucket counts alike, (stretches, memories)."""
        return _less_best(_mean(self.excess, axis=1))

    @property
    def pooled_best(self) -> Array:
        """The one β for all buckets that would have predicted best, per stretch."""
        return _at_best(self.pooled)

    def to_json(self) -> Any:
        arrays = {
            "best": self.best,
            "excess": self.excess,
            "pooled_best": self.pooled_best,
            "pooled_excess": self.pooled,
        }
        lists = {name: x.tolist() for name, x in arrays.items()}
        return to_json({"betas": BETAS, "edges": self.edges, "buckets": self.names, **lists})


def examine(names: Sequence[str], steps: ArrayLike, norms: ArrayLike, stretches: int = STRETCHES) -> Forecasts:
    """Which memory would have predicted `norms`, (steps, buckets), best, in each of equally long parts of training.

    NOTE: `steps` have no gap, as a trace records them: a memory of 100 steps must have seen 100 steps.
    """
    at = np.asarray(steps, np.int64)
    loss = losses(norms)
    edges = np.linspace(at[0], at[-1] + 1, stretches + 1).round().astype(int)
    parts = [_mean(loss[(at >= low) & (at < high)], axis=0) for low, high in itertools.pairwise(edges)]
    return Forecasts(tuple(names), tuple(edges.tolist()), _less_best(np.stack(parts)))


def over_runs(found: Sequence[Forecasts]) -> Forecasts:
    """The mean excess over runs with the same buckets and stretches."""
    excess = _mean(np.stack([one.excess for one in found]), axis=0)
    return Forecasts(found[0].names, found[0].edges, _less_best(excess))


def _mean(x: Array, axis: int) -> Array:
    """The mean without NaN; NaN where there is nothing else."""
    there = np.isfinite(x)
    count = there.sum(axis)
    return np.where(count > 0, np.where(there, x, 0).sum(axis) / np.maximum(count, 1), np.nan)


def _less_best(x: Array) -> Array:
    lowest = np.nan_to_num(x, nan=np.inf).min(-1, keepdims=True)
    return x - np.where(np.isinf(lowest), np.nan, lowest)


def _at_best(excess: Array) -> Array:
    best = np.asarray(BETAS)[np.argmin(np.nan_to_num(excess, nan=np.inf), axis=-1)]
    return np.where(np.isnan(excess).all(-1), np.nan, best)
