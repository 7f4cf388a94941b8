"""kbeta watch and kbeta status: a study is followed while it runs, by a process that it never notices."""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from kourkoutas.lab.results.store import Holder, StoreError, Study
from kourkoutas.lab.showing import progress, status, watch
from tests.lab import made_study
from tests.lab.browsing import MISSING, Tab, chromium

KBETA = [sys.executable, "-m", "kourkoutas"]
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


def get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=30) as answer:
        text: str = answer.read().decode()
        return text


def told(address: str, part: str) -> str | None:
    """The page, when it says that."""
    page = get(address)
    return page if part in page else None


@contextlib.contextmanager
def watched(out: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen([*KBETA, "watch", str(out)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = re.match(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert address is not None
        yield process, address[0]
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


def half_done(out: Path) -> bool:
    found = status.status_of(Study.open(out))
    return (found.done, found.running) == (2, 1)


def test_a_second_look_shows_more_finished_runs_and_killing_the_server_harms_nothing(tmp_path: Path) -> None:
    with going(tmp_path) as (study, out):
        until(lambda: half_done(out))
        with watched(out) as (server, address):
            first = get(address)
            assert done(first) == 2
            assert "8 runs: 2 finished, 1 running, 5 waiting." in first
            assert "kbeta, seed 1: step 1, loss 1" in first
            assert "kbeta: 2 runs" in first  # curves so far, of the run that goes on too
            (tmp_path / "go").touch()
            until(lambda: done(get(address)) > 2)
            server.send_signal(signal.SIGKILL)
            server.wait()
        study.communicate(timeout=240)
        assert study.returncode == 0
        assert status.status_of(Study.open(out)).finished == 8


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_an_open_page_renews_itself_and_keeps_what_the_reader_has_unfolded(tmp_path: Path) -> None:
    with going(tmp_path) as (_, out), chromium() as browser:
        until(lambda: half_done(out))
        with watched(out) as (_, address), Tab(browser, address) as tab:
            assert done(tab.page.content()) == 2
            tab.page.locator("#settings summary").click()
            tab.page.get_by_role("button", name="adam95").first.click()
            (tmp_path / "go").touch()
            until(lambda: done(tab.page.content()) > 2)
            assert tab.page.locator("#settings[open]").count() == 1
            assert tab.page.locator("body.picking").count() == 1
            assert tab.page.locator("button.pick[aria-pressed='true']").count() >= 1
            assert tab.complaints == []
            assert {url.split("/")[2] for url in tab.requests if url.startswith("http")} == {address.split("/")[2]}


def test_a_tuned_study_is_followed_through_its_tuning_and_its_comparison(tmp_path: Path) -> None:
    tuning = ["--tune", "lr=0.01:0.1", "--trials", "2", "--tune-seeds", "100-101", "--tune-budget", "0"]
    with going(tmp_path, *tuning, task=TUNED_TASK) as (study, out):
        until(lambda: any(run.values for run in status.status_of(Study.open(out)).going))
        with watched(out) as (_, address):
            page = until(lambda: told(address, "seed 101: step 1"))
            assert isinstance(page, str)
            # 2 arms of 2 values and 2 tuning seeds, then 2 arms of 4 seeds
            assert "16 runs, 8 of them to tune" in page
            assert re.search(r"The optimizers are being tuned, \d of 8 runs so far; the comparison follows\.", page)
            assert re.search(r"<li>(kbeta|adam95), lr 0\.01?, seed 101: step 1, loss 1</li>", page)
            assert re.search(r"<span>compute \d+ s in 8 runs</span>", page)
            assert page.count("<td>4</td></tr>") == 2  # to come, of either arm
            (tmp_path / "go-compare").touch()
            page = until(lambda: told(address, "seed 1: step 1"))
            assert isinstance(page, str)
            assert "16 runs, 8 of them to tune (8 done)" in page
            assert "<li>kbeta, seed 1: step 1, loss 1</li>" in page
            assert re.search(r"So far, with \d+ of 16 runs done", page)
            (tmp_path / "go").touch()
            study.communicate(timeout=240)
        assert study.returncode == 0
        assert status.status_of(Study.open(out)).finished == 16


def test_study_watch_serves_the_page_while_it_runs(tmp_path: Path) -> None:
    with going(tmp_path, "--watch") as (study, _):
        assert study.stderr is not None
        address = re.match(r"http://127\.0\.0\.1:\d+/", study.stderr.readline())
        assert address is not None
        until(lambda: 'max="8" value="2"' in get(address[0]))
        (tmp_path / "go").touch()
        study.communicate(timeout=240)
        assert study.returncode == 0


def test_the_server_answers_this_machine_alone_and_serves_nothing_but_the_page(tmp_path: Path) -> None:
    study = made_study.own(tmp_path / "out", {"x": {0: 1.0}, "y": {0: 2.0}})
    with watch.serving(study.path) as address:
        host = address.split("/")[2]

        def ask(path: str, name: str) -> int:
            link = http.client.HTTPConnection(host, timeout=30)
            link.request("GET", path, headers={"Host": name})
            code = link.getresponse().status
            link.close()
            return code

        assert ask("/", host) == 200
        assert ask("/", host.replace("127.0.0.1", "localhost")) == 200
        assert ask("/", "example.org") == 403
        for path in ("/study.json", "/../study.json", "/runs/", "//etc/passwd"):
            assert ask(path, host) == 404
        assert json.loads(get(address + "state"))["page"] == 1
        listening = Path("/proc/net/tcp").read_text() if sys.platform == "linux" else ""
        port = f"{int(host.split(':')[1]):04X}"
        assert all(
            line.split()[1].startswith("0100007F") for line in listening.splitlines() if f":{port} " in line[:30]
        )
    assert sorted(p.name for p in study.path.iterdir()) == [".lock", "runs", "study.json"]  # nothing was written


def test_a_page_is_made_again_when_the_folder_changes_and_not_otherwise(tmp_path: Path, monkeypatch) -> None:
    study = made_study.own(tmp_path / "out", {"x": {0: 1.0}, "y": {0: 2.0}})
    monkeypatch.setattr(watch, "SHORTEST", 0.0)
    made = []

    def render(found: Study) -> str:
        made.append(found)
        return f"page {len(made)}"

    follower = watch.Follower(study.path, render)
    assert [follower.page(), follower.page()] == [("page 1", 1), ("page 1", 1)]
    (study.runs()[0].folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    until(lambda: follower.page() == ("page 2", 2), 5)
    assert len(made) == 2


def test_a_folder_that_is_broken_for_a_moment_keeps_the_last_page(tmp_path: Path, monkeypatch) -> None:
    study = made_study.own(tmp_path / "out", {"x": {0: 1.0}, "y": {0: 2.0}})
    monkeypatch.setattr(watch, "SHORTEST", 0.0)

    def render(found: Study) -> str:
        if (found.path / "broken").exists():
            raise StoreError("half a file")
        return "page"

    follower = watch.Follower(study.path, render)
    assert follower.page() == ("page", 1)
    (study.path / "broken").touch()
    (study.path / "study.json").touch()
    assert follower.page() == ("page", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nowhere"], "nowhere/study.json: not found"),
        (["out", "--port", "70000"], "--port must be between 0 and 65535, 0 for any free one; got 70000"),
    ],
)
def test_watching_what_cannot_be_watched_is_one_line(tmp_path: Path, options: list[str], message: str) -> None:
    made_study.own(tmp_path / "out", {"x": {0: 1.0}, "y": {0: 2.0}})
    done = subprocess.run([*KBETA, "watch", *options], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_status_counts_every_run_and_estimates_the_rest(tmp_path: Path, monkeypatch) -> None:
    ends = {
        "x": {0: 1.0, 1: 1.0, 2: None, 3: None},
        "y": {0: float("nan"), 1: made_study.failed(), 2: None, 3: None},
    }
    study = made_study.own(tmp_path / "out", ends)
    assert status.words(status.status_of(study)).startswith(
        "8 runs: 2 finished, 1 diverged, 1 failed, 4 waiting. Nobody"
    )
    holder = Holder("process 1 (kbeta study)", time.time() - 5)
    monkeypatch.setattr(Study, "holder", lambda self: holder)
    x2 = next(run for run in study.runs() if (run.spec.optimizer, run.spec.seed) == ("x", 2))
    (x2.folder / "metrics.jsonl").write_text('{"step": 7, "loss": 0.25}\n')
    found = status.status_of(study)
    assert (found.running, found.waiting) == (1, 3)
    assert [(run.optimizer, run.seed, run.step, run.loss) for run in found.going] == [("x", 2, 7, 0.25)]
    assert found.seconds_left == 8.0  # four runs of two seconds, one at a time
    assert status.words(found) == "8 runs: 2 finished, 1 diverged, 1 failed, 1 running, 3 waiting. About 8 s left."


def test_a_run_that_an_earlier_process_left_is_waiting_not_running(tmp_path: Path, monkeypatch) -> None:
    study = made_study.own(tmp_path / "out", {"x": {0: None}, "y": {0: 1.0}})
    file = study.runs()[0].folder / "metrics.jsonl"
    file.write_text('{"step": 7, "loss": 0.25}\n')
    os.utime(file, (time.time() - 1000,) * 2)
    monkeypatch.setattr(Study, "holder", lambda self: Holder("process 1", time.time()))
    found = status.status_of(study)
    assert (found.running, found.waiting) == (0, 1)


def test_a_process_that_has_ended_holds_nothing(tmp_path: Path) -> None:
    study = made_study.own(tmp_path / "out", {"x": {0: 1.0}, "y": {0: 1.0}})
    assert study.holder() is None
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for text, there in (
        (f"process {ended.pid} (kbeta)", False),
        ("rubbish", False),
        (f"process {os.getpid()} (x)", True),
    ):
        (study.path / ".lock").write_text(text)
        assert (study.holder() is not None) is there


def test_no_number_of_the_status_is_broken_across_lines_at_80_columns(tmp_path: Path) -> None:
    arms = ["a-name-of-an-optimizer-that-is-much-longer-than-any-column-of-a-table-should-be", "y"]
    row = dict.fromkeys(("finished", "diverged", "failed", "running", "waiting"), 123456)
    found = status.Status(
        testbed="t",
        writer=None,
        total=1234567,
        tuning=123456,
        tuned=123456,
        seconds_left=None,
        arms=tuple(status.ArmStatus(arm, **row) for arm in arms),
        going=(),
        **row,
    )
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(progress.render_status(found))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    for arm in ("a-name", "y "):
        (line,) = [line for line in lines if line.strip().startswith(arm)]
        assert line.split()[-5:] == ["123456"] * 5
