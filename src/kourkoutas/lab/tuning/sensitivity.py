"""What a tuning shows beyond the choice: how much an optimizer depends on the value of an option, mostly its learning
rate.

For the values v that were tried, with ℓ(v) the mean endpoint over the tuning seeds (geometric where the endpoint is
compared as ratios), ℓ₀ the worst finite mean that any arm gave, and ℓ* = min ℓ(v):

    range within 5 %   the widest run of neighbouring values around the best with ℓ(v) ≤ ℓ* + 5 %·|ℓ*|, as a ratio
    sensitivity        E_v[min(ℓ(v), ℓ₀) - ℓ*]         the learning-rate sensitivity of Wortsman et al. (2023)

NOTE: Wortsman et al. take ℓ₀ as the loss at initialisation, so that a diverged run counts as one that learned nothing.
The laboratory does not know it, so ℓ₀ is one number for all arms. The expectation is over the values tried, evenly
spaced in ratio for a tuning on a log scale; compare only arms that tried the same values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kourkoutas.lab.results.store import StudyRecord
from kourkoutas.lab.specs.spec import Endpoint, Value
from kourkoutas.lab.tuning.trials import Tried, as_ratios, of_all_arms

MARGIN = 0.05  # the part of the best mean by which another may be worse and still count as about as good


@dataclass(frozen=True)
class Point:
    """One value: the mean and the range of the endpoint over the tuning seeds; infinite where the run diverged.

    With `maximize`, minus infinity stands for a diverged run.
    """

    value: Value
    mean: float
    low: float
    high: float
    runs: int
    diverged: int


@dataclass(frozen=True)
class Sensitivity:
    """One arm's dependence on one option.

    Attributes:
      points: by rising value.
      best: the value with the best mean.
      low, high: the ends of the values around `best` whose means are within `margin` of the best one.
      ratio: high/low, 1 when no neighbour of the best is within the margin; None where low is not positive.
      open_below, open_above: that range ends because the values tried end there.
      sensitivity: mean over the values of what is lost against the best one; None when every run diverged.
    """

    arm: str
    option: str
    points: tuple[Point, ...]
    best: Value
    margin: float
    low: Value
    high: Value
    ratio: float | None
    open_below: bool
    open_above: bool
    sensitivity: float | None


def sensitivity(
    record: StudyRecord, found: Mapping[str, Sequence[Tried]], endpoint: Endpoint
) -> tuple[Sensitivity, ...]:
    """How much each arm depends on the tuned option, of a study that tuned one.

    Args:
      found: what was tried, with the scores of the endpoint.
    """
    space = record.tuning
    if space is None or len(space.axes) > 1:
        return ()
    ended = {arm: [one for one in own if one.scores] for arm, own in found.items()}
    option = space.axes[0].name
    return tuple(sensitivities(ended, option, maximize=endpoint.maximize, log=endpoint.log).values())


def sensitivities(
    tried: Mapping[str, Sequence[Tried]], option: str, *, maximize: bool = False, log: bool = False
) -> dict[str, Sensitivity]:
    """{arm: its sensitivity to `option`}, of arms that tuned that option alone."""
    rising = {
        arm: sorted((one for one in own if set(one.values) == {option}), key=lambda one: one.values[option])
        for arm, own in tried.items()
    }
    log = as_ratios(of_all_arms(tried), log)
    losses = {arm: [one.loss(maximize, log) for one in own] for arm, own in rising.items() if own}
    of_all = itertools.chain.from_iterable(losses.values())
    worst = max(filter(math.isfinite, of_all), default=math.nan)
    return {arm: _of(arm, option, rising[arm], own, worst, maximize) for arm, own in losses.items()}


def _of(
    arm: str, option: str, tried: Sequence[Tried], losses: Sequence[float], worst: float, maximize: bool
) -> Sensitivity:
    values = [one.values[option] for one in tried]
    at = min(range(len(values)), key=losses.__getitem__)
    best = losses[at]
    allowed = best + MARGIN * abs(best) if math.isfinite(best) else -math.inf
    first = last = at
    while first > 0 and losses[first - 1] <= allowed:
        first -= 1
    while last < len(values) - 1 and losses[last + 1] <= allowed:
        last += 1
    # E_v[min(ℓ(v), ℓ₀) - ℓ*]
    lost = [min(loss, worst) - best for loss in losses] if math.isfinite(best) else []
    return Sensitivity(
        arm=arm,
        option=option,
        points=tuple(_point(one, v, loss, maximize) for one, v, loss in zip(tried, values, losses, strict=True)),
        best=values[at],
        margin=MARGIN,
        low=values[first],
        high=values[last],
        ratio=values[last] / values[first] if values[first] > 0 else None,
        open_below=first == 0,
        open_above=last == len(values) - 1,
        sensitivity=sum(lost) / len(lost) if lost else None,
    )


def _point(tried: Tried, value: Value, loss: float, maximize: bool) -> Point:
    worst = -math.inf if maximize else math.inf
    ranked = [score if math.isfinite(score) else worst for score in tried.scores]
    return Point(value, -loss if maximize else loss, min(ranked), max(ranked), len(ranked), ranked.count(worst))
