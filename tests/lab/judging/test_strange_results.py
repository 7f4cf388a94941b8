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

from kourkoutas.cli.command import app
from kourkoutas.lab import api
from kourkoutas.lab.judging import comparing, endpoints, headline, table_file
from kourkoutas.lab.optimizers import looks
from kourkoutas.lab.results import export, files, store
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.running import trial
from kourkoutas.lab.showing import curves, report, status
from kourkoutas.lab.specs.spec import RunResult, RunSpec
from kourkoutas.lab.tuning import luck, search, trials
from kourkoutas.lab.tuning.trials import Tried
from tests.lab import made_study
from tests.lab.judging.test_analysis import CODE, folder
from tests.lab.made_study import analysed, rendered

SETUP: dict[str, Any] = {"testbed": "task.train", "preset": "own", "engine": "own", "settings": {}}
Row = Mapping[str, float]


def kbeta(*words: str | Path) -> str:
    """What a command prints; it must succeed."""
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "140"}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


# What was logged in calls of its own


def logging_study(path: Path, rows: Mapping[str, Sequence[Row]], **more: Any) -> Snapshot:
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
    return Snapshot.read(path)


def in_two_calls(steps: int, every: int) -> Iterator[Row]:
    """A loss at each step, and at every so many one of validation, in a call of its own."""
    for step in range(1, steps + 1):
        yield {"step": step, "loss": 1 / step}
        if step % every == 0:
            yield {"step": step, "val_loss": 2 / step}


@pytest.mark.parametrize(("steps", "every"), [(100, 10), (1500, 1)], ids=["few", "more rows than a curve keeps"])
def test_a_metric_logged_in_calls_of_its_own_does_not_cut_the_loss(tmp_path: Path, steps: int, every: int) -> None:
    study = logging_study(tmp_path / "out", {"kbeta": list(in_two_calls(steps, every))})
    found = curves.courses(Snapshot.read(study.path))
    whole = curves.thinned(found["kbeta"][0])
    assert whole.steps[-1] == steps
    assert not whole.diverged
    titles = [one.title for one in curves.panels(found, looks.looks_of(["kbeta"]), lambda *run: "runs")]
    assert titles[-1] == "K-β: 1 run"
    rows = export.rows(Snapshot.read(study.path), "curves")
    assert [row["step"] for row in rows if row["loss"] is not None] == list(range(1, steps + 1))
    assert [row["step"] for row in rows if row["val_loss"] is not None] == list(range(every, steps + 1, every))


def test_a_page_reads_every_file_of_the_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = logging_study(tmp_path / "out", {name: list(in_two_calls(30, 3)) for name in ("kbeta", "adam95")})
    arrays = {"names": np.array(["w"]), "steps": np.arange(3)} | dict.fromkeys(("sun", "beta2"), np.ones((3, 1)))
    files.write_arrays(study.runs[0].folder / "trace.npz", arrays)
    opened: list[Path] = []
    for name in ("read_json", "read_lines", "read_arrays"):
        read = getattr(files, name)
        monkeypatch.setattr(
            files, name, lambda file, *rest, read=read, **more: opened.append(file) or read(file, *rest, **more)
        )
    assert "K-β" in rendered(study, endpoints=["val_loss:best", "val_loss:tail", "loss:best", "val_loss:until=0.5"])
    names = ["spec.json", "result.json", "metrics.jsonl"]
    expected = [study.path / "study.json", study.runs[0].folder / "trace.npz"]
    expected += [run.folder / name for run in study.runs for name in names]
    assert sorted(opened) == sorted(expected)


def test_what_a_run_writes_after_the_snapshot_is_in_no_view_of_it(tmp_path: Path) -> None:
    study = made_study.own(tmp_path / "out", {"kbeta": {0: None}, "adam95": {0: 1.0}})
    (going,) = [run for run in study.runs if run.result is None]
    file = going.folder / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 4.0}\n')
    assert curves.courses(study)["kbeta"][0].losses.tolist() == [4.0]
    with file.open("a") as more:
        more.write('{"step": 2, "loss": 2.0}\n')
    files.write_arrays(going.folder / "trace.npz", {"names": np.array(["w"]), "steps": np.arange(3)})
    assert curves.courses(study)["kbeta"][0].losses.tolist() == [4.0]
    assert going.trace() is None
    assert curves.courses(Snapshot.read(study.path))["kbeta"][0].losses.tolist() == [4.0, 2.0]


def test_a_diverged_run_is_crossed_though_its_last_losses_are_gone(tmp_path: Path) -> None:
    study = made_study.own(tmp_path / "out", {"kbeta": {0: made_study.diverged([1, 2, 3], [1.0, 2.0, math.nan])}})
    (course,) = curves.courses(Snapshot.read(study.path))["kbeta"].values()
    thin = curves.thinned(course)
    assert (thin.steps.tolist(), thin.diverged) == ([1, 2], True)


def test_a_target_is_met_at_the_step_that_was_logged_however_long_the_run(tmp_path: Path) -> None:
    rows = {"kbeta": list(in_two_calls(1500, 1)), "adam95": list(in_two_calls(5000, 5000))}
    runs = Snapshot.read(logging_study(tmp_path / "out", rows).path).runs
    # 1/step first is that small at step 701
    first = endpoints.values_of(runs, endpoints.parse(f"loss:until={1 / 701!r}"))
    assert first == {"kbeta": {0: 701}, "adam95": {0: 701}}
    found = endpoints.values_of(runs, endpoints.parse(f"val_loss:until={2.0 / 5000!r}"))
    assert math.isnan(found["kbeta"][0])
    assert found["adam95"] == {0: 5000}


def test_a_run_that_reached_the_target_and_then_diverged_has_reached_it_and_an_infinite_loss_meets_none() -> None:
    def run(seed: int, losses: list[float]) -> store.StoredRun:
        result = made_study.diverged([float(k) for k in range(1, 1 + len(losses))], losses)
        return store.StoredRun(RunSpec(**SETUP, optimizer="kbeta", seed=seed), result, Path("nowhere"))

    found = endpoints.values_of([run(0, [3.0, 1.0, 9.0]), run(1, [3.0, -math.inf])], endpoints.parse("loss:until=1"))
    assert found["kbeta"][0] == 2
    assert math.isnan(found["kbeta"][1])


# Holm's family


SHIFT = (0.5, 0.9, 0.1, 1.2, -0.25, 0.8, 0.4, -0.1)
ALONE = float(scipy.stats.ttest_1samp(SHIFT, 0).pvalue)  # shown alone, and not as one of two


def shifted() -> dict[str, dict[int, Any]]:
    return {"kbeta": dict.fromkeys(range(8), 10.0), "adam95": {i: 10 + x for i, x in enumerate(SHIFT)}}


def test_an_arm_without_results_makes_no_other_contrast_surer(tmp_path: Path) -> None:
    assert 0.025 < ALONE < 0.05
    crashed = {seed: made_study.failed() for seed in range(8)}
    found = analysed(made_study.own(tmp_path / "out", {**shifted(), "lion": crashed}))
    only, lion = found.primary.contrasts
    assert only.p == pytest.approx(ALONE)
    assert (lion.p, lion.verdict, lion.why) == (None, "unfinished", "8 of 8 of Lion failed")
    # lion has no p, which counts as the largest
    assert only.p_holm == pytest.approx(multipletests([ALONE, 1.0], method="holm")[1][0])
    assert (only.family, only.verdict) == (2, "unclear")
    assert "Holm for 2 comparisons" in found.answers[0]


def test_an_arm_that_is_no_other_makes_no_other_contrast_surer(tmp_path: Path) -> None:
    ends: dict[str, dict[int, RunResult]] = {}
    for arm, like in (("kbeta", "kbeta"), ("adam95", "adam95"), ("lion", "kbeta")):
        ends[arm] = {
            seed: made_study.finished(
                value, curve={"step": [1.0, 2.0], "loss": [9.0, value]}, settings={"used": ["optimizer", "returned"]}
            )
            for seed, value in shifted()[like].items()
        }
    found = analysed(made_study.own(tmp_path / "out", ends))
    assert any("Not compared: K-β and Lion" in line for line in found.fairness)
    (only,) = found.primary.contrasts
    assert only.p_holm == pytest.approx(multipletests([ALONE, 1.0], method="holm")[1][0])
    assert only.verdict == "unclear"


def test_holm_counts_what_could_not_be_compared_also_with_the_luck_of_a_tuning() -> None:
    values = {arm: dict(by_seed) for arm, by_seed in shifted().items()}
    once = dict.fromkeys(values, luck.lost_by_tuning([[0.0]], 0))
    (found,) = comparing.compare_pairs(values, [("kbeta", "adam95")], resamples=0, family=3, lost=once).contrasts
    assert found.p is not None
    assert found.p_holm == pytest.approx(3 * found.p)


def test_times_are_adjusted_for_planned_arms_whose_runs_failed(tmp_path: Path) -> None:
    fast, slow = {"step": [1.0, 2.0], "loss": [1.0, 1.0]}, {"step": [1.0, 2.0], "loss": [3.0, 1.0]}
    never = {"step": [1.0, 2.0], "loss": [3.0, 3.0]}
    slower = [slow, slow, slow, slow, never, never, never, never]  # ranks decide
    ends: dict[str, dict[int, Any]] = {
        "kbeta": {seed: made_study.finished(1.0, curve=fast) for seed in range(8)},
        "adam95": {seed: made_study.finished(1.0, curve=slower[seed]) for seed in range(8)},
        "lion": {seed: made_study.failed() for seed in range(8)},
    }
    time = analysed(made_study.own(tmp_path / "out", ends), endpoints=["loss:until=1"]).endpoints[-1]
    only, lion = time.contrasts
    # eight pairs of one sign: 2/2⁸, one of two planned contrasts of each of two endpoints
    assert (only.p, only.p_holm) == (pytest.approx(2 / 2**8), pytest.approx(4 * 2 / 2**8))
    assert (lion.verdict, lion.why) == ("unfinished", "8 of 8 of Lion failed")


# The luck of the tuning


QUESTION = search.search_space(
    search.parse_tune(["lr=1e-3:4e-3"]), trials=3, seeds=[100, 101, 102], test_seeds=range(8), budget=0
)
RATES = (1e-3, 2e-3, 4e-3)


def tuned_study(
    path: Path, ends: Mapping[str, Sequence[float]], tries: Mapping[str, Mapping[float, Sequence[float]]]
) -> Snapshot:
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
    return Snapshot.read(path)


SHARP = {1e-3: (30.0, 30.1, 30.2), 2e-3: (10.0, 10.1, 10.2), 4e-3: (30.0, 30.1, 30.2)}
FLAT = {1e-3: (10.1, 10.0, 10.2), 2e-3: (10.0, 10.1, 10.2), 4e-3: (10.0, 10.2, 10.1)}
AHEAD = [10.0, 10.2, 9.9, 10.1, 10.3, 9.8, 10.0, 10.1]
BEHIND = [x + y for x, y in zip(AHEAD, SHIFT, strict=True)]


def test_what_is_unclear_has_no_shares_and_counts_the_luck_in_what_it_could_have_found(tmp_path: Path) -> None:
    # The t test alone would call kbeta better than adam95, and kbeta-static as adam95.
    ends = {"kbeta": AHEAD, "adam95": BEHIND, "kbeta-static": [x + 0.001 * (-1) ** i for i, x in enumerate(BEHIND)]}
    assert scipy.stats.ttest_rel(AHEAD, BEHIND).pvalue < 0.05
    study = tuned_study(tmp_path / "out", ends, dict.fromkeys(ends, FLAT))
    found = analysed(study)
    (only,) = found.primary.contrasts
    assert (only.verdict, only.tuned) == ("unclear", True)
    assert only.effect is not None
    assert only.effect.interval is not None
    assert only.effect.interval.holds(0.0)
    assert [one.parts for one in found.attribution[found.primary.name]] == [()]
    assert "nothing to explain" in found.causes[0]
    untuned = analysed(folder(tmp_path / "given", {arm: dict(enumerate(x)) for arm, x in ends.items()}))
    assert only.detectable is not None
    assert untuned.primary.contrasts[0].detectable is not None
    assert only.detectable > untuned.primary.contrasts[0].detectable
    page = rendered(study)
    assert "All but the first row ignore tuning luck." in page
    assert f"p = {only.p:.3g}" in page


def test_a_difference_that_is_clear_keeps_its_shares(tmp_path: Path) -> None:
    far = [x + 5 for x in BEHIND]
    ends = {"kbeta": AHEAD, "adam95": far, "kbeta-static": [x + 0.001 * (-1) ** i for i, x in enumerate(far)]}
    found = analysed(tuned_study(tmp_path / "out", ends, dict.fromkeys(ends, SHARP)))
    assert found.primary.contrasts[0].verdict == "better"
    shares = {part.cause: part.share for part in found.attribution[found.primary.name][0].parts}
    assert shares["dynamics of β2"] == pytest.approx(1.0, abs=0.01)
    assert "dynamics of β2 100 %" in found.causes[0]


def test_shares_follow_the_headline_also_where_holm_alone_decides(tmp_path: Path) -> None:
    wave = {i: 10 + (-1) ** i for i in range(8)}
    ends: dict[str, Any] = {**shifted(), "lion": wave, "kbeta-static": {i: x + 0.1 for i, x in wave.items()}}
    found = analysed(made_study.own(tmp_path / "out", ends))
    assert found.primary.contrasts[0].p == pytest.approx(ALONE)
    assert found.primary.contrasts[0].verdict == "unclear"
    assert [one.parts for one in found.attribution[found.primary.name]] == [()]


def test_p_is_never_nought_and_the_luck_of_a_tuning_makes_nothing_surer() -> None:
    rng = np.random.default_rng(5)
    once = dict.fromkeys("ab", luck.lost_by_tuning([[0.0]], 0))
    for gap in (0.5, 1.0, 1.5, 2.0, 50.0):
        a, b = rng.normal(size=6), gap + rng.normal(size=6)
        values = {"a": dict(enumerate(a)), "b": dict(enumerate(b))}
        (found,) = comparing.compare_pairs(values, [("a", "b")], resamples=0, lost=once).contrasts
        assert found.p is not None
        assert found.p >= scipy.stats.ttest_rel(a, b).pvalue > 0


def test_a_tuning_in_which_everything_diverges_goes_on_downwards() -> None:
    question = search.search_space(search.parse_tune(["lr=1e-3:1"]), trials=7, seeds=[100], test_seeds=[0], budget=9)

    def score(lr: float) -> float:
        return abs(math.log10(lr) + 4) if lr < 2e-4 else math.nan

    tried: dict[str, list[Tried]] = {"kbeta": []}
    while requests := search.next_requests(question, {"kbeta": question.axes}, tried):
        tried["kbeta"] += [Tried(values, (score(float(values["lr"])),)) for _, values in requests]
    found = sorted(tried["kbeta"], key=lambda one: one.values["lr"])
    # seven values from 1e-3 to 1, and two steps of √0.1 below them, of which the second is the first that works
    assert [one.values["lr"] for one in found[:3]] == pytest.approx([1e-4, 3.162e-4, 1e-3])
    assert trials.best(found).values["lr"] == pytest.approx(1e-4)
    assert trials.best(found) == trials.best(found[::-1])
    same = [Tried({"lr": 1.0}, (math.nan,)), Tried({"lr": 0.1}, (math.nan,))]
    assert trials.best(same).values == trials.best(same[::-1]).values == {"lr": 0.1}


@pytest.mark.parametrize("lost", ["result.json", "folder"])
@pytest.mark.parametrize("rate", RATES)
def test_with_a_tuning_run_missing_nothing_is_shown_against_that_arm(tmp_path: Path, rate: float, lost: str) -> None:
    far = [x + 5 for x in BEHIND]
    study = tuned_study(tmp_path / "out", {"kbeta": AHEAD, "adam95": far}, dict.fromkeys(("kbeta", "adam95"), SHARP))
    assert analysed(study).primary.contrasts[0].verdict == "better"
    told = str(status.status_of(Snapshot.read(study.path)))
    assert told == "34 runs, 18 of them to tune (18 done): 34 finished."
    gone = study.path / "runs" / RunSpec(**{**SETUP, "settings": {"lr": rate}}, optimizer="adam95", seed=101).id
    if lost == "folder":
        shutil.rmtree(gone)
    else:
        (gone / lost).unlink()
    found = analysed(study)
    (only,) = found.primary.contrasts
    assert (only.verdict, only.p) == ("unclear", 1.0)
    told = str(status.status_of(Snapshot.read(study.path)))
    assert told.startswith("34 runs, 18 of them to tune (17 done): 33 finished, 1 waiting.")
    assert any(line.startswith("1 tuning run is missing.") for line in found.fairness)
    assert "1 tuning run is missing." in rendered(study)


# Tables


def test_seeds_that_are_one_number_are_one_seed(tmp_path: Path) -> None:
    table = tmp_path / "t.csv"
    table.write_text("seed,optimizer,value\n1,a,1.0\n2,a,3.0\n01,a,2.0\n")
    with pytest.raises(ValueError, match="line 4: 'a' has seed 1 already; keep one"):
        table_file.read_table(table)
    table.write_text("seed,optimizer,value\n1,a,1.0\nx,a,3.0\n01,a,2.0\n")
    assert table_file.read_table(table) == {"a": {"1": 1.0, "x": 3.0, "01": 2.0}}


def test_a_metric_overwrites_no_column_of_the_export(tmp_path: Path) -> None:
    rows = [{"step": 1.0, "loss": 2.0, "seconds": 77.0, "endpoint": 55.0, "optimizer": 3.0, "seed": 9.0, "status": 4.0}]
    study = logging_study(tmp_path / "out", {"kbeta": rows}, seconds=2.0, settings={"lr": 0.1})
    (row,) = export.rows(Snapshot.read(study.path))
    assert [row[key] for key in ("optimizer", "seed", "status", "endpoint", "seconds")] == ["kbeta", 0, "ok", 1.0, 2.0]
    assert [row[f"metrics.{key}"] for key in ("optimizer", "seed", "status", "endpoint", "seconds")] == [
        3,
        9,
        4,
        55,
        77,
    ]
    assert (row["loss"], row["settings.lr"]) == (2.0, 0.1)
    (point,) = export.rows(Snapshot.read(study.path), "curves")
    assert (point["optimizer"], point["seed"], point["step"]) == ("kbeta", 0, 1.0)
    assert (point["metrics.optimizer"], point["metrics.seed"], point["seconds"]) == (3.0, 9.0, 77.0)


# Curves, targets and pages


def test_descending_steps_are_drawn_by_rising_ones(tmp_path: Path) -> None:
    study = logging_study(tmp_path / "out", {"kbeta": [{"step": s, "loss": 1 / s} for s in range(10, 0, -1)]})
    found = curves.courses(Snapshot.read(study.path))
    assert found["kbeta"][0].steps.tolist() == list(range(1, 11))
    assert found["kbeta"][0].losses.tolist() == [1 / s for s in range(1, 11)]
    assert "K-β: 1 run" in rendered(study)


def test_curves_without_a_common_step_have_no_median_and_no_error() -> None:
    early, late = (curves.Course(np.arange(a, a + 5.0), np.ones(5)) for a in (1, 10))
    drawn = curves.panels({"a": {0: early, 1: late}}, looks.looks_of(["a"]), lambda *run: "runs")
    assert [one.title for one in drawn] == ["a: 2 runs"]


def test_the_answer_is_printed_before_the_page_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = made_study.own(tmp_path / "out", shifted())
    (tmp_path / "task.py").write_text("def train(trial):\n    return 1.0\n")

    def breaks(*given: Any, **more: Any) -> Path:
        raise ValueError("no page")

    monkeypatch.setattr(api, "execute", lambda *given, **more: Snapshot.read(made.path))
    monkeypatch.setattr(report, "write", breaks)
    for more in ([], ["--json"]):
        done = CliRunner().invoke(app, ["study", f"{tmp_path / 'task.py'}:train", "--out", str(made.path), *more])
        assert str(done.exception) == "no page"
        assert "is ahead of Adam 0.95 (4.2 % lower)" in " ".join(done.output.split())


# Lost runs


def test_a_lost_run_is_missed(tmp_path: Path) -> None:
    study = made_study.own(tmp_path / "out", shifted())
    assert str(status.status_of(Snapshot.read(study.path))) == "16 runs: 16 finished."
    assert analysed(study).notes == ()
    shutil.rmtree(study.path / "runs" / RunSpec(**SETUP, optimizer="adam95", seed=3).id)
    found = status.status_of(Snapshot.read(study.path))
    assert (found.count(), found.count("finished"), found.count("waiting")) == (16, 15, 1)
    assert str(found).startswith("16 runs: 15 finished, 1 waiting. Nobody is making the rest")
    judged = analysed(study)
    assert [(arm.runs, arm.ok, arm.unfinished) for arm in judged.arms] == [(8, 8, 0), (8, 7, 1)]
    assert judged.notes[0].startswith("1 run is not in the folder (Adam 0.95: seed 3)")
    assert judged.headline == "15 of 16 runs have ended. The verdict comes when all have."


def test_what_is_missing_does_not_depend_on_the_words_of_the_command(tmp_path: Path) -> None:
    for arm, seed in (("kbeta", 0), ("adam95", 3)):
        spec = RunSpec(**SETUP, optimizer=arm, seed=seed)
        how: dict[str, Any] = {"arms": [store.Arm(label=arm, optimizer=arm)], "seeds": [seed], "code": CODE}
        with store.writing(tmp_path / "out", **SETUP, **how, command="python run study.py") as writer:
            writer.plan([spec])
            writer.finish(spec, made_study.finished(1.0))
    study = Snapshot.read(tmp_path / "out")
    assert str(status.status_of(study)).startswith("4 runs: 2 finished, 2 waiting.")
    assert any(
        note.startswith("2 runs are not in the folder (K-β: seed 3; Adam 0.95: seed 0)")
        for note in analysed(study).notes
    )


# Words


def test_stats_says_why_nothing_is_compared(tmp_path: Path) -> None:
    ends = {
        arm: {s: made_study.finished(1.0 + s, settings={"used": ["returned"]}) for s in (0, 1)} for arm in shifted()
    }
    made_study.own(tmp_path / "out", ends)
    assert "never asked for trial.optimizer" in " ".join(kbeta("stats", tmp_path / "out").split())


def test_an_undefined_t_says_why_and_not_something_else() -> None:
    values = {"a": dict.fromkeys(range(3), 1.0), "b": dict.fromkeys(range(3), math.nan), "c": {0: 2.0, 1: 2.0, 2: 2.0}}
    ranks, flat = comparing.compare_pairs(values, [("a", "b"), ("a", "c")], resamples=0).contrasts
    assert any(note.startswith("no pair of finite runs:") for note in ranks.notes)
    flat = dataclasses.replace(flat, notes=(*flat.notes, "something else"))
    assert "no verdict, the differences are all equal" in headline.answer(flat)


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
        analysed(study, endpoints=["nn"])
    with pytest.raises(ValueError, match="unknown metric in --endpoint 'nm'"):
        analysed(study, endpoints=["nm"])


# A tuned option that reaches nothing

DEAF = """
def train(trial):
    known = dict(trial.settings)  # which reads the lr, and nothing is made of it
    value = 1.0 + trial.seed + len(trial.arm)
    for step in range(3):
        value *= 1 - {lr}
        trial.log(step, loss=value)
    return value
"""


@pytest.mark.parametrize(("lr", "deaf"), [("1e-2", True), ("0.5 * float(known['lr'])", False)])
def test_an_arm_whose_tuned_values_change_nothing_is_told_and_not_compared(tmp_path: Path, lr: str, deaf: bool) -> None:
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
    assert bool(analysed(Snapshot.read(tmp_path / "out")).primary.contrasts) is not deaf
