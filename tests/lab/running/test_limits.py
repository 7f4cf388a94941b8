"""Runs that take too long or too much memory, and runs that are lost, in real processes of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kourkoutas.lab import api
from kourkoutas.lab.planning import plan as planning
from kourkoutas.lab.results import store
from kourkoutas.lab.running import pool
from kourkoutas.lab.running.executor import Limits, choose_executor
from kourkoutas.lab.running.pool import rss_above


def execute(
    folder: Path, source: str, seeds: str = "0-2", *, retries: int = 0, **limits: Any
) -> Sequence[store.StoredRun]:
    file = folder / "task.py"
    file.write_text(source)
    made = planning.plan_study(f"{file}:train", seeds=planning.parse_seeds(seeds), optimizers=["kbeta"])
    with contextlib.closing(pool.Pool(2, Limits(**limits))) as executor:
        return api.execute(made, folder / "out", command="test", executor=executor, retries=retries).runs


def ends(runs: Sequence[store.StoredRun]) -> list[str]:
    return [run.result.status for run in runs if run.result is not None]


# Seed 1 holds the interpreter's lock for ever, so that no Python code of the process runs any more.
ENDLESS = """
import ctypes, os, pathlib, subprocess, time

here = pathlib.Path(__file__)

def train(trial):
    with here.with_name(f"tries-{trial.seed}").open("a") as file:
        file.write("x")
    trial.log(1, loss=1.0)
    if trial.seed == 1:
        print("about to hang", flush=True)
        here.with_name("stuck").write_text(str(os.getpid()))
        ctypes.PyDLL(None).sleep(3600)
    if trial.seed == 2:
        os._exit(3)
    if trial.seed == 3:
        raise ValueError("no")
    if trial.seed == 4:
        child = subprocess.Popen(["sleep", "3600"])
        here.with_name("child").write_text(str(child.pid))
        time.sleep(3600)
    return 0.5
"""
STATUSES = ["ok", "failed", "failed", "failed", "failed", "ok"]


class Endless(NamedTuple):
    """A study of `ENDLESS`, made by the command with `--timeout 6 --retries 2`."""

    folder: Path
    call: list[str]
    done: subprocess.CompletedProcess[str]
    runs: Sequence[store.StoredRun]


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Endless:
    folder = tmp_path_factory.mktemp("endless")
    file, out = folder / "task.py", folder / "out"
    file.write_text(ENDLESS)
    options = ["--seeds", "0-5", "--optimizers", "kbeta", "--workers", "3", "--timeout", "6", "--retries", "2"]
    call = [sys.executable, "-m", "kourkoutas", "study", f"{file}:train", *options, "--no-report", "--out", str(out)]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120)
    runs, damage = store.read_runs(out, store.read_record(out).arms)
    assert not damage
    return Endless(folder, call, done, runs)


def test_a_run_that_hangs_in_native_code_is_ended_and_the_others_finish(endless: Endless) -> None:
    assert ends(endless.runs) == STATUSES
    result = endless.runs[1].result
    assert result is not None
    assert (result.error or "").splitlines()[0] == "the run was ended after 6 s: --timeout 6"
    assert "about to hang" in (result.error or "")
    assert 6 <= result.seconds < 60
    assert not Path(f"/proc/{(endless.folder / 'stuck').read_text()}").exists()


def test_a_hanging_run_is_listed_by_the_command_with_the_way_to_repeat_it(endless: Endless) -> None:
    assert endless.done.returncode == 1
    assert "K-β seed 1: failed: the run was ended after 6 s: --timeout 6" in " ".join(endless.done.stderr.split())
    assert "4 runs failed; to try again:" in endless.done.stderr
    again = subprocess.run([*endless.call, "--json"], capture_output=True, text=True, timeout=120)
    assert [run["status"] for run in json.loads(again.stdout)["runs"]] == STATUSES


def test_a_run_that_fails_by_itself_or_exceeds_its_time_is_not_made_again(endless: Endless) -> None:
    assert [(endless.folder / f"tries-{seed}").read_text() for seed in range(6)] == ["x"] * 6


def test_the_children_of_a_run_are_ended_with_it(endless: Endless) -> None:
    child, end = Path(f"/proc/{(endless.folder / 'child').read_text()}/cmdline"), time.monotonic() + 10
    while child.exists() and child.read_bytes() and time.monotonic() < end:
        time.sleep(0.05)
    assert not child.exists() or not child.read_bytes()  # a zombie until somebody asks for it has no command line


def test_a_run_above_its_memory_is_ended_and_addresses_alone_are_no_memory(tmp_path: Path) -> None:
    source = """
import mmap, time

def train(trial):
    no_reserve = 0x4000
    held = [mmap.mmap(-1, 64 << 30, flags=mmap.MAP_PRIVATE | no_reserve)]
    for _ in range(60 if trial.seed == 1 else 1):
        held.append(b"x" * (32 << 20))
        time.sleep(0.05)
    return 0.5
"""
    runs = execute(tmp_path, source, memory=0.75)
    assert ends(runs) == ["ok", "failed", "ok"]
    result = runs[1].result
    assert result is not None
    assert (result.error or "").startswith("the run was ended when it held ")
    assert (result.error or "").splitlines()[0].endswith(" GiB: --memory 0.75")


def test_what_earlier_runs_left_in_the_worker_does_not_count_against_a_run(tmp_path: Path) -> None:
    source = """
import pathlib, time

left = []

def train(trial):
    with pathlib.Path(__file__).with_name(f"tries-{trial.seed}").open("a") as file:
        file.write("x")
    left.append(b"x" * (400 << 20))
    time.sleep(3)
    return 0.5
"""
    runs = execute(tmp_path, source, "0-2", memory=0.75)  # two workers
    assert ends(runs) == ["ok", "ok", "ok"]
    assert len((tmp_path / "tries-2").read_text()) > 1


def test_memory_that_parent_and_child_share_is_counted_once_and_the_childs_own_is_added() -> None:
    size = 200 << 20
    script = f"""
import os, sys, time
shared = b"x" * {size}
if os.fork() == 0:
    own = b"y" * {size}
    print("ready", flush=True)
    time.sleep(60)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            held, nothing = (rss_above(process.pid, limit * size) for limit in (1, 3))
        finally:
            os.killpg(process.pid, 9)
    assert held is not None
    assert 2 * size < held < 2.5 * size
    assert nothing is None


KILLED = """
import os, pathlib, signal

def train(trial):
    tries = pathlib.Path(__file__).with_name(f"tries-{trial.seed}")
    count = int(tries.read_text()) if tries.exists() else 0
    tries.write_text(str(count + 1))
    if count < trial.seed:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.5
"""


def test_a_lost_run_is_made_again_up_to_retries(tmp_path: Path) -> None:
    runs = execute(tmp_path, KILLED, seeds="0-3", retries=2)
    assert ends(runs) == ["ok", "ok", "ok", "failed"]
    assert [(tmp_path / f"tries-{seed}").read_text() for seed in range(4)] == ["1", "2", "3", "3"]
    error = (runs[3].result.error or "") if runs[3].result else ""
    assert "signal 9, SIGKILL" in error
    assert error.endswith("Attempts: 3")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 0}, "--timeout must be a number of seconds above 0"),
        ({"timeout": float("nan")}, "--timeout must be a number of seconds above 0"),
        ({"memory_per_run": -1.0}, "--memory must be a number of GiB above 0"),
        ({"retries": -1}, "--retries must be 0 or above; got -1"),
        ({"workers": 0}, "--workers must be at least 1; got 0"),
        ({"cpus_per_run": 2.0}, "--cpus-per-run 2.0 is for runs on a Ray cluster: add --ray"),
        ({"gpus_per_run": 1.0}, "--gpus-per-run 1.0 is for runs on a Ray cluster: add --ray"),
        ({"storage": "/shared"}, "--storage /shared is for runs on a Ray cluster: add --ray"),
        ({"ray": "", "workers": 2}, "--workers 2 is for processes of this machine"),
    ],
)
def test_options_that_cannot_be_met_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose_executor(**options)


def test_without_ray_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--ray needs ray, .* pip install 'kourkoutas-beta\[ray\]'"):
        choose_executor(ray="")
