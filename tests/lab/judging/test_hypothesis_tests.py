"""Tests, quantiles and intervals, each against hand values, enumeration, or another package."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats
from statsmodels.stats.multitest import multipletests

from kourkoutas.lab.judging import comparing, intervals
from kourkoutas.lab.judging import hypothesis_tests as judged

TABLE = Path(__file__).parents[1] / "data" / "rare_trigger.csv"  # the paper's Testbed C table: final loss by seed


QUICK = {"resamples": 199}


def against(treatment: list[float], baseline: list[float], **options: object) -> comparing.Contrast:
    values = {"new": dict(enumerate(treatment)), "old": dict(enumerate(baseline))}
    return comparing.compare_pairs(values, [("new", "old")], **{**QUICK, **options}).contrasts[0]  # type: ignore[arg-type]


def test_paired_t_matches_hand_arithmetic() -> None:
    # d = 1, 2, 3, 4: mean 2.5, sd √(5/3), t = 2.5/(√(5/3)/2) = 3.87298, 95 % half-width 3.18245·0.645497
    found = against([1, 1, 1, 1], [2, 3, 4, 5])
    assert found.statistics["paired_t"].value == pytest.approx(3.872983, abs=1e-6)
    assert found.statistics["d_z"].value == pytest.approx(3.872983 / 2, abs=1e-6)
    assert found.statistics["r"].value == pytest.approx(math.sqrt(15 / 18), abs=1e-9)  # t² = 15, df = 3
    assert found.effect is not None
    assert found.effect.value == pytest.approx(2.5)
    assert found.effect.interval is not None
    assert [found.effect.interval.low, found.effect.interval.high] == pytest.approx([0.445739, 4.554261], abs=1e-5)
    # P(|T₃| > t) in closed form: 1 - (2/π)(atan(t/√3) + (t/√3)/(1 + t²/3))
    x = 3.872983 / math.sqrt(3)
    assert found.statistics["paired_t"].p == pytest.approx(1 - 2 / math.pi * (math.atan(x) + x / (1 + x * x)), rel=1e-5)


@pytest.mark.parametrize("d", [[1.0, -2.0, 3.0, 4.0, 5.0], [1.0, 1.0, -1.0, 2.0, 2.0, -3.0], [0.5, 0.5, 0.5, 0.5]])
def test_wilcoxon_equals_the_enumeration_of_all_signs(d: list[float]) -> None:
    size = np.abs(d)
    ranks = np.array([np.mean([1 + np.sum(size < x), np.sum(size <= x)]) for x in size])
    seen = sum(r for r, x in zip(ranks, d, strict=True) if x > 0)
    sums = [
        sum(r for r, up in zip(ranks, signs, strict=True) if up) for signs in itertools.product([0, 1], repeat=len(d))
    ]
    below, above = np.mean([w <= seen for w in sums]), np.mean([w >= seen for w in sums])
    found = judged.wilcoxon(np.array(d), np.zeros(len(d)))
    assert found.p == pytest.approx(min(1.0, 2 * min(below, above)), abs=1e-12)
    assert found.method.startswith("exact")


@given(st.lists(st.integers(-10_000, 10_000).filter(bool), min_size=1, max_size=25, unique_by=abs))
@settings(max_examples=40, deadline=None)
def test_wilcoxon_without_ties_equals_scipys_exact_test(d: list[int]) -> None:
    found = judged.wilcoxon(np.array(d, float), np.zeros(len(d)))
    expected = scipy_stats.wilcoxon(d, method="exact")
    assert found.p == pytest.approx(expected.pvalue, abs=1e-12)
    assert found.statistic == expected.statistic


def test_differences_equal_but_for_rounding_share_their_rank() -> None:
    # 0.3 - 0.2 and 0.2 - 0.1 differ in the last bits of a double
    found = against([0.2, 0.1, 0.5], [0.3, 0.2, 0.1])
    assert found.statistics["rank_biserial"].value == pytest.approx((1.5 + 1.5 - 3) / 6)
    assert "tied" in found.statistics["wilcoxon"].detail


def test_many_pairs_fall_back_to_the_normal_approximation_and_say_so() -> None:
    rng = np.random.default_rng(1)
    d = rng.normal(0.1, 1, judged.EXACT_UP_TO + 1)
    found = judged.wilcoxon(d, np.zeros(len(d)))
    assert found.method == "normal approximation"
    assert found.p == pytest.approx(scipy_stats.wilcoxon(d, method="asymptotic").pvalue, rel=1e-9)


@pytest.mark.parametrize(
    ("wins", "losses", "p"), [(10, 0, 2 / 1024), (9, 1, 22 / 1024), (8, 2, 112 / 1024), (1, 1, 1.0), (0, 0, None)]
)
def test_sign_test_matches_binomial_sums(wins: int, losses: int, p: float | None) -> None:
    assert judged.sign_test(wins, losses) == (None if p is None else pytest.approx(p, rel=1e-12))


def test_mcnemar_matches_its_binomial_sum_and_counts_diverged_runs_as_failures() -> None:
    nan = math.nan
    new = np.array([1.0, 1, 1, 1, 1, 1, 9, 9, nan, 1])
    old = np.array([9.0, 9, 9, 9, 9, nan, 1, 9, nan, 1])
    found = judged.mcnemar(new, old, threshold=2.0)
    assert (found.only_treatment, found.only_baseline) == (6, 1)
    assert found.p == pytest.approx(2 * (1 + 7) / 2**7)  # 2·P(X ≤ 1), X ~ Binomial(7, ½)
    assert found.rate_difference == pytest.approx(0.5)


@pytest.mark.parametrize(("k", "n"), [(0, 10), (10, 10), (0, 1)])
def test_clopper_pearson_matches_its_closed_form_at_the_ends(k: int, n: int) -> None:
    ci = intervals.clopper_pearson(k, n)
    edge = 0.025 ** (1 / n)
    assert [ci.low, ci.high] == pytest.approx([edge, 1.0] if k else [0.0, 1 - edge], abs=1e-12)


def test_clopper_pearson_inverts_the_binomial_tails() -> None:
    ci = intervals.clopper_pearson(8, 10)
    assert sum(math.comb(10, j) * ci.low**j * (1 - ci.low) ** (10 - j) for j in (8, 9, 10)) == pytest.approx(0.025)
    assert sum(math.comb(10, j) * ci.high**j * (1 - ci.high) ** (10 - j) for j in range(9)) == pytest.approx(0.025)


def test_holm_matches_the_step_down_by_hand() -> None:
    assert judged.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert judged.holm([0.5, 0.9]) == [1.0, 1.0]
    assert judged.holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
@settings(max_examples=10, deadline=None)
def test_holm_equals_statsmodels(p_values: list[float]) -> None:
    assert judged.holm(p_values) == pytest.approx(multipletests(p_values, method="holm")[1])


def test_holm_counts_a_contrast_without_a_p_value() -> None:
    assert judged.holm([0.01, None]) == [pytest.approx(0.02), None]


def test_quantiles_equal_numpys_on_finite_values() -> None:
    x = np.random.default_rng(0).normal(size=11)
    assert [intervals.quantile(x, q) for q in (0, 0.25, 0.4, 1)] == pytest.approx(np.quantile(x, [0, 0.25, 0.4, 1]))


def test_bootstrap_intervals_cover_the_mean_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(7)
    inside = 0
    for _ in range(200):
        ci = intervals.bootstrap_mean(rng.exponential(size=30), 0.9, resamples=399)
        assert ci is not None
        assert ci.method == "BCa bootstrap"
        inside += ci.holds(1.0)
    assert 160 <= inside <= 196  # 0.9·200 = 180, ± 4 binomial standard deviations, less BCa's shortfall at n = 30


def test_bootstrap_intervals_are_the_same_every_time() -> None:
    x = np.random.default_rng(0).normal(size=9)
    assert intervals.bootstrap_mean(x) == intervals.bootstrap_mean(x)


def test_differences_have_variance_when_they_spread_by_more_than_their_rounding() -> None:
    rounding = np.array([1.0, 0.5])
    assert judged.paired_t(np.array([0.0, 2.0]), rounding).t is None
    # mean 1.25, sd 2.5/√2, so t = 1.25/(2.5/2) = 1
    found = judged.paired_t(np.array([0.0, 2.5]), rounding)
    assert (found.t, found.df) == (pytest.approx(1.0), 1)
    assert judged.paired_t(np.array([1.0]), np.zeros(1)).df == 0
    assert judged.paired_t(np.array([]), np.zeros(0)).df == 0


def test_sizes_share_a_rank_up_to_the_sum_of_their_roundings() -> None:
    assert judged._midranks(np.array([1.0, 3.0]), np.array([0.5, 1.5])).tolist() == [1.5, 1.5]
    assert judged._midranks(np.array([1.0, 3.01]), np.array([0.5, 1.5])).tolist() == [1.0, 2.0]


def test_the_smallest_exact_p_is_that_of_all_signs_alike() -> None:
    assert judged.wilcoxon(np.arange(1.0, 6.0), np.zeros(5)).p == 2 / 2**5
    assert judged.wilcoxon(np.array([1.0, -1.0]), np.zeros(2)).p == 1.0


def test_a_threshold_is_met_by_a_value_on_it_and_lower_is_better_unless_told() -> None:
    found = judged.mcnemar(np.array([1.0, 2.0, 1.0]), np.array([1.5, 1.0, 2.0]), 1.0)
    assert (found.only_treatment, found.only_baseline) == (2, 1)
    assert found.rate_difference == pytest.approx(1 / 3)
    found = judged.mcnemar(np.array([2.0, math.inf]), np.array([1.5, 3.0]), 2.0, higher_is_better=True)
    assert (found.only_treatment, found.only_baseline, found.p) == (1, 1, 1.0)
    assert judged.mcnemar(np.array([1.0]), np.array([1.0]), 1.0).p == 1.0  # nobody disagrees


def test_intervals_are_of_95_percent_unless_told() -> None:
    x = np.array([1.0, 2.0, 4.0, 7.0])
    assert intervals.t_interval(x) == intervals.t_interval(x, 0.95)
    assert intervals.clopper_pearson(3, 10) == intervals.clopper_pearson(3, 10, 0.95)
    assert intervals.bootstrap_mean(x, resamples=99) == intervals.bootstrap_mean(x, 0.95, 99)
    exact = scipy_stats.binomtest(3, 10).proportion_ci(0.95)
    assert intervals.clopper_pearson(3, 10).low == pytest.approx(exact.low)
    assert intervals.clopper_pearson(3, 10).high == pytest.approx(exact.high)
    wanted = scipy_stats.ttest_1samp(x, 0).confidence_interval(0.95)
    assert [intervals.t_interval(x).low, intervals.t_interval(x).high] == pytest.approx([wanted.low, wanted.high])


def test_a_bootstrap_is_made_where_resamples_can_differ_and_of_9999_of_them_unless_told() -> None:
    x = np.array([1.0, 2.0, 4.0, 7.0, 7.5])
    assert intervals.bootstrap_mean(x) == intervals.bootstrap_mean(x, resamples=9_999)
    assert intervals.bootstrap_mean(np.ones(5), resamples=99) is None
    assert intervals.bootstrap_mean(x[:2], resamples=99) is not None
    assert intervals.bootstrap_mean(x[:1], resamples=99) is None
    assert intervals.bootstrap_mean(x, resamples=0) is None
    assert intervals.bootstrap_mean(x, resamples=1) is not None
    assert intervals.bootstrap_mean(np.arange(2_000.0), resamples=2) is not None
    assert intervals.bootstrap_mean(np.arange(2_001.0), resamples=2) is None


def test_where_bca_is_undefined_the_interval_is_a_percentile_one_and_says_so() -> None:
    found = intervals.bootstrap_mean(np.array([0.0, 0.0, 0.0, 1e-300]))
    assert found is not None
    assert found.method == "percentile bootstrap"
    assert 0 <= found.low < found.high <= 1e-300


def test_quantiles_between_infinite_neighbours() -> None:
    inf = math.inf
    assert intervals.quantile(np.array([-inf, inf]), 0.5) == 0.0
    assert intervals.quantile(np.array([1.0, inf]), 0.5) == inf
    assert intervals.quantile(np.array([-inf, 1.0]), 0.5) == -inf
    assert intervals.quantile(np.array([inf, inf]), 0.5) == inf
    assert intervals.quantile(np.array([1.0, 2.0, inf]), 0.5) == 2.0
    assert intervals.quantile(np.array([1.0, 2.0, inf]), 0.25) == 1.5
    assert intervals.quantile(np.array([0.0, 1.0, inf]), 0.75) == inf
    assert intervals.quantile(np.array([1.0, 1.0, 2.0]), 0.75) == 1.5


def test_an_interval_holds_its_ends() -> None:
    ci = intervals.Interval(1.0, 2.0, "t")
    assert [ci.holds(x) for x in (0.9, 1.0, 1.5, 2.0, 2.1)] == [False, True, True, True, False]


def test_rates_of_none_and_of_all() -> None:
    # 1 - (α/2)^(1/n) above none of n; (α/2)^(1/n) below all
    assert intervals.clopper_pearson(0, 5).low == 0.0
    assert intervals.clopper_pearson(0, 5).high == pytest.approx(1 - 0.025 ** (1 / 5))
    assert intervals.clopper_pearson(5, 5).low == pytest.approx(0.025 ** (1 / 5))
    assert intervals.clopper_pearson(5, 5).high == 1.0


def test_signed_ranks_by_hand() -> None:
    # ranks 1, 2, 3, 4 of which 2 is negative: W⁺ = 8, W⁻ = 2, (8 - 2)/10
    found = judged.wilcoxon(np.array([1.0, -2.0, 3.0, 4.0, 0.0]), np.zeros(5))
    assert (found.n, found.zeros, found.statistic) == (4, 1, 2.0)
    assert found.rank_biserial == pytest.approx(0.6)
    nothing = judged.wilcoxon(np.zeros(2), np.zeros(2))
    assert (nothing.n, nothing.zeros, nothing.p, nothing.method) == (0, 2, None, "no pair differs")


def test_signed_ranks_are_exact_up_to_500_pairs() -> None:
    d = np.arange(1.0, 502.0)
    d[::3] *= -1
    assert judged.wilcoxon(d[:500], np.zeros(500)).method == "exact"
    assert judged.wilcoxon(d, np.zeros(501)).method == "normal approximation"


def test_each_size_has_its_own_rounding() -> None:
    sizes, rounding = np.array([1.0, 3.0, 10.0, 10.5]), np.array([0.1, 0.1, 0.3, 0.3])
    assert judged._midranks(sizes, rounding).tolist() == [1.0, 2.0, 3.5, 3.5]
