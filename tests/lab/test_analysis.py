"""The one analysis: its rule, its endpoints, its shares, and what it says about missing and hard cases."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats as scipy_stats
from statsmodels.stats.power import TTestPower

from kourkoutas.lab.judging import analysis, attribution, endpoints, planned, power, stats, tables, verdicts
from kourkoutas.lab.planning import plan as planning
from kourkoutas.lab.results import store
from kourkoutas.lab.showing import report
from kourkoutas.lab.specs.spec import RunResult, RunSpec

CODE = store.Code(file="task.py", function="train", sha256="0" * 64)
QUICK = {"resamples": 199}
Value = float | Mapping[str, Sequence[float]] | None


def folder(
    path: Path,
    values: Mapping[str, Mapping[int, Value]],
    *,
    code: store.Code = CODE,
    settings: Mapping[str, Any] | None = None,
) -> store.Study:
    """A results folder of a user's function: a number is the endpoint, a mapping the logged metrics, None no result."""
    arms = [store.Arm(label=label, optimizer=label.partition("[")[0]) for label in values]
    seeds = sorted({seed for by_seed in values.values() for seed in by_seed})
    same: dict[str, Any] = {"testbed": "task.train", "preset": "own", "engine": "own", "settings": dict(settings or {})}
    with store.writing(path, **same, arms=arms, seeds=seeds, command="kbeta study", code=code) as study:
        for label, by_seed in values.items():
            for seed, value in by_seed.items():
                spec = RunSpec(**same, optimizer=label, seed=seed)
                study.plan([spec])
                if value is not None:
                    study.finish(spec, _result(value, study.folder(spec)))
    return store.Study.open(path)


def _result(value: Value, run: Path) -> RunResult:
    if isinstance(value, Mapping):
        columns = {name: list(map(float, column)) for name, column in value.items()}
        steps = range(1, 1 + len(next(iter(columns.values()))))
        rows = [{"step": step, **{n: c[i] for n, c in columns.items()}} for i, step in enumerate(steps)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        last = {name: column[-1] for name, column in columns.items()}
        curve = {"step": [float(s) for s in steps], **columns}
        return RunResult(status="ok", endpoint=next(iter(last.values())), metrics=last, curve=curve)
    assert value is not None
    fine = math.isfinite(value)
    return RunResult(status="ok" if fine else "diverged", endpoint=value if fine else None)


def shifted(shift: Sequence[float], base: float = 10.0) -> tuple[dict[int, Value], dict[int, Value]]:
    """(treatment, baseline) of which the baseline is higher by `shift` in each seed."""
    return dict.fromkeys(range(len(shift)), base), {i: base + d for i, d in enumerate(shift)}


# paired t: p = 0.020 alone, 0.040 of two, 0.061 of three
SHIFT = (0.5, 0.9, 0.1, 1.2, -0.2, 0.8, 0.4, 0.2)


def test_the_headline_is_the_primary_endpoints_holm_adjusted_test(tmp_path: Path) -> None:
    p = float(scipy_stats.ttest_1samp(SHIFT, 0).pvalue)
    assert 0.05 / 3 < p < 0.05 / 2
    new, old = shifted(SHIFT)
    two = {"kbeta": new, "adam95": old, "lion": {i: 10 + (-1) ** i for i in range(8)}}
    found = analysis.analyse(folder(tmp_path / "two", two), **QUICK)
    (first, second) = found.primary.findings
    assert (first.verdict, first.answer, first.family) == ("better", "Yes", 2)
    assert first.p == pytest.approx(p)
    assert first.p_holm == pytest.approx(2 * p)
    assert second.answer == "Not shown"
    assert found.headline[0].startswith("Yes: kbeta ends better than adam95 (")
    assert "Holm" in found.rule
    assert "primary endpoint" in found.rule
    three = {**two, "soap": {i: 10 + (-1) ** i * 2 for i in range(8)}}
    third = analysis.analyse(folder(tmp_path / "three", three), **QUICK).primary.findings[0]
    assert third.effect_low is not None
    assert third.effect_low > 0  # its own interval excludes no difference
    assert third.p_holm == pytest.approx(3 * p)
    assert third.answer == "Not shown"


def test_the_percentage_is_of_the_baseline(tmp_path: Path) -> None:
    new, old = shifted([1.0, 2.0, 3.0, 2.0], base=10.0)  # 10 against a mean of 12
    found = analysis.analyse(folder(tmp_path / "o", {"kbeta": new, "adam95": old}), **QUICK).primary.findings[0]
    assert found.percent == pytest.approx(100 * 2 / 12)
    half = scipy_stats.t.ppf(0.975, 3) * np.std([1, 2, 3, 2], ddof=1) / 2
    assert found.percent_low == pytest.approx(100 * (2 - half) / 12)


def test_on_logarithms_the_percentage_is_of_geometric_means(tmp_path: Path) -> None:
    code = CODE.model_copy(update={"log": True})
    values: dict[str, dict[int, Value]] = {
        "kbeta": {0: 1.0, 1: 2.0, 2: 4.0},
        "adam95": {0: 2.0, 1: 5.0, 2: 7.0},
    }
    found = analysis.analyse(folder(tmp_path / "o", values, code=code), **QUICK).primary.findings[0]
    ratio = (2 * 2.5 * 1.75) ** (1 / 3)
    assert found.effect == pytest.approx(ratio)
    assert found.percent == pytest.approx(100 * (1 - 1 / ratio))


@pytest.mark.parametrize(("n", "alpha", "ratio"), [(5, 0.05, 1.5), (10, 0.0125, 0.9), (40, 0.05, 0.3), (3, 0.05, 4.0)])
def test_power_equals_statsmodels(n: int, alpha: float, ratio: float) -> None:
    assert power.found(ratio, n, alpha) == pytest.approx(TTestPower().power(ratio, n, alpha), abs=2e-5)


@pytest.mark.parametrize(("n", "alpha", "ratio"), [(101, 0.05, 0.3), (101, 0.0125, 0.3), (1_000, 0.05, 0.1)])
def test_power_of_many_seeds_is_right_to_four_digits(n: int, alpha: float, ratio: float) -> None:
    assert power.found(ratio, n, alpha) == pytest.approx(TTestPower().power(ratio, n, alpha), abs=2e-4)


@pytest.mark.parametrize(("n", "alpha"), [(3, 0.05), (5, 0.05), (10, 0.01), (100, 0.05)])
def test_the_detectable_difference_is_found_with_the_stated_probability(n: int, alpha: float) -> None:
    ratio = power.detectable_ratio(n, alpha)
    assert TTestPower().power(ratio, n, alpha) == pytest.approx(0.8, abs=1e-4)


def test_not_shown_says_what_the_seeds_could_have_shown_and_what_the_observed_needs(tmp_path: Path) -> None:
    shift = [1.0, -0.8, 0.9, -0.5, 0.6]
    new, old = shifted(shift, base=10.0)
    found = analysis.analyse(folder(tmp_path / "o", {"kbeta": new, "adam95": old}), **QUICK).primary.findings[0]
    assert found.answer == "Not shown"
    assert found.detectable is not None
    sd = np.std(shift, ddof=1)
    wanted = TTestPower().solve_power(nobs=5, alpha=0.05, power=0.8) * sd
    assert found.detectable.difference == pytest.approx(wanted, rel=1e-3)
    assert found.detectable.percent == pytest.approx(100 * wanted / np.mean(list(old.values())), rel=1e-3)  # type: ignore[arg-type]
    needed = math.ceil(TTestPower().solve_power(effect_size=np.mean(shift) / sd, alpha=0.05, power=0.8))
    assert found.detectable.seeds_for_observed == needed
    assert f"would need {needed} seeds" in found.sentence
    assert "These 5 seeds find a difference of" in found.sentence


def test_seeds_needed_for_a_stated_difference() -> None:
    new, old = shifted([1.0, -0.8, 0.9, -0.5, 0.6])
    c = stats.compare_pairs({"a": new, "b": old}, [("a", "b")], **QUICK).contrasts[0]  # type: ignore[arg-type,dict-item]
    sd = np.std([1.0, -0.8, 0.9, -0.5, 0.6], ddof=1)
    found = power.needed(c, "5%", log=False, higher_is_better=False)
    assert found is not None
    assert found.difference == pytest.approx(0.05 * np.mean(list(old.values())))  # type: ignore[arg-type]
    assert found.seeds == math.ceil(TTestPower().solve_power(effect_size=found.difference / sd, alpha=0.05, power=0.8))
    for bad in ("0", "-1%", "much", "nan"):
        with pytest.raises(ValueError, match="--difference must be a size > 0"):
            power.needed(c, bad, log=False, higher_is_better=False)
    with pytest.raises(ValueError, match="compared as ratios; give percent"):
        power.needed(c, "0.5", log=True, higher_is_better=False)


@pytest.mark.parametrize(("ratio", "alpha", "wanted"), [(0.1, 0.05, 0.055), (1.0, 0.05, 0.8), (0.3, 0.2, 0.21)])
def test_the_number_of_seeds_is_the_smallest_that_is_enough(ratio: float, alpha: float, wanted: float) -> None:
    """At a low power both tails count, and fewer seeds are enough than one tail says."""
    enough = [n for n in range(2, 60) if power.found(ratio, n, alpha) >= wanted]
    assert power.seeds_needed(ratio, alpha, wanted) == enough[0]
    assert power.seeds_needed(0.0, alpha, wanted) is None
    assert power.seeds_needed(1e-9, alpha, 0.99) is None


def test_percentages_on_logarithms_and_where_there_are_none() -> None:
    new, old = shifted([1.0, -0.8, 0.9, -0.5, 0.6])
    c = stats.compare_pairs({"a": new, "b": old}, [("a", "b")], log=True, **QUICK).contrasts[0]  # type: ignore[arg-type,dict-item]
    lower = power.needed(c, "20%", log=True, higher_is_better=False)
    higher = power.needed(c, "20%", log=True, higher_is_better=True)
    assert lower is not None
    assert higher is not None
    assert (lower.difference, higher.difference) == (pytest.approx(-math.log10(0.8)), pytest.approx(math.log10(1.2)))
    assert lower.percent == higher.percent == 20
    with pytest.raises(ValueError, match="nothing is lower by 100 % or more"):
        power.needed(c, "100%", log=True, higher_is_better=False)
    both_signs = {"a": dict.fromkeys(range(3), 0.0), "b": {0: -1.0, 1: 2.0, 2: 0.5}}
    c = stats.compare_pairs(both_signs, [("a", "b")], **QUICK).contrasts[0]
    with pytest.raises(ValueError, match="b has values on both sides of 0"):
        power.needed(c, "5%", log=False, higher_is_better=False)
    equal = {"a": dict.fromkeys(range(3), 1.0), "b": dict.fromkeys(range(3), 2.0)}
    c = stats.compare_pairs(equal, [("a", "b")], **QUICK).contrasts[0]
    assert power.needed(c, "5%", log=False, higher_is_better=False) is None
    assert power.detectable(c, log=False, higher_is_better=False) is None


def answered(treatment: Sequence[float], baseline: Sequence[float], **options: Any) -> verdicts.Answer:
    values = {"a": dict(enumerate(treatment)), "b": dict(enumerate(baseline))}
    c = stats.compare_pairs(values, [("a", "b")], **QUICK, **options).contrasts[0]
    return verdicts.answer(c, power.detectable(c, log=False, higher_is_better=False))


def test_the_sentence_of_an_answer_says_what_the_data_say() -> None:
    same = answered([1.0, 2.0], [1.0, 2.0])
    assert same == verdicts.Answer("No difference", "a and b end with the same value on all 2 seeds.")
    one = answered([1.0], [2.0])
    assert (one.short, "one finite pair" in one.sentence) == ("Cannot tell", True)
    # both signs: no percentages, so the difference itself
    sides = answered([0.0, 0.1, -0.1, 0.0], [1.0, -2.0, 2.1, 0.4])
    assert sides.short == "Not shown"
    assert "by 0.375, 95 % interval" in sides.sentence
    assert "better on 3 of 4 seeds" in sides.sentence
    # two exact pairs that differ in size cannot give p < 0.5
    fell = answered([1.0, 2.0, math.nan], [2.0, 1.5, 1.0])
    assert fell.short == "Not shown"
    assert "diverged: a 1, b 0 of 3" in fell.sentence
    assert "3 pairs cannot give an exact p below 0.25" in fell.sentence
    gone = answered([math.nan] * 7, [1.0] * 7)
    assert gone.short == "No"
    assert gone.sentence.startswith("a ends worse than b (better on 0 of 7 seeds; diverged: a 7, b 0 of 7; Wilcoxon, p")


def test_a_share_needs_two_seeds_that_every_arm_finished() -> None:
    values = controls(lambda k, s: 0.01 * k * s)
    for s in range(1, 8):
        values["adam95"][s] = math.nan
    assert attribution.attribute(values) == ()


def test_five_pairs_and_the_exact_wilcoxon_test_say_that_it_cannot_decide() -> None:
    new, old = shifted([1.0, 2.0, 3.0, 4.0, 5.0])
    five = stats.compare({"a": new, "b": old}, baseline="b", **QUICK).contrasts[0]  # type: ignore[arg-type,dict-item]
    assert five.wilcoxon.p == five.wilcoxon.floor == 0.0625
    assert "5 pairs cannot give an exact p below 0.0625" in tables.wilcoxon_name(five)
    six, other = shifted([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    alone = stats.compare({"a": six, "b": other}, baseline="b", **QUICK).contrasts[0]  # type: ignore[arg-type,dict-item]
    assert tables.wilcoxon_name(alone) == "Wilcoxon (exact)"  # 2/64 is below 0.05
    three = stats.compare({"a": six, "c": six, "b": other}, baseline="b", **QUICK).contrasts[0]  # type: ignore[arg-type,dict-item]
    assert "0.0625 adjusted" in tables.wilcoxon_name(three)  # but not twice 2/64


# Endpoints


def test_any_logged_metric_can_be_asked_for_afterwards(tmp_path: Path) -> None:
    def course(level: float) -> dict[str, list[float]]:
        losses = [level + x for x in (9.0, 1.0, 5.0, *[3.0] * 15, 2.0, 4.0)]
        return {"loss": losses, "acc": [1 - x / 100 for x in losses]}

    values = {"kbeta": {s: course(s) for s in range(3)}, "adam95": {s: course(s + 1 + 0.1 * s) for s in range(3)}}
    study = folder(tmp_path / "o", values)
    asked = ["loss:best", "loss:tail", "acc:max", "acc:best:max", "loss:log"]
    found = analysis.analyse(study, endpoints=asked, **QUICK)
    assert [(j.name, j.primary, j.declared) for j in found.endpoints] == [
        ("endpoint", True, True),
        *((name, False, False) for name in asked),
    ]
    by_name = {j.name: j for j in found.endpoints}
    assert by_name["loss:best"].values["kbeta"] == {0: 1.0, 1: 2.0, 2: 3.0}
    assert by_name["loss:tail"].values["kbeta"] == {0: 3.0, 1: 4.0, 2: 5.0}  # mean of the last 2 of 20: 2 and 4
    assert by_name["acc:max"].values["kbeta"][0] == pytest.approx(0.96)
    assert by_name["acc:best:max"].values["kbeta"][0] == pytest.approx(0.99)
    assert by_name["acc:max"].findings[0].verdict == by_name["loss:best"].findings[0].verdict == "better"
    assert by_name["loss:log"].log
    assert tables.standing(by_name["acc:max"]) == "secondary, asked for after the runs"
    assert found.headline == tuple(f"{f.answer}: {f.sentence}" for f in by_name["endpoint"].findings)


def test_a_metric_that_some_runs_never_logged_is_noted_and_one_that_none_did_is_an_error(tmp_path: Path) -> None:
    one, both = {"loss": [1.0, 0.5]}, {"loss": [1.0, 0.5], "acc": [0.1, 0.9]}
    values = {"kbeta": {0: both, 1: both, 2: one}, "adam95": {0: both, 1: both, 2: both}}
    study = folder(tmp_path / "o", values)
    found = analysis.analyse(study, endpoints=["acc:max"], **QUICK).endpoints[1]
    assert "kbeta has no acc for seed 2" in found.notes
    with pytest.raises(ValueError, match="unknown metric in --endpoint 'ac': did you mean 'acc'"):
        analysis.analyse(study, endpoints=["ac"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("acc:maximum", "unknown word in --endpoint acc:maximum 'maximum': did you mean 'max'"),
        ("acc:min:max", "give one of min, max"),
        (":max", "--endpoint must look like METRIC"),
    ],
)
def test_an_endpoint_that_cannot_be_understood_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        endpoints.parse(text)


# Attribution


def controls(noise: Callable[[int, int], float]) -> dict[str, dict[int, float]]:
    """adam95 → adam95-warm takes away 4.95 of 5, kbeta-static → kbeta the rest."""
    levels = {"kbeta": 5.0, "adam95": 10.0, "adam95-warm": 5.05, "kbeta-static": 5.05}
    return {arm: {s: level + noise(k, s) for s in range(8)} for k, (arm, level) in enumerate(levels.items())}


def test_attribution_names_shares_largest_first_that_add_up_to_the_whole() -> None:
    rng = np.random.default_rng(5)
    noise = rng.normal(0, 0.02, (4, 8))
    values = controls(lambda k, s: float(noise[k, s]))
    (found,) = attribution.attribute(values)
    assert found.parts[0].cause == "hidden warmup"
    assert sum(part.share for part in found.parts) == pytest.approx(1.0)
    shares = {part.cause: part for part in found.parts}
    whole = np.mean([values["adam95"][s] - values["kbeta"][s] for s in range(8)])
    warmup = np.mean([values["adam95"][s] - values["adam95-warm"][s] for s in range(8)])
    assert shares["hidden warmup"].share == pytest.approx(warmup / whole)
    assert shares["dynamics of β2"].ci.holds(0.01)
    assert shares["hidden warmup"].ci.holds(0.99)
    assert "hidden warmup 99 % [" in found.sentence
    assert found.paths == (("adam95", "adam95-warm", "kbeta-static", "kbeta"),)


def test_the_interval_of_a_share_holds_exactly_the_shares_that_a_t_test_does_not_reject() -> None:
    rng = np.random.default_rng(2)
    whole = rng.normal(3, 1, 10)
    part = 0.4 * whole + rng.normal(0, 0.5, 10)
    ci = attribution.fieller(part, whole)
    assert ci is not None
    for share in (ci.low, ci.high):
        assert scipy_stats.ttest_1samp(part - share * whole, 0).pvalue == pytest.approx(0.05, abs=1e-9)
    assert scipy_stats.ttest_1samp(part - (ci.low + ci.high) / 2 * whole, 0).pvalue > 0.05


def test_a_difference_that_is_not_shown_is_not_taken_apart() -> None:
    rng = np.random.default_rng(0)
    values = {arm: {s: rng.normal(5, 1) for s in range(6)} for arm in ("kbeta", "adam95", "kbeta-static")}
    (found,) = attribution.attribute(values)
    assert found.parts == ()
    assert "nothing to take apart" in found.sentence


def test_an_absent_control_leaves_its_step_with_the_next() -> None:
    noise = np.random.default_rng(1).normal(0, 0.02, (4, 8))
    values = controls(lambda k, s: float(noise[k, s]))
    del values["kbeta-static"]
    (found,) = attribution.attribute(values)
    assert {part.cause for part in found.parts} == {"hidden warmup", "dynamics of β2 and mean of β2"}
    assert attribution.attribute({arm: values[arm] for arm in ("kbeta", "adam95")}) == ()


# Grids


def pairs_of(optimizers: list[str], grids: dict[str, str]) -> list[tuple[str, str]]:
    _, arms = planning.arms_of(optimizers, {}, grids)
    record = store.StudyRecord.model_construct(arms=arms)
    return planned.contrasts(record, [arm.label for arm in arms])


def test_a_grid_over_a_setting_compares_like_with_like() -> None:
    found = pairs_of(["kbeta", "adam95", "lion"], {"lr": "0.1,0.01,0.001"})
    assert len(found) == 6
    assert all(a.removeprefix("kbeta") == b.removeprefix("adam95").removeprefix("lion") for a, b in found)


def test_grids_of_both_optimizers_are_no_cross_product() -> None:
    found = pairs_of(["kbeta", "adam95"], {"kbeta.alpha": "0.8,0.85,0.9", "adam95.beta2": "0.9,0.95"})
    assert len(found) == 4
    assert {arm for pair in found for arm in pair} == {
        *(f"kbeta[alpha={a}]" for a in (0.8, 0.85, 0.9)),
        *(f"adam95[beta2={b}]" for b in (0.9, 0.95)),
    }


def test_a_large_grid_has_about_as_many_contrasts_as_arms() -> None:
    values = ",".join(str(1 + i) for i in range(300))
    assert len(pairs_of(["kbeta", "adam95"], {"lr": values})) == 300


# What is missing, and what is large


def test_a_missing_pair_is_among_the_notes_of_the_json(tmp_path: Path) -> None:
    values: dict[str, dict[int, Value]] = {
        "kbeta": {0: 1.0, 1: 1.1, 2: 1.2},
        "adam95": {0: 2.0, 1: 2.2, 2: None},
        "lion": {0: None, 1: None, 2: None},
    }
    study = folder(tmp_path / "o", values)
    found = analysis.analyse(study, **QUICK)
    whole = json.loads(json.dumps(analysis.as_json(study, found), allow_nan=False))
    text = " ".join(whole["notes"])
    assert "no finished seed in common, so not compared: kbeta vs lion" in text
    assert "kbeta has no partner in adam95 for seed 2" in text
    assert whole["analysis"]["endpoints"][0]["missing"] == [["kbeta", "lion"]]
    (comparison,) = whole["comparisons"].values()
    assert any("no partner in adam95 for seed 2" in note for note in comparison["notes"])


def test_an_analysis_is_strict_json_with_its_sentences_and_arms(tmp_path: Path) -> None:
    new, old = shifted(SHIFT)
    study = folder(tmp_path / "o", {"kbeta": new, "adam95": {**old, 7: math.nan}})
    found = json.loads(json.dumps(analysis.analyse(study, **QUICK).to_dict(), allow_nan=False))
    assert [(arm["label"], arm["role"], arm["runs"], arm["ok"], arm["diverged"]) for arm in found["arms"]] == [
        ("kbeta", "treatment", 8, 8, 0),
        ("adam95", "baseline", 8, 7, 1),
    ]
    (finding,) = found["endpoints"][0]["findings"]
    assert finding["test"] == "Wilcoxon"  # a run diverged
    assert {"sentence", "percent", "percent_low", "p_holm", "detectable", "notes"} <= finding.keys()
    assert found["headline"][0].endswith(finding["sentence"])


@pytest.mark.parametrize("size", [1e308, 1.7e308, 1e-308])
def test_endpoints_near_the_end_of_doubles_do_not_overflow(tmp_path: Path, size: float) -> None:
    # the same numbers as in units of one, where nothing can overflow
    small = {"kbeta": {s: 0.5 + 0.01 * s for s in range(5)}, "adam95": {s: 0.9 - 0.02 * s for s in range(5)}}
    large = {arm: {s: x * size for s, x in by.items()} for arm, by in small.items()}
    one = analysis.analyse(folder(tmp_path / "small", small), **QUICK)  # type: ignore[arg-type]
    study = folder(tmp_path / "large", large)  # type: ignore[arg-type]
    two = analysis.analyse(study, **QUICK)
    a, b = one.primary.findings[0], two.primary.findings[0]
    assert (b.verdict, b.wins) == (a.verdict, a.wins)
    assert b.p == pytest.approx(a.p)
    assert b.percent == pytest.approx(a.percent)
    assert b.effect == pytest.approx(a.effect * size)  # type: ignore[operator]
    assert [arm.mean for arm in two.arms] == pytest.approx([arm.mean * size for arm in one.arms])  # type: ignore[operator]
    assert [arm.median for arm in two.arms] == pytest.approx([arm.median * size for arm in one.arms])  # type: ignore[operator]
    for before, after in zip(one.comparisons().values(), two.comparisons().values(), strict=True):
        for s, t in zip(before.summaries, after.summaries, strict=True):
            assert t.sd == pytest.approx(s.sd * size)  # type: ignore[operator]
            assert t.iqm == pytest.approx(s.iqm * size)
    json.dumps(analysis.as_json(study, two), allow_nan=False)


def test_a_study_near_the_end_of_doubles_and_with_a_damaged_trace_has_a_page(tmp_path: Path) -> None:
    values = {"kbeta": {0: 1.2e308, 1: 1.25e308, 2: 1.21e308}, "adam95": {0: 1.6e308, 1: 1.7e308, 2: 1.65e308}}
    study = folder(tmp_path / "o", values)  # type: ignore[arg-type]
    (study.runs()[0].folder / "trace.npz").write_bytes(b"PK damaged")
    assert "1.6e+308" in report.build(study).read_text()


def test_differences_of_opposite_signs_near_the_end_of_doubles_are_no_divergence() -> None:
    values = {"a": {0: -1.7e308, 1: -1.6e308, 2: -1.5e308}, "b": {0: 1.7e308, 1: 1.5e308, 2: 1.6e308}}
    found = stats.compare(values, baseline="b", **QUICK).contrasts[0]
    assert (found.diverged, found.wins, found.t.n) == (0, 3, 3)
    assert found.verdict == "better"
    assert found.wilcoxon.rank_biserial == 1


def test_a_hundred_thousand_seeds_are_compared_without_a_bootstrap() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(1.0, 1, 100_000)
    values = {"a": dict(enumerate(x.tolist())), "b": dict(enumerate((x + rng.normal(0.1, 1, 100_000)).tolist()))}
    found = stats.compare(values, baseline="b")
    assert found.contrasts[0].n == 100_000
    assert found.contrasts[0].verdict == "better"
    assert found.contrasts[0].difference is not None
    assert found.contrasts[0].difference.bootstrap_ci is None


def test_very_many_arms_have_no_bootstrap_and_say_so_and_only_the_first_are_printed() -> None:
    values = {f"a{i}": {0: 1.0 + i, 1: 2.0, 2: 3.5 - i} for i in range(2_000)}
    found = stats.compare(values, baseline="a0")
    assert len(found.contrasts) == 1_999
    assert all(s.median_ci is None for s in found.summaries)
    assert any("no bootstrap intervals" in note for note in found.notes)
    from rich.console import Console

    console = Console(width=100)
    with console.capture() as printed:
        console.print(tables.render(found))
    assert "the first 200 of 1999 contrasts are shown; --json has all" in printed.get()
