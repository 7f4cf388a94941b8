"""How much an optimizer depends on the value of an option, mostly its learning rate, from the runs of a tuning.

For the values v that were tried, with ℓ(v) the mean endpoint over the tuning seeds (geometric where the endpoint is
compared as ratios), ℓ₀ that of the untrained model or the worst tried, and ℓ* = min ℓ(v):

    range within 5 %   the widest run of neighbouring values around the best with ℓ(v) ≤ ℓ* + 5 %·|ℓ*|, as a ratio
    sensitivity        E_v[min(ℓ(v), ℓ₀) - ℓ*]         the learning-rate sensitivity of Wortsman et al. (2023)

NOTE: Wortsman et al. take ℓ₀ as the loss at initialisation, so that a diverged run counts as one that learned nothing.
Where that is not known, ℓ₀ is the worst finite mean that any arm gave, the same for all arms. The expectation is over
the values tried, evenly spaced in ratio for a tuning on a log scale; compare only arms that tried the same values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kourkoutas.lab.judging.values import to_json
from kourkoutas.lab.planning.search import Tried
from kourkoutas.lab.specs.search_space import Value

MARGIN = 0.05


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

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; numbers that are not finite become the strings "nan", "inf" and "-inf"."""
        found: dict[str, Any] = to_json(self)
        return found


def sensitivities(
    tried: Mapping[str, Sequence[Tried]],
    option: str,
    *,
    maximize: bool = False,
    log: bool = False,
    margin: float = MARGIN,
    initial: float | None = None,
) -> dict[str, Sensitivity]:
    """{arm: its sensitivity to `option`}, of arms that tuned that option alone.

    Args:
      tried: {arm: what was tried}.
      option: "lr", for example.
      maximize: whether more is better.
      margin: the part of the best mean by which another may be worse and still count as about as good.
      initial: the endpoint of an untrained model; None takes the worst finite mean of all arms.
    """
    if not margin >= 0:
        raise ValueError(f"`margin` must be a part >= 0, for example 0.05; got {margin!r}")
    alone = {arm: [one for one in own if set(one.values) == {option}] for arm, own in tried.items()}
    losses = {arm: [one.loss(maximize, log) for one in own] for arm, own in alone.items() if own}
    finite = [loss for own in losses.values() for loss in own if math.isfinite(loss)]
    worst = (-initial if maximize else initial) if initial is not None else max(finite, default=math.nan)
    return {arm: _of(arm, option, alone[arm], own, worst, margin, maximize) for arm, own in losses.items()}


def _of(
    arm: str,
    option: str,
    tried: Sequence[Tried],
    losses: Sequence[float],
    worst: float,
    margin: float,
    maximize: bool,
) -> Sensitivity:
    order = sorted(range(len(tried)), key=lambda i: tried[i].values[option])
    values = [tried[i].values[option] for i in order]
    sorted_losses = [losses[i] for i in order]
    at = min(range(len(values)), key=sorted_losses.__getitem__)
    best = sorted_losses[at]
    allowed = best + margin * abs(best) if math.isfinite(best) else -math.inf
    first = last = at
    while first > 0 and sorted_losses[first - 1] <= allowed:
        first -= 1
    while last < len(values) - 1 and sorted_losses[last + 1] <= allowed:
        last += 1
    # E_v[min(ℓ(v), ℓ₀) - ℓ*]
    lost = [min(loss, worst) - best for loss in sorted_losses] if math.isfinite(best) else []
    return Sensitivity(
        arm=arm,
        option=option,
        points=tuple(_point(tried[i].values[option], tried[i].scores, losses[i], maximize) for i in order),
        best=values[at],
        margin=margin,
        low=values[first],
        high=values[last],
        ratio=values[last] / values[first] if values[first] > 0 else None,
        open_below=first == 0,
        open_above=last == len(values) - 1,
        sensitivity=sum(lost) / len(lost) if lost else None,
    )


def _point(value: Value, scores: Sequence[float], loss: float, maximize: bool) -> Point:
    worst = -math.inf if maximize else math.inf
    ranked = [score if math.isfinite(score) else worst for score in scores]
    return Point(
        value=value,
        mean=-loss if maximize else loss,
        low=min(ranked),
        high=max(ranked),
        runs=len(scores),
        diverged=sum(not math.isfinite(score) for score in scores),
    )
