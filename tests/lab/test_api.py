"""The laboratory from Python: functions of files, scripts and notebooks, and what comes back."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import io
import json
import math
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

import kourkoutas.lab as lab
from kourkoutas.cli import running
from kourkoutas.lab import api
from kourkoutas.lab.errors import ArgumentError
from kourkoutas.lab.planning import plan as planning
from kourkoutas.lab.planning import shipping
from kourkoutas.lab.specs.study_options import StudyOptions
from tests.lab import made_study

ARMS = ["kbeta", "adam95"]
TASK = """
import math

def train(trial):
    lr = trial.settings.get("lr", 1e-2)
    for step in range(1, 4):
        trial.log(step, loss=len(trial.arm) / step)
    return 1 + abs(math.log10(lr) + 2) + trial.seed + 0.01 * len(trial.arm) * (1 + trial.seed % 2)

def other(trial):
    return 1.0
"""


def imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module with a file."""
    monkeypatch.setenv("KBETA_CACHE", str(folder / "cache"))
    file = folder / "a_task_of_mine.py"
    file.write_text(TASK)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, file.stem, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return imported(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[lab.Result, str]]:
    """A tuned study of a module's function, and what it said on standard error."""
    folder = tmp_path_factory.mktemp("tuned")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as said:
        task = imported(folder, patch)
        made = {"optimizers": ARMS, "seeds": range(3), "tune": {"lr": (1e-3, 1e-1)}, "trials": 3, "tune_seeds": [9]}
        yield lab.study(task.train, **made, out=folder / "out", workers=1), said.getvalue()


def test_a_tuned_study_gives_frames_of_its_runs_and_curves(tuned: tuple[lab.Result, str]) -> None:
    result, said = tuned
    assert "K-β lr=0.01 seed 9" in said
    assert result.chosen == {"kbeta": {"lr": 0.01}, "adam95": {"lr": 0.01}}
    frame = result.frame()
    assert list(frame["optimizer"]) == ["kbeta"] * 3 + ["adam95"] * 3
    assert list(frame["seed"]) == [0, 1, 2] * 2
    assert set(frame["lr"]) == {0.01}
    assert frame["endpoint"].iloc[0] == pytest.approx(1.05)
    assert len(result.frame(tuning=True)) == 2 * 3
    curves = result.curves()
    assert len(curves) == 6 * 3
    assert list(curves.columns[:5]) == ["id", "optimizer", "seed", "lr", "step"]
    assert curves["loss"].iloc[0] == 5


def test_what_a_study_shows_comes_as_frames(tuned: tuple[lab.Result, str]) -> None:
    result, _ = tuned
    (row,) = result.compare().to_dict("records")
    (contrast,) = result.analysis.primary.contrasts
    assert (row["treatment"], row["baseline"], row["wins"], row["decides"]) == ("kbeta", "adam95", 3, True)
    assert (row["verdict"], row["effect_p"]) == (contrast.verdict, contrast.p)
    # losses of 1.05, 2.10, 3.05 against 1.06, 2.12, 3.06
    assert row["effect"] == row["mean"] == pytest.approx((0.01 + 0.02 + 0.01) / 3)
    assert row["mean_low"] < row["mean"] < row["mean_high"]
    assert row["sign_p"] == pytest.approx(2 / 2**3)
    asked = result.compare("loss:best")
    assert list(asked["decides"]) == [True, False]
    assert result.sensitivity().loc["kbeta", "best"] == 0.01
    # len(arm)/step: 5/2 ≤ 3 at step 2, and 6/2 ≤ 3 as well
    (_, reached) = result.compare("loss:until=3").to_dict("records")
    assert (reached["endpoint"], reached["verdict"]) == ("steps until loss ≤ 3", "identical")
    assert (reached["wins"], reached["ties"], reached["losses"]) == (0, 3, 0)


def test_a_notebook_shows_the_answer_then_the_effect_plot_then_the_table(tuned: tuple[lab.Result, str]) -> None:
    result, _ = tuned
    shown = result._repr_html_()
    places = [shown.index(part) for part in (result.analysis.headline, "data:image/svg+xml;base64,", "<td>kbeta</td>")]
    assert places == sorted(places)
    assert "Tuned alike" in shown
    assert "Study of a_task_of_mine.train" in repr(result)
    assert result.report().read_text(encoding="utf-8").startswith("<!")
    assert repr(lab.load(result.path)) == repr(result)


def test_the_effect_plot_is_a_whole_svg_with_each_contrast_and_its_estimate(tuned: tuple[lab.Result, str]) -> None:
    result, _ = tuned
    (contrast,) = result.analysis.primary.contrasts
    effect = contrast.effect  # three seeds with losses from 1 to 3 have no percentage with an interval
    assert contrast.percent is None
    assert effect is not None
    drawn = result.plot()
    told = f"{effect.value:+.2g}, no verdict".replace("-", "−")  # of three seeds
    root = ElementTree.fromstring(drawn.svg)
    assert f"K-β vs Adam 0.95: {told}" in [text.text for text in root.iter("{http://www.w3.org/2000/svg}title")]
    (style,) = root.iter("{http://www.w3.org/2000/svg}style")
    assert ".interval { stroke: var(--c)" in (style.text or "")
    assert drawn._repr_svg_() == drawn.svg


def test_an_interval_without_an_end_leaves_the_plot_with_an_arrow(tmp_path: Path) -> None:
    lost = {seed: math.nan if seed > 6 else 2.0 + 0.1 * seed for seed in range(8)}
    made = made_study.own(tmp_path / "out", {"kbeta": {seed: 1.0 + 0.01 * seed for seed in range(8)}, "adam95": lost})
    (arrow,) = re.findall(r'd="M([\d.]+) [\d.]+l(-?\d+) -5v10z" class="arrow"', lab.load(made.path).plot().svg)
    assert arrow[1] == "-6"  # its tip is 6 px right of the end of the line


def test_a_study_without_a_contrast_has_no_plot_but_a_display(task: Any, tmp_path: Path) -> None:
    result = lab.study(task.train, optimizers=["kbeta"], seeds=[0], out=tmp_path / "out", progress=False)
    with pytest.raises(ValueError, match="there is nothing to plot: There is nothing to compare"):
        result.plot()
    assert "<img" not in result._repr_html_()
    assert result.compare().empty
    assert result.sensitivity().empty
    arm = result.snapshot.record.arms[0]
    result.snapshot.record.arms[0] = arm.model_copy(update={"label": "<script>alert(1)</script>"})
    assert "<script>" not in lab.Result(result.snapshot)._repr_html_()


def test_the_same_call_again_makes_nothing_twice_in_a_folder_named_after_the_file(
    task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def made() -> list[int]:
        result = lab.study(task.train, optimizers=ARMS, seeds=[0], workers=1, progress=False)
        assert result.path == Path("results/a_task_of_mine")
        return [file.stat().st_mtime_ns for file in sorted(result.path.glob("runs/*/result.json"))]

    assert made() == made()
    other = planning.plan_study(f"{tmp_path}/a_task_of_mine.py:other", optimizers=ARMS, seeds=[0])
    assert api.results_folder(other) == Path("results/a_task_of_mine.other")
    assert api.results_folder(planning.plan_study("rare_trigger", seeds=[0])) == Path("results/rare_trigger")


SCRIPT = """
import sys
from kourkoutas.lab import study

SHIFT = 0.25

def train(trial):
    trial.log(1, loss=len(trial.arm))
    return trial.seed + len(trial.arm) + SHIFT

result = study(train, optimizers=["kbeta", "adam95"], seeds=[0, 1], workers=1, progress=False)
print(result.path, file=sys.stderr)
print(result.frame().to_json(orient="records"))
"""


def test_a_function_of_the_running_script_needs_no_guard_and_brings_what_it_refers_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KBETA_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    rows = []
    for _ in range(2):
        done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=120, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stderr.split() == [str(Path("results/script"))]
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
    assert shipping.target_of(lambda trial: 1.0).endswith("test_api.py:train")
    typed: dict[str, Any] = {"__name__": "no_module"}
    exec("def mine(trial): return 1.0", typed)
    assert shipping.target_of(typed["mine"]).endswith("notebook.py:mine")


def test_a_testbed_is_studied_by_name(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    result = lab.study(
        "rare-trigger",
        optimizers=ARMS,
        seeds=[0],
        engine="mlx",
        settings={"steps": 40},
        out=tmp_path / "out",
        workers=1,
        progress=False,
    )
    assert result.summary()["ok"].tolist() == [1, 1]
    assert result.summary()["seconds_per_step"].min() > 0
    assert result.frame()["seconds_per_step"].min() > 0


@pytest.mark.parametrize(
    ("train", "more", "error", "message"),
    [
        (3, {}, TypeError, "`train` must be a function"),
        ("no_such_bed", {}, ValueError, "unknown testbed 'no_such_bed'"),
        ("rare_trigger", {"log": True}, ValueError, "`log` is for functions of your own"),
        (len, {"preset": "paper"}, ValueError, "`preset` paper is for testbeds"),
        ("rare_trigger", {"seeds": [-1]}, ValueError, "`seeds` must be whole numbers"),
        ("rare_trigger", {"optimizers": " "}, ValueError, "`optimizers` must name at least one"),
        ("rare_trigger", {"settings": {"lr": object()}}, ValueError, r"settings=\{'lr': <object"),
        ("rare_trigger", {"grid": {"lr": 3}}, ValueError, "`grid` lr must be a list of values"),
        ("rare_trigger", {"tune": {"lr": 0.1}}, ValueError, "`tune` must give lr a range"),
        ("rare_trigger", {"tune": {"lr": (1, 0.1)}}, ValueError, r"tune=\{'lr': \(1, 0.1\)\}: the range must rise"),
        ("rare_trigger", {"tune": {"lr": (0.1, 1)}, "trials": 1}, ValueError, "`trials` must be at least 2"),
        (
            "rare_trigger",
            {"tune": {"lr": (0.1, 1)}, "tune_seeds": [3]},
            ValueError,
            r"`tune_seeds` and `seeds` share 3: .* for example tune_seeds=range\(100, 103\)",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused_by_the_name_of_its_argument(
    train: Any, more: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        lab.study(train, **more)
    assert "--" not in str(raised.value)


def test_importing_the_laboratory_imports_nothing_else() -> None:
    code = textwrap.dedent(
        """
        import sys, kourkoutas.lab
        assert not {"scipy", "pandas", "pydantic", "rich", "torch"} & set(sys.modules), sorted(sys.modules)
        assert "study" in kourkoutas.lab.__all__
        """
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


WRONG_CALLS: list[tuple[dict[str, Any], str, str, str]] = [
    ({"tune_seeds": "3-5", "tune": {"lr": (1e-3, 1e-1)}}, "tune_seeds", "`tune_seeds` and `seeds` share",
     "--tune-seeds and --seeds share"),
    ({"trials": 3}, "trials", "add tune={'lr': (1e-4, 1e-1)}", "add --tune lr=1e-4:1e-1"),
    ({"settings": ["x"]}, "settings", "for example settings={'kbeta.alpha': 0.9}", "for example --set kbeta.alpha=0.9"),
    ({"storage": "there"}, "storage", "add `ray`", "add --ray"),
    ({"timeout": -1}, "timeout", "`timeout` must be a number of seconds above 0", "--timeout must be"),
    ({"memory": 0}, "memory", "`memory` must be a number of GiB above 0", "--memory must be"),
    ({"retries": -1}, "retries", "`retries` must be 0 or above", "--retries must be"),
    ({"margin": "3"}, "margin", "`margin` must be a percentage", "--margin must be"),
    ({"optimizers": "nowhere.py:Mine"}, "optimizers", "`optimizers` nowhere.py:Mine: there is no file",
     "--optimizers nowhere"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "name", "in_python", "in_words"), WRONG_CALLS, ids=[one[1] for one in WRONG_CALLS])
def test_an_error_carries_the_argument_and_each_reader_finds_his_own_spelling_of_it(
    given: dict[str, Any], name: str, in_python: str, in_words: str, tmp_path: Path
) -> None:
    with pytest.raises(ArgumentError, match=re.escape(in_python)) as told:
        lab.study("rare_trigger", **given, out=tmp_path / "out", progress=False)
    assert told.value.argument == name
    assert "--" not in str(told.value)
    with pytest.raises(ArgumentError, match=re.escape(in_words)):
        api.conduct(StudyOptions("rare_trigger", **given), console=Console(quiet=True), say=lambda line: None)


def test_every_option_of_the_command_is_an_argument_of_the_function_and_the_other_way_round() -> None:
    arguments = set(inspect.signature(lab.study).parameters)
    options = set(inspect.signature(running.study).parameters)
    of_the_command = {"target", "text", "target_", "no_report", "as_json"}
    of_the_function = {"train", "progress"}
    assert arguments - of_the_function == options - of_the_command
    assert all(f"  {name}: " in (lab.study.__doc__ or "") for name in arguments)


def test_an_argument_that_there_is_none_of_is_told_by_the_name_of_the_function() -> None:
    with pytest.raises(TypeError, match="study: got an unexpected keyword argument 'sedes'"):
        lab.study("rare_trigger", sedes=range(3))  # type: ignore[call-arg]


def test_a_run_of_a_study_from_python_can_be_limited_in_time(tmp_path: Path) -> None:
    file = tmp_path / "slow.py"
    file.write_text("import time\n\ndef train(trial):\n    time.sleep(60)\n    return 1.0\n")
    result = lab.study(
        f"{file}:train",
        optimizers=["kbeta"],
        seeds=[0],
        timeout=0.5,
        count_failed=True,
        workers=1,
        out=tmp_path / "out",
        progress=False,
    )
    (run,) = result.snapshot.runs
    assert run.result is not None
    assert (run.result.error or "").startswith("the run was ended after 0.5 s")
