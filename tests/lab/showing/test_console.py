"""What `kbeta` prints on a console of 80 columns: the same words and numbers as on a wide one, none of them broken."""

from __future__ import annotations

import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kourkoutas import cli
from kourkoutas.cli import command, results, running
from kourkoutas.lab.showing.fitting import Fitting

# Values of many digits, and names as long as a study's own.
TASK = """
ARMS = {
    "kbeta": 1.0, "adam95": 1.3, "adam999": 1.1, "adam999-warm": 1.7, "adam95-warm": 1.2, "adam-mid": 1.4,
    "kbeta-static": 1.5, "kbeta-exact": 1.6, "lion": 1.8,
}

def train(trial):
    lr = trial.settings["lr"]
    value = 1.23456789e-7 * (1 + 0.1 * (trial.seed * 7919 % 13)) * ARMS[trial.arm] + 1e-9 * lr
    for step in range(1, 4):
        trial.log(step * 10_000, loss=value / step, a_metric_with_a_long_name=-123456.789 * value)
    return value
"""
STUDY = [
    *(
        "--optimizers",
        "kbeta,adam95,adam999,adam999-warm,adam95-warm,adam-mid,kbeta-static,kbeta-exact,lion",
        "--seeds",
        "0-4",
        "--workers",
        "2",
        "--log",
        "--no-report",
    ),
    *("--tune", "lr=0.0123:0.345", "--trials", "2", "--tune-seeds", "100-101", "--tune-budget", "0"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("terminal")
    (made / "task.py").write_text(TASK)
    done = CliRunner().invoke(cli.app, ["study", f"{made}/task.py:train", *STUDY, "--out", str(made / "out")])
    assert done.exit_code == 0, done.output
    return made


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, list[str]], str]:
    def call(width: int, arguments: list[str]) -> str:
        text = io.StringIO()
        console = Console(width=width, file=text)
        for module in (command, running, results):
            monkeypatch.setattr(module, "out", console)
        done = CliRunner().invoke(cli.app, arguments)
        assert done.exit_code == 0, done.output
        return text.getvalue()

    return call


@pytest.mark.parametrize("command", ["study", "stats", "testbeds"])
def test_no_word_and_no_number_is_broken_at_80_columns(
    command: str, folder: Path, printed: Callable[[int, list[str]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    task, out = f"{folder}/task.py:train", "out"
    arguments = {
        "study": ["study", task, *STUDY, "--out", out],
        "stats": ["stats", out, "--endpoint", "a_metric_with_a_long_name", "--endpoint", "loss:until=1e-7"],
        "testbeds": ["testbeds"],
    }[command]
    texts = [printed(width, arguments) for width in (1000, 120, 80)]
    widest, wide, narrow = (re.sub(r"─{3,}", " ", text).split() for text in texts)
    assert any(re.search(r"\d", word) for word in narrow)
    assert set(narrow) == set(wide) == set(widest)
    if command == "study":
        assert narrow == wide == widest  # word for word: no table of the answer is cut in two
        assert all(len(text.splitlines()) <= 30 for text in texts)
        assert "… 5 controls" in " ".join(narrow)  # what was left out to be short is told


def test_the_last_lines_break_no_path_in_two(
    folder: Path, printed: Callable[[int, list[str]], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    long = f"results/{'long-' * 9}name"
    shutil.copytree("out", long)
    how = [argument for argument in STUDY if argument != "--no-report"]
    lines = printed(80, ["study", f"{folder}/task.py:train", *how, "--out", long]).splitlines()
    assert [line.strip() for line in lines[-2:]] == [f"Report: {long}/report.html", f"tables: kbeta stats {long}"]


def test_a_table_that_is_too_wide_goes_on_below_with_its_first_column_again() -> None:
    table = Fitting("A title", ["name", "first number", "second number", "third"])
    table.add_row("x[y]", "1.23456e-07 [1, 2]", "-123456.789", "7")
    console = Console(width=40, file=io.StringIO(), record=True)
    console.print(table)
    lines = [line.split() for line in console.export_text().splitlines() if line.strip() and "─" not in line]
    assert lines == [
        ["A", "title"],
        ["name", "first", "number"],
        ["x[y]", "1.23456e-07", "[1,", "2]"],
        ["name", "second", "number", "third"],
        ["x[y]", "-123456.789", "7"],
    ]


def test_a_row_of_another_length_than_the_head_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of this table has 2 cells, name, value; got"):
        Fitting("", ["name", "value"]).add_row("x")
