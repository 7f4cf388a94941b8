"""The decisions of a tuning: which values to try next, and which one to keep.

They are pure functions of the scores so far; `kourkoutas.lab.api` makes the runs that they ask for.

One option: a grid. Every arm tries the same values, evenly spaced over the range. An arm's choice is the value with the
fewest runs that diverged, and of those the best mean endpoint over the tuning seeds, geometric where the endpoint is
compared as ratios. A value with a run that failed cannot be chosen: nobody knows what that run would have given. While
the best value of *any* arm is the outermost on a side, *every* arm tries `STEPS` more values there, `budget` times at
most, and no further than `MOST_RATIO` times beyond the range that was asked for.

Several options: the first points of a Halton sequence, which fill the ranges evenly however many they are. Every arm
tries the same values of the options that it has.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kourkoutas.lab.specs.search_space import Axis, SearchSpace, Value

STEPS = 2  # grid steps by which a range is widened
MOST_RATIO = 10.0  # by which a widened range may reach beyond an end; of a linear one, the width of the range

Values = Mapping[str, Value]


@dataclass(frozen=True)
class Tried:
    """One set of values of one arm and what its tuning runs gave.

    Attributes:
      values: {axis: value}.
      scores: the endpoint of each tuning seed, in order; NaN for a run that diverged or failed.
      missing: tuning seeds whose runs have not ended or are lost, and have no score.
      failed: tuning seeds whose runs failed; 0 where failures count as divergence does.
    """

    values: Values
    scores: tuple[float, ...]
    missing: int = 0
    failed: int = 0

    @property
    def finite(self) -> list[float]:
        return [x for x in self.scores if math.isfinite(x)]

    def standing(self, maximize: bool, log: bool = False) -> tuple[int, float]:
        """(runs without a score, mean of the others with the sign that makes less better): less is better.

        NOTE: the mean is that of the comparison on the test seeds, geometric where `log`. Seeds that are hard for every
        value move all means alike, and so do not blur the choice as they would blur one by medians.
        """
        fine = self.finite
        if not fine:
            return len(self.scores), math.inf
        mean = 10 ** (sum(map(math.log10, fine)) / len(fine)) if log else sum(x / len(fine) for x in fine)
        return len(self.scores) - len(fine), -mean if maximize else mean

    def loss(self, maximize: bool, log: bool = False) -> float:
        """The mean with the sign that makes less better; infinite when a run diverged or failed."""
        lost, mean = self.standing(maximize, log)
        return math.inf if lost else mean


def as_ratios(tried: Iterable[Tried], log: bool) -> bool:
    """Whether scores are compared as ratios: one at or below 0 has no logarithm, and makes all of them differences."""
    return log and all(x > 0 for one in tried for x in one.finite)


def best(tried: Sequence[Tried], maximize: bool = False, log: bool = False) -> Tried:
    """Of the values without a failed run the one with the fewest diverged, and of those the best mean; of equal ones
    that with the smallest values.

    >>> best([Tried({"lr": 0.1}, (3.0, math.nan, math.nan)), Tried({"lr": 0.2}, (9.0, 7.0, math.nan))]).values
    {'lr': 0.2}
    """
    known = [one for one in tried if not one.failed]
    if not known:
        raise ValueError("every value that was tried has a failed run, so nothing can be chosen")
    ratios = as_ratios(tried, log)
    return min(known, key=lambda one: (*one.standing(maximize, ratios), *one.values.values()))


def choose(tried: Mapping[str, Sequence[Tried]], maximize: bool = False, log: bool = False) -> dict[str, Tried]:
    """{arm: its best}, all by the same kind of mean."""
    ratios = as_ratios(itertools.chain.from_iterable(tried.values()), log)
    return {arm: best(own, maximize, ratios) for arm, own in tried.items()}


def widened(space: SearchSpace, tried: range, chosen: Sequence[Value], takes: Callable[[Value], bool]) -> range:
    """The indices of `Axis.value` that were tried, with `STEPS` more on each side where some arm's best value is.

    `takes` says whether the option can have a value at all; a side ends before the first that it cannot.
    """
    (axis,) = space.axes

    def value(index: int) -> Value:
        return axis.value(index, space.trials)

    def goes_on(index: int, before: int) -> bool:
        new = math.isfinite(value(index)) and value(index) != value(before)
        return new and _near(axis, value(index)) and takes(value(index))

    first, last = tried[0], tried[-1]
    below, above = value(first) in chosen, value(last) in chosen
    for _ in range(STEPS):
        first -= below and goes_on(first - 1, first)
        last += above and goes_on(last + 1, last)
    return range(first, last + 1)


def _near(axis: Axis, value: Value) -> bool:
    """Whether a value is not too far from the range that was asked for."""
    if axis.scale == "linear":
        width = axis.high - axis.low
        return axis.low - width <= value <= axis.high + width
    slack = 1.001  # a value is rounded to a few digits
    return axis.low / (MOST_RATIO * slack) <= value <= axis.high * MOST_RATIO * slack


Request = tuple[str, Values]
"""An arm, and the values that it is to try."""


def next_requests(
    space: SearchSpace,
    axes: Mapping[str, Sequence[Axis]],
    tried: Mapping[str, Sequence[Tried]],
    takes: Callable[[str, Values], bool] = lambda arm, values: True,
    *,
    maximize: bool = False,
    log: bool = False,
) -> list[Request]:
    """What every arm tries next, given all that was tried; nothing when the tuning has come to its end.

    The same for the same scores: a tuning that was stopped goes on where it was.

    Args:
      axes: {arm: the options that it tunes}.
      takes: whether an arm can have these values at all.
      maximize: whether more is better.
      log: whether scores are compared as ratios.
    """
    if len(space.axes) > 1:
        return [
            (arm, values)
            for arm, own in axes.items()
            for values in spread(space, own)
            if all(one.values != values for one in tried[arm])
        ]
    (axis,) = space.axes
    indices = range(space.trials)
    for _ in range(space.budget + 1):
        grid = [axis.value(index, space.trials) for index in indices]
        known = {arm: [one for one in own if one.values[axis.name] in grid] for arm, own in tried.items()}
        have = {arm: [one.values[axis.name] for one in own] for arm, own in known.items()}
        missing: list[Request] = [(arm, {axis.name: x}) for arm in axes for x in grid if x not in have[arm]]
        if missing:
            return missing
        chosen = [one.values[axis.name] for one in choose(known, maximize, log).values()]
        indices = widened(space, indices, chosen, lambda x: all(takes(arm, {axis.name: x}) for arm in axes))
    return []


def edge(space: SearchSpace, tried: Sequence[Tried], chosen: Values) -> str | None:
    """ "lowest" or "highest" when the chosen value of a one-option tuning is the outermost one tried, else None."""
    if len(space.axes) > 1:
        return None
    name = space.axes[0].name
    values = [one.values[name] for one in tried]
    return None if not values else {min(values): "lowest", max(values): "highest"}.get(chosen[name])


def spread(space: SearchSpace, axes: Sequence[Axis]) -> list[Values]:
    """What an arm with these of the options tries; a value of whole numbers may come up again, and is tried once."""
    from scipy.stats import qmc

    parts = qmc.Halton(len(space.axes), scramble=False).fast_forward(1).random(space.trials)  # without the corner 0
    columns = [space.axes.index(axis) for axis in axes]
    rows = [{axis.name: axis.at(row[k]) for k, axis in zip(columns, axes, strict=True)} for row in parts]
    return list({tuple(values.values()): values for values in rows}.values())
