"""Suites: several studies with one answer, made in real processes, killed and resumed; and what the answer says."""

from __future__ import annotations

import io
import json
import math
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import field_study
import numpy as np
import pytest
from rich.console import Console

from kourkoutas.lab import suites
from kourkoutas.lab.judging.analysis import analyse
from kourkoutas.lab.judging.values import Sides
from kourkoutas.lab.judging.verdicts import Ruling
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.specs.spec import RunResult
from kourkoutas.lab.suites import across, asking, conducting, judging, page
from kourkoutas.lab.suites.analysis import SuiteAnalysis, analyse_suite
from kourkoutas.lab.suites.showing import MOST_LINES, Answer, markdown, on_each, problem_table
from tests.lab import made_study
from tests.lab.simulated_suite import KINDS, counts

ROOT = Path(__file__).parents[2]

# A training function without a framework. kbeta is better by a factor that the settings name; a file `hurry` beside it
# ends its pauses, which are there to be killed in. Every run says who made it, and how often.
TASK = """
import math, os, pathlib, random, time

hurry = pathlib.Path(__file__).with_name("hurry")

def train(trial):
    with (trial.folder / "made-by").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    noise = random.Random(f"{trial.arm} {trial.seed}").uniform(0.98, 1.02)
    factor, lr = trial.settings["factor"], trial.settings["lr"]
    if trial.arm != "kbeta":
        factor = 1.0
    for step in range(1, 11):
        trial.log(step, loss=10 * factor * noise / step)
        if not hurry.exists():
            time.sleep(0.02)
    return factor * noise * (1 + abs(math.log10(lr / 1e-2)))
"""
SUITE = """
about = "Two made-up problems"
optimizers = ["kbeta", "adam95"]
seeds = "0-7"
trials = 3
tune_seeds = "100-101"
tune_budget = 0
tune = { lr = [1e-3, 1e-1] }

[studies.easy]
train = "task.py:train"
settings = { factor = 0.5 }

[studies.hard]
train = "task.py:train"
settings = { factor = 0.8 }
"""
RUNS = 2 * (2 * 3 * 2 + 2 * 8)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "hurry").touch()
    (tmp_path / "mine.toml").write_text(SUITE)
    return tmp_path / "mine.toml"


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "kourkoutas", "suite", *map(str, words)]


def called(*words: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=280)
    assert done.returncode == code, done.stderr
    return done


def made_by(out: Path) -> dict[str, str]:
    return {run.parent.name: run.read_text() for run in out.glob("*/runs/*/made-by")}


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


def test_a_suite_makes_every_study_with_one_set_of_workers_and_answers_over_all_of_them(file: Path) -> None:
    out = file.parent / "out"
    done = called(file, "--out", out, "--workers", "2")
    assert "kbeta" not in done.stdout
    assert "K-β (ratio 0.63" in done.stdout  # √(0.5·0.8) = 0.632, and noise of 2 %
    assert "is clearly ahead of Adam 0.95 over these 2 problems" in " ".join(done.stdout.split())
    assert len(done.stdout.splitlines()) <= MOST_LINES
    assert f"[{RUNS}/{RUNS}] hard " in done.stderr
    makers = made_by(out)
    assert len(makers) == RUNS
    assert len(set(makers.values())) == 2
    for name in ("easy", "hard"):
        assert (out / name / "report.html").exists()
        assert analyse(Snapshot.read(out / name)).finished
    assert (out / "suite.html").exists()


def test_a_suite_that_is_killed_goes_on_and_ends_with_the_same_answer(file: Path) -> None:
    out, hurry = file.parent / "out", file.with_name("hurry")
    whole = json.loads(called(file, "--out", file.parent / "whole", "--json", "--no-report").stdout)
    hurry.unlink()
    call = command(file, "--out", out, "--no-report")
    with subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: len(list(out.glob("easy/runs/*/result.json"))) > 3)
        process.send_signal(signal.SIGKILL)
    hurry.touch()
    kept = {run.parent.name for run in out.glob("*/runs/*/result.json")}
    before = {name: text for name, text in made_by(out).items() if name in kept}
    resumed = json.loads(called(file, "--out", out, "--json", "--no-report").stdout)
    assert {name: made_by(out)[name] for name in kept} == before
    for found in (whole, resumed):
        for problem in found["problems"]:
            del problem["folder"]
            for row in problem["rows"]:
                del row["seconds_per_step"]
    assert resumed == whole


def test_an_interrupted_suite_says_how_to_resume(file: Path) -> None:
    file.with_name("hurry").unlink()
    out = file.parent / "out"
    hearing = "import os, signal, sys; signal.signal(2, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    call = [sys.executable, "-c", hearing, *command(file, "--out", out)]
    with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: any(out.glob("easy/runs/*/result.json")))
        process.send_signal(signal.SIGINT)
        printed, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert printed == ""
    assert said.strip().splitlines()[-1].startswith("Stopped; finished runs are kept. To resume: ")


def test_a_suite_goes_on_when_its_progress_can_no_longer_be_shown(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    def breaks(self: conducting.Far, run: str, what: str, result: RunResult) -> None:
        told.append(run)
        raise KeyError("no such bar")

    monkeypatch.setattr(conducting.Far, "finished", breaks)
    out, text = file.parent / "out", io.StringIO()
    console = Console(file=text, width=200)
    suites.run(asking.read(str(file)), out, console=console, command="test", pages=False, workers=1)
    assert len(told) == 1
    assert len(list(out.glob("*/runs/*/result.json"))) == RUNS
    assert text.getvalue().count("Progress can no longer be shown (KeyError: 'no such bar')") == 1


def test_python_makes_the_same_suite_from_a_list_and_gives_frames(file: Path) -> None:
    task = f"{file.with_name('task.py')}:train"
    problems = {
        "easy": {"train": task, "settings": {"factor": 0.5}},
        "hard": {"train": task, "settings": {"factor": 0.8}},
    }
    shared: dict[str, Any] = {"optimizers": ["kbeta", "adam95"], "seeds": range(8), "trials": 3, "tune_budget": 0}
    shared |= {"tune": {"lr": (1e-3, 1e-1)}, "tune_seeds": [100, 101]}
    found = suites.suite(problems, **shared, out=file.parent / "python", workers=2, progress=False)
    summary = found.summary().set_index("optimizer")
    assert summary.loc["kbeta", "verdict"] == "better"
    assert summary.loc["kbeta", "ahead"] == 2
    assert set(found.problems()["problem"]) == {"easy", "hard"}
    assert list(found.profile()["share"]) == [0.5, 1.0, 0.5, 1.0]
    assert "clearly ahead" in repr(found)
    assert "<svg" in found._repr_html_()
    again = suites.load_suite(file.parent / "python")
    assert again.to_json() == found.to_json()


def test_a_problem_that_is_taken_out_of_the_file_stays_part_of_the_answer(file: Path) -> None:
    out = file.parent / "out"
    called(file, "--out", out, "--no-report")
    file.write_text(SUITE.partition("[studies.hard]")[0])
    found = json.loads(called(file, "--out", out, "--no-report", "--json").stdout)
    assert [problem["name"] for problem in found["problems"]] == ["easy", "hard"]


MISTAKES = {
    "optimizer = 'kbeta'": "unknown argument of a suite 'optimizer': did you mean 'optimizers'?",
    "baseline = 'adam999'": "unknown baseline 'adam999'",
    "seeds = 'many'": "study easy: --seeds must be numbers and ranges",
    "[studies.easy]\noptimizers = ['kbeta']": "study easy: `optimizers` are the same in all studies of a suite",
    "[studies.easy]\nsteps = 3": "unknown argument of study easy 'steps'",
    "[studies.easy]\ntrain = 'gone.py:train'": "study easy: ",
    "[studies.'../easy']\ntrain = 'task.py:train'": "a study's name is that of its folder",
    "= 3": "not a TOML file",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_in_a_suites_file_is_told_before_any_run(line: str, file: Path) -> None:
    head = [part for part in ('optimizers = ["kbeta", "adam95"]', 'seeds = "0-7"') if part[:6] not in line[:6]]
    study = "" if "[studies" in line else '\n[studies.easy]\ntrain = "task.py:train"'
    file.write_text("\n".join([*head, line, study]))
    with pytest.raises(ValueError, match=re.escape(MISTAKES[line])):
        asking.read(str(file))


def test_an_unknown_suite_is_told_which_there_are() -> None:
    with pytest.raises(ValueError, match="unknown suite 'feild': did you mean 'field'"):
        asking.read("feild")


@pytest.mark.parametrize("name", ["paper", "smoke", *sorted(map(str, (ROOT / "examples").glob("*.toml")))])
def test_every_shipped_suite_is_a_plan(name: str) -> None:
    assert len(asking.read(name).plans) >= 2


def test_a_folder_of_something_else_is_left_alone(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").touch()
    done = called(file, "--out", other, code=2)
    assert "is no suite's folder and not empty (it holds thesis.tex)" in " ".join(done.stderr.split())
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]


# What the answer says.


def ends(ratio: float, n: int = 10, spread: float = 0.01) -> dict[str, dict[int, float]]:
    """Two optimizers whose ends have this ratio exactly in the geometric mean over the seeds."""
    shifts = spread * np.sin(2 * math.pi * np.arange(n) / n)  # which sum to 0
    base = 2.0 + np.arange(n) / n
    mine = base * ratio * 10**shifts
    return {"kbeta": dict(enumerate(mine.tolist())), "adam95": dict(enumerate(base.tolist()))}


def answered(
    folder: Path, problems: Mapping[str, Any], how: Mapping[str, Any] | None = None, **more: Any
) -> SuiteAnalysis:
    snapshots = {}
    for name, own in problems.items():
        snapshots[name] = made_study.own(folder / name, own, **{"log": True, **(how or {})})
    return analyse_suite(snapshots, **more)


def test_the_ratio_is_the_geometric_mean_over_problems_and_each_counts_alike(tmp_path: Path) -> None:
    found = answered(tmp_path, {"one": ends(0.5, n=8), "two": ends(0.9, n=12)})
    (one,) = found.standings
    assert one.ratio == pytest.approx(math.sqrt(0.5 * 0.9))
    assert one.interval is not None
    assert one.interval.low < one.ratio < one.interval.high
    assert one.verdict == "better"
    assert one.ratios == pytest.approx({"one": 0.5, "two": 0.9})


def test_where_higher_is_better_a_ratio_below_1_still_speaks_for_the_treatment(tmp_path: Path) -> None:
    found = answered(tmp_path, {"one": ends(2.0), "two": ends(2.0)}, {"higher_is_better": True})
    assert found.standings[0].ratio == pytest.approx(0.5)
    assert found.standings[0].verdict == "better"


def test_ahead_on_one_problem_and_behind_on_another_is_no_answer_over_both(tmp_path: Path) -> None:
    found = answered(tmp_path, {"one": ends(0.5), "two": ends(2.0)})
    (one,) = found.standings
    assert (one.count("better"), one.count("worse"), one.verdict) == (1, 1, "unclear")
    assert "clearly ahead on one, clearly behind on two" in found.answers[0]


def test_a_diverged_run_counts_as_the_worst_end_of_its_problem_and_is_told(tmp_path: Path) -> None:
    own = ends(0.5)
    own["kbeta"][3] = math.nan
    found = answered(tmp_path, {"one": own, "two": ends(0.5)})
    (one,) = found.standings
    worst = max(x for by_seed in own.values() for x in by_seed.values() if math.isfinite(x))
    logs = [math.log10((worst if math.isnan(x) else x) / own["adam95"][seed]) for seed, x in own["kbeta"].items()]
    assert one.ratios["one"] == pytest.approx(10 ** np.mean(logs))
    assert one.diverged == {"one": 1}
    assert "runs diverged on one (1)" in found.answers[0]


def test_the_answer_waits_for_a_run_that_failed(tmp_path: Path) -> None:
    own: dict[str, Any] = ends(0.5)
    own["kbeta"][3] = made_study.failed()
    found = answered(tmp_path, {"one": own, "two": ends(0.5)})
    (one,) = found.standings
    assert (one.verdict, one.ratio) == ("unfinished", None)
    assert one.rulings["two"].verdict == "better"
    assert "No verdict over these 2 problems on K-β (a run failed)." in found.headline


def test_nothing_is_said_before_every_study_has_finished(tmp_path: Path) -> None:
    own: dict[str, Any] = ends(0.5)
    own["kbeta"][3] = None
    found = answered(tmp_path, {"one": own, "two": ends(0.5)})
    assert found.standings == ()
    assert found.headline == "1 of 2 studies have finished. The answer over all of them comes when all have."
    assert "Studies" in page.render(found, tmp_path)


def test_a_problem_without_ratios_is_left_out_of_the_mean_and_named(tmp_path: Path) -> None:
    below = {"kbeta": dict.fromkeys(range(10), -1.0), "adam95": {seed: -1.0 - 0.1 * seed for seed in range(10)}}
    found = answered(tmp_path, {"one": ends(0.5), "two": below}, {"log": False})
    (one,) = found.standings
    assert one.ratio == pytest.approx(0.5)
    assert found.notes == ("two has no part in the mean of K-β: values at or below 0 have no ratio.",)


def test_equal_is_said_only_within_a_margin(tmp_path: Path) -> None:
    problems = {"one": ends(1.0, spread=0.001), "two": ends(1.0, spread=0.001)}
    assert answered(tmp_path / "a", problems).standings[0].verdict == "unclear"
    found = answered(tmp_path / "b", problems, margin=2.0)
    assert (found.standings[0].verdict, found.standings[0].count("equal")) == ("equal", 2)


def test_the_answer_is_the_same_in_whatever_order_the_problems_are_named(tmp_path: Path) -> None:
    one = answered(tmp_path / "a", {"one": ends(0.97), "two": ends(0.99, spread=0.03)}).standings[0]
    two = answered(tmp_path / "b", {"two": ends(0.99, spread=0.03), "one": ends(0.97)}).standings[0]
    assert (one.p, one.interval) == (two.p, two.interval)


def test_an_optimizer_that_some_problems_lack_is_named_and_left_out(tmp_path: Path) -> None:
    found = answered(tmp_path, {"one": {**ends(0.5), "lion": ends(0.7)["kbeta"]}, "two": ends(0.5)})
    assert found.optimizers == ("kbeta", "adam95")
    assert found.notes == ("Lion is in one only, and no part of the answer over all problems.",)


def test_statements_of_one_family_are_adjusted_together(tmp_path: Path) -> None:
    found = answered(tmp_path, {"one": ends(0.5), "two": ends(0.999, spread=0.01), "three": ends(0.998, spread=0.01)})
    (one,) = found.standings
    raw = [study.judged[0].paired["kbeta", "adam95"].decision.p for study in found.studies.values()]
    every = sorted([*raw, one.p], key=float)  # type: ignore[arg-type]
    assert found.family == 4
    first = one.rulings["one"]
    assert first.p_holm == pytest.approx((4 - every.index(raw[0])) * raw[0])


@pytest.mark.slow
def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(300):
        made = [across.Ratios(rng.normal(0.1, 0.2, 10), Sides(np.zeros(8), np.zeros(8))) for _ in range(4)]
        interval = across.over_problems(made).interval(0.95)
        assert interval is not None
        covered += interval.holds(10**-0.1)
    assert 270 <= covered <= 297  # 285 expected, ±4 standard deviations


def test_the_profile_is_dolan_and_mores() -> None:
    ends_of = {"p": {"a": 2.0, "b": 1.0, "c": math.inf}, "q": {"a": 0.5, "b": 0.25, "c": 0.25}}
    assert across.profile(ends_of, {"p": False, "q": True}) == {"a": [1.0, 2.0], "b": [1.0, 2.0], "c": [2.0, math.inf]}


@pytest.mark.parametrize("kind", ["two arms", pytest.param("one diverged on every problem", marks=pytest.mark.slow)])
def test_equal_optimizers_are_seldom_told_apart_by_a_suite(kind: str) -> None:
    """benchmarks/error_rates.py has the rates; this many of 60 come up once in a thousand at a rate of 6 %."""
    assert counts(KINDS[kind], 60)["any"] <= 10


# Views.


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> SuiteAnalysis:
    """The kept records of the field's problems."""
    folder = tmp_path_factory.mktemp("field")
    assert sorted(field_study.unpack_all(folder)) == ["burgers", "darcy", "emulator", "pinnacle"]
    return suites.load_suite(folder).analysis


def test_the_tables_of_the_field_study_are_those_of_the_suite(field: SuiteAnalysis) -> None:
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    rows = [line for line in markdown(field).splitlines() if line.startswith("|") and not line.startswith("|---")]
    assert len(rows) == 9 + 4 * 10
    for row in rows:
        assert row in text


def test_the_field_study_on_a_terminal_has_30_lines_of_80_columns(field: SuiteAnalysis) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(Answer(field, Path("results/field/suite.html")))
    lines = console.export_text().splitlines()
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= 80
    assert all(any(line.startswith(name) for line in lines) for name in ("SOAP", "K-β exact", "AdaGC"))


def test_an_effect_beyond_a_factor_of_2_is_told_as_a_factor(tmp_path: Path) -> None:
    found = answered(tmp_path, {"quarter": ends(0.25), "fourfold": ends(4.0), "less": ends(0.8)})
    _, (cells,) = on_each(found)
    assert [cell.rstrip("*") for cell in cells] == ["K-β", "4.0× better", "4.0× worse", "+20 %"]
    texts = [problem_table(found, problem) for problem in found.problems]
    for text, effect in zip(texts, ("4.0× lower", "4.0× higher", "20 % lower"), strict=True):
        assert f"| {effect} [" in text


def test_the_page_of_a_suite_leads_to_every_problem_and_loads_nothing(field: SuiteAnalysis, tmp_path: Path) -> None:
    text = page.write(field, tmp_path).read_text(encoding="utf-8")
    assert "<title>Suite: field</title>" in text
    for number, problem in enumerate(field.problems):
        assert f'href="#problem-{number}"' in text
        assert f'id="problem-{number}"' in text
        assert problem.title in text
    assert not re.findall(r"(?:src|href)=\"(?:https?:)?//", text)
    assert "speaks of these problems" in text


def test_studies_of_their_own_are_answered_together_with_one_page(tmp_path: Path) -> None:
    for name, ratio in (("one", 0.5), ("two", 0.8)):
        made_study.own(tmp_path / name, ends(ratio), log=True)
    done = called(tmp_path / "one", tmp_path / "two", "--out", tmp_path)
    assert "K-β (ratio 0.632) is clearly ahead of Adam 0.95 over these 2 problems." in " ".join(done.stdout.split())
    assert (tmp_path / "suite.html").exists()


def test_what_a_suite_is_expected_to_make_is_known_before_it_begins() -> None:
    plans = asking.read("smoke").plans
    assert {name: conducting.expected_runs(plan) for name, plan in plans.items()} == {
        "rare_trigger": 2 * 3 * 2 + 2 * 6,
        "burgers": 2 * 3 * 2 + 2 * 6,
    }


def test_verdicts_of_a_suite_count_by_problem() -> None:
    rulings = {"a": Ruling("better"), "b": Ruling("worse"), "c": Ruling("better")}
    one = judging.Standing("x", "unclear", "", 1.0, None, None, None, {}, rulings, {}, {})
    assert (one.count("better"), one.count("worse"), one.count("equal")) == (2, 1, 0)
