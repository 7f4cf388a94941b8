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
from kourkoutas.lab.results import store
from kourkoutas.lab.specs.looks import label
from kourkoutas.lab.specs.spec import Endpoint, RunResult

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

    def value(self, run: store.StoredRun) -> float | None:
        """The number of a run that has ended: NaN where it diverged or failed, None without the metric in its log."""
        if run.result is None or run.result.status != "ok":
            return math.nan
        value = _reduced(run, run.result, self.endpoint, self.reduction)
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


def values(runs: Iterable[store.StoredRun], measure: Measure) -> Numbers:
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
    return [f"{label(arm)} has no {metric} for {of_seeds(in_order(seeds))}" for arm, seeds in lone.items()]
