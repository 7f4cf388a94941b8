"""One optimizer over its seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kourkoutas.lab.judging.intervals import (
    RESAMPLES,
    Interval,
    antilog,
    bootstrap_ci,
    clopper_pearson,
    interval_times,
    iqm,
    quantile,
    trimmed,
    unit_of,
)
from kourkoutas.lab.judging.tests import succeeds


@dataclass(frozen=True)
class Rate:
    """Successes out of n runs with the Clopper–Pearson interval."""

    successes: int
    n: int
    rate: float
    ci: Interval


@dataclass(frozen=True)
class Summary:
    """One optimizer over its seeds. `mean`, `sd` and `geometric_mean` are of the finite values; the rest ranks diverged
    runs as the worst."""

    optimizer: str
    n: int
    diverged: int
    mean: float | None
    sd: float | None
    geometric_mean: float | None
    median: float
    q1: float
    q3: float
    median_ci: Interval | None
    iqm: float
    iqm_ci: Interval | None
    success: Rate | None


def summarise(
    optimizer: str,
    values: Sequence[float],
    *,
    log: bool = False,
    higher_is_better: bool = False,
    threshold: float | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
) -> Summary:
    """Medians, quartiles, IQM and rates of one optimizer."""
    x = np.asarray(values, float)
    unit = unit_of(x)
    finite = x[np.isfinite(x)] / unit
    ranked = np.where(np.isfinite(x), x / unit, -np.inf if higher_is_better else np.inf)
    success = None
    if threshold is not None:
        k = int(np.sum(succeeds(x, threshold, higher_is_better)))
        success = Rate(k, len(x), k / len(x), clopper_pearson(k, len(x), confidence))
    return Summary(
        optimizer=optimizer,
        n=len(x),
        diverged=len(x) - len(finite),
        mean=float(finite.mean()) * unit if len(finite) else None,
        sd=float(finite.std(ddof=1)) * unit if len(finite) > 1 else None,
        geometric_mean=antilog(float(np.log10(finite).mean())) * unit if log and len(finite) else None,
        median=quantile(ranked, 0.5) * unit,
        q1=quantile(ranked, 0.25) * unit,
        q3=quantile(ranked, 0.75) * unit,
        median_ci=interval_times(bootstrap_ci(ranked, np.median, confidence, resamples), unit),
        iqm=iqm(ranked) * unit,
        iqm_ci=interval_times(bootstrap_ci(ranked, trimmed, confidence, resamples), unit),
        success=success,
    )
