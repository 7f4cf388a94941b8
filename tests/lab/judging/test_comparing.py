"""Paired statistics: the paper's Testbed C table, hand values, independent formulas, invariances and hard cases."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats as scipy_stats

from kourkoutas.lab.judging import comparing, intervals, statistics, table_file, values
from kourkoutas.lab.showing import console

TABLE = Path(__file__).parents[1] / "data" / "rare_trigger.csv"  # the paper's Testbed C table: final loss by seed
QUICK = {"resamples": 199}


def printed(comparison: comparing.Comparison, width: int = 100) -> str:
    terminal = Console(width=width)
    with terminal.capture() as capture:
        terminal.print(console.of_table(comparison))
    return capture.get()


def against(treatment: list[float], baseline: list[float], **options: object) -> comparing.Contrast:
    values = {"new": dict(enumerate(treatment)), "old": dict(enumerate(baseline))}
    return comparing.compare_pairs(values, [("new", "old")], **{**QUICK, **options}).contrasts[0]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("baseline", "t", "p", "ratio", "low", "high"),
    [("adam95", 4.288, 0.00203, 1.0987, 1.0455, 1.1546), ("adam999", 4.805, 0.000968, 4.127, 2.117, 8.043)],
)
def test_the_papers_table_gives_its_recomputed_statistics(
    baseline: str, t: float, p: float, ratio: float, low: float, high: float
) -> None:
    found = comparing.compare(table_file.read_table(TABLE), baseline=baseline, log=True, **QUICK).contrasts[0]
    assert (found.treatment, found.baseline, found.n) == ("kbeta", baseline, 10)
    assert found.statistics["paired_t"].detail == f"t(9) = {t:.3f}"
    assert found.statistics["paired_t"].p == pytest.approx(p, rel=3e-3)
    assert found.statistics["wilcoxon"].p == pytest.approx(0.00977, abs=5e-6)
    assert found.statistics["sign"].p == pytest.approx(0.109, abs=5e-4)
    assert (found.wins, found.ties, found.losses) == (8, 0, 2)
    mean = found.statistics["mean"]
    assert mean.interval is not None
    last_digit = 5e-5 if baseline == "adam95" else 5e-4
    assert [mean.value, mean.interval.low, mean.interval.high] == pytest.approx([ratio, low, high], abs=last_digit)
    assert found.verdict == "better"


def test_the_papers_medians_come_back() -> None:
    found = comparing.compare(table_file.read_table(TABLE), baseline="adam999", log=True, **QUICK)
    medians = {arm: own["median"].value for arm, own in found.arms.items()}
    assert medians == pytest.approx({"kbeta": 0.0012545, "adam95": 0.0013675, "adam999": 0.008593}, rel=1e-6)
    assert found.contrasts[0].statistics["median"].value == pytest.approx(6.39, abs=5e-3)


def test_the_printed_tables_hold_every_seed_and_the_figures_and_fit_80_columns() -> None:
    found = comparing.compare(table_file.read_table(TABLE), baseline="adam95", log=True, threshold=0.002, **QUICK)
    text = printed(found, width=80)
    for expected in ("t(9) = 4.288", "0.00203", "0.00977", "1.099 [1.045, 1.155]", "0.524838", "0.086955"):
        assert expected in text
    assert text.index("mean [t]") < text.index("t(9) = 4.288")  # effects first
    assert max(map(len, text.splitlines())) <= 80


def test_every_other_optimizer_is_compared_with_the_baseline() -> None:
    comparison = comparing.compare(table_file.read_table(TABLE), baseline="adam95", log=True, **QUICK)
    assert [(c.treatment, c.baseline) for c in comparison.contrasts] == [("kbeta", "adam95"), ("adam999", "adam95")]


positive = st.floats(1e-6, 1e3)
pairs = st.lists(st.tuples(positive, positive), min_size=2, max_size=12)


@given(pairs, st.randoms(use_true_random=False))
@settings(max_examples=25, deadline=None)
def test_the_order_of_seeds_does_not_matter(xy: list[tuple[float, float]], rng: object) -> None:
    shuffled = list(range(len(xy)))
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    straight = {"new": {i: xy[i][0] for i in range(len(xy))}, "old": {i: xy[i][1] for i in range(len(xy))}}
    mixed = {name: {i: seeds[i] for i in shuffled} for name, seeds in straight.items()}
    one = values.to_json(comparing.compare(straight, baseline="old", log=True, **QUICK))
    two = values.to_json(comparing.compare(mixed, baseline="old", log=True, **QUICK))
    assert one == two


@given(pairs, st.booleans())
@settings(max_examples=25, deadline=None)
def test_swapping_the_arms_flips_signs_and_keeps_p_values(xy: list[tuple[float, float]], log: bool) -> None:
    new, old = [x for x, _ in xy], [y for _, y in xy]
    one, two = against(new, old, log=log), against(old, new, log=log)
    assert (one.wins, one.ties, one.losses) == (two.losses, two.ties, two.wins)
    assert one.effect is not None
    assert two.effect is not None
    assert one.effect.value == pytest.approx(1 / two.effect.value if log else -two.effect.value)
    assert (one.statistics["paired_t"].p is None) == (two.statistics["paired_t"].p is None)
    if (
        one.statistics["paired_t"].p is not None
        and two.statistics["paired_t"].p is not None
        and one.statistics["paired_t"].value is not None
        and two.statistics["paired_t"].value is not None
    ):
        assert one.statistics["paired_t"].p == pytest.approx(two.statistics["paired_t"].p)
        assert one.statistics["paired_t"].value == pytest.approx(-two.statistics["paired_t"].value)
        assert one.statistics["r"].value == pytest.approx(two.statistics["r"].value)
    assert one.statistics["wilcoxon"].p == (
        None if two.statistics["wilcoxon"].p is None else pytest.approx(two.statistics["wilcoxon"].p)
    )
    assert one.statistics["sign"].p == two.statistics["sign"].p
    flipped = {"better": "worse", "worse": "better"}
    assert one.verdict == flipped.get(two.verdict, two.verdict)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=3, max_size=10), st.sampled_from([0.125, 8, 1e3])
)
@settings(max_examples=25, deadline=None)
def test_scaling_all_values_leaves_log_results_alone(xy: list[tuple[int, int]], scale: float) -> None:
    one = against([float(x) for x, _ in xy], [float(y) for _, y in xy], log=True)
    two = against([x * scale for x, _ in xy], [y * scale for _, y in xy], log=True)
    assert one.effect is not None
    assert two.effect is not None
    assert one.effect.value == pytest.approx(two.effect.value)
    assert one.statistics["wilcoxon"].p == (
        None if two.statistics["wilcoxon"].p is None else pytest.approx(two.statistics["wilcoxon"].p)
    )
    assert (one.statistics["paired_t"].p is None) == (two.statistics["paired_t"].p is None)
    if one.statistics["paired_t"].p is not None:
        assert one.statistics["paired_t"].p == pytest.approx(two.statistics["paired_t"].p, rel=1e-6)


def test_higher_is_better_mirrors_the_analysis() -> None:
    accuracy = against([0.9, 0.8, 0.95], [0.7, 0.75, 0.6], higher_is_better=True)
    loss = against([0.7, 0.75, 0.6], [0.9, 0.8, 0.95])
    assert (
        (accuracy.wins, accuracy.statistics["paired_t"].value)
        == (loss.wins, pytest.approx(loss.statistics["paired_t"].value))
        == (3, pytest.approx(loss.statistics["paired_t"].value))
    )


def test_diverged_runs_are_counted_ranked_worst_and_left_out_of_t_with_a_note() -> None:
    found = against([1, 2, 3, math.nan, 1], [2, 4, 6, 1, math.inf])
    assert (found.diverged, found.failed, found.lost) == ((1, 1), (0, 0), 2)
    assert (found.wins, found.ties, found.losses) == (4, 0, 1)
    assert found.statistics["paired_t"].detail.startswith("t(2) = ")
    # |d| = 1, 2, 3 and two infinite ones that share rank 4.5: W⁺ = 1+2+3+4.5, W⁻ = 4.5
    assert found.statistics["wilcoxon"].value == 4.5
    assert any("2 of 5 pairs hold a lost run" in note for note in found.notes)


def test_divergence_cannot_be_hidden_behind_good_finite_seeds() -> None:
    good, bad = [1, 1.1, 1.2, 1.05, 1.1, 1.0], [2, 2.2, 2.1, 2.3, 2.1, 2.05]
    finite = against(good, bad)
    diverging = against([*good, *[math.nan] * 8], [*bad, *[2.0] * 8])
    assert finite.verdict == "better"
    assert diverging.statistics["paired_t"].p == pytest.approx(finite.statistics["paired_t"].p)
    assert diverging.verdict != "better"
    assert diverging.statistics["rank_biserial"].value is not None
    assert diverging.statistics["rank_biserial"].value < 0


def test_one_seed_gives_the_pair_and_no_test() -> None:
    found = against([1.0], [2.0], log=True)
    assert found.effect is not None
    assert found.effect.value == pytest.approx(2.0)
    assert (found.effect.interval, found.statistics["paired_t"].value, found.statistics["paired_t"].p) == (None,) * 3
    assert not {"d_z", "r", "bootstrap"} & found.statistics.keys()
    assert found.verdict == "untested"
    assert any("one finite pair" in note for note in found.notes)


@pytest.mark.parametrize("log", [False, True])
def test_equal_differences_have_no_t_and_say_so(log: bool) -> None:
    old = [0.3, 0.6, 1.2, 0.9]
    new = [x / 3 for x in old] if log else [x - 0.1 for x in old]
    found = against(new, old, log=log)
    assert (found.statistics["paired_t"].value, found.statistics["paired_t"].p) == (None, None)
    assert found.wins == 4
    assert found.verdict == "untested"
    assert any("the differences are all equal" in note for note in found.notes)


def test_identical_arms_are_called_identical() -> None:
    found = against([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], log=True)
    assert (found.verdict, found.ties, found.statistics["wilcoxon"].p, found.statistics["sign"].p) == (
        "identical",
        3,
        None,
        None,
    )
    assert any("3 pairs are equal" in note for note in found.notes)


@pytest.mark.parametrize("value", [0.0, -1.0])
def test_log_refuses_values_that_have_none(value: float) -> None:
    with pytest.raises(ValueError, match=rf"`log` needs values > 0; 'b' has {value} for seed 4"):
        comparing.compare({"a": {3: 1.0, 4: 1.0}, "b": {3: 1.0, 4: value}}, baseline="a", log=True)


def test_unmatched_seeds_are_listed_and_only_common_ones_paired() -> None:
    values = {"new": {0: 1.0, 1: 1.5, 2: 1.0}, "old": {1: 2.0, 2: 3.0, 3: 4.0, 10: 2.0}}
    found = comparing.compare_pairs(values, [("new", "old")], **QUICK).contrasts[0]
    assert [pair.seed for pair in found.pairs] == [1, 2]
    assert any("new has no partner in old for seed 0:" in note for note in found.notes)
    assert any("old has no partner in new for seeds 3, 10:" in note for note in found.notes)


def test_an_unknown_baseline_names_the_near_one() -> None:
    with pytest.raises(ValueError, match=r"unknown baseline 'adam59': did you mean 'adam95'"):
        comparing.compare(table_file.read_table(TABLE), baseline="adam59")


@pytest.mark.parametrize(
    ("values", "message"),
    [({"a": {0: 1.0}}, "only 'a'"), ({"a": {0: 1.0}, "b": {}}, "no value for 'b'"), ({}, "unknown baseline 'a'")],
)
def test_too_little_to_compare_is_an_error(values: values.Values, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        comparing.compare(values, baseline="a")


def test_a_table_may_have_other_columns_separators_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("\ufeffOptimizer;note;Value;Seed\n\nb;x;1e-3;s1\nb;;nan;2\n", encoding="utf-8")
    found = table_file.read_table(path)
    assert list(found) == ["b"]
    assert found["b"]["s1"] == 1e-3
    assert math.isnan(found["b"]["2"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"t\.csv: No columns to parse from file; give a UTF-8 table with the columns seed, optimizer, value"),
        ("seed,optimizer,value\n", r"t\.csv: holds no rows"),
        ("seed,name,value\n0,a,1\n", r"line 1: found seed, name, value; name the columns seed, optimizer, value"),
        ("seed,seed,optimizer,value\n", r"line 1: found seed, seed, optimizer, value; name .* each once"),
        ("seed,optimizer,value\n0,a,1\n1,a,low\n", r"line 3: value 'low' is not a number; write 1.2e-3"),
        ("seed,optimizer,value\n0,a,\n", r"line 2: value '' is not a number.*nan if it diverged"),
        ("seed,optimizer,value\n0,a,1\n1,a\n", r"line 3: value '' is not a number.*nan if it diverged"),
        ("seed,optimizer,value\n0,a,1\n,a,1\n", r"line 3: seed or optimizer is empty; fill it in"),
        ("seed,optimizer,value\n0,a,1\n0,a,2\n", r"line 3: 'a' has seed 0 already; keep one value per optimizer"),
        ("seed,optimizer,value\n0,a,1,5\n", r"t\.csv: .*Expected 3 fields in line 2, saw 4; give a UTF-8 table"),
    ],
)
def test_a_broken_table_names_file_line_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        table_file.read_table(path)


def test_a_missing_folder_or_binary_table_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.csv: .*No such file or directory.*; give a UTF-8 table"):
        table_file.read_table(tmp_path / "gone.csv")
    with pytest.raises(ValueError, match=r"Is a directory.*; give a UTF-8 table"):
        table_file.read_table(tmp_path)
    (tmp_path / "b.csv").write_bytes(b"seed\xff")
    with pytest.raises(ValueError, match=r"b\.csv: .*in position 4.*; give a UTF-8 table"):
        table_file.read_table(tmp_path / "b.csv")


def test_labels_with_brackets_are_printed_whole() -> None:
    values = {"kbeta[alpha=0.85]": {0: 1.0, 1: 2.0}, "kbeta[alpha=0.9]": {0: 1.5, 1: 2.5}}
    text = printed(comparing.compare(values, baseline="kbeta[alpha=0.9]", **QUICK), width=200)
    assert "K-β [alpha=0.85] vs K-β [alpha=0.9]" in text
    assert text.count("K-β [alpha=0.85]") > 3


TWO = {"a": {0: 1.0, 1: 2.0, 2: 4.0}, "b": {0: 2.0, 1: 3.0, 2: 7.0}}


def test_a_ratio_beyond_a_double_is_infinite() -> None:
    found = against([1e-300, 1e-300], [1e90, 1e89], log=True)
    assert found.effect is not None
    assert found.effect.value == math.inf


# Edges: what is just inside and just outside of a rule


@pytest.mark.parametrize(("family", "least"), [(1, 6), (2, 7), (3, 7), (6, 8)])
def test_a_verdict_needs_pairs_enough_that_their_signs_could_give_it(family: int, least: int) -> None:
    assert family * 2.0 ** (1 - least) <= 0.05 < family * 2.0 ** (2 - least)
    spread = np.linspace(1.0, 1.000001, least)
    few, enough = (against([1.0] * n, list(1 + spread[:n]), family=family) for n in (least - 1, least))
    assert few.p is not None
    assert few.p < 1e-9  # however sure t is
    assert few.p_holm is None
    assert (few.verdict, enough.verdict) == ("untested", "better")
    assert f"{least - 1} pairs are too few" in few.why
    assert few.why.endswith(f", {least} are needed")
    assert any(note == few.why for note in few.notes)
    assert against(list(1 + spread), [1.0] * least, family=family).verdict == "worse"


def test_by_ranks_only_pairs_that_differ_are_counted() -> None:
    nan = math.nan
    six = against([1.0] * 7, [2.0, 2.1, 2.2, 2.3, 2.4, nan, 1.0])
    five = against([1.0] * 7, [2.0, 2.1, 2.2, 2.3, nan, 1.0, 1.0])
    assert (six.test, six.verdict, five.test, five.verdict) == ("Wilcoxon", "better", "Wilcoxon", "untested")
    assert five.why.startswith("5 pairs that differ are too few for 1 comparison")


def test_where_more_than_half_of_the_pairs_tie_ranks_give_no_verdict_and_the_note_says_why() -> None:
    nan = math.nan
    most = against([1.0] * 26, [*[1.0] * 20, 2.0, 2.1, 2.2, 2.3, 2.4, nan])
    assert most.effect is not None
    assert (most.effect.value, most.effect.interval, most.p) == (0.0, None, None)
    assert most.verdict == "untested"
    assert most.why == "20 of 26 pairs tie, more than half"
    assert most.why in most.notes
    assert most.statistics["wilcoxon"].p == pytest.approx(2 / 2**6)  # of the six that differ
    half = against([1.0] * 12, [*[1.0] * 6, 2.0, 2.1, 2.2, 2.3, 2.4, nan])
    assert half.effect is not None
    assert half.effect.interval is not None
    assert half.verdict == "better"
    assert half.effect.interval.low <= half.effect.value <= half.effect.interval.high
    assert half.effect.value > 0


def test_a_verdict_at_the_level_itself_is_unclear() -> None:
    d = np.array([0.4, 1.1, 2.3, -0.6, 0.7, 1.9, 0.8])

    def p_of(shift: float) -> float:
        return float(scipy_stats.ttest_1samp(d + shift, 0).pvalue)

    at = intervals.bisect(lambda shift: -p_of(shift), -0.05, -0.6, 1.0)
    below, above = (against([0.0] * 7, list(d + at + step)) for step in (1e-9, -1e-9))
    assert (below.verdict, above.verdict) == ("better", "unclear")


def test_notes_of_few_of_equal_and_of_tied_pairs() -> None:
    five, six = ([1.0] * n for n in (5, 6))
    assert "5 pairs are too few for 1 comparison, 6 are needed" in against(five, [2, 3, 4, 5, 7]).notes
    assert against(six, [2, 3, 4, 5, 7, 9]).notes == ()
    one, two = against([1, 1, 1], [1, 2, 4]), against([1, 1, 1, 1], [1, 1, 2, 4])
    assert any(note.startswith("1 pair is equal: set aside") for note in one.notes)
    assert any(note.startswith("2 pairs are equal: set aside") for note in two.notes)
    values = {"new": {0: 1.0, 1: 2.0, 5: 1.0}, "old": {0: 2.0, 1: 4.0, 7: 1.0, 8: 1.0}}
    assert comparing.unpaired(values, "new", "old") == [
        "new has no partner in old for seed 5: not part of this contrast",
        "old has no partner in new for seeds 7, 8: not part of this contrast",
    ]


def test_lists_in_sentences_stop_after_twenty() -> None:
    assert values.first_few(range(20)).endswith(", 18, 19")
    assert values.first_few(range(21)).endswith(", 18, 19, … (21 in all)")
    assert values.in_order(["b", 10, "a", 9]) == [9, 10, "a", "b"]


def test_zero_has_no_logarithm_and_what_is_not_finite_is_no_value() -> None:
    assert values.without_logarithm({"a": {0: 1e-300, 1: math.nan, 2: -math.inf}}) is None
    assert values.without_logarithm({"a": {0: 1.0}, "b": {0: 1.0, 1: 0.0}}) == ("b", 1)
    assert values.to_json({"x": [math.nan, (math.inf, -math.inf, 1.5)], 3: None}) == {
        "x": ["nan", ["inf", "-inf", 1.5]],
        "3": None,
    }


def test_two_diverged_runs_of_a_seed_tie() -> None:
    found = against([1, math.nan], [2, math.inf])
    assert (found.wins, found.ties, found.losses) == (1, 1, 0)


def test_a_value_beyond_1e100_is_a_diverged_run() -> None:
    found = against([1.0, 2.0, 1e101], [2.0, 3.5, 1e100])
    assert (found.diverged, found.test, found.losses) == ((1, 0), "Wilcoxon", 1)


def test_the_share_of_better_seeds_is_exact_with_ties_set_aside() -> None:
    found = against([1.0, 1.0, 1.0, 3.0, 5.0], [2.0, 2.0, 1.0, 1.0, 6.0]).statistics["better"]
    exact = scipy_stats.binomtest(3, 4).proportion_ci(0.95)
    assert found.value == 3 / 4
    assert found.interval is not None
    assert [found.interval.low, found.interval.high] == pytest.approx([exact.low, exact.high])
    assert found.detail == "3 of 4, 1 equal"
    assert "better" not in against([1.0, 2.0], [1.0, 2.0]).statistics


def test_quartiles_of_differences_and_of_ratios() -> None:
    baseline = [2.0, 3.0, 5.0, 9.0, 17.0]
    plain, ratio = (against([1.0] * 5, baseline, log=log).statistics["median"] for log in (False, True))
    assert plain.interval is not None
    assert ratio.interval is not None
    assert (plain.interval.low, plain.value, plain.interval.high) == (2.0, 4.0, 8.0)
    assert (ratio.interval.low, ratio.value, ratio.interval.high) == pytest.approx((3.0, 5.0, 9.0))


def test_the_statistics_of_one_arm_by_hand() -> None:
    given = {"a": dict(enumerate([1.0, 3.0, 100.0, 10.0, math.nan])), "b": {0: 1.0}, "c": {0: math.nan, 1: math.inf}}
    found = comparing.compare_pairs(given, [], threshold=3.0, log=True, resamples=0).arms
    a = found["a"]
    assert a["runs"].detail == "5, 1 lost"
    assert a["mean"].value == pytest.approx(28.5)
    assert a["mean"].detail.endswith(f"± {np.std([1, 3, 100, 10], ddof=1):.2g}")
    assert a["geometric_mean"].value == pytest.approx(3000 ** (1 / 4))
    assert (a["median"].value, a["median"].interval) == (10.0, intervals.Interval(3.0, 100.0, "quartiles"))
    assert (a["success"].detail, a["success"].interval) == ("2 of 5", intervals.clopper_pearson(2, 5))
    assert found["b"]["mean"].detail == "1"
    assert not {"mean", "geometric_mean"} & found["c"].keys()
    assert found["c"]["median"].value == math.inf
    assert statistics.show(math.inf) == "diverged"
    high = comparing.compare_pairs({"a": {0: math.nan, 1: 1.0, 2: 2.0}}, [], higher_is_better=True).arms["a"]
    assert (high["median"].value, high["median"].interval) == (1.0, intervals.Interval(-math.inf, 1.5, "quartiles"))


def test_percentages_of_means_have_fiellers_interval() -> None:
    x, y = np.array([1.0, 1.2, 0.9, 1.1]), np.array([2.0, 3.0, 4.0, 7.0])
    found = against(list(x), list(y)).percent
    assert found is not None
    assert found.value == pytest.approx(100 * (y - x).mean() / y.mean())
    assert found.interval is not None
    # Fieller's ends are those ratios ρ at which the paired t test of (y - x) - ρ·y just reaches its level.
    for end in (found.interval.low, found.interval.high):
        assert scipy_stats.ttest_1samp((y - x) - end / 100 * y, 0).pvalue == pytest.approx(0.05)
    assert against([1, 1], [-2, 3]).percent is None


def test_percentages_of_ratios_in_either_sense() -> None:
    lower = against([1.0, 1.0, 1.0], [2.0, 2.1, 1.9], log=True).percent
    higher = against([3.0, 3.3, 3.6], [1.0, 1.1, 1.2001], log=True, higher_is_better=True).percent
    assert lower is not None
    assert higher is not None
    assert lower.value == pytest.approx(100 * (1 - (2.0 * 2.1 * 1.9) ** (-1 / 3)))
    assert higher.value == pytest.approx(200, rel=1e-3)


def test_an_optimizer_that_always_diverges_is_reported_not_dropped() -> None:
    given = {"a": dict(enumerate([1.0, 2.0, 3.0])), "b": dict.fromkeys(range(3), math.nan)}
    found = comparing.compare(given, baseline="a", log=True, threshold=2.0, **QUICK)
    assert found.arms["b"]["runs"].detail == "3, 3 lost"
    assert (found.contrasts[0].losses, found.contrasts[0].percent) == (3, None)
    assert "3, 3 lost" in printed(found)


def test_ranks_decide_where_runs_of_both_diverged() -> None:
    nan = math.nan
    found = against([nan, *range(1, 9), 1], [1, *([nan] * 8), 1.5])
    assert (found.diverged, found.lost) == ((1, 8), 9)
    # ranks 1 and nine times 6, of which one 6 is negative: W⁻ ≤ 6 for no rank, for 1, or for one of nine, twice of 2¹⁰
    assert (found.test, found.p, found.verdict) == ("Wilcoxon", pytest.approx(22 / 1024), "better")
    won = against([1.0] * 7, [nan] * 7)
    assert (won.verdict, won.test) == ("better", "Wilcoxon")


def test_json_is_strict_and_holds_every_statistic() -> None:
    given = {"a": {0: 1.0, 1: math.nan, 2: 2.0, 3: 1.0}, "b": {0: 2.0, 1: 3.0, 2: math.inf, 3: 1.7}}
    back = json.loads(
        json.dumps(values.to_json(comparing.compare(given, baseline="b", threshold=1.5, **QUICK)), allow_nan=False)
    )
    assert back["values"]["a"]["1"] == "nan"
    (contrast,) = back["contrasts"]
    assert contrast["verdict"] == "untested"
    assert contrast["statistics"]["mcnemar"]["detail"] == "only first 2, only other 0"
    assert {one.name for one in statistics.OF_CONTRASTS} == contrast["statistics"].keys()


def test_adding_a_statistic_touches_its_function_and_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    def largest(pairs: statistics.Paired) -> statistics.Finding:
        return statistics.Finding(float(pairs.both.max()))

    new = statistics.Statistic("largest", "largest difference", largest, statistics.with_interval)
    monkeypatch.setattr(comparing, "OF_CONTRASTS", (*statistics.OF_CONTRASTS, new))
    found = comparing.compare(TWO, baseline="b", **QUICK)
    assert values.to_json(found)["contrasts"][0]["statistics"]["largest"]["value"] == 3.0
    assert "largest difference" in printed(found)  # and the page prints the same rows, see test_report


def test_notes_name_whom_they_are_about_once() -> None:
    (note,) = comparing.compare(TWO, baseline="b", **QUICK).notes
    assert note == "a vs b: 3 pairs are too few for 1 comparison, 6 are needed"
    three = comparing.compare({**TWO, "c": {0: 1.0, 1: 2.5, 2: 3.0}}, baseline="b", **QUICK)
    assert three.notes == ("every contrast: 3 pairs are too few for 2 comparisons, 7 are needed",)


def test_pairs_without_a_seed_in_common_are_named() -> None:
    found = comparing.compare({"a": {0: 1.0}, "b": {1: 1.0}}, baseline="a", **QUICK)
    assert (found.contrasts, found.missing) == ((), (("b", "a"),))
    assert "not compared: b vs a" in found.notes[0]


def test_intervals_of_a_family_are_all_at_the_same_level_whatever_the_data() -> None:
    rng = np.random.default_rng(0)
    given = {
        arm: dict(enumerate(5 + shift + rng.normal(size=8))) for arm, shift in (("a", 0.0), ("b", 0.9), ("c", 1.0))
    }
    for c in comparing.compare_pairs(given, [("a", "b"), ("a", "c")], family=3, **QUICK).contrasts:
        assert c.p is not None
        assert c.p_holm is not None
        assert c.effect is not None
        assert c.effect.interval is not None
        d = [pair.difference for pair in c.pairs]
        wanted = scipy_stats.ttest_1samp(d, 0).confidence_interval(1 - 0.05 / 3)
        assert [c.effect.interval.low, c.effect.interval.high] == pytest.approx([wanted.low, wanted.high])
        assert c.effect.interval.holds(0.0) or c.p_holm < 0.05


def test_the_detectable_difference_is_found_four_times_out_of_five() -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=10), 0.3 + rng.normal(size=10)
    c = against(list(x), list(y))
    assert c.detectable is not None
    nc = c.detectable / np.std(y - x, ddof=1) * math.sqrt(10)
    critical = scipy_stats.t.ppf(0.975, 9)
    assert scipy_stats.nct.sf(critical, 9, nc) + scipy_stats.nct.cdf(-critical, 9, nc) == pytest.approx(0.8, abs=1e-4)
    assert against([1.0, math.nan, 2.0], [2.0, 1.0, 4.5]).detectable is None
