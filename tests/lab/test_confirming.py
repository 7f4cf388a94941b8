"""The luck of the tuning, counted: p against its definition integrated by quadrature, and what is left uncounted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import scipy.stats

from kourkoutas.lab.judging import confirming, stats
from kourkoutas.lab.judging.confirming import counted
from kourkoutas.lab.planning.search import Tried

CHOSEN = {"a": {"lr": 1.0}, "b": {"lr": 1.0}}
POINTS = 80  # of the quadrature in each of three directions; 200 move p by less than 0.001


def comparison(a: Sequence[float], b: Sequence[float], **more: Any) -> stats.Comparison:
    values = {"a": dict(enumerate(a)), "b": dict(enumerate(b))}
    return stats.compare_pairs(values, [("a", "b")], resamples=10, **more)


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
    """p by 10,000 draws: three and a half standard errors of 2·(the share of draws)."""
    return pytest.approx(p, abs=3.5 * 2 * math.sqrt(p / 2 * (1 - p / 2) / 10_000))


BEHIND = {"one value": (), "as good": (0.0,), "worse": (0.4,), "better": (-0.5,), "many": (0.1, 0.3, 0.0, 2.0)}


@pytest.mark.parametrize("others", BEHIND.values(), ids=BEHIND)
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("d", [(0.9, 2.0, 1.4), (0.2, 1.1, 0.8, 0.1, 0.9)], ids=["3 pairs", "5 pairs"])
def test_p_is_the_probability_of_the_definition(d: Sequence[float], k: int, others: Sequence[float]) -> None:
    """a is ahead by d; b might have had other values, of means `others` above the chosen one over k tuning seeds."""
    b = [
        Tried({"lr": 1.0}, tuple(np.arange(k))),
        *(Tried({"lr": 2.0 + i}, tuple(np.arange(k) + m)) for i, m in enumerate(others)),
    ]
    a = [Tried({"lr": 1.0}, (math.nan,))]  # of the arm ahead nothing is read
    how = comparison(np.zeros(len(d)), np.array(d))
    (found,) = counted(how, {"a": a, "b": b}, CHOSEN).contrasts
    assert found.p == near(definition(d, k, others))
    assert found.test == confirming.TEST
    # and the same with the arms in the other order
    how = stats.compare_pairs(
        {"a": dict(enumerate(np.zeros(len(d)))), "b": dict(enumerate(d))}, [("b", "a")], resamples=10
    )
    assert counted(how, {"a": a, "b": b}, CHOSEN).contrasts[0].p == found.p


def test_without_another_value_p_is_that_of_the_paired_t_test() -> None:
    d = np.array([0.9, 2.0, 1.4, -0.3])
    (found,) = counted(comparison(0 * d, d), {key: [Tried({"lr": 1.0}, (3.0,))] for key in "ab"}, CHOSEN).contrasts
    assert found.p == near(scipy.stats.ttest_1samp(d, 0).pvalue)


def test_p_is_at_most_one() -> None:
    d = np.array([0.1, -0.1, 0.05, 0.0])
    flat = [Tried({"lr": float(i)}, (0.0,)) for i in range(1, 9)]
    (found,) = counted(comparison(0 * d, d), {"a": flat, "b": flat}, CHOSEN).contrasts
    assert found.p == 1.0


def test_the_family_is_adjusted_with_the_new_p_and_ranks_where_a_run_diverged() -> None:
    rng = np.random.default_rng(3)
    values = {
        "a": dict(enumerate(rng.normal(size=9))),
        "b": dict(enumerate([*(3 + rng.normal(size=8)), math.inf])),
        "c": dict(enumerate(0.9 + rng.normal(size=9))),
    }
    how = stats.compare_pairs(values, [("a", "b"), ("a", "c")], resamples=10)
    chosen = {key: {"lr": 1.0} for key in "abc"}
    ranks, luck = counted(how, {key: [Tried({"lr": 1.0}, (0.0,))] for key in "abc"}, chosen).contrasts
    assert (ranks.test, ranks.p) == ("Wilcoxon", how.contrasts[0].p)
    assert luck.p == near(scipy.stats.ttest_rel(list(values["a"].values()), list(values["c"].values())).pvalue)
    # Holm: the smaller p twice, the larger once but not below that
    assert ranks.p < luck.p
    assert ranks.p_holm == pytest.approx(2 * ranks.p)
    assert luck.p_holm == pytest.approx(max(2 * ranks.p, luck.p))


def scale(*, log: bool = False, higher_is_better: bool = False) -> stats.Comparison:
    return comparison([1.0, 2.0], [2.0, 4.0], log=log, higher_is_better=higher_is_better)


def test_scores_lie_on_the_scale_of_the_comparison() -> None:
    assert confirming._y(-3.0, scale()) == -3.0
    assert confirming._y(-3.0, scale(higher_is_better=True)) == 3.0
    assert confirming._y(1000.0, scale(log=True)) == pytest.approx(3.0)
    assert confirming._y(0.01, scale(log=True, higher_is_better=True)) == pytest.approx(2.0)
    for diverged, how in ((0.0, scale(log=True)), (-1.0, scale(log=True)), (math.nan, scale()), (math.inf, scale())):
        assert math.isnan(confirming._y(diverged, how))
    assert confirming._y(0.0, scale()) == 0.0


def test_the_table_has_the_chosen_value_first_and_the_means_of_the_others_above_it() -> None:
    tried = [
        Tried({"lr": 2.0, "wd": 0.1}, (5.0, 5.0)),
        Tried({"lr": 1.0, "wd": 0.1}, (1.0, 3.0)),
        Tried({"lr": 1.0, "wd": 0.2}, (math.nan, 0.0)),
        Tried({"lr": 3.0, "wd": 0.1}, (0.0, 3.0)),
    ]
    m, k = confirming._table(tried, {"lr": 1.0, "wd": 0.1}, scale())
    assert (m.tolist(), k) == ([0.0, 3.0, -0.5], 2)
    m, k = confirming._table(tried, {"lr": 1.0, "wd": 0.1}, scale(higher_is_better=True))
    assert (m.tolist(), k) == ([0.0, -3.0, 0.5], 2)
    assert confirming._table(tried, {"lr": 1.0, "wd": 0.2}, scale()) is None


def test_the_arm_behind_gets_the_benefit_of_the_doubt_only_where_its_tuning_leaves_one() -> None:
    rng = np.random.default_rng(0)
    noise = rng.standard_normal(10)
    how = comparison(noise, 1.6 + rng.standard_normal(10))
    assert how.contrasts[0].t.p is not None
    assert how.contrasts[0].t.p < 0.05
    chosen = {"a": {"lr": 1.0}, "b": {"lr": 1.0}}
    sharp = [Tried({"lr": 1.0}, (0.0, 0.0, 0.0)), Tried({"lr": 2.0}, (9.0, 9.0, 9.0))]
    flat = [Tried({"lr": 1.0}, (0.0, 0.0, 0.0)), *(Tried({"lr": float(k)}, (0.1, 0.0, 0.0)) for k in range(2, 6))]
    (clear,) = counted(how, {"a": flat, "b": sharp}, chosen).contrasts
    (doubtful,) = counted(how, {"a": sharp, "b": flat}, chosen).contrasts
    assert clear.verdict == "better"
    assert clear.p == pytest.approx(how.contrasts[0].t.p, rel=0.25, abs=0.002)
    assert doubtful.verdict == "unclear"
    assert doubtful.p is not None
    assert doubtful.p > 5 * how.contrasts[0].t.p


def test_scores_of_which_more_is_better_and_ratios_are_read_on_the_scale_of_the_comparison() -> None:
    rng = np.random.default_rng(0)
    low, high = rng.standard_normal(10), 1.6 + rng.standard_normal(10)
    sharp = [Tried({"lr": 1.0}, (0.0, 0.0, 0.0)), Tried({"lr": 2.0}, (9.0, 9.0, 9.0))]
    chosen = {"a": {"lr": 1.0}, "b": {"lr": 1.0}}
    (plain,) = counted(comparison(low, high), {"a": sharp, "b": sharp}, chosen).contrasts
    turned = [Tried(one.values, tuple(-x for x in one.scores)) for one in sharp]
    (upside,) = counted(comparison(-low, -high, higher_is_better=True), {"a": turned, "b": turned}, chosen).contrasts
    powers = [Tried(one.values, tuple(10**x for x in one.scores)) for one in sharp]
    (ratios,) = counted(comparison(10**low, 10**high, log=True), {"a": powers, "b": powers}, chosen).contrasts
    assert plain.verdict == upside.verdict == ratios.verdict == "better"
    assert plain.p == pytest.approx(upside.p) == pytest.approx(ratios.p)


def test_a_diverged_run_leaves_the_verdict_by_ranks() -> None:
    how = comparison([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [2.0, 3.5, 4.0, 5.5, 6.0, math.nan])
    sharp = [Tried({"lr": 1.0}, (0.0,)), Tried({"lr": 2.0}, (9.0,))]
    (found,) = counted(how, {"a": sharp, "b": sharp}, {"a": {"lr": 1.0}, "b": {"lr": 1.0}}).contrasts
    assert (found.verdict, found.test, found.p) == (how.contrasts[0].verdict, "Wilcoxon", how.contrasts[0].p)


def test_an_arm_whose_chosen_value_diverged_while_it_was_tuned_leaves_no_verdict() -> None:
    rng = np.random.default_rng(0)
    how = comparison(rng.standard_normal(10), 5 + rng.standard_normal(10))
    chosen = {"a": {"lr": 1.0}, "b": {"lr": 1.0}}
    fine = [Tried({"lr": 1.0}, (0.0, 0.0))]
    broken = [Tried({"lr": 1.0}, (0.0, math.nan)), Tried({"lr": 2.0}, (1.0, 1.0))]
    (found,) = counted(how, {"a": fine, "b": broken}, chosen).contrasts
    assert (found.p, found.verdict) == (1.0, "unclear")
    # a value that diverged is none that the arm might have had
    others = [*fine, Tried({"lr": 2.0}, (-9.0, math.inf))]
    (found,) = counted(how, {"a": fine, "b": others}, chosen).contrasts
    assert found.verdict == "better"


def test_differences_without_variance_have_no_luck_to_count() -> None:
    how = comparison([1.0, 1.0, 1.0], [2.0, 2.0, 2.0])
    tried = [Tried({"lr": 1.0}, (0.0,))]
    (found,) = counted(how, {"a": tried, "b": tried}, {"a": {"lr": 1.0}, "b": {"lr": 1.0}}).contrasts
    assert found == how.contrasts[0]
