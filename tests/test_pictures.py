"""The pictures of README and docs: what draws them, and what they say."""

import hashlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("pydantic")
pytest.importorskip("scipy")
pytest.importorskip("kept_runs", reason="benchmarks/ is not here")

import kept_runs

from kourkoutas.lab import api
from kourkoutas.lab.optimizers.looks import DARK, LIGHT, looks_of
from kourkoutas.lab.planning import plan as planning
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.tuning import search as asking

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
TASK = """
def train(trial):
    lr = trial.settings["lr"]
    for step in range(500, 2001, 500):
        trial.log(step, loss=1e-5 / step)
    return abs(lr - 0.02) + 0.001 * trial.seed
"""


@pytest.fixture
def make(monkeypatch):
    spec = importlib.util.spec_from_file_location("pictures_make", FOLDER / "make.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where its dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def test_make_draws_every_picture_and_none_is_larger_than_200_kb(make):
    drawn = {f"{name}-{theme}.png" for name in make.PICTURES for theme in make.THEMES}
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir() if path.suffix in (".png", ".gif")}
    assert set(files) == {*drawn, "report.png"}
    assert max(files.values()) < 200_000


def test_an_optimizer_has_the_colour_that_it_has_in_reports(make):
    arms = ["kbeta", "adam95", "adam999"]
    for arm, look in looks_of(arms).items():
        assert make.colour("light", arm) == LIGHT[look.colour]
        assert make.colour("dark", arm) == DARK[look.colour]


def test_the_screenshot_is_of_the_example_that_readme_shows(make):
    readme = (FOLDER.parents[1] / "README.md").read_text(encoding="utf-8")
    source = re.search(r"```python\n(# my_task.py\n.*?)```", readme, re.DOTALL)[1]
    optimizers = re.search(r"^kbeta study my_task.py:train .*--optimizers (\S+)$", readme, re.MULTILINE)[1]
    with make.unpacked(make.REPORTED) as folder:
        record = Snapshot.read(folder).record
    assert record.code.sha256 == hashlib.sha256(source.encode()).hexdigest()
    assert [arm.label for arm in record.arms] == optimizers.split(",")


@pytest.mark.parametrize("testbed", ["B", "C", "D"])
def test_an_interval_misses_the_line_exactly_where_the_difference_is_clear(make, testbed):
    line = 1 if testbed == "B" else 0
    for arm, found in make.decisions(testbed).items():
        assert found.low < found.value < found.high
        assert found.clear == (not found.low <= line <= found.high), arm


@pytest.mark.parametrize("evaluated", ["loss", None])
def test_the_eigenbasis_gets_a_panel_once_its_losses_are_kept(make, tmp_path, monkeypatch, evaluated):
    file = tmp_path / "task.py"
    file.write_text(TASK)
    tuning = asking.search_space(
        asking.parse_tune(["lr=0.01:0.04"]), trials=3, seeds=[100], test_seeds=[0, 1], budget=0
    )
    arms = ["kbeta", "kbeta-eigen"]
    plan = planning.plan_study(f"{file}:train", optimizers=arms, seeds=[0, 1], tuning=tuning)
    api.execute(plan, tmp_path / "B", command="kbeta study", workers=1)
    kept_runs.keep(tmp_path, "B", tmp_path / "kept", evaluated=evaluated)
    monkeypatch.setattr(make, "EIGENBASIS", tmp_path / "kept" / "B.tar.xz")
    found = make.losses()
    assert ("kbeta-eigen" in found) == (evaluated == "loss")
    if evaluated == "loss":
        rate, table = found["kbeta-eigen"]
        assert rate == pytest.approx(0.02)
        assert table.shape == (4, 2)
        assert make.curves("light").axes[0].get_title() == "K-β eigen, lr 0.02"
