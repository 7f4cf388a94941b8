"""Paired statistics: the paper's Testbed C table, hand values, independent formulas, invariances and hard cases."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats as scipy_stats
from statsmodels.stats.multitest import multipletests

from kourkoutas.lab.judging import contrasts, intervals, stats, summaries, tables, values
from kourkoutas.lab.judging import tests as judged

TABLE = Path(__file__).parent / "data" / "rare_trigger.csv"  # the paper's Testbed C table: final loss by seed
QUICK = {"resamples": 199}


def printed(comparison: stats.Comparison, width: int = 100) -> str:
    console = Console(width=width, record=True, quiet=True)
    with console.capture() as capture:
        console.quiet = False
        console.print(tables.render(comparison))
    return capture.get()


def against(treatment: list[float], baseline: list[float], **options: object) -> stats.Contrast:
    values = {"new": dict(enumerate(treatment)), "old": dict(enumerate(baseline))}
    return stats.contrast(values, "new", "old", **{**QUICK, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("baseline", "t", "p", "ratio", "low", "high"),
    [("adam95", 4.288, 0.00203, 1.0987, 1.0455, 1.1546), ("adam999", 4.805, 0.000968, 4.127, 2.117, 8.043)],
)
def test_the_papers_table_gives_its_recomputed_statistics(
    baseline: str, t: float, p: float, ratio: float, low: float, high: float
) -> None:
    found = stats.compare(tables.read_table(TABLE), baseline=baseline, log=True).contrasts[0]
    assert (found.treatment, found.baseline, found.n) == ("kbeta", baseline, 10)
    assert found.t.df == 9
    assert found.t.t == pytest.approx(t, abs=5e-4)
    assert found.t.p == pytest.approx(p, rel=3e-3)
    assert found.wilcoxon.p == pytest.approx(0.00977, abs=5e-6)
    assert found.sign.p == pytest.approx(0.109, abs=5e-4)
    assert (found.wins, found.ties, found.losses) == (8, 0, 2)
    assert found.ratio is not None
    assert found.ratio.ci is not None
    last_digit = 5e-5 if baseline == "adam95" else 5e-4
    found_ratio = [found.ratio.value, found.ratio.ci.low, found.ratio.ci.high]
    assert found_ratio == pytest.approx([ratio, low, high], abs=last_digit)
    assert found.verdict == "better"


def test_the_papers_medians_come_back() -> None:
    comparison = stats.compare(tables.read_table(TABLE), baseline="adam999", log=True, **QUICK)
    medians = {s.optimizer: s.median for s in comparison.summaries}
    assert medians == pytest.approx({"kbeta": 0.0012545, "adam95": 0.0013675, "adam999": 0.008593}, rel=1e-6)
    assert comparison.contrasts[0].median == pytest.approx(6.39, abs=5e-3)


def test_every_other_optimizer_is_compared_with_the_baseline() -> None:
    comparison = stats.compare(tables.read_table(TABLE), baseline="adam95", log=True, **QUICK)
    assert [(c.treatment, c.baseline) for c in comparison.contrasts] == [("kbeta", "adam95"), ("adam999", "adam95")]


def test_the_printed_tables_hold_every_seed_and_the_figures_and_fit_80_columns() -> None:
    comparison = stats.compare(tables.read_table(TABLE), baseline="adam95", log=True, **QUICK)
    text = printed(comparison, width=80)
    for expected in ("t(9) = 4.288", "0.00203", "0.00977", "1.0987 [1.0455, 1.1546]", "0.524838", "0.086955"):
        assert expected in text
    assert text.index("Effect sizes") < text.index("Tests, two-sided")
    assert max(map(len, text.splitlines())) <= 80


def test_paired_t_matches_hand_arithmetic() -> None:
    # d = 1, 2, 3, 4: mean 2.5, sd √(5/3), t = 2.5/(√(5/3)/2) = 3.87298, 95 % half-width 3.18245·0.645497
    found = against([1, 1, 1, 1], [2, 3, 4, 5])
    assert found.t.t == pytest.approx(3.872983, abs=1e-6)
    assert found.t.d_z == pytest.approx(3.872983 / 2, abs=1e-6)
    assert found.t.r == pytest.approx(math.sqrt(15 / 18), abs=1e-9)  # t² = 15, df = 3
    assert found.difference is not None
    assert found.difference.value == pytest.approx(2.5)
    assert found.difference.ci is not None
    assert [found.difference.ci.low, found.difference.ci.high] == pytest.approx([0.445739, 4.554261], abs=1e-5)
    # P(|T₃| > t) in closed form: 1 - (2/π)(atan(t/√3) + (t/√3)/(1 + t²/3))
    x = 3.872983 / math.sqrt(3)
    assert found.t.p == pytest.approx(1 - 2 / math.pi * (math.atan(x) + x / (1 + x * x)), rel=1e-5)


@pytest.mark.parametrize("d", [[1.0, -2.0, 3.0, 4.0, 5.0], [1.0, 1.0, -1.0, 2.0, 2.0, -3.0], [0.5, 0.5, 0.5, 0.5]])
def test_wilcoxon_equals_the_enumeration_of_all_signs(d: list[float]) -> None:
    size = np.abs(d)
    ranks = np.array([np.mean([1 + np.sum(size < x), np.sum(size <= x)]) for x in size])
    seen = sum(r for r, x in zip(ranks, d, strict=True) if x > 0)
    sums = [
        sum(r for r, up in zip(ranks, signs, strict=True) if up) for signs in itertools.product([0, 1], repeat=len(d))
    ]
    below, above = np.mean([w <= seen for w in sums]), np.mean([w >= seen for w in sums])
    found = stats.wilcoxon(np.array(d), np.zeros(len(d)))
    assert found.p == pytest.approx(min(1.0, 2 * min(below, above)), abs=1e-12)
    assert found.method.startswith("exact")


@given(st.lists(st.integers(-10_000, 10_000).filter(bool), min_size=1, max_size=25, unique_by=abs))
@settings(max_examples=40, deadline=None)
def test_wilcoxon_without_ties_equals_scipys_exact_test(d: list[int]) -> None:
    found = stats.wilcoxon(np.array(d, float), np.zeros(len(d)))
    expected = scipy_stats.wilcoxon(d, method="exact")
    assert found.p == pytest.approx(expected.pvalue, abs=1e-12)
    assert found.statistic == expected.statistic


def test_differences_equal_but_for_rounding_share_their_rank() -> None:
    # 0.3 - 0.2 and 0.2 - 0.1 differ in the last bits of a double
    found = against([0.2, 0.1, 0.5], [0.3, 0.2, 0.1])
    assert found.wilcoxon.rank_biserial == pytest.approx((1.5 + 1.5 - 3) / 6)
    assert "tied" in found.wilcoxon.method


def test_many_pairs_fall_back_to_the_normal_approximation_and_say_so() -> None:
    rng = np.random.default_rng(1)
    d = rng.normal(0.1, 1, stats.EXACT_UP_TO + 1)
    found = stats.wilcoxon(d, np.zeros(len(d)))
    assert found.method == "normal approximation"
    assert found.p == pytest.approx(scipy_stats.wilcoxon(d, method="asymptotic").pvalue, rel=1e-9)


@pytest.mark.parametrize(
    ("wins", "losses", "p"), [(10, 0, 2 / 1024), (9, 1, 22 / 1024), (8, 2, 112 / 1024), (1, 1, 1.0), (0, 0, None)]
)
def test_sign_test_matches_binomial_sums(wins: int, losses: int, p: float | None) -> None:
    assert stats.sign_test(wins, losses).p == (None if p is None else pytest.approx(p, rel=1e-12))


def test_mcnemar_matches_its_binomial_sum_and_counts_diverged_runs_as_failures() -> None:
    nan = math.nan
    new = np.array([1.0, 1, 1, 1, 1, 1, 9, 9, nan, 1])
    old = np.array([9.0, 9, 9, 9, 9, nan, 1, 9, nan, 1])
    found = stats.mcnemar(new, old, threshold=2.0)
    assert (found.both, found.only_treatment, found.only_baseline, found.neither) == (1, 6, 1, 2)
    assert found.p == pytest.approx(2 * (1 + 7) / 2**7)  # 2·P(X ≤ 1), X ~ Binomial(7, ½)
    assert found.rate_difference == pytest.approx(0.5)


@pytest.mark.parametrize(("k", "n"), [(0, 10), (10, 10), (0, 1)])
def test_clopper_pearson_matches_its_closed_form_at_the_ends(k: int, n: int) -> None:
    ci = stats.clopper_pearson(k, n)
    edge = 0.025 ** (1 / n)
    assert [ci.low, ci.high] == pytest.approx([edge, 1.0] if k else [0.0, 1 - edge], abs=1e-12)


def test_clopper_pearson_inverts_the_binomial_tails() -> None:
    ci = stats.clopper_pearson(8, 10)
    assert sum(math.comb(10, j) * ci.low**j * (1 - ci.low) ** (10 - j) for j in (8, 9, 10)) == pytest.approx(0.025)
    assert sum(math.comb(10, j) * ci.high**j * (1 - ci.high) ** (10 - j) for j in range(9)) == pytest.approx(0.025)


def test_holm_matches_the_step_down_by_hand() -> None:
    assert stats.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert stats.holm([0.5, 0.9]) == [1.0, 1.0]
    assert stats.holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
@settings(max_examples=10, deadline=None)
def test_holm_equals_statsmodels(p_values: list[float]) -> None:
    assert stats.holm(p_values) == pytest.approx(multipletests(p_values, method="holm")[1])


def test_holm_counts_a_contrast_without_a_p_value() -> None:
    assert stats.holm([0.01, None]) == [pytest.approx(0.02), None]


def test_iqm_drops_the_outer_quarters() -> None:
    assert stats.iqm(np.array([100.0, 1, 2, 3, 4, 5, 6, -50])) == pytest.approx((2 + 3 + 4 + 5) / 4)


def test_quantiles_equal_numpys_on_finite_values() -> None:
    x = np.random.default_rng(0).normal(size=11)
    assert [stats.quantile(x, q) for q in (0, 0.25, 0.4, 1)] == pytest.approx(np.quantile(x, [0, 0.25, 0.4, 1]))


def test_bootstrap_intervals_cover_the_mean_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(7)
    inside = 0
    for _ in range(200):
        ci = stats.bootstrap_ci(rng.exponential(size=30), np.mean, 0.9, resamples=399)
        assert ci is not None
        assert ci.method == "BCa bootstrap"
        inside += ci.holds(1.0)
    assert 160 <= inside <= 196  # 0.9·200 = 180, ± 4 binomial standard deviations, less BCa's shortfall at n = 30


def test_bootstrap_intervals_are_the_same_every_time() -> None:
    x = np.random.default_rng(0).normal(size=9)
    assert stats.bootstrap_ci(x, np.median) == stats.bootstrap_ci(x, np.median)


positive = st.floats(1e-6, 1e3)
pairs = st.lists(st.tuples(positive, positive), min_size=2, max_size=12)


@given(pairs, st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_the_order_of_seeds_does_not_matter(xy: list[tuple[float, float]], rng: object) -> None:
    shuffled = list(range(len(xy)))
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    plain = {"new": {i: xy[i][0] for i in range(len(xy))}, "old": {i: xy[i][1] for i in range(len(xy))}}
    mixed = {name: {i: seeds[i] for i in shuffled} for name, seeds in plain.items()}
    one = stats.compare(plain, baseline="old", log=True, **QUICK).to_dict()
    two = stats.compare(mixed, baseline="old", log=True, **QUICK).to_dict()
    assert one == two


@given(pairs, st.booleans())
@settings(max_examples=25, deadline=None)
def test_swapping_the_arms_flips_signs_and_keeps_p_values(xy: list[tuple[float, float]], log: bool) -> None:
    new, old = [x for x, _ in xy], [y for _, y in xy]
    one, two = against(new, old, log=log), against(old, new, log=log)
    assert (one.wins, one.ties, one.losses) == (two.losses, two.ties, two.wins)
    assert one.improvement == pytest.approx(1 - two.improvement)
    assert one.difference is not None
    assert two.difference is not None
    assert one.difference.value == pytest.approx(-two.difference.value)
    assert (one.t.p is None) == (two.t.p is None)
    if one.t.p is not None and two.t.p is not None and one.t.t is not None and two.t.t is not None:
        assert one.t.p == pytest.approx(two.t.p)
        assert one.t.t == pytest.approx(-two.t.t)
        assert one.t.r == pytest.approx(two.t.r)
    assert one.wilcoxon.p == (None if two.wilcoxon.p is None else pytest.approx(two.wilcoxon.p))
    assert one.sign.p == two.sign.p
    flipped = {"better": "worse", "worse": "better"}
    assert one.verdict == flipped.get(two.verdict, two.verdict)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=3, max_size=10), st.sampled_from([0.125, 8, 1e3])
)
@settings(max_examples=25, deadline=None)
def test_scaling_all_values_leaves_log_results_alone(xy: list[tuple[int, int]], scale: float) -> None:
    one = against([float(x) for x, _ in xy], [float(y) for _, y in xy], log=True)
    two = against([x * scale for x, _ in xy], [y * scale for _, y in xy], log=True)
    assert one.ratio is not None
    assert two.ratio is not None
    assert one.ratio.value == pytest.approx(two.ratio.value)
    assert one.wilcoxon.p == (None if two.wilcoxon.p is None else pytest.approx(two.wilcoxon.p))
    assert (one.t.p is None) == (two.t.p is None)
    if one.t.p is not None:
        assert one.t.p == pytest.approx(two.t.p, rel=1e-6)


def test_higher_is_better_mirrors_the_analysis() -> None:
    accuracy = against([0.9, 0.8, 0.95], [0.7, 0.75, 0.6], higher_is_better=True)
    loss = against([0.7, 0.75, 0.6], [0.9, 0.8, 0.95])
    assert (accuracy.wins, accuracy.t.t) == (loss.wins, pytest.approx(loss.t.t)) == (3, pytest.approx(loss.t.t))


def test_diverged_runs_are_counted_ranked_worst_and_left_out_of_t_with_a_note() -> None:
    found = against([1, 2, 3, math.nan, 1], [2, 4, 6, 1, math.inf])
    assert (found.diverged_treatment, found.diverged_baseline) == (1, 1)
    assert (found.wins, found.ties, found.losses) == (4, 0, 1)
    assert (found.t.n, found.t.left_out, found.t.df) == (3, 2, 2)
    # |d| = 1, 2, 3 and two infinite ones that share rank 4.5: W⁺ = 1+2+3+4.5, W⁻ = 4.5
    assert found.wilcoxon.statistic == 4.5
    assert any("2 of 5 pairs hold a diverged run (new: 1, old: 1)" in note for note in found.notes)


def test_two_diverged_runs_of_a_seed_tie() -> None:
    found = against([1, math.nan], [2, math.inf])
    assert (found.wins, found.ties, found.losses) == (1, 1, 0)
    assert found.improvement == 0.75


def test_divergence_cannot_be_hidden_behind_good_finite_seeds() -> None:
    finite = against([1, 1.1, 1.2, 1.05], [2, 2.2, 2.1, 2.3])
    diverging = against([1, 1.1, 1.2, 1.05, *[math.nan] * 6], [2, 2.2, 2.1, 2.3, *[2.0] * 6])
    assert finite.verdict == "better"
    assert diverging.t.p == pytest.approx(finite.t.p)
    assert diverging.verdict != "better"
    assert diverging.wilcoxon.rank_biserial is not None
    assert diverging.wilcoxon.rank_biserial < 0


def test_medians_count_diverged_runs_as_the_worst() -> None:
    summary = stats.summarise("a", [1.0, 2.0, math.nan, math.inf, math.nan])
    assert (summary.n, summary.diverged, summary.q1, summary.mean) == (5, 3, 2.0, 1.5)
    assert summary.median == math.inf
    assert stats.summarise("a", [1.0, 2.0, math.nan], higher_is_better=True).median == 1.0
    assert tables.show(summary.median) == "diverged"


def test_an_optimizer_that_always_diverges_is_reported_not_dropped() -> None:
    values = {"a": {0: 1.0, 1: 2.0, 2: 3.0}, "b": {0: math.nan, 1: math.nan, 2: math.nan}}
    comparison = stats.compare(values, baseline="a", log=True, threshold=2.0, **QUICK)
    assert comparison.summaries[1].diverged == 3
    assert comparison.summaries[1].mean is None
    assert comparison.contrasts[0].difference is None
    assert comparison.contrasts[0].losses == 3
    assert "b: 3 of 3 runs diverged" in printed(comparison)


def test_one_seed_gives_the_pair_and_no_test() -> None:
    found = against([1.0], [2.0], log=True)
    assert found.ratio is not None
    assert found.ratio.value == pytest.approx(2.0)
    assert (found.ratio.ci, found.t.t, found.t.p, found.t.d_z, found.t.r) == (None,) * 5
    assert found.verdict == "untested"
    assert any("one finite pair" in note for note in found.notes)


@pytest.mark.parametrize("log", [False, True])
def test_equal_differences_have_no_t_and_say_so(log: bool) -> None:
    old = [0.3, 0.6, 1.2, 0.9]
    new = [x / 3 for x in old] if log else [x - 0.1 for x in old]
    found = against(new, old, log=log)
    assert (found.t.t, found.t.p) == (None, None)
    assert found.wins == 4
    assert found.verdict == "untested"
    assert any("the differences are all equal" in note for note in found.notes)


def test_identical_arms_are_called_identical() -> None:
    found = against([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], log=True)
    assert (found.verdict, found.ties, found.wilcoxon.p, found.sign.p) == ("identical", 3, None, None)
    assert any("3 pairs are equal" in note for note in found.notes)


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_log_refuses_values_that_have_none(value: float) -> None:
    with pytest.raises(ValueError, match=rf"'b' has {value} for seed 4: leave out --log"):
        stats.compare({"a": {3: 1.0, 4: 1.0}, "b": {3: 1.0, 4: value}}, baseline="a", log=True)


def test_unmatched_seeds_are_listed_and_only_common_ones_paired() -> None:
    values = {"new": {0: 1.0, 1: 1.5, 2: 1.0}, "old": {1: 2.0, 2: 3.0, 3: 4.0, 10: 2.0}}
    found = stats.contrast(values, "new", "old", **QUICK)
    assert [pair.seed for pair in found.pairs] == [1, 2]
    assert any("new has no partner in old for seed 0:" in note for note in found.notes)
    assert any("old has no partner in new for seeds 3, 10:" in note for note in found.notes)


def test_a_note_about_all_contrasts_is_printed_once() -> None:
    values = {"a": {0: 1.0, 1: 2.0}, "b": {0: 2.0, 1: 2.7}, "c": {0: 3.0, 1: 3.5}}
    notes = stats.all_notes(stats.compare(values, baseline="c", **QUICK))
    assert notes == ["every contrast: 2 finite pairs: no exact two-sided p-value can be below 0.5"]


def test_no_common_seed_is_an_error() -> None:
    with pytest.raises(ValueError, match="no seed in common"):
        stats.compare({"a": {0: 1.0}, "b": {1: 1.0}}, baseline="a")


def test_an_unknown_baseline_names_the_near_one() -> None:
    with pytest.raises(ValueError, match=r"got 'adam59' \(did you mean 'adam95'\?\)"):
        stats.compare(tables.read_table(TABLE), baseline="adam59")


@pytest.mark.parametrize(
    ("values", "message"),
    [({"a": {0: 1.0}}, "only 'a'"), ({"a": {0: 1.0}, "b": {}}, "no value for 'b'"), ({}, "got 'a'")],
)
def test_too_little_to_compare_is_an_error(values: stats.Values, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stats.compare(values, baseline="a")


def test_json_is_strict_and_complete() -> None:
    values = {"a": {0: 1.0, 1: math.nan, 2: 2.0}, "b": {0: 2.0, 1: 3.0, 2: math.inf}}
    plain = stats.compare(values, baseline="b", threshold=1.5, **QUICK).to_dict()
    back = json.loads(json.dumps(plain, allow_nan=False))
    assert back["values"]["a"]["1"] == "nan"
    assert back["contrasts"][0]["verdict"] == "unclear"
    assert back["contrasts"][0]["mcnemar"]["only_treatment"] == 1
    assert {"d_z", "r", "t", "p", "p_holm", "df"} <= back["contrasts"][0]["t"].keys()


def test_a_table_may_have_other_columns_separators_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\ufeffOptimizer;note;Value;Seed\n\nb;x;1e-3;s1\nb;;nan;2\n", encoding="utf-8")
    found = tables.read_table(path)
    assert list(found) == ["b"]
    assert found["b"]["s1"] == 1e-3
    assert math.isnan(found["b"]["2"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"t\.csv: holds no rows"),
        ("seed,optimizer,value\n", r"t\.csv: holds no rows"),
        ("seed,name,value\n0,a,1\n", r"line 1: column 'optimizer' is missing \(found seed, name, value\)"),
        ("seed,seed,optimizer,value\n", r"line 1: column 'seed' appears more than once"),
        ("seed,optimizer,value\n0,a,1\n1,a,low\n", r"line 3, column 'value': 'low' is not a number; write it as"),
        ("seed,optimizer,value\n0,a,\n", r"line 2, column 'value': '' is not a number.*nan for a diverged run"),
        ("seed,optimizer,value\n0,a,1\n,a,1\n", r"line 3, column 'seed': empty"),
        ("seed,optimizer,value\n0,a,1\n0,a,2\n", r"line 3, column 'seed': 'a' has seed 0 already on line 2"),
        ("seed,optimizer,value\n0,a,1,5\n", r"line 2: 4 fields where the first line names 3 columns"),
    ],
)
def test_a_broken_table_names_file_line_column_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        tables.read_table(path)


def test_a_missing_folder_or_binary_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.csv: no such file"):
        tables.read_table(tmp_path / "gone.csv")
    with pytest.raises(ValueError, match="is a folder"):
        tables.read_table(tmp_path)
    (tmp_path / "b.csv").write_bytes(b"seed\xff")
    with pytest.raises(ValueError, match="byte 4 is not UTF-8"):
        tables.read_table(tmp_path / "b.csv")


def test_labels_with_brackets_are_printed_whole() -> None:
    values = {"kbeta[alpha=0.85]": {0: 1.0, 1: 2.0}, "kbeta[alpha=0.9]": {0: 1.5, 1: 2.5}}
    text = printed(stats.compare(values, baseline="kbeta[alpha=0.9]", **QUICK), width=200)
    assert "kbeta[alpha=0.85] vs kbeta[alpha=0.9]" in text
    assert text.count("kbeta[alpha=0.85]") > 3


TWO = {"a": {0: 1.0, 1: 2.0, 2: 4.0}, "b": {0: 2.0, 1: 3.0, 2: 7.0}}


def test_planned_pairs_are_compared_plainly_at_95_percent_unless_told_otherwise():
    found = stats.compare_pairs(TWO, [("a", "b")], resamples=0)
    assert (found.log, found.higher_is_better, found.confidence, found.threshold) == (False, False, 0.95, None)


@pytest.mark.parametrize("confidence", [0, 1, 1.5, -0.1])
def test_a_confidence_at_or_beyond_its_ends_is_refused(confidence):
    with pytest.raises(ValueError, match="`confidence`"):
        stats.compare_pairs(TWO, [("a", "b")], confidence=confidence)


def test_a_note_of_the_only_contrast_names_it():
    found = stats.compare_pairs(TWO, [("a", "b")], resamples=0)
    assert found.contrasts[0].notes
    assert all(note.startswith("a vs b: ") for note in stats.all_notes(found)[len(found.notes) :])
    three = stats.compare_pairs({**TWO, "c": TWO["a"]}, [("a", "b"), ("c", "b")], resamples=0)
    assert any(note.startswith("every contrast: ") for note in stats.all_notes(three))


def test_the_defaults_of_compare_are_those_of_planned_pairs():
    found = stats.compare(TWO, baseline="b", resamples=0)
    assert (found.log, found.higher_is_better, found.confidence) == (False, False, 0.95)


@pytest.mark.parametrize(("arms", "pairs", "noted"), [(4, 2, False), (4, 3, True)])
def test_bootstraps_are_left_out_above_a_number_of_arms_and_contrasts(arms, pairs, noted, monkeypatch):
    assert stats.BOOTSTRAPPED == 200
    monkeypatch.setattr(stats, "BOOTSTRAPPED", 6)
    resampled = []
    real = stats.summarise

    def summarise(*args, resamples, **options):
        resampled.append(resamples)
        return real(*args, resamples=0, **options)

    monkeypatch.setattr(stats, "summarise", summarise)
    values = {f"arm{i}": TWO["a"] for i in range(arms)}
    found = stats.compare_pairs(values, [(f"arm{i + 1}", "arm0") for i in range(pairs)], resamples=7)
    assert any("no bootstrap intervals" in note for note in found.notes) == noted
    assert set(resampled) == {0 if noted else 7}


def test_a_ratio_beyond_a_double_is_infinite() -> None:
    found = against([1e-300, 1e-300], [1e300, 1e299], log=True)
    assert found.ratio is not None
    assert found.ratio.value == math.inf
    assert found.difference is not None
    assert found.difference.value == pytest.approx(599.5)


def test_a_statistic_without_finite_resamples_has_no_bootstrap_interval() -> None:
    def broken(values: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.full(values.shape[:-1], np.nan)

    assert intervals.bootstrap_ci(np.arange(5.0), broken, resamples=99) is None


# Edges: what is just inside and just outside of a rule


def test_differences_have_variance_when_they_spread_by_more_than_their_rounding() -> None:
    rounding = np.array([1.0, 0.5])
    assert judged.paired_t(np.array([0.0, 2.0]), rounding).t is None
    # mean 1.25, sd 2.5/√2, so t = 1.25/(2.5/2) = 1
    found = judged.paired_t(np.array([0.0, 2.5]), rounding)
    assert (found.t, found.left_out, found.df) == (pytest.approx(1.0), 0, 1)
    assert judged.paired_t(np.array([1.0]), np.zeros(1)).df == 0
    assert judged.paired_t(np.array([]), np.zeros(0)).df == 0


def test_sizes_share_a_rank_up_to_the_sum_of_their_roundings() -> None:
    assert judged._midranks(np.array([1.0, 3.0]), np.array([0.5, 1.5])).tolist() == [1.5, 1.5]
    assert judged._midranks(np.array([1.0, 3.01]), np.array([0.5, 1.5])).tolist() == [1.0, 2.0]


def test_the_smallest_exact_p_is_that_of_all_signs_alike() -> None:
    found = judged.wilcoxon(np.arange(1.0, 6.0), np.zeros(5))
    assert found.p == found.floor == 2 / 2**5
    assert judged.wilcoxon(np.zeros(3), np.zeros(3)).floor is None
    assert judged.wilcoxon(np.array([1.0, -1.0]), np.zeros(2)).p == 1.0
    many = judged.wilcoxon(np.arange(1.0, judged.EXACT_UP_TO + 2), np.zeros(judged.EXACT_UP_TO + 1))
    assert many.floor is None


def test_a_threshold_is_met_by_a_value_on_it_and_lower_is_better_unless_told() -> None:
    found = judged.mcnemar(np.array([1.0, 2.0, 1.0]), np.array([1.5, 1.0, 2.0]), 1.0)
    assert (found.both, found.only_treatment, found.only_baseline, found.neither) == (0, 2, 1, 0)
    assert found.rate_difference == pytest.approx(1 / 3)
    found = judged.mcnemar(np.array([2.0, math.inf]), np.array([1.5, 3.0]), 2.0, higher_is_better=True)
    assert (found.both, found.only_treatment, found.only_baseline, found.neither) == (0, 1, 1, 0)


def test_intervals_are_of_95_percent_unless_told() -> None:
    x = np.array([1.0, 2.0, 4.0, 7.0])
    assert intervals.t_interval(x) == intervals.t_interval(x, 0.95)
    assert intervals.clopper_pearson(3, 10) == intervals.clopper_pearson(3, 10, 0.95)
    assert intervals.bootstrap_ci(x, np.mean, resamples=99) == intervals.bootstrap_ci(x, np.mean, 0.95, 99)
    exact = scipy_stats.binomtest(3, 10).proportion_ci(0.95)
    assert intervals.clopper_pearson(3, 10).low == pytest.approx(exact.low)
    assert intervals.clopper_pearson(3, 10).high == pytest.approx(exact.high)
    wanted = scipy_stats.ttest_1samp(x, 0).confidence_interval(0.95)
    assert [intervals.t_interval(x).low, intervals.t_interval(x).high] == pytest.approx([wanted.low, wanted.high])


def test_bootstrap_intervals_are_scipys_with_seed_0() -> None:
    x = np.array([1.0, 2.0, 4.0, 7.0, 7.5])
    for resamples in (99, 9_999):
        wanted = scipy_stats.bootstrap(
            (x,), np.mean, n_resamples=resamples, method="BCa", rng=np.random.default_rng(0)
        ).confidence_interval
        found = intervals.bootstrap_ci(x, np.mean, resamples=resamples)
        assert found == intervals.Interval(wanted.low, wanted.high, "BCa bootstrap")
    assert intervals.bootstrap_ci(x, np.mean) == found  # 9,999 unless told
    assert intervals.bootstrap_ci(x[:2], np.mean, resamples=99) is not None
    assert intervals.bootstrap_ci(x[:1], np.mean, resamples=99) is None
    assert intervals.bootstrap_ci(x, np.mean, resamples=0) is None
    assert intervals.bootstrap_ci(x, np.mean, resamples=1) is not None
    assert intervals.bootstrap_ci(np.arange(2_000.0), np.mean, resamples=2) is not None
    assert intervals.bootstrap_ci(np.arange(2_001.0), np.mean, resamples=2) is None
    assert intervals.bootstrap_ci(np.array([1.0, math.inf]), np.mean, resamples=99) is None


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
    assert intervals.quantile(np.array([-1e308, 1e308]), 0.75) == pytest.approx(5e307)


def test_an_interval_holds_its_ends() -> None:
    ci = intervals.Interval(1.0, 2.0, "t")
    assert [ci.holds(x) for x in (0.9, 1.0, 1.5, 2.0, 2.1)] == [False, True, True, True, False]


def test_rates_of_none_and_of_all() -> None:
    # 1 - (α/2)^(1/n) above none of n; (α/2)^(1/n) below all
    assert intervals.clopper_pearson(0, 5).low == 0.0
    assert intervals.clopper_pearson(0, 5).high == pytest.approx(1 - 0.025 ** (1 / 5))
    assert intervals.clopper_pearson(5, 5).low == pytest.approx(0.025 ** (1 / 5))
    assert intervals.clopper_pearson(5, 5).high == 1.0


def test_a_verdict_at_the_level_itself_is_unclear_and_two_pairs_can_have_one() -> None:
    found = against([1.0, 1.0, 1.0, 1.0], [2.0, 3.0, 4.0, 5.0])
    assert (found.verdict, found.family) == ("better", 1)
    assert replace(found, p_holm=1 - found.confidence).verdict == "unclear"
    assert replace(found, p_holm=None).verdict == "untested"
    two = against([1.0, 1.0], [2.0, 2.000001])
    assert two.p is not None
    assert (two.p < 0.05, two.verdict) == (True, "better")
    assert against([2.0, 2.000001], [1.0, 1.0]).verdict == "worse"


def test_half_a_tie_is_half_a_win() -> None:
    found = against([1.0, 1.0, 1.0, 3.0], [2.0, 2.0, 1.0, 1.0])
    assert (found.wins, found.ties, found.losses, found.improvement) == (2, 1, 1, 2.5 / 4)
    assert found.improvement_ci == intervals.clopper_pearson(2.5, 4)


def test_quartiles_of_differences_and_of_ratios() -> None:
    baseline = [2.0, 3.0, 5.0, 9.0, 17.0]
    plain, ratio = against([1.0] * 5, baseline), against([1.0] * 5, baseline, log=True)
    assert (plain.q1, plain.median, plain.q3) == (2.0, 4.0, 8.0)
    assert (ratio.q1, ratio.median, ratio.q3) == pytest.approx((3.0, 5.0, 9.0))


def test_percentages_of_either_sense_on_either_scale() -> None:
    # lower is better: 100·(1 - treatment/baseline); higher is better: 100·(treatment/baseline - 1)
    assert contrasts.percent_of(math.log10(2), None, True, False) == pytest.approx(50)
    assert contrasts.percent_of(math.log10(3), None, True, True) == pytest.approx(200)
    assert contrasts.percent_of(0.5, 2.0, False, False) == contrasts.percent_of(0.5, 2.0, False, True) == 25
    assert contrasts.percent_of(0.5, None, False, False) is None
    assert contrasts.baseline_size(np.array([-1.0, -3.0])) == 2.0
    assert contrasts.baseline_size(np.array([1.0, 0.0])) is None
    assert contrasts.baseline_size(np.array([-1.0, 0.0])) is None
    assert contrasts.baseline_size(np.array([])) is None


def test_notes_of_few_of_equal_and_of_tied_pairs() -> None:
    five, six = ([1.0] * n for n in (5, 6))
    assert any("no exact two-sided p-value can be below 0.0625" in n for n in against(five, [2, 3, 4, 5, 7]).notes)
    assert against(six, [2, 3, 4, 5, 7, 9]).notes == ()
    one, two = against([1, 1, 1], [1, 2, 4]), against([1, 1, 1, 1], [1, 1, 2, 4])
    assert any(note.startswith("1 pair is equal: set aside") for note in one.notes)
    assert any(note.startswith("2 pairs are equal: set aside") for note in two.notes)
    values = {"new": {0: 1.0, 1: 2.0, 5: 1.0}, "old": {0: 2.0, 1: 4.0, 7: 1.0, 8: 1.0}}
    assert contrasts.unpaired(values, "new", "old") == [
        "new has no partner in old for seed 5: not part of this contrast",
        "old has no partner in new for seeds 7, 8: not part of this contrast",
    ]


def test_the_summary_of_one_arm_by_hand() -> None:
    found = summaries.summarise("a", [1.0, 3.0, 100.0, 10.0, math.nan], threshold=3.0, log=True, resamples=99)
    assert (found.n, found.diverged) == (5, 1)
    assert found.mean == pytest.approx(28.5)
    assert found.sd == pytest.approx(np.std([1, 3, 100, 10], ddof=1))
    assert found.geometric_mean == pytest.approx(3000 ** (1 / 4))
    assert (found.q1, found.median, found.q3) == (3.0, 10.0, 100.0)
    assert found.iqm == pytest.approx((3 + 10 + 100) / 3)
    assert found.median_ci is None  # a diverged run
    assert found.success == summaries.Rate(2, 5, 0.4, intervals.clopper_pearson(2, 5))
    one = summaries.summarise("a", [4.0], higher_is_better=True)
    assert (one.mean, one.sd, one.geometric_mean, one.success) == (4.0, None, None, None)
    two = summaries.summarise("a", [4.0, 6.0])
    assert two.sd == pytest.approx(math.sqrt(2))
    none = summaries.summarise("a", [math.nan, math.inf], log=True)
    assert (none.mean, none.sd, none.geometric_mean, none.median, none.diverged) == (None, None, None, math.inf, 2)
    high = summaries.summarise("a", [math.nan, 1.0, 2.0], higher_is_better=True)
    assert (high.median, high.q1) == (1.0, -math.inf)


def test_lists_in_sentences_stop_after_twenty() -> None:
    assert values.listed(range(20)).endswith(", 18, 19")
    assert values.listed(range(21)).endswith(", 18, 19, … (21 in all)")
    assert values.in_order(["b", 10, "a", 9]) == [9, 10, "a", "b"]


def test_zero_has_no_logarithm_and_what_is_not_finite_is_no_value() -> None:
    with pytest.raises(ValueError, match=r"`log` needs values > 0; 'a' has 0.0 for seed 1"):
        values.check_positive({"a": {0: 1.0, 1: 0.0}}, ["a"])
    values.check_positive({"a": {0: 1e-300, 1: math.nan, 2: -math.inf}}, ["a"])
    assert values.all_positive({"a": {0: 1.0, 1: math.nan, 2: -math.inf}})
    assert not values.all_positive({"a": {0: 1.0}, "b": {0: 0.0}})
    assert values.plain({"x": [math.nan, (math.inf, -math.inf, 1.5)], 3: None}) == {
        "x": ["nan", ["inf", "-inf", 1.5]],
        "3": None,
    }


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


def test_the_unit_is_one_but_for_sizes_whose_squares_are_no_doubles() -> None:
    for plain in ([], [0.0], [1e-100], [0.5, -3.0], [1e100], [math.nan, math.inf]):
        assert intervals.unit_of(np.array(plain)) == 1.0
    assert intervals.unit_of(np.array([0.1]), np.array([-3e300])) == 2.0 ** math.floor(math.log2(3e300))
    assert intervals.unit_of(np.array([5e-200])) == 2.0 ** math.floor(math.log2(5e-200))
    assert intervals.unit_of(np.array([5e-324])) == 2.0**-1000


@pytest.mark.parametrize("unit", [2.0**900, 2.0**-900])
def test_results_scale_with_values_whose_squares_are_no_doubles(unit: float) -> None:
    treatment, baseline = [1.0, 2.0, 1.5, 3.0], [2.0, 3.5, 2.0, 6.0]
    plain = against(treatment, baseline)
    scaled = against([x * unit for x in treatment], [x * unit for x in baseline])
    assert plain.difference is not None
    assert scaled.difference == intervals.effect_times(plain.difference, unit)
    assert scaled.difference.value == plain.difference.value * unit
    assert scaled.difference.ci is not None
    assert plain.difference.ci is not None
    assert scaled.difference.ci.low == plain.difference.ci.low * unit
    assert scaled.difference.ci.high == plain.difference.ci.high * unit
    assert (scaled.median, scaled.q1, scaled.q3) == (plain.median * unit, plain.q1 * unit, plain.q3 * unit)
    assert plain.baseline_size is not None
    assert (scaled.baseline_size, scaled.percent) == (plain.baseline_size * unit, plain.percent)
    assert [pair.difference for pair in scaled.pairs] == [pair.difference * unit for pair in plain.pairs]
    one, other = (summaries.summarise("a", [x * u for x in baseline], resamples=99) for u in (1.0, unit))
    assert one.mean is not None
    assert one.sd is not None
    ratios = summaries.summarise("a", [x * unit for x in baseline], log=True, resamples=0)
    assert ratios.geometric_mean == pytest.approx((2.0 * 3.5 * 2.0 * 6.0) ** (1 / 4) * unit)
    assert one.median_ci is not None
    assert other.median_ci is not None
    assert (other.mean, other.sd, other.iqm) == (one.mean * unit, one.sd * unit, one.iqm * unit)
    assert (other.median, other.q1, other.q3) == (one.median * unit, one.q1 * unit, one.q3 * unit)
    assert other.median_ci.high == one.median_ci.high * unit


def test_half_a_success_and_one_have_a_lower_end() -> None:
    # one of n: 1 - (1 - α/2)^(1/n)
    assert intervals.clopper_pearson(1, 10).low == pytest.approx(1 - 0.975 ** (1 / 10))
    assert 0 < intervals.clopper_pearson(0.5, 10).low < intervals.clopper_pearson(1, 10).low
    assert 1 > intervals.clopper_pearson(9.5, 10).high > intervals.clopper_pearson(9, 10).high


def test_the_difference_has_a_bootstrap_interval_where_it_varies() -> None:
    found = against([1, 1, 1, 1], [2, 3, 4, 6], resamples=199)
    assert found.difference is not None
    assert found.difference.bootstrap_ci == intervals.bootstrap_ci(np.array([1.0, 2, 3, 5]), np.mean, resamples=199)
    same = against([1, 1, 1], [2, 2, 2])
    assert same.difference is not None
    assert (same.difference.ci, same.difference.bootstrap_ci) == (None, None)


def test_ranks_decide_where_runs_of_both_diverged() -> None:
    nan = math.nan
    found = against([nan, *range(1, 9), 1], [1, *([nan] * 8), 1.5])
    assert (found.diverged_treatment, found.diverged_baseline, found.diverged) == (1, 8, 9)
    # ranks 1 and nine times 6, of which one 6 is negative: W⁻ ≤ 6 for no rank, for 1, or for one of nine, twice of 2¹⁰
    assert (found.test, found.p, found.verdict) == ("Wilcoxon", pytest.approx(22 / 1024), "better")
    lost = against([nan, 2.0, 3.0], [1.0, nan, 4.0])
    assert lost.diverged == 2
    won = against([1.0] * 7, [nan] * 7)
    assert (won.verdict, won.test, won.wilcoxon.rank_biserial) == ("better", "Wilcoxon", 1.0)


def test_percentages_come_with_their_interval() -> None:
    found = against([1, 1, 1, 1], [2, 3, 4, 7])
    assert found.percent is not None
    assert found.difference is not None
    assert found.percent.value == pytest.approx(100 * 3 / 4)  # mean difference 3 of a baseline of 4
    assert found.percent.ci is not None
    assert found.difference.ci is not None
    assert found.percent.ci.low == pytest.approx(25 * found.difference.ci.low)
    assert found.percent.ci.high == pytest.approx(25 * found.difference.ci.high)
    assert against([1, 1], [-2, 3]).percent is None


def test_five_pairs_can_reach_the_level_that_is_their_floor() -> None:
    assert against([1.0] * 5, [2, 3, 4, 5, 7], confidence=1 - 2.0**-4).notes == ()
