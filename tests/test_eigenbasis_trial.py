"""What the trial of the eigenbasis says of runs: benchmarks/eigenbasis_trial/trial.py."""

import importlib.util
import math
import sys
from pathlib import Path

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("scipy")
pytest.importorskip("kept_runs", reason="benchmarks/ is not here")

from kourkoutas.lab import suites
from kourkoutas.lab.specs.spec import RunResult
from kourkoutas.lab.suites.showing import problem_table
from tests.lab import made_study

FILE = Path(__file__).parents[1] / "benchmarks" / "eigenbasis_trial" / "trial.py"
SEEDS = range(10)


@pytest.fixture(scope="module")
def trial():
    spec = importlib.util.spec_from_file_location("trial", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["trial"] = module  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    yield module
    del sys.modules["trial"]


def around(median, waves=1, spread=0.01):
    """An end for each seed, in so many waves; with `median` as their geometric mean, and nearly as their median."""
    return {seed: median * 10 ** (spread * math.sin(2 * math.pi * waves * (seed + 0.5) / 10)) for seed in SEEDS}


# The best Adam ends at 2.0.
ENDS = {
    "kbeta-eigen": 1.0, "eigen95": 0.8, "soap": 0.5, "muon": 1.5, "kbeta": 3.0,
    "adam95": 4.0, "adam95-warm": 2.0, "adam999": 8.0, "adam999-warm": 16.0,
}  # fmt: skip


def made(folder, shift=None, curve=None):
    """A study with these ends; `shift` multiplies those of K-β in the eigenbasis, seed by seed."""
    ends = {arm: around(median, 2 if arm == "kbeta-eigen" else 1) for arm, median in ENDS.items()}
    if shift is not None:
        ends["kbeta-eigen"] = {seed: end * shift(seed) for seed, end in ends["kbeta-eigen"].items()}
    if curve is not None:
        for seed, end in ends["kbeta-eigen"].items():
            ends["kbeta-eigen"][seed] = RunResult(status="ok", endpoint=end, seconds=2.0, curve=curve(seed))
    made_study.own(folder, ends, log=True)
    return folder


def test_a_problem_is_told_by_medians_and_by_p_against_every_adam(trial, tmp_path):
    found = trial.found_in(made(tmp_path / "one"))
    assert found.ratios["soap"] == pytest.approx(2.0, rel=1e-3)
    assert found.ratios["eigen95"] == pytest.approx(1 / 0.8, rel=1e-3)
    assert found.over_best_adam == pytest.approx(0.5, rel=1e-3)
    assert set(found.p) == {"adam95", "adam95-warm", "adam999", "adam999-warm"}
    assert found.ahead
    assert found.behind_soap
    assert found.longer is None


def test_who_is_lower_on_half_of_the_seeds_is_not_clearly_ahead(trial, tmp_path):
    found = trial.found_in(made(tmp_path / "one", shift=lambda seed: 4.0 if seed % 2 else 1.0))
    assert not found.ahead
    assert max(found.p.values()) > 0.01


def test_the_time_is_the_part_of_the_steps_after_which_the_best_adams_end_is_reached(trial, tmp_path):
    def curve(seed):
        losses = [9.0, 5.0, 1.9, 1.0] if seed < 6 else [9.0, 5.0, 3.0, 1.0]
        return {"step": [10.0, 20.0, 30.0, 40.0], "error": losses}

    assert trial.found_in(made(tmp_path / "one", curve=curve)).time == pytest.approx(0.75)


def test_the_best_adam_with_as_many_seconds_is_compared_seed_by_seed(trial, tmp_path):
    made(tmp_path / "one")
    made_study.own(tmp_path / "one-longer", {"adam95-warm": {**around(1.25), 3: 0.1}}, log=True)
    longer = trial.found_in(tmp_path / "one").longer
    assert longer.adam == "adam95-warm"
    assert (longer.wins, longer.seeds) == (9, 10)
    assert longer.ratio == pytest.approx(0.8, rel=0.01)


@pytest.mark.slow
def test_the_tables_of_the_results_are_made_of_the_kept_records(trial, tmp_path):
    page = (FILE.parents[2] / "docs" / "results.md").read_text(encoding="utf-8")
    kept = [tmp_path / problem for problem in trial.problems() if trial.unpack(tmp_path, problem, trial.HERE)]
    finished = [folder for folder in kept if trial.found_in(folder) is not None]
    found = suites.load_suite(finished, baseline=trial.OURS).analysis
    assert len(found.problems) >= 7
    for problem in found.problems:
        rows = [line for line in problem_table(found, problem).splitlines() if line.startswith("|")]
        assert "\n".join(rows) in page, problem.name


def test_a_study_with_runs_to_come_has_no_numbers(trial, tmp_path):
    ends = {arm: around(median) for arm, median in ENDS.items()}
    made_study.own(tmp_path / "one", {**ends, "soap": {**around(0.5), 7: None}}, log=True)
    assert trial.found_in(tmp_path / "one") is None
