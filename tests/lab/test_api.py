"""The laboratory from Python: functions of files, scripts and notebooks, and what comes back."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import kourkoutas.lab as lab
from kourkoutas.lab.planning import shipping

ARMS = ["kbeta", "adam95"]
TASK = """
import math

def train(trial):
    lr = trial.settings.get("lr", 1e-2)
    for step in range(1, 4):
        trial.log(step, loss=len(trial.arm) / step)
    return 1 + abs(math.log10(lr) + 2) + trial.seed + 0.01 * len(trial.arm) * (1 + trial.seed % 2)
"""


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with a file."""
    monkeypatch.setenv("KBETA_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "a_task_of_mine.py"
    file.write_text(TASK)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)
    spec.loader.exec_module(module)
    return module


def test_a_tuned_study_of_a_function_gives_frames_a_comparison_a_display_and_a_report(
    task: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = {"optimizers": ARMS, "seeds": range(3), "tune": {"lr": (1e-3, 1e-1)}, "trials": 3, "tune_seeds": [9]}
    result = lab.study(task.train, **made, out=tmp_path / "out", workers=2)
    assert "K-β lr=0.01 seed 9" in capfd.readouterr().err
    assert result.chosen == {"kbeta": {"lr": 0.01}, "adam95": {"lr": 0.01}}
    frame = result.frame()
    assert list(frame["optimizer"]) == ["kbeta"] * 3 + ["adam95"] * 3
    assert list(frame["seed"]) == [0, 1, 2] * 2
    assert set(frame["lr"]) == {0.01}
    assert frame["endpoint"].iloc[0] == pytest.approx(1.05)
    assert len(result.frame(tuning=True)) == 2 * 3
    curves = result.curves()
    assert len(curves) == 6 * 3
    assert list(curves.columns[:4]) == ["optimizer", "seed", "lr", "step"]
    assert curves["loss"].iloc[0] == 5
    assert [(one.baseline, one.wins) for one in result.compare().primary.contrasts] == [("adam95", 3)]
    assert result.sensitivity()["kbeta"].best == 0.01
    assert result.to_target("loss<=3").arms["kbeta"].steps == {0: 2, 1: 2, 2: 2}
    assert "Tuned alike" in result._repr_html_()
    assert "<td>kbeta</td>" in result._repr_html_()
    assert "Study of a_task_of_mine.train" in repr(result)
    assert result.report().read_text(encoding="utf-8").startswith("<!")
    assert repr(lab.load(tmp_path / "out")) == repr(result)


def test_the_same_call_again_makes_nothing_twice(task: Any, tmp_path: Path) -> None:
    def made() -> list[int]:
        lab.study(task.train, optimizers=ARMS, seeds=[0, 1], out=tmp_path / "out", progress=False)
        return [file.stat().st_mtime_ns for file in sorted(tmp_path.glob("out/runs/*/result.json"))]

    assert made() == made()


def test_names_in_the_display_stay_text(task: Any, tmp_path: Path) -> None:
    result = lab.study(task.train, optimizers=["kbeta"], seeds=[0], out=tmp_path / "out", progress=False)
    arm = result.snapshot.record.arms[0]
    result.snapshot.record.arms[0] = arm.model_copy(update={"label": "<script>alert(1)</script>"})
    assert "<script>" not in result._repr_html_()


SCRIPT = """
import sys
from kourkoutas.lab import study

SHIFT = 0.25

def train(trial):
    trial.log(1, loss=len(trial.arm))
    return trial.seed + len(trial.arm) + SHIFT

result = study(train, optimizers=["kbeta", "adam95"], seeds=[0, 1], out=sys.argv[1], progress=False)
print(result.frame().to_json(orient="records"))
"""


def test_a_function_of_the_running_script_needs_no_guard_and_brings_what_it_refers_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KBETA_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    call = [sys.executable, str(file), str(tmp_path / "out")]
    rows = []
    for _ in range(2):
        done = subprocess.run(call, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        rows.append(json.loads(done.stdout))
    assert [row["endpoint"] for row in rows[0]] == [5.25, 6.25, 6.25, 7.25]
    assert rows[1] == rows[0]


def test_an_edited_function_is_another_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBETA_CACHE", str(tmp_path / "cache"))

    def one(trial: Any) -> float:
        return 1.0

    def two(trial: Any) -> float:
        return 2.0

    assert shipping.target_of(one) == shipping.target_of(one)
    assert shipping.target_of(one) != shipping.target_of(two)
    assert shipping.target_of(lambda trial: 1.0).endswith("notebook.py:train")


def test_a_testbed_is_studied_by_name(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    result = lab.study(
        "rare-trigger", optimizers=ARMS, seeds=[0], engine="mlx", settings={"steps": 40}, out=tmp_path / "out"
    )
    assert result.summary()["ok"].tolist() == [1, 1]
    assert result.frame()["seconds_per_step"].min() > 0


@pytest.mark.parametrize(
    ("train", "more", "error", "message"),
    [
        (3, {}, TypeError, "`train` must be a function"),
        ("no_such_bed", {}, ValueError, "unknown testbed 'no_such_bed'"),
        ("rare_trigger", {"log": True}, ValueError, "--log is for functions of your own"),
        (len, {"preset": "paper"}, ValueError, "--preset paper is for testbeds"),
        ("rare_trigger", {"tune": {"lr": (1, 0.1)}}, ValueError, "the range must rise"),
        ("rare_trigger", {"tune": {"lr": (0.1, 1)}, "tune_seeds": [3]}, ValueError, "share 3"),
    ],
)
def test_what_cannot_be_meant_is_refused(train: Any, more: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lab.study(train, **more)


def test_importing_the_laboratory_imports_nothing_else() -> None:
    code = textwrap.dedent(
        """
        import sys, kourkoutas.lab
        assert not {"scipy", "pandas", "pydantic", "rich", "torch"} & set(sys.modules), sorted(sys.modules)
        assert "study" in kourkoutas.lab.__all__
        """
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
