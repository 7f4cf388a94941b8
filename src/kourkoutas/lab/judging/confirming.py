"""How sure a tuned comparison is, with the luck of the tuning counted.

The winners are compared on fresh seeds, so the choice does not flatter them. But a choice on a few tuning seeds may
miss the arm's best value, and then two equal optimizers differ because one was tuned with less luck. A plain paired t
test on the winners takes that for a difference in one of six to ten studies instead of one of twenty.

So the arm that is behind gets the benefit of the doubt. With d the mean paired difference on n test seeds, s the
standard deviation of the pairs, k tuning seeds and m(v) the mean over them of y(v) - y(chosen),

    δ ~ d + s/√n · t        the difference of the two winners; s² ~ (n-1)·s²/χ²
    μ(v) ~ m(v) + s/√(2k)·z  each value of the arm behind; a pair's variance is that of two runs
    r = μ(chosen) - min μ    what that arm may have lost by its choice
    p = 2·P(δ - r ≤ 0)

The probability is counted in N draws, of which one more counts as δ ≤ r, since none of N is not never:
p = (2·count + 1)/(N + 1). The luck of the tuning makes nothing surer, so p is never below that of the t test.

NOTE: where a run diverged there is no mean, and the verdict by ranks stands as it is, without this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from kourkoutas.lab.judging.stats import Array, Comparison, Contrast, holm
from kourkoutas.lab.planning.search import Tried, Values

DRAWS = 10_000


TEST = "paired t with the luck of the tuning"


def counted(comparison: Comparison, tried: Mapping[str, Sequence[Tried]], chosen: Mapping[str, Values]) -> Comparison:
    """The comparison with `p` and `p_holm` of its contrasts, and so their verdicts, taken with the tuning counted."""
    found = [_doubted(c, tried, chosen, comparison) for c in comparison.contrasts]
    family = max((c.family for c in comparison.contrasts), default=0)
    adjusted = holm([c.p if p is None else p for c, p in zip(comparison.contrasts, found, strict=True)], family)
    contrasts = [
        replace(c, p_holm=p_holm) if p is None else replace(c, test=TEST, p=p, p_holm=p_holm)
        for c, p, p_holm in zip(comparison.contrasts, found, adjusted, strict=True)
    ]
    return replace(comparison, contrasts=tuple(contrasts))


def _doubted(
    c: Contrast, tried: Mapping[str, Sequence[Tried]], chosen: Mapping[str, Values], how: Comparison
) -> float | None:
    """p with the tuning counted, or None where the t test itself has no value."""
    if c.t.p is None or c.t.left_out:
        return None
    d = np.array([pair.difference for pair in c.pairs])
    behind = c.baseline if d.mean() > 0 else c.treatment
    table = _table(tried.get(behind, ()), chosen[behind], how)
    n, rng = len(d), np.random.default_rng(0)
    s = d.std(ddof=1) / np.sqrt(rng.chisquare(n - 1, DRAWS) / (n - 1))
    delta = abs(d.mean()) + s / math.sqrt(n) * rng.standard_normal(DRAWS)
    if table is None:
        return 1.0
    m, k = table
    mu = m + (s / math.sqrt(2 * k))[:, None] * rng.standard_normal((DRAWS, len(m)))
    r = mu[:, 0] - mu.min(axis=1)
    count = int(np.sum(delta - r <= 0))
    return min(1.0, max(c.t.p, (2 * count + 1) / (DRAWS + 1)))


def _table(tried: Sequence[Tried], chosen: Values, how: Comparison) -> tuple[Array, int] | None:
    """(m(v) with the chosen value first, tuning seeds), of the values that no seed diverged at.

    None if the chosen one did, or if a tuning run is missing: what the arm may have lost is not known then.
    """
    if any(one.missing for one in tried):
        return None
    columns = {tuple(one.values.items()): np.array([_y(x, how) for x in one.scores]) for one in tried}
    own = columns.pop(tuple(chosen.items()), None)
    if own is None or not np.isfinite(own).all():
        return None
    others = [float(np.mean(y - own)) for y in columns.values() if np.isfinite(y).all()]
    return np.array([0.0, *others]), len(own)


def _y(value: float, how: Comparison) -> float:
    """The score on the scale of the comparison, less being better; NaN for a diverged run."""
    if not math.isfinite(value) or (how.log and value <= 0):
        return math.nan
    y = math.log10(value) if how.log else value
    return -y if how.higher_is_better else y
