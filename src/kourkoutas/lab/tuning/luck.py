"""What an optimizer may have lost by the luck of its tuning.

The winners of a tuning are compared on fresh seeds, so the choice does not flatter them. But a choice on a few tuning
seeds may miss an optimizer's best value, and then two equal optimizers differ because one was tuned with less luck. So
what the one behind may have lost is given back to it. With n test pairs, s the standard deviation of their differences,
k tuning seeds and m(v) the mean over them of y(v) - y(chosen), less being better:

    s* ~ s·√((n-1)/χ²)               what the standard deviation of a difference may be
    μ(v) ~ m(v) + s*/√(2k)·z         the true mean of each value tried; a difference is of two runs, hence the 2
    r = μ(chosen) - min μ            what the optimizer may have lost by its choice

s* and μ are generalized pivotal quantities (Tsui and Weerahandi, 1989), which here are also the posterior draws under
flat priors on μ and log s. r is the opportunity cost of ranking and selection (Chick and Inoue, 2001). That the choice
of hyperparameters is a source of variance that a comparison has to count is the finding of Bouthillier et al. (2021).

The model's assumptions, and which way each errs:

* Runs are normal with one size of noise, s/√2, at every value and on tuning and test seeds. Noise that grows away from
  the best value makes r too small; it does so mostly at values that nobody would choose.
* A seed's effect is shared by all values and cancels in y(v) - y(chosen). Where it does not, it is part of s too.
* The μ(v) know nothing of their neighbours, though a loss is smooth in its learning rate. That makes r too large.
* A value that diverged on some tuning seeds is judged by the seeds on which it did not: it may get credit that it does
  not deserve, which makes r too large. One that diverged on all of them gets none, nor does one of which every run
  failed.
* Values between and beyond those that were tried count for nothing. The report says where a choice is at the edge.
* Every endpoint is given its own r, as if the optimizer could have been tuned for it. The choice was by the primary
  one, so for the others r is too large where they disagree about the best value.

How often all of this errs is simulated: `tests/lab/judging/test_error_rates.py`, benchmarks/error_rates.py.

References:
  Tsui and Weerahandi (1989), Generalized p-values in significance testing of hypotheses in the presence of nuisance
  parameters. Journal of the American Statistical Association 84, 602-607.
  Chick and Inoue (2001), New two-stage and sequential procedures for selecting the best simulated system. Operations
  Research 49, 732-743.
  Bouthillier et al. (2021), Accounting for variance in machine learning benchmarks. Proceedings of MLSys 3, 747-769.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from kourkoutas.lab.results.store import StudyRecord
from kourkoutas.lab.specs.spec import Endpoint
from kourkoutas.lab.tuning.trials import Tried

DRAWS = 4_000

Array = NDArray[np.float64]
Lost = Callable[[Array], Array]  # draws of s* → as many draws of r


def nothing_lost(s: Array) -> Array:
    """r of an optimizer that was not tuned."""
    return np.zeros(len(s))


def draws_of_s(differences: Array) -> Array:
    """s* ~ s·√((n-1)/χ²) of paired differences; 0 where fewer than two have no s."""
    n = len(differences)
    if n < 2:
        return np.zeros(DRAWS)
    return np.asarray(differences.std(ddof=1) / np.sqrt(_chi2(n - 1) / (n - 1)))


@functools.lru_cache(maxsize=16)
def _chi2(df: int) -> Array:
    return np.random.default_rng(1).chisquare(df, DRAWS)


@functools.lru_cache(maxsize=16)
def _normal(rows: int, draws: int) -> Array:
    return np.random.default_rng(0).standard_normal((rows, draws))


def lost_by_tuning(scores: Sequence[Sequence[float]], chosen: int) -> Lost | None:
    """r of an optimizer that was tuned; None where no run of its chosen value gave a score.

    Args:
      scores: one row per value with the score of each tuning seed on the scale of the comparison, less being better;
        NaN where a run diverged or failed. A value is compared with the chosen one on the seeds on which both have a
        score.
      chosen: the row that was chosen.
    """
    y = np.array(scores, float)
    if not np.isfinite(y[chosen]).any():
        return None
    seeds_of_chosen = int(np.isfinite(y[chosen]).sum())
    others: list[tuple[float, int]] = []  # m(v), and over how many seeds
    for row in np.delete(y - y[chosen], chosen, axis=0):
        known = row[np.isfinite(row)]
        if len(known):
            others.append((float(known.mean()), len(known)))

    def draw(s: Array) -> Array:
        z = _normal(1 + len(others), len(s))
        own = s / math.sqrt(2 * seeds_of_chosen) * z[0]
        best = own
        for k, (mean, seeds) in enumerate(others, start=1):
            best = np.minimum(best, mean + s / math.sqrt(2 * seeds) * z[k])
        return np.asarray(own - best)

    return draw


def lost(record: StudyRecord, found: Mapping[str, Sequence[Tried]], endpoint: Endpoint) -> dict[str, Lost | None]:
    """{arm: what its tuning may have lost on an endpoint}, None where a tuning run is missing; empty without a tuning.

    Args:
      found: what was tried, with the scores of the endpoint.
      endpoint: its `log` says on which scale the arms are compared, so that both have one unit.
    """
    if record.tuning is None:
        return {}
    by_arm: dict[str, Lost | None] = {}
    for arm, chosen in record.chosen.items():
        own = found.get(arm, ())
        at = next((k for k, one in enumerate(own) if dict(one.values) == dict(chosen)), None)
        if at is None or any(one.missing for one in own):
            by_arm[arm] = None
        else:
            by_arm[arm] = lost_by_tuning([as_losses(one.scores, endpoint) for one in own], at)
    return by_arm


def as_losses(scores: Sequence[float], endpoint: Endpoint) -> list[float]:
    """Scores on the scale on which the endpoint is compared, less being better; NaN where one has no place there."""
    sign = -1 if endpoint.maximize else 1
    if not endpoint.log:
        return [sign * x for x in scores]
    return [sign * math.log10(x) if x > 0 else math.nan for x in scores]
