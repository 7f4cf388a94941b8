"""kbeta report --follow, and how far a study is: it is followed while it runs, by a process that it never notices."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from kourkoutas.cli import app, command, results
from kourkoutas.lab.results import snapshot
from kourkoutas.lab.results.snapshot import Holder, Snapshot, holder_of
from kourkoutas.lab.results.store import StoreError
from kourkoutas.lab.showing import report, status
from tests.lab import made_study
from tests.lab.showing.browsing import MISSING, Tab, chromium

KBETA = [sys.executable, "-m", "kourkoutas"]
# `kbeta report --follow` with pages that follow each other closely
WATCH = """
from kourkoutas.__main__ import main
from kourkoutas.lab.showing import report

report.SECONDS_BETWEEN_PAGES = 0.2
main()
"""
# Every run but those of seed 0 waits until it is let go, so that a test sees a study half done on any machine.
TASK = """
import pathlib, time

def train(trial):
    trial.log(1, loss=1.0)
    while trial.seed > 0 and not pathlib.Path({go!r}).exists():
        time.sleep(0.05)
    trial.log(2, loss=0.5)
    return 1.0 + 0.1 * trial.seed + (trial.arm != "kbeta")
"""

# The same with a tuning, whose runs of seed 101 wait for a file of their own.
TUNED_TASK = """
import pathlib, time

def train(trial):
    lr = trial.settings["lr"]
    trial.log(1, loss=1.0)
    go = pathlib.Path({go!r} if trial.seed < 100 else {go!r} + "-compare")
    while trial.seed % 100 and not go.exists():
        time.sleep(0.05)
    trial.log(2, loss=0.5)
    return 1.0 + lr + 0.1 * trial.seed + (trial.arm != "kbeta")
"""


def until(what: Callable[[], object], seconds: float = 120.0) -> object:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError, StoreError):
            found = what()
            if found:
                return found
        time.sleep(0.1)
    raise AssertionError("waited in vain")


def told(page: Path, part: str) -> str | None:
    """The page, when it says that."""
    text = page.read_text(encoding="utf-8")
    return text if part in text else None


@contextlib.contextmanager
def watched(out: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WATCH, "report", "--follow", str(out)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"{out / 'report.html'}\n"
        until((out / "report.html").exists)
        yield process, out / "report.html"
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def going(folder: Path, *options: str, task: str = TASK) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A real study of eight runs, one at a time, that stops after two until `folder`/go is there."""
    (folder / "task.py").write_text(task.format(go=str(folder / "go")))
    out = folder / "out"
    command = [*KBETA, "study", "task.py:train", "--seeds", "0-3", "--optimizers", "kbeta,adam95", "--workers", "1"]
    process = subprocess.Popen(
        [*command, "--out", str(out), *options],
        cwd=folder,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, out
    finally:
        process.kill()
        process.communicate()


def done(page: str) -> int:
    found = re.search(r'<progress max="8" value="(\d)"', page)
    assert found is not None
    return int(found[1])


def status_of(out: Path) -> status.Status:
    return status.status_of(Snapshot.read(out))


def half_done(out: Path) -> bool:
    found = status_of(out)
    return (found.done, found.count("running")) == (2, 1)


def test_a_second_look_shows_more_finished_runs_and_killing_the_watcher_harms_nothing(tmp_path: Path) -> None:
    with going(tmp_path) as (study, out):
        until(lambda: half_done(out))
        with watched(out) as (watcher, page):
            first = page.read_text(encoding="utf-8")
            assert done(first) == 2
            assert '<meta http-equiv="refresh"' in first
            assert "8 runs: 2 finished, 1 running, 5 waiting." in first
            assert "K-β, seed 1: step 1, loss 1" in first
            assert "K-β: 2 of 4 runs" in first  # curves so far, of the run that goes on too
            assert "2 of 8 runs have ended. The verdict comes when all have." in first
            (tmp_path / "go").touch()
            until(lambda: told(page, "K-β: 3 of 4 runs") or told(page, "K-β: 4 runs"))
            watcher.send_signal(signal.SIGKILL)
            watcher.wait()
        study.communicate(timeout=240)
        assert study.returncode == 0
        assert status_of(out).count("finished") == 8
        assert '<meta http-equiv="refresh"' not in (out / "report.html").read_text(
            encoding="utf-8"
        )  # the study's own, at its end


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_an_open_page_renews_itself_and_keeps_what_the_reader_has_unfolded(tmp_path: Path) -> None:
    with going(tmp_path) as (_, out), chromium() as browser:
        until(lambda: half_done(out))
        with watched(out) as (_, page), Tab(browser, page.as_uri()) as tab:
            assert done(tab.page.content()) == 2
            tab.page.locator("#settings summary").click()
            (tmp_path / "go").touch()
            tab.page.locator("figcaption", has_text="K-β: 4 runs").first.wait_for(timeout=120_000)
            tab.page.locator("#settings[open]").wait_for(timeout=40_000)  # the script stands at the end of the page
            assert tab.complaints == []


def test_a_tuned_study_is_followed_through_its_tuning_and_its_comparison(tmp_path: Path) -> None:
    tuning = ["--tune", "lr=0.01:0.1", "--trials", "2", "--tune-seeds", "100-101", "--tune-budget", "0"]
    with going(tmp_path, *tuning, task=TUNED_TASK) as (study, out):
        until(lambda: any(run.values for run in status_of(out).going))
        with watched(out) as (_, page):
            text = until(lambda: told(page, "seed 101: step 1"))
            assert isinstance(text, str)
            # 2 arms of 2 values and 2 tuning seeds, then 2 arms of 4 seeds
            assert "16 runs, 8 of them to tune" in text
            assert re.search(r"The optimizers are being tuned, \d runs so far; the comparison follows\.", text)
            assert re.search(r"<li>(K-β|Adam 0\.95), lr 0\.01?, seed 101: step 1, loss 1</li>", text)
            (tmp_path / "go-compare").touch()
            text = until(lambda: told(page, "seed 1: step 1"))
            assert isinstance(text, str)
            assert "16 runs, 8 of them to tune (8 done)" in text
            assert re.search(r"\d of 8 runs have ended\. The verdict comes when all have\.", text)
            (tmp_path / "go").touch()
            study.communicate(timeout=240)
        assert study.returncode == 0
        assert status_of(out).count("finished") == 16


def test_a_page_is_made_again_until_the_study_ends_and_a_broken_folder_keeps_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []

    def write(path: Path, **how: object) -> bool:
        made.append(path)
        if len(made) == 2:
            raise StoreError("half a file")
        return len(made) < 4

    monkeypatch.setattr(report, "SECONDS_BETWEEN_PAGES", 0.01)
    monkeypatch.setattr(report, "_follow_once", write)
    report.follow(tmp_path)
    assert made == [tmp_path] * 4  # tried again after the error, and ended with the study


def test_following_what_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [*KBETA, "report", "nowhere", "--follow"], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 2
    assert "nowhere/study.json: not found" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_status_counts_every_run_and_estimates_the_rest(tmp_path: Path, monkeypatch) -> None:
    ends = {
        "x": {0: 1.0, 1: 1.0, 2: None, 3: None},
        "y": {0: float("nan"), 1: made_study.failed(), 2: None, 3: None},
    }
    study = made_study.own(tmp_path / "out", ends)
    assert str(status_of(study.path)).startswith("8 runs: 2 finished, 1 diverged, 1 failed, 4 waiting. Nobody")
    holder = Holder("process 1 (kbeta study)", time.time() - 5)
    monkeypatch.setattr(snapshot, "holder_of", lambda path: holder)
    x2 = next(run for run in Snapshot.read(study.path).runs if (run.spec.optimizer, run.spec.seed) == ("x", 2))
    (x2.folder / "metrics.jsonl").write_text('{"step": 7, "loss": 0.25}\n')
    found = status_of(study.path)
    assert (found.count("running"), found.count("waiting")) == (1, 3)
    assert [(run.optimizer, run.seed, run.step, run.loss) for run in found.going] == [("x", 2, 7, 0.25)]
    assert found.seconds_left == 8.0  # four runs of two seconds, one at a time
    assert str(found) == "8 runs: 2 finished, 1 diverged, 1 failed, 1 running, 3 waiting. About 8 s left."


def test_a_run_that_an_earlier_process_left_is_waiting_not_running(tmp_path: Path, monkeypatch) -> None:
    study = made_study.own(tmp_path / "out", {"x": {0: None}, "y": {0: 1.0}})
    file = Snapshot.read(study.path).runs[0].folder / "metrics.jsonl"
    file.write_text('{"step": 7, "loss": 0.25}\n')
    os.utime(file, (time.time() - 1000,) * 2)
    monkeypatch.setattr(snapshot, "holder_of", lambda path: Holder("process 1", time.time()))
    found = status_of(study.path)
    assert (found.count("running"), found.count("waiting")) == (0, 1)


def test_a_process_that_has_ended_holds_nothing(tmp_path: Path) -> None:
    study = made_study.own(tmp_path / "out", {"x": {0: 1.0}, "y": {0: 1.0}})
    assert holder_of(study.path) is None
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for text, there in (
        (f"process {ended.pid} (kbeta)", False),
        ("rubbish", False),
        (f"process {os.getpid()} (x)", True),
    ):
        (study.path / ".lock").write_text(text)
        assert (holder_of(study.path) is not None) is there


def test_the_report_of_a_study_that_has_not_ended_says_how_far_it_is_in_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "a-name-of-an-optimizer-that-is-much-longer-than-any-column-of-a-table-should-be"
    study = made_study.own(tmp_path / "out", {long: {0: 1.0, 1: None}, "y": {0: math.nan, 1: 1.0}})
    text = io.StringIO()
    for module in (command, results):
        monkeypatch.setattr(module, "out", Console(width=80, file=text))
    assert CliRunner().invoke(app, ["report", str(study.path)]).exit_code == 0
    assert "4 runs: 2 finished, 1 diverged, 1 waiting. Nobody is making the rest" in text.getvalue()
    lines = text.getvalue().splitlines()[2:]  # without path and sentence, which a terminal wraps
    assert max(map(len, lines)) <= 80
    # finished, diverged, failed, running, waiting
    for arm, counts in (("a-name", "1 0 0 0 1"), ("y ", "1 1 0 0 0")):
        (line,) = [line for line in lines if line.strip().startswith(arm)]
        assert line.split()[-5:] == counts.split()


def test_the_report_of_a_finished_study_is_one_line_also_when_it_is_followed(tmp_path: Path) -> None:
    study = made_study.own(tmp_path / "out", {"x": {0: 1.0}, "y": {0: 1.0}})
    for options in ([], ["--follow"]):
        done = CliRunner().invoke(app, ["report", str(study.path), *options])
        assert (done.exit_code, done.output) == (0, f"{study.path / 'report.html'}\n")
        assert '<meta http-equiv="refresh"' not in (study.path / "report.html").read_text(encoding="utf-8")


def test_report_without_a_folder_lists_the_studies_in_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    empty = CliRunner().invoke(app, ["report"])
    assert (empty.exit_code, empty.output) == (0, "No studies in results/. To make one: kbeta study rare_trigger\n")
    made_study.own(tmp_path / "results" / "one", {"x": {0: 1.0}, "y": {0: math.nan}})
    made_study.own(tmp_path / "results" / "two", {"x": {0: 1.0}, "y": {0: None}})
    (tmp_path / "results" / "other").mkdir()
    listed = [line.split() for line in CliRunner().invoke(app, ["report"]).output.splitlines()]
    assert ["results/one", "2/2", "finished"] in listed
    assert ["results/two", "1/2", "stopped"] in listed
