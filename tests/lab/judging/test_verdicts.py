"""What a study may say: its family, its margin, seeds that carry a verdict, and what came after the runs."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats as scipy_stats

from kourkoutas.lab import api
from kourkoutas.lab.judging import comparing, endpoints, headline
from kourkoutas.lab.judging.analysis import analyse
from kourkoutas.lab.judging.comparing import Question
from kourkoutas.lab.judging.values import to_json
from kourkoutas.lab.planning import plan as planning
from kourkoutas.lab.planning.contrasts import Family
from kourkoutas.lab.results import export, store
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.running import train
from kourkoutas.lab.showing import effects, progress
from kourkoutas.lab.specs.spec import Arm, RunResult, RunSpec
from kourkoutas.lab.tuning import search, trials
from tests.lab import made_study
from tests.lab.made_study import analysed, rendered

SETUP: dict[str, Any] = {"testbed": "char-lm", "preset": "smoke", "engine": "torch", "settings": {}}
RATES = (1e-4, 1e-3, 1e-2, 1e-1)
SPACE = search.search_space(
    search.parse_tune(["lr=1e-4:1e-1"]), trials=4, seeds=(100, 101, 102), test_seeds=range(10), budget=0
)


def tuned_study(
    out: Path, tuning: Mapping[str, Sequence[Sequence[float]]], test: Mapping[str, Sequence[float]], **record: Any
) -> Snapshot:
    """A tuned study of char-lm whose two endpoints are the same numbers; lr 1e-3 is everybody's choice."""
    arms = [Arm(label=arm, optimizer=arm) for arm in test]
    with store.writing(
        out, **SETUP, arms=arms, seeds=range(10), command="kbeta study char-lm", tuning=SPACE, **record
    ) as study:

        def put(arm: str, lr: float, seed: int, value: float) -> None:
            spec = RunSpec(**{**SETUP, "settings": {"lr": lr}}, optimizer=arm, seed=seed)
            study.plan([spec])
            metrics = {"bpc": value, "train_loss": value}
            study.finish(spec, RunResult(status="ok", endpoint=value, metrics=metrics, settings={"lr": lr}))

        for arm, values in test.items():
            for lr, scores in zip(RATES, tuning[arm], strict=True):
                for seed, score in zip(SPACE.seeds, scores, strict=True):
                    put(arm, lr, seed, score)
            for seed, value in enumerate(values):
                put(arm, 1e-3, seed, value)
        study.choose({arm: {"lr": 1e-3} for arm in test})
    return Snapshot.read(out)


def luckily_apart() -> tuple[dict[str, list[list[float]]], dict[str, list[float]]]:
    """Two arms whose test runs differ by chance, p between 0.01 and 0.04, after a tuning that leaves doubts."""
    for seed in range(1000):
        rng = np.random.default_rng(seed)
        test = {arm: (100 + rng.normal(size=10)).tolist() for arm in ("kbeta", "adam95")}
        if 0.01 < scipy_stats.ttest_rel(test["kbeta"], test["adam95"]).pvalue < 0.04:
            return {arm: (100 + 0.1 * rng.normal(size=(4, 3))).tolist() for arm in test}, test
    raise AssertionError


def test_a_secondary_endpoint_counts_the_luck_of_the_tuning_like_the_primary_one(tmp_path: Path) -> None:
    found = analysed(tuned_study(tmp_path / "o", *luckily_apart()))
    first, second = (one.contrasts[0] for one in found.endpoints)
    assert first.p == pytest.approx(second.p)
    assert second.tuned
    assert (first.verdict, second.verdict) == ("unclear", "unclear")
    assert found.headline == "Smoke: not evidence. No clear difference between K-β and Adam 0.95."
    assert second.rows(found.endpoints[1].standing)[0][0] == "secondary: paired t, with luck"
    assert "decides" not in " ".join(row[0] for row in second.rows(found.endpoints[1].standing))


def test_holm_covers_every_declared_endpoint_and_contrast_and_nothing_that_was_asked_for_later() -> None:
    rng = np.random.default_rng(1)
    values = [{a: {s: 10 + k + rng.normal() for s in range(10)} for k, a in enumerate("abc")} for _ in range(3)]
    questions = [Question(values[k], name=str(k), primary=k == 0, declared=k < 2) for k in range(3)]
    one, two, asked = comparing.compare_endpoints(questions, [("a", "b"), ("a", "c")], resamples=0)
    declared = [c.p for c in (*one.contrasts, *two.contrasts)]
    from statsmodels.stats.multitest import multipletests

    assert [c.p_holm for c in (*one.contrasts, *two.contrasts)] == pytest.approx(
        multipletests(declared, method="holm")[1]
    )
    assert {c.family for c in (*one.contrasts, *two.contrasts)} == {4}
    assert {c.family for c in asked.contrasts} == {6}
    assert (one.confidence, asked.confidence) == (pytest.approx(1 - 0.05 / 4), pytest.approx(1 - 0.05 / 6))


def test_an_endpoint_asked_for_later_changes_no_declared_verdict(tmp_path: Path) -> None:
    study = made_study.rare_trigger(tmp_path / "o", ("kbeta", "adam95", "adam999"))
    plain, asked = analysed(study), analysed(study, endpoints=["loss:best"])
    assert [one.name for one in asked.endpoints] == [*(one.name for one in plain.endpoints), "loss:best"]
    assert to_json(asked.endpoints[:3]) == to_json(plain.endpoints)
    assert {c.family for one in plain.endpoints for c in one.contrasts} == {6}


@pytest.mark.parametrize(("contrasts", "endpoints", "least"), [(1, 1, 6), (2, 1, 7), (2, 3, 8), (8, 3, 10)])
def test_the_fewest_pairs_of_a_family(contrasts: int, endpoints: int, least: int) -> None:
    family = Family(contrasts, endpoints)
    assert family.least_pairs == least
    assert family.smallest_p(least) <= 0.05 < family.smallest_p(least - 1)


def test_a_plan_with_too_few_seeds_for_its_family_says_so_before_the_compute() -> None:
    def doubts(seeds: int, *optimizers: str) -> list[str]:
        return planning.plan_study("char-lm", optimizers=optimizers, seeds=range(seeds)).doubts()

    (said,) = doubts(6, "kbeta", "adam95", "adam999")
    assert said.startswith("6 seeds are too few for a verdict on 2 comparisons × 2 endpoints")
    assert said.endswith("It takes at least 8, and more if a run diverges: use --seeds 0-9")
    assert doubts(8, "kbeta", "adam95", "adam999") == []
    assert doubts(1, "kbeta") == []  # nothing is compared


# Margin


BASE = {i: 1 + 0.05 * math.sin(7 * i) for i in range(10)}


def near(size: float, spread: float) -> dict[int, float]:
    return {i: x * (1 + size + spread * math.sin(3 * i + 1)) for i, x in BASE.items()}


def test_an_interval_inside_the_margin_is_equal_and_a_clear_difference_inside_it_is_small(tmp_path: Path) -> None:
    ends = {"kbeta": BASE, "adam95": near(0.0, 0.004), "adam999": near(0.004, 0.001), "lion": near(0.0, 0.03)}
    study = made_study.own(tmp_path / "o", ends, margin=1.0)
    found = analysed(study)
    equal, small, unclear = found.primary.contrasts
    assert (equal.verdict, small.verdict, unclear.verdict) == ("equal", "better", "unclear")
    assert (equal.small, small.small) == (False, True)
    for c in (equal, small):
        assert c.percent is not None
        assert c.percent.interval is not None
        assert -1 < c.percent.interval.low < c.percent.interval.high < 1
    assert "K-β is equal to Adam 0.95 within 1 %." in found.headline
    assert "ahead of Adam 0.999 (0.40 % lower; clear, and smaller than 1 %)" in found.headline
    assert "No clear difference between K-β and Lion." in found.headline
    assert "equal within 1 %" in found.answers[0]
    assert "equal to Adam 0.95 within 1" in rendered(study)
    whole = to_json(found)
    assert [c["verdict"] for c in whole["endpoints"][0]["contrasts"]] == ["equal", "better", "unclear"]
    assert whole["endpoints"][0]["margin"] == 1.0
    without = analysed(made_study.own(tmp_path / "p", ends))
    assert [c.verdict for c in without.primary.contrasts] == ["unclear", "better", "unclear"]


def test_where_a_run_diverged_nothing_is_called_equal() -> None:
    values = {"a": {**BASE, 4: math.nan}, "b": near(0.0, 0.001)}
    assert comparing.compare_pairs(values, [("a", "b")], resamples=0, margin=50.0).contrasts[0].verdict == "unclear"


def test_a_margin_is_declared_before_the_runs_and_one_that_came_later_is_marked(tmp_path: Path) -> None:
    study = made_study.own(tmp_path / "o", {"kbeta": BASE, "adam95": near(0.0, 0.004)}, margin=1.0)
    assert json.loads((study.path / "study.json").read_text())["margin"] == 1.0
    assert "after the runs" not in analysed(study).headline
    assert "The margin of 2 % was chosen after the runs." in analysed(study, margin=2.0).headline
    with pytest.raises(store.StoreError, match=r"margin is 1\.0 there and 2\.0 here"):
        made_study.own(study.path, {"kbeta": BASE, "adam95": BASE}, margin=2.0)


@pytest.mark.parametrize("text", ["1", "0%", "-1%", "a%", "1%%", "100%", "nan%"])
def test_a_margin_that_is_no_percentage_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--margin must be a percentage between 0% and 100%, for example 1%; got"):
        planning.parse_margin(text)


def test_python_takes_the_margin_and_what_counts_as_the_command_does(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`margin` must be a percentage"):
        api.study("rare_trigger", margin="1", out=tmp_path / "o")


# Failed runs


def test_whether_failures_count_is_declared_before_the_runs(tmp_path: Path) -> None:
    ends: dict[str, Any] = {"kbeta": BASE, "adam95": {**BASE, 3: made_study.failed()}}
    study = made_study.own(tmp_path / "o", ends, count_failed=True)
    assert json.loads((study.path / "study.json").read_text())["count_failed"] is True
    with pytest.raises(store.StoreError, match="count_failed is True there and False here"):
        made_study.own(study.path, ends)


def test_failed_tuning_runs_are_told_by_what_they_mean(tmp_path: Path) -> None:
    study = tuned_study(tmp_path / "o", *luckily_apart())
    run = next(run for run in study.tuning_runs if run.spec.settings["lr"] == RATES[0])
    store.write_result(run.folder, made_study.failed())
    found = Snapshot.read(study.path)
    assert trials.of_study(found, endpoints.measures_of(found.record)[0].score)["kbeta"][0].failed == 1
    assert "1 of 24 tuning runs failed: no value with a failed run can be chosen." in " ".join(analysed(found).fairness)


# Scales


def test_a_value_without_a_logarithm_turns_both_the_comparison_and_the_luck_into_differences(tmp_path: Path) -> None:
    """emulator's endpoint is compared as ratios; one run of the test ended at 0."""
    tuning, test = luckily_apart()
    rng = np.random.default_rng(0)
    noisy = {arm: (100 + rng.normal(size=(4, 3))).tolist() for arm in tuning}
    test["kbeta"][0] = 0.0
    out = tmp_path / "o"
    setup = {**SETUP, "testbed": "emulator"}
    arms = [Arm(label=arm, optimizer=arm) for arm in test]
    with store.writing(out, **setup, arms=arms, seeds=range(10), command="kbeta study", tuning=SPACE) as study:
        for arm in test:
            runs = [
                (lr, s, x)
                for lr, own in zip(RATES, noisy[arm], strict=True)
                for s, x in zip((100, 101, 102), own, strict=True)
            ]
            runs += [(1e-3, seed, value) for seed, value in enumerate(test[arm])]
            for lr, seed, value in runs:
                spec = RunSpec(**{**setup, "settings": {"lr": lr}}, optimizer=arm, seed=seed)
                study.plan([spec])
                study.finish(spec, RunResult(status="ok", endpoint=value, metrics={"error": value, "one_step": value}))
        study.choose({arm: {"lr": 1e-3} for arm in test})
    found = analysed(Snapshot.read(out)).primary
    assert not found.log
    from kourkoutas.lab.tuning.luck import lost_by_tuning

    lost = {arm: lost_by_tuning(noisy[arm], 1) for arm in test}  # in the same unit
    values = {arm: dict(enumerate(own)) for arm, own in test.items()}
    wanted = comparing.compare_pairs(values, [("kbeta", "adam95")], family=2, lost=lost, resamples=0).contrasts[0]
    assert found.contrasts[0].p == pytest.approx(wanted.p)
    assert found.contrasts[0].effect == wanted.effect


# One seed


def test_the_answer_names_the_seed_without_which_the_verdict_would_be_another(tmp_path: Path) -> None:
    shift = [0.004, 0.012, 0.009, -0.035, 0.015, 0.011, 0.008, 0.013, 0.006, 0.010]
    ends = {"kbeta": dict.fromkeys(range(10), 1.0), "adam95": {i: 1 + x for i, x in enumerate(shift)}}
    found = analysed(made_study.own(tmp_path / "o", ends))
    without = [x for i, x in enumerate(shift) if i != 3]
    assert scipy_stats.ttest_1samp(shift, 0).pvalue > 0.05 > scipy_stats.ttest_1samp(without, 0).pvalue
    (c,) = found.primary.contrasts
    assert (c.verdict, c.carried_by) == ("unclear", ((3, "better"),))
    said = "Without seed 3, K-β would be clearly ahead of Adam 0.95."
    assert said in found.headline
    assert said in found.answers[0]


def test_seeds_that_carry_a_verdict_are_those_whose_absence_changes_the_test() -> None:
    rng = np.random.default_rng(11)
    found = 0
    for _ in range(30):
        d = 0.75 + rng.normal(size=9)
        values = {"a": dict.fromkeys(range(9), 0.0), "b": dict(enumerate(d.tolist()))}
        (c,) = comparing.compare_pairs(values, [("a", "b")], resamples=0).contrasts
        clear = scipy_stats.ttest_1samp(d, 0).pvalue < 0.05
        wanted = {s for s in range(9) if (scipy_stats.ttest_1samp(np.delete(d, s), 0).pvalue < 0.05) != clear}
        assert {seed for seed, _ in c.carried_by} == wanted
        found += len(wanted)
    assert found


def test_a_sentence_about_many_optimizers_counts_them() -> None:
    near = {f"o{k}": {i: 1.0 + 0.01 * k + 0.001 * i for i in range(8)} for k in range(6)}
    pairs = [("new", name) for name in near]
    shown = {}
    for what, shift in (("ahead", -0.5), ("behind", 0.5)):
        values = {"new": {i: 1.0 + shift + 0.0013 * i for i in range(8)}, **near}
        shown[what] = headline.headline([comparing.compare_pairs(values, pairs, resamples=0)])
    assert shown["ahead"] == "new is ahead of 6 optimizers on the deciding endpoint."
    assert shown["behind"] == "new is behind 6 optimizers on the deciding endpoint."
    few = {arm: {i: by_seed[i] for i in range(2)} for arm, by_seed in values.items()}
    said = headline.headline([comparing.compare_pairs(few, pairs, resamples=0)])
    assert said.startswith("new cannot be compared with 6 optimizers: ")


def test_many_seeds_that_carry_a_verdict_are_counted() -> None:
    values = {"a": dict.fromkeys(range(6), 1.0), "b": dict(enumerate([2.0, 0.95, 2.3, 1.1, 2.3, 1.9]))}
    (c,) = comparing.compare_pairs(values, [("a", "b")], resamples=0).contrasts
    text = headline.carried_words(c)
    assert len(c.carried_by) > headline.MOST_SEEDS
    assert text.startswith(f"Without any one of {len(c.carried_by)} of the 6 seeds")


# What came after the runs


def test_a_baseline_chosen_after_the_runs_is_marked_in_headline_page_and_json(tmp_path: Path) -> None:
    ends = {"kbeta": BASE, "adam95": near(0.1, 0.01), "adam999": near(0.2, 0.01)}
    study = made_study.own(tmp_path / "o", ends)
    said = "The baseline Adam 0.999 was chosen after the runs."
    assert said in analysed(study, baseline="adam999").headline
    assert said in rendered(study, baseline="adam999")
    assert to_json(analysed(study, baseline="adam999"))["afterwards"] == [said]
    assert analysed(study).afterwards == ()


def test_seeds_and_optimizers_added_when_results_were_there_are_marked(tmp_path: Path) -> None:
    few = {arm: {i: x for i, x in BASE.items() if i < 8} for arm in ("kbeta", "adam95")}
    study = made_study.own(tmp_path / "o", few)
    assert analysed(study).afterwards == ()
    more = dict.fromkeys(("kbeta", "adam95", "lion"), BASE)
    found = analysed(made_study.own(study.path, more))
    assert found.afterwards == (
        "Added when results were there: Lion.",
        "Seeds added when results were there: 8-9.",
    )
    assert all(said in found.headline for said in found.afterwards)
    again = made_study.own(study.path, more)
    assert analysed(again).afterwards == found.afterwards


def test_what_is_added_before_the_first_result_is_part_of_the_plan(tmp_path: Path) -> None:
    made_study.own(tmp_path / "o", {arm: dict.fromkeys(range(8)) for arm in ("kbeta", "adam95")})
    assert analysed(made_study.own(tmp_path / "o", {"kbeta": BASE, "adam95": BASE})).afterwards == ()


def test_versions_that_changed_between_the_runs_are_marked_and_those_of_a_mere_look_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = {"kbeta": BASE, "adam95": BASE}
    arms = [Arm(label=arm, optimizer=arm) for arm in ends]

    def open_with(version: str, runs: int) -> None:
        monkeypatch.setattr(store, "versions", lambda: {"numpy": version})
        with store.writing(tmp_path / "o", **SETUP, arms=arms, seeds=range(10), command="kbeta study") as study:
            if runs:
                study.begin(runs)

    open_with("2.1", 12)
    open_with("2.2", 0)
    assert analyse(Snapshot.read(tmp_path / "o")).afterwards == ()
    open_with("2.2", 8)
    said = "The versions changed between the runs: numpy 2.1, then 2.2."
    assert analyse(Snapshot.read(tmp_path / "o")).afterwards == (said,)


def test_the_endpoint_that_was_asked_for_is_that_of_the_result() -> None:
    spec = RunSpec(testbed="rare_trigger", settings={"steps": 20})
    first, asked = train.run(spec), train.run(spec, endpoint="heldout_bce")
    assert first.endpoint == first.metrics["last_batch_bce"]
    assert asked.endpoint == asked.metrics["heldout_bce"]
    assert asked.endpoint != asked.metrics["last_batch_bce"]


def test_the_endpoint_that_was_asked_for_is_in_progress_lines_results_and_export(tmp_path: Path) -> None:
    plan = planning.plan_study(
        "rare_trigger",
        engine="mlx",
        optimizers=["kbeta"],
        seeds=[0],
        options={"steps": "20"},
        endpoint="heldout_bce",
    )
    lines = io.StringIO()
    with progress.showing(Console(file=lines, width=200), plan) as observer:
        done = api.execute(plan, tmp_path / "o", command="kbeta study", workers=1, observer=observer)
    (run,) = done.runs
    assert run.result is not None
    assert run.result.endpoint == run.result.metrics["heldout_bce"]
    assert f"K-β seed 0: {run.result.metrics['heldout_bce']:.6g} (" in lines.getvalue()
    (row,) = export.rows(done)
    assert row["endpoint"] == row["heldout_bce"]
    assert [call.runs for call in done.record.calls] == [1]


# Pictures


def test_the_text_of_the_picture_says_how_sure_its_intervals_are(tmp_path: Path) -> None:
    ends = {"kbeta": BASE, "adam95": near(0.1, 0.01), "adam999": near(0.2, 0.01), "lion": near(0.0, 0.01)}
    study = made_study.own(tmp_path / "o", ends)
    plot = effects.plot(analysed(study).endpoints)
    assert plot is not None
    assert "Intervals hold together at 95 %, each of 3 at 98.33 %" in plot.description
    assert "each of 3 at 98.33" in analysed(study).rule
    for c in analysed(study).primary.contrasts:
        assert c.effect is not None
        assert c.effect.interval is not None
        d = [pair.difference for pair in c.pairs]
        wanted = scipy_stats.ttest_1samp(d, 0).confidence_interval(1 - 0.05 / 3)
        assert [c.effect.interval.low, c.effect.interval.high] == pytest.approx([wanted.low, wanted.high])
