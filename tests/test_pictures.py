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


from kourkoutas.lab.optimizers.looks import DARK, LIGHT, looks_of
from kourkoutas.lab.results.snapshot import Snapshot

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"


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


def test_the_curves_have_a_panel_of_ten_runs_per_optimizer_and_their_title_says_who_blows_up(make):
    names = ["K-β eigen", "K-β", "Adam 0.95 warmed", "Adam 0.95", "Adam 0.999"]
    assert [axis.get_title() for axis in make.curves("light").axes] == names
    tables = make.losses()
    assert {table.shape[1] for table in tables.values()} == {10}
    blown = [name for name, table in zip(names, tables.values(), strict=True) if table.max().max() > make.BLOWN_UP]
    assert f"{make.in_words(blown)} blow up" in make.what_the_curves_show(tables)
