"""What runs are judged by: declared before they were made, or any logged metric asked for afterwards.

    val_acc:max          the last value of the logged metric `val_acc`; more is better
    val_loss:best        its best value during the run
    loss:tail:log        the mean of the last tenth of what was logged, compared as ratios

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
from kourkoutas.lab.errors import unknown
from kourkoutas.lab.judging.values import in_order, is_number, of_seeds
from kourkoutas.lab.optimizers.looks import name_of
from kourkoutas.lab.results import store
from kourkoutas.lab.specs.spec import Endpoint

PRIMARY = "endpoint"  # the metric's name of what a run's `endpoint` holds
TAIL = 0.1

Reduction = Literal["last", "best", "tail"]
Numbers = dict[str, dict[int | str, float]]

_WORDS = ("last", "best", "tail", "min", "max", "log", "linear")


@dataclass(frozen=True)
class Measure:
    """One number of every run.

    Attributes:
      name: as it is asked for on a command line.
      endpoint: metric, title, scale and direction.
      reduction: which number of the metric's course: its last, its best, or the mean of its last tenth.
      primary: whether it decides the study.
      declared: whether it was named before the runs were made.
    """

    name: str
    endpoint: Endpoint
    reduction: Reduction = "last"
    primary: bool = False
    declared: bool = False


def declared(record: store.StudyRecord) -> list[Endpoint]:
    """What the runs are judged by, the primary one first; a user's function has one."""
    if record.code is not None:
        code = record.code
        title = code.endpoint or f"value of {code.function}"
        return [Endpoint(PRIMARY, title, log=code.log, maximize=code.higher_is_better)]
    found = testbeds.get(record.testbed).endpoints
    return sorted(found, key=lambda one: one.metric != record.primary)  # stable: the others stay in order


def measures(record: store.StudyRecord, asked: Sequence[str] = ()) -> list[Measure]:
    """The declared endpoints, the primary one first, then those asked for after the runs."""
    known = declared(record)
    found = {one.metric: Measure(one.metric, one, primary=one is known[0], declared=True) for one in known}
    for text in asked:
        one = parse(text, known)
        found.setdefault(one.name, one)
    return list(found.values())


def parse(text: str, known: Sequence[Endpoint] = ()) -> Measure:
    """A measure from METRIC[:last|best|tail][:min|max][:log|linear]; scale and direction of a known endpoint stay.

    >>> parse("val_acc:best:max").endpoint
    Endpoint(metric='val_acc', title='best val_acc', log=False, threshold=None, maximize=True)
    """
    metric, *words = (part.strip() for part in text.split(":"))
    if not metric:
        raise ValueError(f"--endpoint must look like METRIC, METRIC:max or METRIC:best:max; got {text!r}")
    for word in words:
        if word not in _WORDS:
            raise unknown(f"word in --endpoint {text}", word, _WORDS)
    for group in (("last", "best", "tail"), ("min", "max"), ("log", "linear")):
        if len([word for word in words if word in group]) > 1:
            raise ValueError(f"--endpoint {text}: give one of {', '.join(group)}")
    reduction: Reduction = "best" if "best" in words else "tail" if "tail" in words else "last"
    base = next((endpoint for endpoint in known if endpoint.metric == metric), Endpoint(metric, metric))
    title = {"last": base.title, "best": f"best {base.title}", "tail": f"{base.title}, mean of the last tenth"}
    endpoint = dataclasses.replace(
        base,
        title=title[reduction],
        log=("log" in words) or (base.log and "linear" not in words),
        maximize=("max" in words) or (base.maximize and "min" not in words),
    )
    if not words and base in known:
        return Measure(metric, endpoint, declared=True, primary=base is known[0])
    return Measure(text, endpoint, reduction)


def values(runs: Iterable[store.StoredRun], endpoint: Endpoint, reduction: Reduction = "last") -> Numbers:
    """{arm: {seed: value}} of the runs that have ended: NaN for one that diverged or failed."""
    found: Numbers = {}
    for run in runs:
        if run.result is None:
            continue
        value = value_of(run, endpoint, reduction) if run.result.status == "ok" else math.nan
        if value is not None:
            found.setdefault(run.spec.optimizer, {})[run.spec.seed] = value if is_number(value) else math.nan
    return found


def as_loss(value: float, endpoint: Endpoint) -> float:
    """A value on the scale on which the endpoint is compared, less being better; NaN where it has none there."""
    if not is_number(value) or (endpoint.log and value <= 0):
        return math.nan
    y = math.log10(value) if endpoint.log else value
    return -y if endpoint.maximize else y


def value_of(run: store.StoredRun, endpoint: Endpoint, reduction: Reduction = "last") -> float | None:
    """The number of one run that ended well; None where it has none."""
    if run.result is None:
        return None
    metric = endpoint.metric
    if reduction == "last":
        if metric == PRIMARY:
            return run.result.endpoint
        if metric in run.result.metrics:
            return run.result.metrics[metric]
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


def score(run: store.StoredRun, endpoint: Endpoint, reduction: Reduction = "last") -> float:
    """What a tuning run counts for, NaN when it diverged, failed or has not ended."""
    if run.result is None or run.result.status != "ok":
        return math.nan
    value = value_of(run, endpoint, reduction)
    return value if value is not None and is_number(value) else math.nan


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


def without_value(measure: Measure, numbers: Numbers, runs: Sequence[store.StoredRun]) -> list[str]:
    """Notes on finished runs that never logged the metric; an error where it was asked for and none has a value."""
    metric = measure.endpoint.metric
    fine = [(run.spec, run.result) for run in runs if run.result is not None and run.result.status == "ok"]
    lone: dict[str, list[int | str]] = {}
    for spec, _ in fine:
        if spec.seed not in numbers.get(spec.optimizer, {}):
            lone.setdefault(spec.optimizer, []).append(spec.seed)
    if fine and not measure.declared:
        if sum(map(len, lone.values())) == len(fine):
            names = dict.fromkeys(name for _, result in fine for name in (*result.metrics, *result.curve))
            raise unknown("metric in --endpoint", metric, [name for name in names if name != "step"])
        if all(math.isnan(x) for by_seed in numbers.values() for x in by_seed.values()):
            raise ValueError(f"--endpoint {measure.name}: every value of {metric} is NaN")
    return [f"{name_of(arm)} has no {metric} for {of_seeds(in_order(seeds))}" for arm, seeds in lone.items()]
