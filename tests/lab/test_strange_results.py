"""Results that are seldom, and must not be misread: sparse logs, crashed arms, lost runs, names that clash."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
from statsmodels.stats.multitest import multipletests
from typer.testing import CliRunner

from kourkoutas import bench
from kourkoutas.cli import running as cli
from kourkoutas.cli.app import app
from kourkoutas.lab import api
from kourkoutas.lab.judging import analysis, confirming, stats, tables, targets, tuned, tuning, verdicts
from kourkoutas.lab.judging.across import compare_studies
from kourkoutas.lab.judging.targets import Target
from kourkoutas.lab.planning.search import Tried
from kourkoutas.lab.results import export, files, store
from kourkoutas.lab.running import trial
from kourkoutas.lab.showing import commands, curves, looks, progress, recorded, report, status
from kourkoutas.lab.specs import search_space as asking
from kourkoutas.lab.specs.spec import RunResult, RunSpec
from tests.lab import made_study
from tests.lab.test_analysis import CODE, folder

SETUP: dict[str, Any] = {"testbed": "task.train", "preset": "own", "engine": "own", "settings": {}}
LOG = CODE.model_copy(update={"log": True})
Row = Mapping[str, float]


def kbeta(*words: str | Path) -> str:
    """What a command prints; it must succeed."""
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "140"}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


# What was logged in calls of its own


def logging_study(path: Path, rows: Mapping[str, Sequence[Row]], **more: Any) -> store.Study:
    """A study of one seed per arm whose function has logged `rows`, kept as a run keeps them."""
    arms = [store.Arm(label=name, optimizer=name) for name in rows]
    with store.writing(path, **SETUP, arms=arms, seeds=[0], command="kbeta study", code=CODE) as writer:
        for arm, logged in rows.items():
            spec = RunSpec(**SETUP, optimizer=arm, seed=0)
            writer.plan([spec])
            with contextlib.closing(files.Lines(writer.folder(spec) / "metrics.jsonl")) as lines:
                for row in logged:
                    lines.write(row)
            own = [dict(row) for row in logged]
            result = RunResult(status="ok", endpoint=1.0, metrics=trial._last(own), curve=trial._curve(own), **more)
            writer.finish(spec, result)
    return store.Study.open(path)


def in_two_calls(steps: int, every: int) -> Iterator[Row]:
    """A loss at each step, and at every so many one of validation, in a call of its own."""
    for step in range(1, steps + 1):
        yield {"step": step, "loss": 1 / step}
        if step % every == 0:
            yield {"step": step, "val_loss": 2 / step}


@pytest.mark.parametrize(("steps", "every"), [(100, 10), (1500, 1)], ids=["few", "more rows than a curve keeps"])
def test_a_metric_logged_in_calls_of_its_own_does_not_cut_the_loss(tmp_path: Path, steps: int, every: int) -> None:
    study = logging_study(tmp_path / "out", {"kbeta": list(in_two_calls(steps, every))})
    found = recorded.courses(study, study.runs())
    whole = curves.thinned(found["kbeta"][0])
    assert whole.steps[-1] == steps
    assert not whole.diverged
    assert recorded.drawn(found)[-1]["step"] == steps
    titles = [one.title for one in curves.panels(found, looks.looks_of(["kbeta"]))]
    assert titles[-1] == "kbeta: 1 run"
    rows = export.rows(study, "curves")
    assert [row["step"] for row in rows if row["loss"] is not None] == list(range(1, steps + 1))
    assert [row["step"] for row in rows if row["val_loss"] is not None] == list(range(every, steps + 1, every))


def test_a_diverged_run_is_crossed_though_its_last_losses_are_gone(tmp_path: Path) -> None:
    study = made_study.own(tmp_path / "out", {"kbeta": {0: made_study.diverged([1, 2, 3], [1.0, 2.0, math.nan])}})
    (course,) = recorded.courses(study, study.runs())["kbeta"].values()
    thin = curves.thinned(course)
    assert (thin.steps.tolist(), thin.diverged) == ([1, 2], True)


def test_a_target_is_met_at_the_step_that_was_logged_however_long_the_run(tmp_path: Path) -> None:
    rows = {"kbeta": list(in_two_calls(1500, 1)), "adam95": list(in_two_calls(5000, 5000))}
    study = logging_study(tmp_path / "out", rows)
    found = targets.reached(study.runs(), Target("loss", 1 / 701))  # 1/step first is that small at step 701
    assert (found["kbeta"].steps, found["adam95"].steps) == ({0: 701}, {0: 701})
    found = targets.reached(study.runs(), Target("val_loss", 2.0 / 5000))
    assert (found["kbeta"].steps, found["adam95"].steps) == ({0: math.inf}, {0: 5000})


def test_a_run_that_reached_the_target_and_then_diverged_has_reached_it_and_an_infinite_loss_meets_none() -> None:
    def run(seed: int, losses: list[float]) -> store.StoredRun:
        result = made_study.diverged([float(k) for k in range(1, 1 + len(losses))], losses)
        return store.StoredRun(RunSpec(**SETUP, optimizer="kbeta", seed=seed), result, Path("nowhere"))

    (found,) = targets.reached([run(0, [3.0, 1.0, 9.0]), run(1, [3.0, -math.inf])], Target("loss", 1.0)).values()
    assert found.steps == {0: 2, 1: math.inf}


# Holm's family


SHIFT = (0.5, 0.9, 0.1, 1.2, -0.25, 0.8, 0.4, -0.1)
ALONE = float(scipy.stats.ttest_1samp(SHIFT, 0).pvalue)  # shown alone, and not as one of two


def shifted() -> dict[str, dict[int, Any]]:
    return {"kbeta": dict.fromkeys(range(8), 10.0), "adam95": {i: 10 + x for i, x in enumerate(SHIFT)}}


def test_an_arm_without_results_makes_no_other_contrast_surer(tmp_path: Path) -> None:
    assert 0.025 < ALONE < 0.05
    crashed = {seed: made_study.failed() for seed in range(8)}
    study = made_study.own(tmp_path / "out", {**shifted(), "lion": crashed})
    found = analysis.analyse(study, resamples=0)
    (only,) = found.primary.findings
    assert only.p == pytest.approx(ALONE)
    # lion has no p, which counts as the largest
    assert only.p_holm == pytest.approx(multipletests([ALONE, 1.0], method="holm")[1][0])
    assert (only.family, only.answer) == (2, "Not shown")
    assert "Holm for 2 contrasts" in found.headline[0]


def test_an_arm_that_is_no_other_makes_no_other_contrast_surer(tmp_path: Path) -> None:
    ends: dict[str, dict[int, RunResult]] = {}
    for arm, like in (("kbeta", "kbeta"), ("adam95", "adam95"), ("lion", "kbeta")):
        ends[arm] = {
            seed: made_study.finished(
                value, curve={"step": [1.0, 2.0], "loss": [9.0, value]}, settings={"used": ["optimizer", "returned"]}
            )
            for seed, value in shifted()[like].items()
        }
    found = analysis.analyse(made_study.own(tmp_path / "out", ends), resamples=0)
    assert any("Not compared: kbeta and lion" in line for line in found.fairness)
    (only,) = found.primary.findings
    assert only.p_holm == pytest.approx(multipletests([ALONE, 1.0], method="holm")[1][0])
    assert only.answer == "Not shown"


def test_holm_counts_what_could_not_be_compared_also_with_the_luck_of_a_tuning() -> None:
    values = {arm: dict(by_seed) for arm, by_seed in shifted().items()}
    how = stats.compare_pairs(values, [("kbeta", "adam95")], resamples=0, family=3)
    once = {arm: [Tried({"lr": 1.0}, (0.0,))] for arm in values}
    (found,) = confirming.counted(how, once, {arm: {"lr": 1.0} for arm in values}).contrasts
    assert found.p is not None
    assert found.p_holm == pytest.approx(3 * found.p)


def test_the_race_to_a_target_is_adjusted_for_planned_arms_without_runs(tmp_path: Path) -> None:
    fast, slow = {"step": [1.0, 2.0], "loss": [1.0, 1.0]}, {"step": [1.0, 2.0], "loss": [3.0, 1.0]}
    ends: dict[str, dict[int, Any]] = {
        "kbeta": {seed: made_study.finished(1.0, curve=fast) for seed in range(6)},
        "adam95": {seed: made_study.finished(1.0, curve=slow) for seed in range(6)},
        "lion": {seed: made_study.failed() for seed in range(6)},
    }
    study = made_study.own(tmp_path / "out", ends)
    _, (race,) = tuned.to_target(study, study.runs(), Target("loss", 1.0))
    # six pairs of one sign: 2/2⁶, one of two planned contrasts
    assert (race.p, race.p_holm) == (pytest.approx(2 / 2**6), pytest.approx(4 / 2**6))
    # without runs of the first arm, the others are not compared in its place
    lone = made_study.own(tmp_path / "lone", {"kbeta": ends["lion"], "adam95": ends["adam95"], "lion": ends["kbeta"]})
    assert tuned.to_target(lone, lone.runs(), Target("loss", 1.0))[1] == []


# The luck of the tuning


QUESTION = asking.search_space(
    asking.parse_tune(["lr=1e-3:4e-3"]), trials=3, seeds=[100, 101, 102], test_seeds=range(8), budget=0
)
RATES = (1e-3, 2e-3, 4e-3)


def tuned_study(
    path: Path, ends: Mapping[str, Sequence[float]], tries: Mapping[str, Mapping[float, Sequence[float]]]
) -> store.Study:
    """A study of arms tuned on seeds 100 to 102, which gave `tries`, each with 0.002 as its choice."""
    arms = [store.Arm(label=name, optimizer=name) for name in ends]
    seeds = range(len(next(iter(ends.values()))))
    with store.writing(
        path, **SETUP, arms=arms, seeds=seeds, command="kbeta study task.py:train", code=CODE, tuning=QUESTION
    ) as writer:
        writer.choose({name: {"lr": 2e-3} for name in ends})
        for arm, values in ends.items():
            runs = [(lr, QUESTION.seeds[i], x) for lr, own in tries[arm].items() for i, x in enumerate(own)]
            for lr, seed, value in [*runs, *((2e-3, seed, x) for seed, x in enumerate(values))]:
                spec = RunSpec(**{**SETUP, "settings": {"lr": lr}}, optimizer=arm, seed=seed)
                writer.plan([spec])
                writer.finish(spec, made_study.finished(value))
    return store.Study.open(path)


SHARP = {1e-3: (30.0, 30.1, 30.2), 2e-3: (10.0, 10.1, 10.2), 4e-3: (30.0, 30.1, 30.2)}
FLAT = {1e-3: (10.1, 10.0, 10.2), 2e-3: (10.0, 10.1, 10.2), 4e-3: (10.0, 10.2, 10.1)}
AHEAD = [10.0, 10.2, 9.9, 10.1, 10.3, 9.8, 10.0, 10.1]
BEHIND = [x + y for x, y in zip(AHEAD, SHIFT, strict=True)]


def causes_of(page: report.Page) -> str:
    (section,) = [section for section in page.sections if section.id == "causes"]
    return " ".join([text for _, found, _ in section.data for text in found.summaries])


def test_what_is_not_shown_has_no_cause_no_shares_and_no_power_of_another_test(tmp_path: Path) -> None:
    # The t test alone would call kbeta better than adam95, and kbeta-static as adam95.
    ends = {"kbeta": AHEAD, "adam95": BEHIND, "kbeta-static": [x + 0.001 * (-1) ** i for i, x in enumerate(BEHIND)]}
    assert scipy.stats.ttest_rel(AHEAD, BEHIND).pvalue < 0.05
    study = tuned_study(tmp_path / "out", ends, dict.fromkeys(ends, FLAT))
    found = analysis.analyse(study, resamples=0)
    (only,) = found.primary.findings
    assert only.answer == "Not shown"
    assert [one.parts for one in found.primary.attribution] == [()]
    assert "nothing to take apart" in found.primary.attribution[0].sentence
    assert only.detectable is None
    assert "seeds find a difference" not in only.sentence
    assert "more --tune-seeds" in only.sentence
    assert "support no difference that needs a cause" in causes_of(report.page_of(study, resamples=0))
    shown = kbeta("power", tmp_path / "out")
    assert "more --tune-seeds" in " ".join(shown.split())
    assert kbeta("power", tmp_path / "out", "--json").count('"detectable": null') == 1


def test_a_difference_that_is_shown_keeps_its_shares_and_causes(tmp_path: Path) -> None:
    far = [x + 5 for x in BEHIND]
    ends = {"kbeta": AHEAD, "adam95": far, "kbeta-static": [x + 0.001 * (-1) ** i for i, x in enumerate(far)]}
    study = tuned_study(tmp_path / "out", ends, dict.fromkeys(ends, SHARP))
    found = analysis.analyse(study, resamples=0)
    assert found.primary.findings[0].answer == "Yes"
    shares = {part.cause: part.share for part in found.primary.attribution[0].parts}
    assert shares["dynamics of β2"] == pytest.approx(1.0, abs=0.01)
    assert "The data support as a cause: the dynamics of β2" in causes_of(report.page_of(study, resamples=0))


def test_shares_follow_the_headline_also_where_holm_alone_decides(tmp_path: Path) -> None:
    wave = {i: 10 + (-1) ** i for i in range(8)}
    ends: dict[str, Any] = {**shifted(), "lion": wave, "kbeta-static": {i: x + 0.1 for i, x in wave.items()}}
    found = analysis.analyse(made_study.own(tmp_path / "out", ends), resamples=0)
    assert found.primary.findings[0].p == pytest.approx(ALONE)
    assert found.primary.findings[0].answer == "Not shown"
    assert [one.parts for one in found.primary.attribution] == [()]


def test_p_is_never_nought_and_the_luck_of_a_tuning_makes_nothing_surer() -> None:
    rng = np.random.default_rng(5)
    chosen, once = {"a": {"lr": 1.0}, "b": {"lr": 1.0}}, {key: [Tried({"lr": 1.0}, (0.0,))] for key in "ab"}
    for gap in (0.5, 1.0, 1.5, 2.0, 50.0):
        a, b = rng.normal(size=6), gap + rng.normal(size=6)
        how = stats.compare_pairs({"a": dict(enumerate(a)), "b": dict(enumerate(b))}, [("a", "b")], resamples=0)
        (found,) = confirming.counted(how, once, chosen).contrasts
        assert found.p is not None
        assert found.p >= scipy.stats.ttest_rel(a, b).pvalue
        # with none of the draws on the other side, p is one of them and the observed: 1 in 10,001
        assert found.p >= 1 / 10_001
    assert found.p == pytest.approx(1 / 10_001)


def test_a_tuning_in_which_everything_diverges_goes_on_downwards() -> None:
    question = asking.search_space(asking.parse_tune(["lr=1e-1:1"]), trials=2, seeds=[100], test_seeds=[0], budget=9)

    def measure(requests: Sequence[tuple[str, Any]]) -> list[tuple[float, ...]]:
        return [(abs(math.log10(v["lr"]) + 5) if v["lr"] < 2e-5 else math.nan,) for _, v in requests]

    (found,) = tuning.tune(question, {"kbeta": question.axes}, measure).values()
    # two steps of 0.1 at a time: 1, 0.1; 0.01, 0.001; 1e-4, 1e-5, the first that works; 1e-6, 1e-7 beyond it
    assert [one.values["lr"] for one in found] == pytest.approx([1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0])
    assert tuning.best(found).values["lr"] == pytest.approx(1e-5)
    assert tuning.best(found) == tuning.best(found[::-1])
    same = [Tried({"lr": 1.0}, (math.nan,)), Tried({"lr": 0.1}, (math.nan,))]
    assert tuning.best(same).values == tuning.best(same[::-1]).values == {"lr": 0.1}


@pytest.mark.parametrize("lost", ["result.json", "folder"])
@pytest.mark.parametrize("rate", RATES)
def test_with_a_tuning_run_missing_nothing_is_shown_against_that_arm(tmp_path: Path, rate: float, lost: str) -> None:
    far = [x + 5 for x in BEHIND]
    study = tuned_study(tmp_path / "out", {"kbeta": AHEAD, "adam95": far}, dict.fromkeys(("kbeta", "adam95"), SHARP))
    assert analysis.analyse(study, resamples=0).primary.findings[0].answer == "Yes"
    assert status.words(status.status_of(study)) == "34 runs, 18 of them to tune (18 done): 34 finished."
    gone = study.folder(RunSpec(**{**SETUP, "settings": {"lr": rate}}, optimizer="adam95", seed=101))
    if lost == "folder":
        shutil.rmtree(gone)
    else:
        (gone / lost).unlink()
    found = analysis.analyse(study, resamples=0)
    (only,) = found.primary.findings
    assert (only.answer, only.p) == ("Not shown", 1.0)
    told = status.words(status.status_of(study))
    assert told.startswith("34 runs, 18 of them to tune (17 done): 33 finished, 1 waiting.")
    assert any(line.startswith("1 tuning run is missing.") for line in found.fairness)
    assert "1 tuning run is missing." in report.render(report.page_of(study, resamples=0))


# Two studies


def test_studies_judged_by_different_endpoints_are_not_compared(tmp_path: Path) -> None:
    values: dict[str, dict[int, Any]] = {"kbeta": {0: {"err": [1.0, 2.0]}, 1: {"err": [1.5, 2.0]}}}
    one = folder(tmp_path / "a", values)
    two = folder(tmp_path / "b", values, code=CODE.model_copy(update={"endpoint": "err"}))
    for asked in (None, "endpoint"):
        with pytest.raises(ValueError, match=r"judged by value of train and .*b by err: name a metric of both"):
            compare_studies(one, two, asked)
    assert compare_studies(one, two, "err").findings[0].verdict == "identical"


def test_options_and_tuned_values_that_differ_are_told(tmp_path: Path) -> None:
    def made(name: str, options: Mapping[str, Any]) -> store.Study:
        arm = store.Arm(label="kbeta", optimizer="kbeta", options=dict(options))
        with store.writing(tmp_path / name, **SETUP, arms=[arm], seeds=[0, 1], command="", code=CODE) as writer:
            for seed in (0, 1):
                spec = RunSpec(**SETUP, optimizer="kbeta", options=dict(options), seed=seed)
                writer.plan([spec])
                writer.finish(spec, made_study.finished(1.0 + seed))
        return store.Study.open(tmp_path / name)

    plain, other = made("plain", {}), made("other", {"alpha": 0.5})
    assert "kbeta: alpha is 0.5 in the first and not set in the second" in compare_studies(other, plain).notes
    sharp = tuned_study(tmp_path / "tuned", {"kbeta": AHEAD}, {"kbeta": SHARP})
    notes = compare_studies(plain, sharp).notes
    assert "arms are not tuned in the first and tuned in the second" in notes
    assert "kbeta: lr is not set in the first and 0.002 in the second" in notes


def test_the_luck_of_a_tuning_counts_between_studies_too(tmp_path: Path) -> None:
    one = tuned_study(tmp_path / "one", {"kbeta": AHEAD}, {"kbeta": FLAT})
    flat = tuned_study(tmp_path / "flat", {"kbeta": BEHIND}, {"kbeta": FLAT})
    given = folder(tmp_path / "given", {"kbeta": dict(enumerate(BEHIND))})
    ratios = [
        folder(tmp_path / f"log-{i}", {"kbeta": dict(enumerate(x))}, code=LOG) for i, x in enumerate((AHEAD, BEHIND))
    ]
    (found,) = compare_studies(one, flat).findings
    assert (found.answer, found.test) == ("Not shown", confirming.TEST)
    # the arm behind was not tuned, so there is no luck that it may have lacked
    (found,) = compare_studies(one, given).findings
    p = float(scipy.stats.ttest_rel(AHEAD, BEHIND).pvalue)
    assert found.p == pytest.approx(p, abs=3.5 * 2 * math.sqrt(p / 2 / 10_000) + 1e-4)
    one.record.code = LOG
    (found,) = compare_studies(one, ratios[1]).findings
    p = float(scipy.stats.ttest_rel(np.log(AHEAD), np.log(BEHIND)).pvalue)
    assert found.p == pytest.approx(p, abs=3.5 * 2 * math.sqrt(p / 2 / 10_000) + 1e-4)
    (found,) = compare_studies(ratios[0], ratios[1]).findings
    assert (found.test, found.p) == ("paired t", pytest.approx(p))


# Tables


def test_seeds_that_are_one_number_are_one_seed(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("seed,optimizer,value\n1,a,1.0\n2,a,3.0\n01,a,2.0\n")
    with pytest.raises(ValueError, match="line 4, column 'seed': 'a' has seed 1 already on line 2; keep one"):
        tables.read_table(table)
    table.write_text("seed,optimizer,value\n1,a,1.0\nx,a,3.0\n01,a,2.0\n")
    assert tables.read_table(table) == {"a": {"1": 1.0, "x": 3.0, "01": 2.0}}


def test_a_metric_overwrites_no_column_of_the_export(tmp_path: Path) -> None:
    rows = [{"step": 1.0, "loss": 2.0, "seconds": 77.0, "endpoint": 55.0, "optimizer": 3.0, "seed": 9.0, "status": 4.0}]
    study = logging_study(tmp_path / "out", {"kbeta": rows}, seconds=2.0, settings={"lr": 0.1})
    (row,) = export.rows(study)
    assert [row[key] for key in ("optimizer", "seed", "status", "endpoint", "seconds")] == ["kbeta", 0, "ok", 1.0, 2.0]
    assert [row[f"metrics.{key}"] for key in ("optimizer", "seed", "status", "endpoint", "seconds")] == [
        3,
        9,
        4,
        55,
        77,
    ]
    assert (row["loss"], row["settings.lr"]) == (2.0, 0.1)
    (point,) = export.rows(study, "curves")
    assert (point["optimizer"], point["seed"], point["step"]) == ("kbeta", 0, 1.0)
    assert (point["metrics.optimizer"], point["metrics.seed"], point["seconds"]) == (3.0, 9.0, 77.0)


# Curves, targets and pages


def test_descending_steps_are_drawn_by_rising_ones(tmp_path: Path) -> None:
    study = logging_study(tmp_path / "out", {"kbeta": [{"step": s, "loss": 1 / s} for s in range(10, 0, -1)]})
    found = recorded.courses(study, study.runs())
    assert found["kbeta"][0].steps.tolist() == list(range(1, 11))
    assert found["kbeta"][0].losses.tolist() == [1 / s for s in range(1, 11)]
    assert "kbeta: 1 run" in report.render(report.page_of(study, resamples=0))


def test_curves_without_a_common_step_have_no_median_and_no_error() -> None:
    early, late = (curves.Course(np.arange(a, a + 5.0), np.ones(5)) for a in (1, 10))
    assert [one.title for one in curves.panels({"a": {0: early, 1: late}}, looks.looks_of(["a"]))] == ["a: 2 runs"]


def test_a_mistyped_target_stops_the_study_at_its_first_good_run() -> None:
    seen: list[str] = []

    class Seen:
        def planned(self, *counts: int) -> None: ...
        def started(self, spec: RunSpec) -> None: ...
        def progress(self, spec: RunSpec, step: int, steps: int | None, loss: float | None) -> None: ...
        def finished(self, spec: RunSpec, result: RunResult) -> None:
            seen.append(result.status)

    spec = RunSpec(**SETUP, optimizer="kbeta", seed=0)
    good = made_study.finished(1.0, curve={"step": [1.0], "loss": [1.0]})
    aiming = progress.Aiming(Seen(), Target("lost", 1.0))
    aiming.finished(spec, made_study.diverged())  # which may have had no time to log it
    with pytest.raises(ValueError, match="--target lost<=1: no run logged 'lost'; logged: loss"):
        aiming.finished(spec, good)
    progress.Aiming(Seen(), Target("loss", 1.0)).finished(spec, good)
    assert seen == ["diverged", "ok", "ok"]


def test_the_answer_is_printed_before_the_page_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_study.own(tmp_path / "out", shifted())
    (tmp_path / "task.py").write_text("def train(trial):\n    return 1.0\n")

    def breaks(*given: Any, **more: Any) -> Path:
        raise ValueError("no page")

    monkeypatch.setattr(api, "execute", lambda *given, **more: made)
    monkeypatch.setattr(cli, "write_report", breaks)
    for more in ([], ["--json"]):
        done = CliRunner().invoke(app, ["study", f"{tmp_path / 'task.py'}:train", "--out", str(made.path), *more])
        assert str(done.exception) == "no page"
        assert "kbeta ends better than adam95" in " ".join(done.output.split())


# Lost runs


def test_a_lost_run_is_missed(tmp_path: Path) -> None:
    study = made_study.own(tmp_path / "out", shifted())
    assert status.words(status.status_of(study)) == "16 runs: 16 finished."
    assert analysis.analyse(study, resamples=0).notes == ()
    shutil.rmtree(study.folder(RunSpec(**SETUP, optimizer="adam95", seed=3)))
    found = status.status_of(study)
    assert (found.total, found.finished, found.waiting) == (16, 15, 1)
    assert status.words(found).startswith("16 runs: 15 finished, 1 waiting. Nobody is making the rest")
    judged = analysis.analyse(study, resamples=0)
    assert [(arm.runs, arm.ok, arm.unfinished) for arm in judged.arms] == [(8, 8, 0), (8, 7, 1)]
    assert judged.notes[0].startswith("1 run is not in the folder (adam95: seed 3)")
    assert report.page_of(study, resamples=0).lead.startswith("So far, with 15 of 16 runs done")


def test_a_folder_of_single_runs_lacks_none(tmp_path: Path) -> None:
    for arm, seed in (("kbeta", 0), ("adam95", 3)):
        spec = RunSpec(**SETUP, optimizer=arm, seed=seed)
        how: dict[str, Any] = {"arms": [store.Arm(label=arm, optimizer=arm)], "seeds": [seed], "code": CODE}
        command = f"python -m kourkoutas run task.py:train --optimizer {arm} --out out"
        with store.writing(tmp_path / "out", **SETUP, **how, command=command) as writer:
            writer.plan([spec])
            writer.finish(spec, made_study.finished(1.0))
    study = store.Study.open(tmp_path / "out")
    assert status.words(status.status_of(study)) == "2 runs: 2 finished."
    assert analysis.analyse(study, resamples=0).notes == ()


# Words


def test_stats_says_why_nothing_is_compared(tmp_path: Path) -> None:
    ends = {
        arm: {s: made_study.finished(1.0 + s, settings={"used": ["returned"]}) for s in (0, 1)} for arm in shifted()
    }
    made_study.own(tmp_path / "out", ends)
    assert "never asked for trial.optimizer" in " ".join(kbeta("stats", tmp_path / "out").split())


def test_power_leaves_out_the_contrast_that_has_no_percentages(tmp_path: Path) -> None:
    noisy = {i: x + 0.1 * (-1) ** i for i, x in enumerate(AHEAD)}
    ends: dict[str, Any] = {"kbeta": dict(enumerate(AHEAD)), "adam95": noisy, "lion": dict.fromkeys(range(8), math.nan)}
    made_study.own(tmp_path / "out", ends)
    rows = [line.split() for line in kbeta("power", tmp_path / "out").splitlines()]
    (lion,) = [row for row in rows if "lion" in row]
    (adam,) = [row for row in rows if "adam95" in row]
    assert lion.count("–") == 7
    assert "–" not in adam
    made_study.own(tmp_path / "none", {"kbeta": ends["kbeta"], "lion": ends["lion"]})
    assert kbeta("power", tmp_path / "none")
    with pytest.raises(ValueError, match="kbeta and lion have no pair of finite runs; give a size"):
        kbeta("power", tmp_path / "none", "--difference", "5%")


def test_an_undefined_t_says_why_and_not_something_else() -> None:
    values = {"a": dict.fromkeys(range(3), 1.0), "b": dict.fromkeys(range(3), math.nan), "c": {0: 2.0, 1: 2.0, 2: 2.0}}
    ranks, flat = stats.compare_pairs(values, [("a", "b"), ("a", "c")], resamples=0).contrasts
    assert any(note.startswith("no pair of finite runs:") for note in ranks.notes)
    flat = dataclasses.replace(flat, notes=(*flat.notes, "something else"))
    assert "the differences are all equal: t, its p-value" in verdicts.answer(flat, None).sentence


def test_a_threshold_of_nought_is_one_and_one_that_is_no_number_is_none(tmp_path: Path) -> None:
    made_study.own(tmp_path / "out", shifted())
    with pytest.raises(ValueError, match="--threshold is for a table"):
        kbeta("stats", tmp_path / "out", "--threshold", "0")
    (tmp_path / "t.csv").write_text("seed,optimizer,value\n1,adam95,1.0\n1,b,2.0\n")
    for text in ("nan", "inf"):
        with pytest.raises(ValueError, match=f"--threshold must be a finite number, for example 0.5; got {text}"):
            kbeta("stats", tmp_path / "t.csv", "--threshold", text)


def test_a_metric_that_was_always_nan_is_not_called_unknown(tmp_path: Path) -> None:
    nan: dict[int, Any] = {seed: {"loss": [1.0, 1.0], "nn": [math.nan, math.nan]} for seed in (0, 1)}
    study = folder(tmp_path / "out", {"kbeta": nan, "adam95": nan})
    with pytest.raises(ValueError, match="--endpoint nn: every value of nn is NaN"):
        analysis.analyse(study, endpoints=["nn"])
    with pytest.raises(ValueError, match="unknown metric in --endpoint 'nm'"):
        analysis.analyse(study, endpoints=["nm"])


@pytest.mark.parametrize(("option", "value"), [("rounds", 0), ("threads", -1), ("threads", 0), ("seconds", math.nan)])
def test_a_benchmark_of_nothing_is_refused(option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"`{option}` must be .*; got {value}"):
        bench.run(["torch"], ["tiny"], **{option: value})  # type: ignore[arg-type]


def test_the_page_offers_seeds_that_the_tuning_has_not_seen_and_says_what_more_looks_cost(tmp_path: Path) -> None:
    assert commands.more_seeds("kbeta study t.py:f --seeds 95-99", range(95, 100), [100, 101, 102], 4) == (
        "kbeta study t.py:f --seeds 95-99,103-106"
    )
    study = tuned_study(tmp_path / "out", {"kbeta": AHEAD, "adam95": BEHIND}, {"kbeta": SHARP, "adam95": SHARP})
    study.record.seeds = [*study.record.seeds, 99]
    page = report.page_of(study, resamples=0)
    assert page.more is not None
    assert page.more.endswith("--seeds 0-7,99,103-112")
    assert page.facts["begun"].endswith("UTC")
    assert "another chance of a false answer" in report.render(page)


# A tuned option that reaches nothing

DEAF = """
import torch

def train(trial):
    known = dict(trial.settings)  # which reads the lr, and nothing is made of it
    torch.manual_seed(trial.seed)
    inputs, model = torch.randn(16, 3), torch.nn.Linear(3, 1)
    optimizer = trial.optimizer(model, lr={lr})
    for step in range(3):
        loss = (model(inputs) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        trial.log(step, loss=loss.item())
    return loss.item()
"""


@pytest.mark.parametrize(("lr", "deaf"), [("1e-2", True), ("0.5 * float(known['lr'])", False)])
def test_an_arm_whose_tuned_values_change_nothing_is_told_and_not_compared(tmp_path: Path, lr: str, deaf: bool) -> None:
    pytest.importorskip("torch")
    (tmp_path / "task.py").write_text(DEAF.format(lr=lr), encoding="utf-8")
    how = [
        "--tune",
        "lr=1e-3:1e-1",
        "--trials",
        "2",
        "--tune-budget",
        "0",
        "--tune-seeds",
        "100",
        "--seeds",
        "0-1",
        "--workers",
        "1",
        "--no-report",
    ]
    out = kbeta(
        "study", f"{tmp_path / 'task.py'}:train", *how, "--optimizers", "kbeta,adam95", "--out", tmp_path / "out"
    )
    told = " ".join(out.split())
    assert ("at every lr that its tuning tried" in told) is deaf
    assert bool(analysis.analyse(store.Study.open(tmp_path / "out"), resamples=0).primary.findings) is not deaf
