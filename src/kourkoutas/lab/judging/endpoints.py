"""What runs are judged by: declared before they were made, or any logged metric asked for afterwards.

    val_acc:max          the last value of the logged metric `val_acc`; more is better
    val_loss:best        its best value during the run
    loss:tail:log        the mean of the last tenth of what was logged, compared as ratios
    val_loss:until=0.5   the first logged step at which it is 0.5 or less; `val_acc:until=0.9:max`, 0.9 or more
    val_loss:seconds_until=0.5

One endpoint is primary: the testbed's first or the one that the study named, or what a user's function returns. It
alone decides a study. All others are secondary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from kourkoutas.lab import testbeds
from kourkoutas.lab.errors import ArgumentError, argument, unknown
from kourkoutas.lab.judging.values import all_values, in_order, is_number, of_seeds
from kourkoutas.lab.optimizers.looks import name_of
from kourkoutas.lab.results import store
from kourkoutas.lab.specs.spec import Endpoint, RunResult

PRIMARY = "endpoint"  # the metric's name of what a run's `endpoint` holds
TAIL = 0.1

Reduction = Literal["last", "best", "tail"]
Numbers = dict[str, dict[int | str, float]]

_REDUCTIONS, _UNTIL = ("last", "best", "tail"), ("until", "seconds_until")
_SIDES, _SCALES = ("min", "max"), ("log", "linear")
_WORDS = (*_REDUCTIONS, *(f"{name}=VALUE" for name in _UNTIL), *_SIDES, *_SCALES)

STEPS = (
    "steps are those that were logged; a run that never got there ranks behind all that did, and two of one seed tie"
)
SECONDS = (
    "seconds are steps times the run's own median seconds per step: training alone, without set-up, compiling and "
    "evaluation"
)


@dataclass(frozen=True)
class Until:
    """When a logged metric first is as good as asked for.

    Attributes:
      value: at most this, or at least where `above`.
      seconds: counted in seconds of training, not in steps.
    """

    value: float
    above: bool = False
    seconds: bool = False

    def of(self, run: store.StoredRun, result: RunResult, metric: str) -> float | None:
        """Steps or seconds; NaN where a run never got there, None without the metric, or the pace, in its log.

        A run that got there and diverged later has got there.
        """
        course = logged(run, metric)
        if not course and result.status == "ok":
            return None
        step = next((step for step, value in course if self._meets(value)), math.nan)
        if math.isnan(step) or not self.seconds:
            return step
        return None if result.seconds_per_step is None else step * result.seconds_per_step

    def _meets(self, value: float) -> bool:
        return math.isfinite(value) and (value >= self.value if self.above else value <= self.value)

    def title(self, metric: str) -> str:
        return f"{'seconds' if self.seconds else 'steps'} until {metric} {'≥' if self.above else '≤'} {self.value:g}"


@dataclass(frozen=True)
class Measure:
    """One number of every run.

    Attributes:
      name: as it is asked for on a command line.
      endpoint: metric, title, scale and direction.
      reduction: which number of the metric's course: its last, its best, the mean of its last tenth, or when it was as
        good as asked for.
      primary: whether it decides the study.
      declared: whether it was named before the runs were made.
    """

    name: str
    endpoint: Endpoint
    reduction: Reduction | Until = "last"
    primary: bool = False
    declared: bool = False

    def value(self, run: store.StoredRun) -> float | None:
        """The number of a run that has ended: NaN where it diverged, failed or never got there, None where it has
        none."""
        result = run.result
        if result is None or result.status == "failed":
            return math.nan
        if isinstance(self.reduction, Until):
            return self.reduction.of(run, result, self.endpoint.metric)
        if result.status == "diverged":
            return math.nan
        value = _reduced(run, result, self.endpoint, self.reduction)
        return value if value is None or is_number(value) else math.nan

    def score(self, run: store.StoredRun) -> float:
        """The same for a tuning: NaN where there is no number."""
        value = self.value(run)
        return math.nan if value is None else value


def declared(record: store.StudyRecord) -> list[Endpoint]:
    """What the runs are judged by, the primary one first; a user's function has one."""
    if record.code is not None:
        code = record.code
        title = code.endpoint or f"value of {code.function}"
        return [Endpoint(PRIMARY, title, log=code.log, maximize=code.higher_is_better)]
    found = testbeds.get(record.testbed).endpoints
    return sorted(found, key=lambda one: one.metric != record.primary)  # stable: the others stay in order


def measures_of(record: store.StudyRecord, asked: Sequence[str] = ()) -> list[Measure]:
    """The declared endpoints, the primary one first, then those asked for after the runs."""
    known = declared(record)
    found = {one.metric: Measure(one.metric, one, primary=one is known[0], declared=True) for one in known}
    for text in asked:
        one = parse(text, known)
        found.setdefault(one.name, one)
    return list(found.values())


def parse(text: str, known: Sequence[Endpoint] = ()) -> Measure:
    """A measure from METRIC[:last|best|tail|until=VALUE|seconds_until=VALUE][:min|max][:log|linear].

    Scale and direction of a known endpoint stay. Steps and seconds are compared as ratios, unless `linear`; with `max`
    the metric is to be at least the value.

    >>> parse("val_acc:best:max").endpoint
    Endpoint(metric='val_acc', title='best val_acc', log=False, threshold=None, maximize=True)
    >>> parse("val_acc:until=0.9:max").endpoint
    Endpoint(metric='val_acc', title='steps until val_acc ≥ 0.9', log=True, threshold=None, maximize=False)
    """
    metric, *parts = (part.strip() for part in text.split(":"))
    if not metric:
        raise ArgumentError(
            "endpoint", f"{argument('endpoint')} must look like METRIC, METRIC:max or METRIC:best:max; got {text!r}"
        )
    words: dict[str, str] = {}
    for part in parts:
        word, equals, value = part.partition("=")
        if not (word in _UNTIL if equals else word in _WORDS):
            raise unknown(f"word in {argument('endpoint')} {text}", part, _WORDS)
        words[word] = value
    for group in ((*_REDUCTIONS, *_UNTIL), _SIDES, _SCALES):
        if len([part for part in parts if part.partition("=")[0] in group]) > 1:
            raise ArgumentError("endpoint", f"{argument('endpoint')} {text}: give one of {', '.join(group)}")
    base = next((endpoint for endpoint in known if endpoint.metric == metric), Endpoint(metric, metric))
    maximize = "max" in words or (base.maximize and "min" not in words)
    for word in _UNTIL:
        if word in words:
            until = Until(_number(text, words[word]), above=maximize, seconds=word == "seconds_until")
            endpoint = Endpoint(metric, until.title(base.title), log="linear" not in words)
            return Measure(text, endpoint, until)
    if not words and base in known:
        return Measure(metric, base, declared=True, primary=base is known[0])
    reduction: Reduction = "best" if "best" in words else "tail" if "tail" in words else "last"
    title = {"last": base.title, "best": f"best {base.title}", "tail": f"{base.title}, mean of the last tenth"}
    log = "log" in words or (base.log and "linear" not in words)
    endpoint = dataclasses.replace(base, title=title[reduction], log=log, maximize=maximize)
    return Measure(text, endpoint, reduction)


def _number(text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ArgumentError(
            "endpoint",
            f"{argument('endpoint')} {text}: until= needs a finite number, for example val_loss:until=0.5; "
            f"got {value!r}",
        )
    return number


def values_of(runs: Iterable[store.StoredRun], measure: Measure) -> Numbers:
    """{arm: {seed: value}} of the runs that have ended, without those that have none."""
    found: Numbers = {}
    for run in runs:
        value = None if run.result is None else measure.value(run)
        if value is not None:
            found.setdefault(run.spec.optimizer, {})[run.spec.seed] = value
    return found


def _reduced(run: store.StoredRun, result: RunResult, endpoint: Endpoint, reduction: Reduction) -> float | None:
    """The number of one run that ended well; None where it has none."""
    metric = endpoint.metric
    if reduction == "last":
        if metric == PRIMARY:
            return result.endpoint
        if metric in result.metrics:
            return result.metrics[metric]
    course = [value for _, value in logged(run, metric)]
    if not course:
        return None
    if reduction == "last":
        return course[-1]
    if reduction == "best":
        finite = [x for x in course if math.isfinite(x)] or [math.nan]
        return max(finite) if endpoint.maximize else min(finite)
    last = course[-max(1, math.ceil(TAIL * len(course))) :]
    return sum(x / len(last) for x in last)


def logged(run: store.StoredRun, metric: str) -> list[tuple[float, float]]:
    """(step, value) of every logged point of a metric, from metrics.jsonl; where that is gone, from the result's curve,
    in which long runs have fewer points."""
    found = []
    with contextlib.suppress(store.StoreError):
        found = [(float(row["step"]), float(row[metric])) for row in run.metrics() if "step" in row and metric in row]
    if found or run.result is None:
        return found
    points = zip(run.result.curve.get("step", ()), run.result.curve.get(metric, ()), strict=False)
    return [(step, value) for step, value in points if not math.isnan(value)]


def notes_on(measure: Measure, numbers: Numbers, runs: Sequence[store.StoredRun]) -> list[str]:
    """What a time is, and which finished runs have no value; an error where one was asked for and none has it."""
    until = measure.reduction if isinstance(measure.reduction, Until) else None
    fine = [(run.spec, run.result) for run in runs if run.result is not None and run.result.status == "ok"]
    lone: dict[str, list[int | str]] = {}
    for spec, _ in fine:
        if spec.seed not in numbers.get(spec.optimizer, {}):
            lone.setdefault(spec.optimizer, []).append(spec.seed)
    if fine and not measure.declared:
        if sum(map(len, lone.values())) == len(fine):
            raise _no_value(measure, [result for _, result in fine])
        if until is None and all(map(math.isnan, all_values(numbers))):
            asked = f"{argument('endpoint')} {measure.name}"
            raise ArgumentError("endpoint", f"{asked}: every value of {measure.endpoint.metric} is NaN")
    what, notes = measure.endpoint.metric, []
    if until is not None:
        what = measure.endpoint.title
        notes.append(STEPS)
        if until.seconds:
            notes.append(SECONDS)
    for arm, seeds in lone.items():
        notes.append(f"{name_of(arm)} has no {what} for {of_seeds(in_order(seeds))}")
    return notes


def _no_value(measure: Measure, results: Sequence[RunResult]) -> ValueError:
    """That no run has what was asked for, and what to ask for instead."""
    metric, timed = measure.endpoint.metric, isinstance(measure.reduction, Until)
    names: dict[str, None] = {}
    for result in results:
        names |= dict.fromkeys(result.curve if timed else (*result.metrics, *result.curve))
    if timed and metric in names:
        asked = f"{argument('endpoint')} {measure.name}"
        return ArgumentError("endpoint", f"{asked}: no run has recorded its seconds per step; ask for until= in steps")
    return unknown(f"metric in {argument('endpoint')}", metric, [name for name in names if name != "step"])
