"""How large a difference is: in the endpoint's unit or as a ratio, in percent of the baseline, and how large it would
have to be for these seeds to find it."""

from __future__ import annotations

import math

import numpy as np

from kourkoutas.lab.judging.deciding import T
from kourkoutas.lab.judging.hypothesis_tests import detectable_ratio
from kourkoutas.lab.judging.intervals import Interval, antilog, fieller, t_interval
from kourkoutas.lab.judging.statistics import Finding, Paired, scaled


def effect(paired: Paired, confidence: float) -> Finding | None:
    """The estimate that decides with its interval; on logarithms as a ratio."""
    decision = paired.decision
    if decision.estimate is None:
        return None
    return scaled(decision.estimate, decision.interval(confidence), paired.log)


def percent(paired: Paired, confidence: float) -> Finding | None:
    """How much better the treatment is in percent of the baseline; None where the baseline has no one sign.

    A ratio of two means has Fieller's interval; what the luck of a tuning adds to the interval of the difference is
    added to it.
    """
    d, interval = paired.decision.estimate, paired.decision.interval(confidence)
    value = None if d is None or not math.isfinite(d) else percent_of(d, paired)
    if value is None or interval is None:
        return None if value is None else Finding(value)
    low, high = percent_of(interval.low, paired), percent_of(interval.high, paired)
    if low is None or high is None:
        return Finding(value)
    size = baseline_size(paired)
    if size is not None and paired.decision.test == T:
        ratio, plain = fieller(paired.both, np.abs(paired.y), confidence), t_interval(paired.both, confidence)
        if ratio is None:
            return None
        low += 100 * (ratio.low - plain.low / size)
        high += 100 * (ratio.high - plain.high / size)
        if interval.holds(0.0):
            low, high = min(low, 0.0), max(high, 0.0)
    return Finding(value, Interval(low, high, interval.method))


def percent_of(d: float, paired: Paired) -> float | None:
    """A difference d in percent of the baseline, of its geometric mean on logarithms, else of its mean:

    100·(1 - treatment/baseline) where lower is better, 100·(treatment/baseline - 1) where higher is.
    """
    if paired.log:
        return 100 * (antilog(d) - 1) if paired.higher_is_better else 100 * (1 - antilog(-d))
    size = baseline_size(paired)
    return None if size is None else 100 * (d / size)


def baseline_size(paired: Paired) -> float | None:
    """|mean| of the baseline's values, for percentages; None on logarithms, and where they have no one sign."""
    values = paired.y[paired.whole]
    if paired.log or not len(values) or not (np.all(values > 0) or np.all(values < 0)):
        return None
    return abs(float(values.mean()))


def detectable(paired: Paired, confidence: float) -> float | None:
    """The difference that these seeds would have found with probability 0.8; None where ranks decide."""
    if paired.decision.test != T or paired.t.t is None:
        return None
    found = detectable_ratio(len(paired.both), 1 - confidence) * float(paired.both.std(ddof=1))
    if paired.decision.tuned:
        with_luck, without = paired.decision.interval(confidence), t_interval(paired.both, confidence)
        if with_luck is None:
            return None
        found += max(without.low - with_luck.low, with_luck.high - without.high)
    return found
