"""Time apart by what it was spent on, and steps to a target, with runs that never reach it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kourkoutas.cli.command import app
from kourkoutas.lab.judging import targets
from kourkoutas.lab.judging.targets import Target
from kourkoutas.lab.results.store import StoredRun
from kourkoutas.lab.running import train
from kourkoutas.lab.specs.spec import RunResult, RunSpec


def run(arm: str, seed: int, losses: list[float], pace: float | None = 0.5, status: str = "ok") -> StoredRun:
    curve = {"step": [10.0 * (k + 1) for k in range(len(losses))], "loss": losses}
    times = {} if pace is None else {"per_step": pace}
    result = RunResult(status=status, curve=curve, times=times)  # type: ignore[arg-type]
    return StoredRun(RunSpec(testbed="t", optimizer=arm, seed=seed), result, Path())


@pytest.mark.parametrize("text", ["loss", "loss=3", "<=3", "loss<=", "loss<=low", "loss<=nan", "loss<3"])
def test_a_target_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--target must look like METRIC<=VALUE"):
        targets.parse_target(text)


def test_the_first_logged_step_that_meets_the_target_counts_and_gaps_do_not() -> None:
    made = run("a", 0, [3.0, math.nan, 1.0, 2.0, 0.5])
    assert [Target("loss", value).step(made) for value in (3.0, 1.0, 0.7, 0.1)] == [10, 30, 50, math.inf]
    assert Target("loss", 3.0, above=True).step(made) == 10
    assert Target("acc", 1.0).step(made) == math.inf


def test_steps_and_seconds_are_censored_where_the_target_was_never_reached() -> None:
    runs = [
        run("a", 0, [3.0, 1.0]),
        run("a", 1, [1.0, 1.0]),
        run("a", 2, [3.0, 3.0]),
        run("a", 3, [9.0], status="diverged"),
    ]
    (found,) = targets.reached(runs, Target("loss", 1.0)).values()
    assert (found.runs, found.reached) == (4, 2)
    assert found.steps == {0: 20, 1: 10, 2: math.inf, 3: math.inf}
    assert found.seconds == {0: 10, 1: 5, 2: math.inf, 3: math.inf}
    assert math.isinf(found.median_steps)
    assert found.share == ((10, 0.25), (20, 0.5))


def test_the_race_is_paired_by_seed_and_two_that_never_arrive_tie() -> None:
    good, bad = [1.0, 1.0, 1.0], [3.0, 3.0, 1.0]
    runs = [run("a", seed, good) for seed in range(6)] + [run("b", seed, bad) for seed in range(6)]
    runs += [run("a", 6, [3.0]), run("b", 6, [3.0])]
    (race,) = targets.races(targets.reached(runs, Target("loss", 1.0)), [("a", "b")])
    assert (race.wins, race.ties, race.losses) == (6, 1, 0)
    # Six pairs of one sign out of 2⁶ equally likely ones, two-sided.
    assert race.p == pytest.approx(2 / 2**6)
    assert race.p_holm == race.p


def test_one_that_never_arrives_loses_to_one_that_does() -> None:
    runs = [run("a", 0, [3.0, 1.0]), run("b", 0, [3.0, 3.0])]
    (race,) = targets.races(targets.reached(runs, Target("loss", 1.0)), [("a", "b")])
    assert (race.wins, race.losses) == (1, 0)


def test_a_metric_that_no_run_logged_is_an_error() -> None:
    with pytest.raises(ValueError, match="no run logged 'acc'; logged: loss"):
        targets.reached([run("a", 0, [1.0])], Target("acc", 1.0))


def test_the_pace_leaves_out_first_calls_of_a_length_which_compile() -> None:
    assert train.pace_of([(100, 5.0), (100, 1.0), (100, 1.0), (50, 2.5)]) == pytest.approx(0.01)
    assert train.pace_of([(100, 5.0)]) == pytest.approx(0.05)
    assert train.pace_of([]) is None


def test_a_run_records_its_pace(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    spec = RunSpec(testbed="rare_trigger", engine="mlx", settings={"steps": 1500})
    result = train.run(spec, tmp_path)
    assert 0 < 1500 * result.seconds_per_step < 2 * result.seconds


SLOW_DATA = """
import functools, time

@functools.lru_cache
def data(seed):
    time.sleep(0.5)

def train(trial):
    data(trial.seed)
    trial.arm
    value = 4.0 + trial.seed
    for step in range(1, 11):
        time.sleep(0.01)
        value *= 0.8 if trial.arm == "kbeta" else 0.9
        trial.log(step, loss=value)
    return value
"""


def test_the_first_arm_of_a_seed_pays_for_the_data_but_its_steps_are_not_slower(tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    file.write_text(SLOW_DATA)
    arguments = [f"{file}:train", "--optimizers", "kbeta,adam95", "--seeds", "0-1", "--workers", "1", "--no-report"]
    call = [sys.executable, "-m", "kourkoutas", "study", *arguments, "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [*call, "--json", "--target", "loss<=2"], capture_output=True, text=True, timeout=120, check=True
    )
    found = json.loads(done.stdout)
    first, second = (run for run in found["runs"] if run["seed"] == 0)
    # 0.5 s of sleep for the data is in the run's seconds, and 5 times what all ten steps sleep.
    assert first["seconds"] > 0.6
    assert all(run["times"]["per_step"] >= 0.01 for run in (first, second))
    assert first["times"]["per_step"] * 10 < first["seconds"] - 0.3
    # 4·0.8⁴ = 1.64 and 4·0.9⁷ = 1.91; 5·0.8⁵ = 1.64 and 5·0.9⁹ = 1.94
    arms = {arm: one["steps"] for arm, one in found["analysis"]["target"]["arms"].items()}
    assert arms == {"kbeta": {"0": 4, "1": 5}, "adam95": {"0": 7, "1": 9}}
    (race,) = found["analysis"]["target"]["contrasts"]
    assert (race["treatment"], race["wins"]) == ("kbeta", 2)
    done_again = CliRunner().invoke(app, ["study", *arguments, "--out", str(tmp_path / "out"), "--target", "loss<=2"])
    assert "s/step" in done_again.output
    assert "Until loss<=2" in done_again.output
