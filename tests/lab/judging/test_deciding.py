"""The one p and interval: against the definition integrated by quadrature, and against scipy without a tuning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import scipy.stats

from kourkoutas.lab.judging import comparing
from kourkoutas.lab.tuning.luck import DRAWS, Lost, lost_by_tuning, nothing_lost

POINTS = 80  # of the quadrature in each of three directions; 200 move p by less than 0.001


def compared(a: Sequence[float], b: Sequence[float], lost: dict[str, Lost | None] | None = None, **how: Any) -> Any:
    values = {"a": dict(enumerate(a)), "b": dict(enumerate(b))}
    return comparing.compare_pairs(values, [("a", "b")], resamples=0, lost=lost, **how).contrasts[0]


def definition(d: Sequence[float], k: int, others: Sequence[float]) -> float:
    """2·P(δ - r ≤ 0) of the module's docstring, by quadrature: midpoints of equal shares of χ² and of z.

    Given s, r exceeds x ≥ 0 unless no other value of the arm is better than the chosen one by more than x.
    """
    n = len(d)
    share = (np.arange(POINTS) + 0.5) / POINTS
    s = np.std(d, ddof=1) * np.sqrt((n - 1) / scipy.stats.chi2.ppf(share, n - 1))
    chosen = scipy.stats.norm.ppf(share)  # z of the chosen value
    delta = scipy.stats.norm.ppf(share)  # z of δ
    s, chosen, delta = s[:, None, None], chosen[None, :, None], delta[None, None, :]
    x = abs(np.mean(d)) + s / math.sqrt(n) * delta
    # δ ≤ r if δ ≤ 0, or if one of the others lies below μ(chosen) - δ
    none_below = np.ones(np.broadcast(s, chosen, delta).shape)
    for m in others:
        none_below *= scipy.stats.norm.sf((s / math.sqrt(2 * k) * chosen - x - m) / (s / math.sqrt(2 * k)))
    return min(1.0, float(2 * np.mean(np.where(x <= 0, 1.0, 1 - none_below))))


def near(p: float) -> Any:
    """p by so many draws: three and a half standard errors of 2·(the share of draws), more than a mean of tails has."""
    return pytest.approx(p, abs=3.5 * 2 * math.sqrt(p / 2 * (1 - p / 2) / DRAWS))


BEHIND = {"one value": (), "as good": (0.0,), "worse": (0.4,), "better": (-0.5,), "many": (0.1, 0.3, 0.0, 2.0)}


@pytest.mark.parametrize("others", BEHIND.values(), ids=BEHIND)
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("d", [(0.9, 2.0, 1.4), (0.2, 1.1, 0.8, 0.1, 0.9)], ids=["3 pairs", "5 pairs"])
def test_p_is_the_probability_of_the_definition(d: Sequence[float], k: int, others: Sequence[float]) -> None:
    """a is ahead by d; b might have had other values, of means `others` above the chosen one over k tuning seeds."""
    scores = [np.arange(k) + m for m in (0.0, *others)]
    lost = {"a": nothing_lost, "b": lost_by_tuning(scores, 0)}
    found = compared(np.zeros(len(d)), d, lost)
    assert found.p == near(definition(d, k, others))
    assert (found.tuned, found.test_name) == (True, "paired t with the luck of the tuning")
    # and the same with the arms in the other order, and with more being better
    other = compared(d, np.zeros(len(d)), {"a": lost["b"], "b": nothing_lost})
    assert other.p == pytest.approx(found.p)
    assert compared(-np.zeros(len(d)), -np.array(d), lost, higher_is_better=True).p == pytest.approx(found.p)


def test_without_a_tuning_p_and_interval_are_those_of_the_paired_t_test() -> None:
    d = [0.9, 2.0, 1.4, -0.3]
    found, wanted = compared([0.0] * 4, d), scipy.stats.ttest_1samp(d, 0)
    assert (found.p, found.tuned) == (pytest.approx(wanted.pvalue), False)
    ends = wanted.confidence_interval()
    assert [found.effect.interval.low, found.effect.interval.high] == pytest.approx([ends.low, ends.high])
    once = dict.fromkeys("ab", lost_by_tuning([[3.0]], 0))
    tuned = compared([0.0] * 4, d, once)
    assert tuned.p == near(wanted.pvalue)
    assert [tuned.effect.interval.low, tuned.effect.interval.high] == pytest.approx([ends.low, ends.high], abs=0.1)


def test_without_a_tuning_ranks_decide_where_a_run_was_lost_with_their_hodges_lehmann_interval() -> None:
    d = np.array([0.4, 1.1, 2.3, -0.6, 3.2, 1.9, 0.8])
    found = compared([0.0] * 8, [*d, math.nan])
    everything = [*d, 1e6]  # a finite value beyond all others has the same ranks
    assert found.p == pytest.approx(scipy.stats.wilcoxon(everything, method="exact").pvalue)
    walsh = [(x + y) / 2 for i, x in enumerate(everything) for y in everything[i:]]
    assert found.effect.value == pytest.approx(np.median(walsh))
    # the ends are where the test of d - x reaches its level: just inside it does not reject, just outside it does
    for end, side in ((found.effect.interval.low, -1), (found.effect.interval.high, 1)):
        if math.isfinite(end):
            inside, outside = (
                scipy.stats.wilcoxon(np.array(everything) - end - side * step, method="exact").pvalue
                for step in (-1e-6, 1e-6)
            )
            assert inside >= 0.05 >= outside


def test_the_optimizer_behind_gets_the_benefit_of_the_doubt_only_where_its_tuning_leaves_one() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal(10), 1.8 + rng.standard_normal(10)
    p = scipy.stats.ttest_rel(a, b).pvalue
    assert p < 0.05
    sharp, flat = lost_by_tuning([[0.0] * 3, [9.0] * 3], 0), lost_by_tuning([[0.0] * 3, *[[0.1, 0.0, 0.0]] * 4], 0)
    clear, doubtful = compared(a, b, {"a": flat, "b": sharp}), compared(a, b, {"a": sharp, "b": flat})
    assert (clear.verdict, doubtful.verdict) == ("better", "unclear")
    assert clear.p == pytest.approx(p, rel=0.25, abs=0.002)
    assert doubtful.p > 5 * p


@pytest.mark.parametrize("how", ["diverged", "failed"])
def test_the_luck_of_the_tuning_counts_where_a_run_was_lost_too(how: str) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal(10), 1.6 + rng.standard_normal(10)
    b[4] = math.nan
    flat = dict.fromkeys("ab", lost_by_tuning([[0.0] * 3, *[[0.1, 0.0, 0.0]] * 4], 0))
    failed = {"b": {4}} if how == "failed" else None
    counted = {"failed": failed, "count_failed": True}
    without, with_luck = compared(a, b, **counted), compared(a, b, flat, **counted)
    assert (without.test, with_luck.test) == ("Wilcoxon", "Wilcoxon")
    assert (without.verdict, with_luck.verdict) == ("better", "unclear")
    assert with_luck.p > without.p
    assert with_luck.effect.interval.holds(0.0)
    assert (with_luck.failed, with_luck.diverged) == (((0, 1), (0, 0)) if failed else ((0, 0), (0, 1)))


def test_a_value_is_compared_with_the_chosen_one_on_the_seeds_that_both_have() -> None:
    lost = lost_by_tuning([[0.0, 0.0, math.nan], [math.nan, -5.0, math.nan], [math.nan, math.nan, -9.0]], 0)
    assert lost is not None
    # s = 0: the second value is better by 5 on the one common seed; the third has none in common with the chosen one
    assert lost(np.zeros(3)).tolist() == [5.0, 5.0, 5.0]


def test_where_nobody_knows_what_was_lost_nothing_is_clear() -> None:
    assert lost_by_tuning([[math.nan, math.nan], [1.0, 1.0]], 0) is None
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal(10), 5 + rng.standard_normal(10)
    found = compared(a, b, {"a": nothing_lost, "b": None})
    assert (found.p, found.verdict, found.effect.interval, found.detectable) == (1.0, "unclear", None, None)
    # what the one ahead may have lost is not asked for
    assert compared(a, b, {"a": None, "b": nothing_lost}).verdict == "better"


def test_two_lost_runs_of_a_seed_are_no_pair_of_finite_runs() -> None:
    found = compared([1.0, 2.0, 3.5, math.nan], [2.0, 3.5, 4.0, math.nan])
    assert (found.test, found.ties) == ("Wilcoxon", 1)


def test_differences_without_variance_have_no_p() -> None:
    once = dict.fromkeys("ab", lost_by_tuning([[0.0]], 0))
    assert (compared([1.0] * 3, [2.0] * 3, once).p, compared([1.0] * 3, [2.0] * 3, once).verdict) == (None, "untested")
