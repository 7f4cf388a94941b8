"""The workers of a study: kept from phase to phase and from study to study, replaced when they must be, then gone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kourkoutas.lab import api, machine
from kourkoutas.lab.planning import plan as planning
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.running.executor import Limits, Observer
from kourkoutas.lab.running.pool import Pool
from kourkoutas.lab.tuning import search

# The best lr lies beyond the range that is asked for, so that it is widened once. Every run says who made it.
TASK = """
import math, os

def train(trial):
    (trial.folder / "made-by").write_text(str(os.getpid()))
    return 1 + abs(math.log10(trial.settings["lr"] / 0.2))
"""


@pytest.fixture
def pool() -> Iterator[Pool]:
    with contextlib.closing(Pool(2)) as opened:
        yield opened


def write(folder: Path, source: str) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "task.py"
    file.write_text(source)
    return file


def plan(file: Path, seeds: str = "0-2", *, tune: str | None = None, **options: str) -> planning.Plan:
    chosen = planning.parse_seeds(seeds)
    space = None
    if tune is not None:
        axes = search.parse_tune([tune])
        space = search.search_space(axes, trials=3, seeds=[100, 101], test_seeds=chosen, budget=2)
    return planning.plan_study(
        f"{file}:train", seeds=chosen, optimizers=["kbeta", "adam95"], options=options, tuning=space
    )


def execute(made: planning.Plan, out: Path, **options: Any) -> Snapshot:
    return api.execute(made, out, command="test", **options)


def workers_of(done: Snapshot) -> set[int]:
    return {int((run.folder / "made-by").read_text()) for run in (*done.runs, *done.tuning_runs)}


def statuses(done: Snapshot) -> list[str | None]:
    return [run.result and run.result.status for run in done.runs]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # A killed process stays in the table until its parent has asked for it, which may happen right here.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until_gone(pids: set[int]) -> None:
    end = time.monotonic() + 10
    while not all(gone(pid) for pid in pids):
        assert time.monotonic() < end, "a worker lives on"
        time.sleep(0.05)


class Phases(Observer):
    """Counts the phases of a study, and does something when the second one is planned."""

    def __init__(self) -> None:
        self.count = 0

    def planned(self, total: int, kept: int, failed: int, workers: int) -> None:
        self.count += 1
        if self.count == 2:
            self.between()

    def between(self) -> None: ...


def test_tuning_widening_and_confirming_are_made_by_the_same_workers_which_end_with_the_study(tmp_path: Path) -> None:
    observer = Phases()
    made = plan(write(tmp_path / "task", TASK), tune="lr=1e-3:1e-1")
    done = execute(made, tmp_path / "out", workers=2, observer=observer)
    assert observer.count >= 3
    assert len(workers_of(done)) == 2
    assert all(gone(pid) for pid in workers_of(done))


def test_a_worker_that_is_killed_while_it_waits_costs_no_run(tmp_path: Path, pool: Pool) -> None:
    out = tmp_path / "out"

    class Killing(Phases):
        def between(self) -> None:
            (victim, *_) = [int(file.read_text()) for file in out.glob("runs/*/made-by")]
            os.kill(victim, signal.SIGKILL)
            wait_until_gone({victim})

    made = plan(write(tmp_path / "task", TASK), tune="lr=1e-3:1e-1")
    done = execute(made, out, executor=pool, observer=Killing())
    assert statuses(done) == ["ok"] * 6
    assert len(workers_of(done)) == 3


def test_the_workers_of_one_study_make_the_next_one_too(tmp_path: Path, pool: Pool) -> None:
    file = write(tmp_path / "task", TASK)
    first = execute(plan(file, lr="0.1"), tmp_path / "first", executor=pool)
    second = execute(plan(file, "3-5", lr="0.2"), tmp_path / "second", executor=pool)
    assert workers_of(first) == workers_of(second)
    pool.close()
    assert all(gone(pid) for pid in workers_of(first))


def test_two_studies_whose_modules_have_the_same_name_each_import_their_own(tmp_path: Path, pool: Pool) -> None:
    source = "from model import VALUE\n\ndef train(trial):\n    return VALUE\n"
    found = []
    for name, value in (("one", 1.0), ("two", 2.0)):
        file = write(tmp_path / name, source)
        file.with_name("model.py").write_text(f"VALUE = {value}\n")
        done = execute(plan(file), tmp_path / f"out-{name}", executor=pool)
        found.append({run.result.endpoint for run in done.runs if run.result is not None})
    assert found == [{1.0}, {2.0}]


def test_after_a_run_that_takes_too_long_the_next_study_gets_a_new_worker(tmp_path: Path) -> None:
    source = "import time\n" + TASK.replace("    return", "    time.sleep(600 if trial.seed == 1 else 0)\n    return")
    file = write(tmp_path / "task", source)
    with contextlib.closing(Pool(1, Limits(timeout=2))) as pool:
        first = execute(plan(file, "0-1", lr="0.1"), tmp_path / "first", executor=pool)
        second = execute(plan(file, "2", lr="0.1"), tmp_path / "second", executor=pool)
    assert sorted(map(str, statuses(first))) == ["failed", "failed", "ok", "ok"]
    assert statuses(second) == ["ok", "ok"]


def test_runs_that_are_under_way_have_ended_before_the_folder_is_given_free(tmp_path: Path, pool: Pool) -> None:
    source = """
import os, time

def train(trial):
    (trial.folder / "made-by").write_text(str(os.getpid()))
    if trial.seed == 1:
        time.sleep(600)
    time.sleep(0.5)
    return 1.0
"""
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"train\(\) never reads trial.settings\['lr'\]"):
        execute(plan(write(tmp_path / "task", source), "0-1", lr="0.1"), out, executor=pool)
    sleeping = [int(file.read_text()) for file in out.glob("runs/*-s1-*/made-by")]
    assert sleeping
    assert all(gone(pid) for pid in sleeping)


def test_what_a_run_registers_for_the_end_of_its_process_is_called(tmp_path: Path) -> None:
    source = """
import atexit, pathlib

atexit.register(lambda: pathlib.Path(__file__).with_name("left").write_text("left"))

def train(trial):
    return 1.0
"""
    file = write(tmp_path / "task", source)
    execute(plan(file, "0"), tmp_path / "out", workers=1)
    assert file.with_name("left").read_text() == "left"


def test_a_worker_ends_at_once_and_not_after_its_interpreter_was_taken_apart(tmp_path: Path) -> None:
    source = """
import time

class Slow:
    def __del__(self):
        time.sleep(3)

kept = Slow()

def train(trial):
    return 1.0
"""
    with contextlib.closing(Pool(1)) as pool:
        execute(plan(write(tmp_path / "task", source), "0"), tmp_path / "out", executor=pool)
        start = time.monotonic()
    assert time.monotonic() - start < 2


@pytest.mark.parametrize("seconds", [1.0, 60.0])
def test_few_runs_after_many_get_workers_with_more_cores_only_if_runs_are_long(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 8)
    for name in ("OMP_NUM_THREADS", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    pool = Pool()
    sizes = []
    for runs in (2, 72, 3, 30):
        pool.resize(runs)
        sizes.append(pool.size)
        pool._seconds.append(seconds)
    assert sizes == ([2, 8, 8, 8] if seconds < 30 else [2, 8, 3, 8])


def test_a_study_that_is_killed_between_its_phases_leaves_no_worker(tmp_path: Path) -> None:
    file = write(tmp_path / "task", TASK)
    out = tmp_path / "out"
    script = f"""
import os, signal
from kourkoutas.lab import study
from kourkoutas.lab.tuning import search

whole = search.next_requests
rounds = 0

def next_requests(*given, **by):
    global rounds
    rounds += 1
    if rounds == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*given, **by)

search.next_requests = next_requests
study({str(file) + ":train"!r}, optimizers=["kbeta", "adam95"], tune={{"lr": (1e-3, 1e-1)}}, trials=3, out={str(out)!r})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL
    pids = {int(made.read_text()) for made in out.glob("runs/*/made-by")}
    assert pids
    wait_until_gone(pids)


def test_a_run_that_a_dying_worker_was_given_and_did_not_begin_goes_to_another(tmp_path: Path, pool: Pool) -> None:
    """The end of a process with threads is seen some time after it: until then it looks as if it waited."""
    out, killed = tmp_path / "out", []

    class Blind(Phases):
        def between(self) -> None:
            (victim, *_) = [int(file.read_text()) for file in out.glob("runs/*/made-by")]
            os.kill(victim, signal.SIGSTOP)  # it reads nothing any more, and its end is not seen
            killed.append(victim)

        def started(self, spec: Any) -> None:
            if killed:
                os.kill(killed.pop(), signal.SIGKILL)

    made = plan(write(tmp_path / "task", TASK), tune="lr=1e-3:1e-1")
    done = execute(made, out, executor=pool, observer=Blind())
    runs = [run.result.status for run in (*done.runs, *done.tuning_runs) if run.result is not None]
    assert set(runs) == {"ok"}
    assert len(workers_of(done)) == 3
