"""What is to be tuned: options, ranges, trials and seeds, from the words of a command line. Kept in study.json."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from kourkoutas.lab.errors import ArgumentError, argument
from kourkoutas.lab.specs.spec import RunSpec

# Significant digits of a value between the ends of a range, so that it can be read and typed again; more where values
# would be the same, up to those of a double.
DIGITS, MOST_DIGITS = 4, 17

Value = float | int


class Axis(BaseModel):
    """One option and the range it is tuned over.

    Attributes:
      name: "lr" or another setting, which every arm has, or "kbeta.alpha", an option of one optimizer.
      scale: whether values are evenly spaced in ratio ("log") or in difference ("linear").
      whole: the option takes whole numbers only.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    low: float
    high: float
    scale: Literal["log", "linear"] = "log"
    whole: bool = False

    def value(self, index: int, points: int) -> Value:
        """Value `index` of a grid of `points` values over the range; other indices go on beyond it in equal steps.

        >>> axis = Axis(name="lr", low=1e-4, high=1e-1)
        >>> [axis.value(i, 4) for i in range(-1, 5)]
        [1e-05, 0.0001, 0.001, 0.01, 0.1, 1.0]
        """
        return self.at(index / (points - 1), _digits(self, points))

    def at(self, part: float, digits: int = DIGITS) -> Value:
        """The value at this part of the range, rounded but for the ends."""
        if part in (0, 1):
            exact = self.low if part == 0 else self.high
        elif self.scale == "log":
            # low·(high/low)^part
            exact = self.low * (self.high / self.low) ** part
        else:
            exact = self.low + (self.high - self.low) * part
        if self.whole:
            return round(exact)
        if part in (0, 1):
            return exact
        rounded = float(f"{exact:.{digits}g}")
        return min(max(rounded, self.low), self.high) if 0 < part < 1 else rounded


@functools.cache
def _digits(axis: Axis, points: int) -> int:
    """As few digits as tell the values of the grid apart."""
    for digits in range(DIGITS, MOST_DIGITS):
        if len({axis.at(index / (points - 1), digits) for index in range(points)}) == points:
            return digits
    return MOST_DIGITS


class SearchSpace(BaseModel):
    """How every arm is tuned, before its best values are compared on seeds that the tuning has not seen.

    Attributes:
      trials: values tried for each arm, before any widening.
      seeds: of the tuning runs.
      budget: how many times the range may be widened when the best value of an arm is at its edge.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    axes: tuple[Axis, ...]
    trials: int
    seeds: tuple[int, ...]
    budget: int

    def values(self, spec: RunSpec) -> dict[str, Value]:
        """{option: value} of a run, of the options that are tuned and that it has."""
        own = {**spec.settings, **{f"{spec.optimizer.partition('[')[0]}.{k}": v for k, v in spec.options.items()}}
        return {axis.name: own[axis.name] for axis in self.axes if axis.name in own}


def search_space(
    axes: Sequence[Axis], *, trials: int, seeds: Sequence[int], test_seeds: Sequence[int], budget: int
) -> SearchSpace:
    """The question, checked."""
    names = [axis.name for axis in axes]
    if len(set(names)) < len(names):
        raise ArgumentError("tune", f"{argument('tune')} names {max(names, key=names.count)} twice; give it one range")
    if trials < 2:
        raise ArgumentError("trials", f"{argument('trials')} must be at least 2, for example 8; got {trials}")
    if budget < 0:
        raise ArgumentError(
            "tune_budget", f"{argument('tune_budget')} must be a number of widenings >= 0, for example 2; got {budget}"
        )
    if not seeds:
        raise ArgumentError("tune_seeds", f"{argument('tune_seeds')} must name at least one seed, for example 100-102")
    both = sorted(set(seeds) & set(test_seeds))
    if both:
        raise ArgumentError(
            "tune_seeds",
            f"{argument('tune_seeds')} and {argument('seeds')} share "
            f"{', '.join(map(str, both[:5]))}{', …' if len(both) > 5 else ''}: a "
            "value chosen on a seed is not tested by it; use other seeds for tuning, for example "
            f"{argument('tune_seeds', '100-102')}",
        )
    return SearchSpace(axes=tuple(axes), trials=trials, seeds=tuple(dict.fromkeys(seeds)), budget=budget)


def check_distinct(space: SearchSpace) -> None:
    """Refuse a grid that would try a value twice; several options are not taken from a grid."""
    axis, *others = space.axes
    if not others and len({axis.value(index, space.trials) for index in range(space.trials)}) < space.trials:
        raise ArgumentError(
            "tune",
            f"{argument('tune', f'{axis.name}={axis.low!r}:{axis.high!r}')} has fewer than {argument('trials')} "
            f"{space.trials} different "
            f"{'whole ' if axis.whole else ''}numbers, {axis.scale}-spaced: widen the range or lower "
            f"{argument('trials')}",
        )


def parse_tune(texts: Sequence[str]) -> list[Axis]:
    """Axes from `NAME=LOW:HIGH`, log-spaced, or `NAME=LOW:HIGH:linear`.

    >>> parse_tune(["lr=1e-4:1e-1", "kbeta.alpha=0.8:0.96:linear"])
    [Axis(name='lr', low=0.0001, high=0.1, ...), Axis(name='kbeta.alpha', low=0.8, high=0.96, scale='linear', ...)]
    """
    axes = []
    for text in texts:
        name, _, limits = (part.strip() for part in text.partition("="))
        parts = limits.split(":")
        try:
            low, high = float(parts[0]), float(parts[1])
        except (ValueError, IndexError):
            low = high = math.nan
        if not name or len(parts) not in (2, 3) or not (math.isfinite(low) and math.isfinite(high)):
            raise ArgumentError(
                "tune",
                f"{argument('tune')} must look like NAME=LOW:HIGH, for example {argument('tune', 'lr=1e-4:1e-1')}; "
                f"got {text!r}",
            )
        if parts[2:] not in ([], ["log"], ["linear"]):
            raise ArgumentError(
                "tune", f"{argument('tune', text)}: the third part is log (the default) or linear; got {parts[2]!r}"
            )
        scale: Literal["log", "linear"] = "linear" if parts[2:] == ["linear"] else "log"
        if not low < high:
            raise ArgumentError(
                "tune", f"{argument('tune', text)}: the range must rise; write {name}={parts[1]}:{parts[0]}"
            )
        if scale == "log" and not low > 0:
            raise ArgumentError(
                "tune", f"{argument('tune', text)}: log-spaced values need LOW > 0; raise it or write {text}:linear"
            )
        axes.append(Axis(name=name, low=low, high=high, scale=scale))
    return axes
