"""What a tuning tries next, from the scores so far alone, and the loop that has it made.

One option: a grid. Every arm tries the same values, evenly spaced over the range. While the best value of *any* arm is
the outermost on a side, *every* arm tries `STEPS` more values there, `budget` times at most, and no further than
`MOST_RATIO` times beyond the range that was asked for.

Several options: the first points of a Halton sequence, which fill the ranges evenly however many they are. Every arm
tries the same values of the options that it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from kourkoutas.lab.errors import ArgumentError, argument
from kourkoutas.lab.optimizers.looks import name_of
from kourkoutas.lab.planning.plan import Plan
from kourkoutas.lab.results.store import StoredRun, Writer
from kourkoutas.lab.specs.spec import Axis, Endpoint, RunSpec, SearchSpace, Value, last_line
from kourkoutas.lab.tuning import trials
from kourkoutas.lab.tuning.trials import Score, Tried, Values, choose

STEPS = 2  # grid steps by which a range is widened
MOST_RATIO = 10.0  # by which a widened range may reach beyond an end; of a linear one, the width of the range

Make = Callable[[Sequence[RunSpec]], None]
Request = tuple[str, Values]
"""An arm, and the values that it is to try."""


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


def search_space(
    axes: Sequence[Axis], *, trials: int, seeds: Sequence[int], test_seeds: Sequence[int], budget: int
) -> SearchSpace:
    """What is asked for, checked."""
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


def tune(
    plan: Plan, space: SearchSpace, study: Writer, make: Make, *, score: Score, endpoint: Endpoint
) -> dict[str, dict[str, Value]]:
    """{arm: its best values}; `make` makes those of the runs that are not there yet.

    NOTE: nothing but runs is kept. After a kill the decisions are taken again from the runs that have finished; they
    are the same, so that only what is missing is made.

    Args:
      score: what a run counts for.
      endpoint: of the scores: whether more is better, and whether they are compared as ratios.

    Raises:
      ValueError: every value that an arm tried has a failed run, and failures do not count.
    """
    arms = {arm.label: arm for arm in plan.arms}
    runs: list[StoredRun] = []
    tried: dict[str, list[Tried]] = {label: [] for label in arms}

    def takes(label: str, values: Values) -> bool:
        try:
            plan.valued(arms[label], values)
        except (ValueError, TypeError):
            return False
        return True

    by = {"maximize": endpoint.maximize, "log": endpoint.log}
    while requests := next_requests(space, plan.axes(), tried, takes, **by):
        valued = [plan.valued(arms[label], values) for label, values in requests]
        specs = []
        for seed in space.seeds:
            specs += [plan.spec(arm, seed) for arm in valued]
        make(specs)
        runs += [study.run(spec) for spec in specs]
        tried = trials.of_runs(space, runs, score, count_failed=plan.count_failed)
        for label, own in tried.items():  # before more is tried, and other arms' ranges are widened for nothing
            _check_some_value(label, own, runs)
    return {label: dict(one.values) for label, one in choose(tried, **by).items()}


def _check_some_value(label: str, tried: Sequence[Tried], runs: Sequence[StoredRun]) -> None:
    """Divergence everywhere is a result; an error everywhere is not."""
    if not all(one.failed for one in tried):
        return
    made, failed = sum(len(one.scores) for one in tried), sum(one.failed for one in tried)
    which = f"all {made} tuning runs of {name_of(label)} failed"
    if failed < made:
        which = f"every value that {name_of(label)} tried has a tuning run that failed ({failed} of {made})"
    results = [run.result for run in runs if run.spec.optimizer == label and run.result is not None]
    first = next(result for result in results if result.status == "failed")
    raise ValueError(
        f"{which}, so that nothing can be chosen for it; the first one: {last_line(first.error)}. Correct that and use "
        f"{argument('retry_failed')}"
    )


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
        return _missing({arm: spread(space, own) for arm, own in axes.items()}, tried)
    (axis,) = space.axes
    indices = range(space.trials)
    for _ in range(space.budget + 1):
        grid: list[Values] = [{axis.name: axis.value(index, space.trials)} for index in indices]
        if missing := _missing(dict.fromkeys(axes, grid), tried):
            return missing
        on_grid = {arm: [one for one in own if one.values in grid] for arm, own in tried.items()}
        chosen = [one.values[axis.name] for one in choose(on_grid, maximize, log).values()]
        indices = widened(space, indices, chosen, lambda x: all(takes(arm, {axis.name: x}) for arm in axes))
    return []


def _missing(wanted: Mapping[str, Sequence[Values]], tried: Mapping[str, Sequence[Tried]]) -> list[Request]:
    """What the arms are to try and have not tried."""
    missing: list[Request] = []
    for arm, own in wanted.items():
        done = [one.values for one in tried[arm]]
        missing += [(arm, values) for values in own if values not in done]
    return missing


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


def spread(space: SearchSpace, axes: Sequence[Axis]) -> list[Values]:
    """What an arm with these of the options tries; a value of whole numbers may come up again, and is tried once."""
    from scipy.stats import qmc

    parts = qmc.Halton(len(space.axes), scramble=False).fast_forward(1).random(space.trials)  # without the corner 0
    columns = [space.axes.index(axis) for axis in axes]
    rows = [{axis.name: axis.at(row[k]) for k, axis in zip(columns, axes, strict=True)} for row in parts]
    return list({tuple(values.values()): values for values in rows}.values())
