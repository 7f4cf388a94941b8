"""Studies in real worker processes that are killed, crash, raise and are interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kourkoutas.lab import api
from kourkoutas.lab.planning import plan as planning
from kourkoutas.lab.results import store
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.running import pool
from kourkoutas.lab.running.worker import Task
from kourkoutas.lab.specs.spec import RunResult, RunSpec

ARMS = ["kbeta", "adam95"]

# A training function without a framework, so that a worker starts in a fraction of a second. Its pauses are there to be
# killed in; a file `hurry` beside it ends them.
TASK = """
import os, pathlib, time

hurry = pathlib.Path(__file__).with_name("hurry")

def train(trial):
    value = 1.0 + trial.seed
    (trial.folder / "made-by").write_text(str(os.getpid()))
    for step in range(1, 11):
        value = value * 0.9 + len(trial.arm) * 1e-3
        trial.log(step, loss=value)
        if "pause" in trial.settings and not hurry.exists():
            time.sleep(trial.settings["pause"])
    return value
"""


@pytest.fixture
def task(tmp_path: Path) -> Path:
    file = tmp_path / "task.py"
    file.write_text(TASK)
    return file


def plan(file: Path, seeds: str = "0-3", optimizers: list[str] = ARMS, **options: str) -> planning.Plan:
    return planning.plan_study(
        f"{file}:train", seeds=planning.parse_seeds(seeds), optimizers=optimizers, options=options
    )


def execute(made: planning.Plan, out: Path, **options: Any) -> list[store.StoredRun]:
    return api.execute(made, out, command="test", workers=options.pop("workers", 2), **options).runs


def facts(runs: list[store.StoredRun]) -> dict[str, Any]:
    """All that a study says, but for how long it took."""
    found = {}
    for run in runs:
        assert run.result is not None
        found[run.id] = (run.result.model_dump_json(exclude={"seconds", "times"}), run.metrics())
    return found


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # A killed process stays in the table until its parent has asked for it.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


@pytest.mark.parametrize("name", ["result.json", "spec.json"])
def test_one_corrupt_file_costs_one_run_and_is_made_again(task: Path, tmp_path: Path, name: str) -> None:
    made = plan(task, "0-2")
    before = facts(execute(made, tmp_path / "out"))
    spec = made.specs()[3]
    file = tmp_path / "out" / "runs" / spec.id / name
    file.write_text(file.read_text()[:40])
    opened = Snapshot.read(tmp_path / "out")
    runs = {run.id: run for run in Snapshot.read(opened.path).runs}
    if name == "result.json":
        assert runs[spec.id].result is not None
        assert runs[spec.id].result.status == "failed"  # type: ignore[union-attr]
    else:
        assert spec.id not in runs
        assert spec.id in Snapshot.read(opened.path).damage[0]
    assert facts([run for key, run in runs.items() if key != spec.id]) == {
        k: v for k, v in before.items() if k != spec.id
    }
    assert facts(execute(made, tmp_path / "out", retry_failed=True)) == before


LONG = """
def train(trial):
    for step in range(20_000):
        trial.log(step, loss=1.0 + step)
    return 1.0
"""


def test_a_full_disk_ends_a_study_in_one_line_and_it_goes_on_when_there_is_room(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(LONG)
    source = "import resource, sys\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 10**9))\n"
    source += "from kourkoutas.cli import main\nsys.argv = ['kbeta', *sys.argv[1:]]\nmain()\n"
    words = ["study", "task.py:train", "--seeds", "0-1", "--optimizers", "kbeta,adam95", "--no-report", "--out", "out"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p)}
    call = [sys.executable, "-P", "-c", source, *words]
    done = subprocess.run(call, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    doubt, planned, *errors = done.stderr.strip().splitlines()
    assert doubt.startswith("2 seeds are too few")
    assert planned.startswith("task.train · seeds 0-1 · 4 runs, ")
    assert len(errors) == 1, done.stderr
    assert "kbeta: no room left on the disk" in errors[0]
    assert "run the same command again" in errors[0]
    assert not list(tmp_path.glob("out/runs/*/result.json"))

    call = [sys.executable, "-P", "-m", "kourkoutas", *words]
    again = subprocess.run(call, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    assert len(list(tmp_path.glob("out/runs/*/result.json"))) == 4


def test_two_workers_share_the_runs_of_a_study(task: Path, tmp_path: Path) -> None:
    runs = execute(plan(task, pause="0.02"), tmp_path / "out")
    assert len({(run.folder / "made-by").read_text() for run in runs}) == 2


def taken_by(workers: Sequence[int], specs: Sequence[RunSpec]) -> list[RunSpec | None]:
    """What these workers take, one after another."""
    made = pool.Pool(2)
    for spec in specs:
        made.submit(Task(spec=spec, folder=Path()))
    taken = [made.take(worker) for worker in workers]
    return [None if task is None else task.spec for task in taken]


def test_a_worker_keeps_its_seed_until_all_its_arms_are_taken() -> None:
    specs = [RunSpec(testbed="t", optimizer=arm, seed=seed) for arm in "ab" for seed in range(3)]
    taken = taken_by((0, 1, 1, 0, 1, 1), specs)
    assert [(spec.seed, spec.optimizer) for spec in taken if spec] == [
        (0, "a"), (1, "a"), (1, "b"), (0, "b"), (2, "a"), (2, "b"),
    ]  # fmt: skip


def test_a_worker_without_a_seed_of_its_own_helps_with_another_seed() -> None:
    taken = taken_by((0, 1, 0, 1), [RunSpec(testbed="t", optimizer=arm, seed=0) for arm in "abc"])
    assert [spec and spec.optimizer for spec in taken] == ["a", "b", "c", None]


def test_threads_are_divided_before_a_framework_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NPROC", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    env = pool.worker_environment(1, shared=True)
    assert (env["OMP_NUM_THREADS"], env["MKL_NUM_THREADS"], env["NPROC"]) == ("1", "1", "1")
    assert env["XLA_FLAGS"] == "--xla_cpu_multi_thread_eigen=false"
    assert "XLA_FLAGS" not in pool.worker_environment(4, shared=False)


def test_thread_counts_that_the_user_has_set_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=true")
    env = pool.worker_environment(1, shared=False)
    assert env["OMP_NUM_THREADS"] == "7"
    assert env["XLA_FLAGS"] == "--xla_cpu_multi_thread_eigen=true"


def test_what_a_run_prints_is_kept_with_the_run_and_it_cannot_read_the_tasks(tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    file.write_text("import sys\ndef train(trial):\n    print('hello', repr(sys.stdin.read()))\n    return 1.0\n")
    runs = execute(plan(file, seeds="0-1"), tmp_path / "out", workers=1)
    assert [(run.folder / "output.txt").read_text() for run in runs] == ["hello ''\n"] * 4


FAILING = """
import os, signal, time

def train(trial):
    if trial.seed == 1:
        raise RuntimeError("no convergence today")
    if trial.seed == 2:
        os._exit(3)
    if trial.seed == 3:
        import ctypes
        ctypes.string_at(0)
    if trial.seed == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    if trial.seed == 5:
        return float("nan")
    if trial.seed == 6:
        raise SystemExit(0)
    return 0.5
"""


def test_runs_that_raise_crash_or_are_killed_are_recorded_and_the_study_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    file.write_text(FAILING)
    runs = execute(plan(file, seeds="0-7", optimizers=["kbeta"]), tmp_path / "out")
    results = {run.spec.seed: run.result for run in runs}
    assert all(result is not None for result in results.values())
    assert {seed: r.status for seed, r in results.items() if r} == {
        0: "ok", 1: "failed", 2: "failed", 3: "failed", 4: "failed", 5: "diverged", 6: "failed", 7: "ok",
    }  # fmt: skip
    errors = {seed: r.error or "" for seed, r in results.items() if r}
    assert errors[1].startswith("Traceback")
    assert errors[1].rstrip().endswith("RuntimeError: no convergence today")
    assert f'File "{file}", line 6, in train' in errors[1]
    assert "exit code 3" in errors[2]
    assert "signal 11, SIGSEGV" in errors[3]
    assert f'File "{file}", line 11 in train' in errors[3]
    assert "signal 9, SIGKILL" in errors[4]
    assert "SystemExit" in errors[6]


def test_failed_runs_wait_until_they_are_to_be_retried(tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    file.write_text(
        "import pathlib\n"
        "def train(trial):\n"
        f"    if not pathlib.Path({str(tmp_path / 'fixed')!r}).exists():\n"
        "        raise OSError('disk full')\n"
        "    return 0.5\n"
    )
    made = plan(file, seeds="0", optimizers=["kbeta"])
    out = tmp_path / "out"
    assert [run.result.status for run in execute(made, out) if run.result] == ["failed"]
    (tmp_path / "fixed").touch()
    assert [run.result.status for run in execute(made, out) if run.result] == ["failed"]
    assert [run.result.status for run in execute(made, out, retry_failed=True) if run.result] == ["ok"]


def test_code_that_changes_while_the_study_runs_makes_no_result(task: Path, tmp_path: Path) -> None:
    made = plan(task, seeds="0", optimizers=["kbeta"])
    task.write_text(TASK + "\n# edited\n")
    (run,) = execute(made, tmp_path / "out")
    assert run.result is not None
    assert run.result.status == "failed"
    assert "changed while the study was running" in (run.result.error or "")


class Watch:
    """An observer that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def planned(self, total: int, kept: int, failed: int, workers: int) -> None:
        self.told.append(("planned", total, kept, failed, workers))

    def started(self, spec: RunSpec) -> None:
        self.told.append(("started", spec.seed))

    def progress(self, spec: RunSpec, step: int, steps: int | None, loss: float | None) -> None:
        self.told.append(("progress", spec.seed))

    def finished(self, spec: RunSpec, result: RunResult) -> None:
        self.told.append(("finished", spec.seed, result.status))


def test_more_seeds_are_added_and_finished_runs_are_not_repeated(task: Path, tmp_path: Path) -> None:
    first = execute(plan(task, seeds="0-1"), tmp_path / "out")
    stamps = {run.id: (run.folder / "result.json").stat().st_mtime_ns for run in first}
    watch = Watch()
    second = execute(plan(task, seeds="0-2"), tmp_path / "out", observer=watch)
    assert watch.told[0] == ("planned", 6, 4, 0, 2)
    assert len(second) == 6
    assert all((run.folder / "result.json").stat().st_mtime_ns == stamps.get(run.id) for run in second[:2])
    assert {told[1] for told in watch.told[1:]} == {2}


def command(file: Path, out: Path, *more: str) -> list[str]:
    options = ["--seeds", "0-5", "--optimizers", ",".join(ARMS), "--workers", "2", "--no-report", "--out", str(out)]
    return [sys.executable, "-m", "kourkoutas", "study", f"{file}:train", *options, *more]


def finished(out: Path) -> dict[str, int]:
    return {file.parent.name: file.stat().st_mtime_ns for file in out.glob("runs/*/result.json")}


def workers_of(out: Path) -> set[int]:
    return {int(file.read_text() or 0) for file in out.glob("runs/*/made-by")} - {0}


def test_after_kill_9_the_same_command_repeats_nothing_and_ends_with_the_same_results(
    task: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with subprocess.Popen(command(task, out, "--set", "pause=0.02"), stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: len(finished(out)) >= 3)
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: all(gone(pid) for pid in workers_of(out)), seconds=5)
    kept = finished(out)
    assert 3 <= len(kept) < 12

    task.with_name("hurry").touch()
    whole = execute(plan(task, seeds="0-5", pause="0.02"), tmp_path / "whole")
    resumed = execute(plan(task, seeds="0-5", pause="0.02"), out)
    now = finished(out)
    assert len(now) == 12
    assert all(now[run] == stamp for run, stamp in kept.items())
    assert facts(resumed) == facts(whole)


def test_a_worker_killed_from_outside_costs_one_run(task: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with subprocess.Popen(command(task, out, "--set", "pause=0.05", "--json"), stdout=subprocess.PIPE, text=True) as p:
        wait_for(lambda: bool(workers_of(out)))
        victim = min(workers_of(out))
        os.kill(victim, signal.SIGKILL)
        task.with_name("hurry").touch()
        printed, _ = p.communicate(timeout=120)
    runs = json.loads(printed)["runs"]
    failed = [run for run in runs if run["status"] == "failed"]
    assert p.returncode == 1
    assert len(runs) == 12
    assert len(failed) == 1
    assert "signal 9, SIGKILL" in failed[0]["error"]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_workers_keeps_results_and_says_how_to_resume(
    task: Path, tmp_path: Path, sent: signal.Signals
) -> None:
    out = tmp_path / "with space"
    call = command(task, out, "--set", "pause=0.05")
    # A shell that starts the tests in the background has made them deaf to an interrupt.
    hearing = f"import os, signal, sys; signal.signal({sent:d}, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])"
    call = [sys.executable, "-c", hearing, *call]
    with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: bool(finished(out)))
        process.send_signal(sent)
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert printed == ""
    assert "Traceback" not in errors
    resume = errors.strip().splitlines()[-1].partition("To resume: ")[2]
    assert resume.endswith(f"'{out}' --set pause=0.05")
    assert all(gone(pid) for pid in workers_of(out))
    kept = finished(out)
    assert 0 < len(kept) < 12
    if sent == signal.SIGTERM:
        return
    task.with_name("hurry").touch()
    again = subprocess.run(
        ["bash", "-c", resume.replace("python", sys.executable, 1)], capture_output=True, timeout=120
    )
    assert again.returncode == 0
    assert len(finished(out)) == 12
    assert all(finished(out)[run] == stamp for run, stamp in kept.items())
