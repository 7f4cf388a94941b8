"""A setting that nobody reads is an error; arms that cannot differ are told, not compared."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kourkoutas.lab import api
from kourkoutas.lab.judging.analysis import analyse, as_json
from kourkoutas.lab.planning import plan as planning
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.running import trial
from kourkoutas.lab.specs.spec import RunSpec
from tests.lab import made_study

README = """
import mlx.core as mx
import mlx.nn as nn

def train(trial):
    mx.random.seed(trial.seed)
    model = nn.Linear(3, 1)
    x = mx.random.normal((16, 3))
    optimizer = trial.optimizer(model, lr=1e-3)
    step = nn.value_and_grad(model, lambda model: (model(x) ** 2).mean())
    for t in range(5):
        loss, gradients = step(model)
        optimizer.update(model, gradients)
        trial.log(t, loss=loss)
    return loss
"""


def executed(tmp_path: Path, source: str, seeds: str = "0-1", **more: Any) -> Snapshot:
    file = tmp_path / "task.py"
    file.write_text(source)
    optimizers = more.pop("optimizers", ["kbeta", "adam95"])
    made = planning.plan_study(f"{file}:train", optimizers=optimizers, seeds=planning.parse_seeds(seeds), **more)
    return api.execute(made, tmp_path / "out", command="test", workers=2)


def trial_of(folder: Path, **settings: Any) -> trial.Trial:
    return trial.Trial(RunSpec(testbed="own", optimizer="adam95", settings=settings), folder)


def test_a_grid_of_learning_rates_reaches_the_optimizer_of_the_readme_example(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    done = executed(tmp_path, README, grids={"lr": "0.001,0.1"}, optimizers=["adam95"], seeds="0")
    low, high = done.runs
    assert low.result is not None
    assert high.result is not None
    assert [run.result.settings["lr"] for run in (low, high) if run.result] == [0.001, 0.1]
    assert low.result.curve["loss"][0] == high.result.curve["loss"][0]
    assert high.result.curve["loss"][-1] < low.result.curve["loss"][-1]


def test_what_a_function_makes_of_the_setting_itself_stands(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    own = trial_of(tmp_path, lr=0.5)
    tensor = torch.nn.Parameter(torch.zeros(2))
    assert own.optimizer([tensor], lr=1e-3).param_groups[0]["lr"] == 0.5
    own = trial_of(tmp_path, lr=0.5)
    assert own.optimizer([tensor], lr=own.settings["lr"] / 10).param_groups[0]["lr"] == 0.05
    own = trial_of(tmp_path)
    assert own.optimizer([tensor], lr=own.settings.get("lr", 0.25)).param_groups[0]["lr"] == 0.25


def test_a_schedule_cannot_be_replaced_by_a_number_and_says_so(tmp_path: Path) -> None:
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(TypeError, match=r"the study sets lr=0.5, but .* make the schedule from trial.settings\['lr'\]"):
        trial_of(tmp_path, lr=0.5).optimizer({"w": jnp.zeros(2)}, lr=lambda count: 0.1 / (count + 1))


def test_settings_are_read_like_any_mapping(tmp_path: Path) -> None:
    own = trial_of(tmp_path, a=1, b=2, c=3)
    assert list(own.settings) == ["a", "b", "c"]
    assert not own.settings.read
    assert (own.settings.get("b"), own.settings.get("z", 9), len(own.settings)) == (2, 9, 3)
    assert own.settings.read == {"b"}
    assert "z" not in own.settings
    assert "a" in own.settings
    assert own.settings.read == {"a", "b"}
    assert dict(**own.settings) == {"a": 1, "b": 2, "c": 3}
    assert own.settings.read == {"a", "b", "c"}


SLEEPY = """
import time
def train(trial):
    if trial.settings.get("long"):
        time.sleep(0.2)
    return 1.0 + trial.seed + len(trial.arm)
"""


@pytest.mark.parametrize("how", ["--set", "--grid", "--tune"])
def test_a_setting_that_nobody_reads_stops_the_study_after_the_first_run(tmp_path: Path, how: str) -> None:
    file = tmp_path / "task.py"
    file.write_text(SLEEPY)
    value = {"--set": "lr=0.1", "--grid": "lr=0.1,0.2", "--tune": "lr=0.1:0.2"}[how]
    out = tmp_path / "out"
    call = [sys.executable, "-m", "kourkoutas", "study", f"{file}:train", "--seeds", "0-19", "--out", str(out)]
    done = subprocess.run(
        [*call, how, value, "--set", "long=1", "--workers", "1"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    said = " ".join(done.stderr.strip().splitlines()[-1].split())
    assert (
        "stopped after the first run: train() never reads trial.settings['lr'], nor does it make its optimizer" in said
    )
    assert "Traceback" not in done.stderr
    assert len(list(out.glob("runs/*/result.json"))) <= 2


def test_a_diverged_run_may_end_before_it_has_read_everything(tmp_path: Path) -> None:
    done = executed(
        tmp_path,
        "def train(trial):\n    if trial.arm == 'kbeta': return float('nan')\n    return trial.settings['width']\n",
        options={"width": "3"},
    )
    assert [run.result.status for run in done.runs if run.result] == ["diverged"] * 2 + ["ok"] * 2


LOGGING = "def train(trial):\n    trial.log(1, loss=1.0 + trial.seed)\n"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (LOGGING + "    return trial.seed\n", "train never asked for trial.optimizer"),
        (LOGGING + "    trial.arm\n", "train returned nothing"),
        (LOGGING + "    trial.arm\n    return trial.seed\n", "K-β and Adam 0.95 logged the same numbers"),
    ],
)
def test_a_study_that_compares_nothing_is_told_and_not_compared(tmp_path: Path, source: str, told: str) -> None:
    done = executed(tmp_path, source, seeds="0-4")
    assert [run.result.status for run in done.runs if run.result] == ["ok"] * 10
    found = analyse(done)
    assert found.primary.contrasts == ()
    assert any(told in line for line in found.fairness)
    json.dumps(as_json(found), allow_nan=False)


def test_arms_that_differ_in_one_seed_are_compared(tmp_path: Path) -> None:
    source = LOGGING + "    return trial.seed + (trial.arm == 'kbeta' and trial.seed == 3)\n"
    done = executed(tmp_path, source, seeds="0-4")
    found = analyse(done)
    assert len(found.primary.contrasts) == len(found.fairness) == 1


def test_a_logged_metric_that_is_named_needs_no_returned_number(tmp_path: Path) -> None:
    source = "def train(trial):\n    trial.log(1, loss=len(trial.arm) + trial.seed)\n"
    assert len(analyse(executed(tmp_path, source, endpoint="loss")).primary.contrasts) == 1


SHORT_RUNS = """
import torch

def train(trial):
    torch.manual_seed(trial.seed)
    model = torch.nn.Linear(2, 1)
    optimizer = trial.optimizer(model, lr=1e-2)
    for step in range(1, 61):
        loss = model(torch.ones(4, 2)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    trial.log(1, loss=loss.item())  # once, as an epoch
    return loss.item()
"""


def test_a_users_own_function_is_warned_of_short_runs_by_the_optimizers_count_of_steps(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = analyse(executed(tmp_path, SHORT_RUNS, optimizers=["kbeta", "adam95"]))
    (warning,) = [line for line in found.fairness if line.startswith("Short runs")]
    # sqrt((1 - 0.999)/(1 - (0.88 + 0.999)/2)) = sqrt(0.001/0.0605) = 0.129
    assert "(60 steps)" in warning
    assert "starts at 13 % of the learning rate" in warning


def test_runs_with_the_exact_correction_are_not_warned(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = analyse(executed(tmp_path, SHORT_RUNS, optimizers=["kbeta-exact", "adam95"]))
    assert not any(line.startswith("Short runs") for line in found.fairness)


def test_a_smoke_preset_says_that_it_is_no_evidence_and_an_untuned_study_says_so_in_its_headline(
    tmp_path: Path,
) -> None:
    study = made_study.rare_trigger(tmp_path / "paper", ("kbeta", "adam95"))
    said = analyse(study, resamples=0).headline
    assert said.endswith("One learning rate for all.")
    assert "Smoke" not in said
    record = study.record.model_copy(update={"preset": "smoke"})
    assert analyse(dataclasses.replace(study, record=record), resamples=0).headline == f"Smoke: not evidence. {said}"
