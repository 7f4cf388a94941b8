"""Studies on a Ray cluster of two nodes on this machine, whose workers, nodes and drivers are killed.

The nodes are two `ray start` processes with one CPU each, on the loopback device. Every study is a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc"),
]

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
SMALL = ["--num-cpus", "1", "--object-store-memory", str(100 * 2**20), "--disable-usage-stats"]


def children(pid: int) -> list[int]:
    """The process and its descendants."""
    found = [pid]
    for each in found:
        try:
            for file in Path(f"/proc/{each}/task").glob("*/children"):
                found += map(int, file.read_text().split())
        except OSError:
            continue
    return found


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> Any:
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)
    return found


class Cluster:
    """Nodes that are started and killed by the tests."""

    def __init__(self) -> None:
        self.temporary = Path(tempfile.mkdtemp(prefix="rt-", dir="/tmp"))  # paths of sockets must be short
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        scratch = self.temporary / "scratch"
        scratch.mkdir()
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TMPDIR": str(self.temporary),
            "TMPDIR": str(scratch),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        self.nodes: list[subprocess.Popen[bytes]] = []
        port = self.address.partition(":")[2]
        self.add("--head", "--port", port, "--include-dashboard", "false", "--temp-dir", str(self.temporary))
        self.add("--address", self.address)

    def add(self, *options: str) -> None:
        self.nodes.append(
            subprocess.Popen(
                [*RAY, "start", "--block", "--node-ip-address", "127.0.0.1", *SMALL, *options],
                env=self.env,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        )
        wait_for(lambda: self.ready() == len(self.nodes))

    def ready(self) -> int:
        """How many nodes the cluster says it has."""
        script = f"import ray; ray.init({self.address!r}, log_to_driver=False, logging_level=50); "
        script += "print('alive', sum(node['Alive'] for node in ray.nodes()))"
        call = [sys.executable, "-c", script]
        done = subprocess.run(call, env=self.env, capture_output=True, text=True, timeout=120)
        return int(done.stdout.partition("alive ")[2] or 0)

    def raylet(self, node: int) -> int:
        (found,) = (pid for pid in children(self.nodes[node].pid) if "raylet/raylet" in command_line(pid).split(" ")[0])
        return found

    def kill_raylet_of_second(self) -> None:
        os.kill(self.raylet(1), signal.SIGKILL)
        self._end(self.nodes.pop())

    @staticmethod
    def _end(node: subprocess.Popen[bytes]) -> None:
        family = children(node.pid)
        node.terminate()
        try:
            node.wait(timeout=30)
        except subprocess.TimeoutExpired:
            node.kill()
            node.wait()
        for pid in family:
            if "ray" in command_line(pid):
                os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        while self.nodes:
            self._end(self.nodes.pop())
        shutil.rmtree(self.temporary, ignore_errors=True)

    def processes(self, what: str) -> list[int]:
        """Processes of the nodes whose command line holds `what`."""
        every = (pid for node in self.nodes for pid in children(node.pid))
        return [pid for pid in every if what in command_line(pid)]

    def study(self, target: str | Path, out: Path, *options: str, ray: bool = True) -> list[str]:
        where = ["--ray", self.address] if ray else ["--workers", "2"]
        call = [sys.executable, "-m", "kourkoutas", "study", str(target), "--out", str(out), "--no-report"]
        return [*call, "--optimizers", "kbeta,adam95", *where, *options]

    def done(self, call: list[str], code: int = 0) -> list[dict[str, Any]]:
        """The runs of a study that ends with `code`."""
        done = subprocess.run([*call, "--json"], env=self.env, capture_output=True, text=True, timeout=400)
        assert done.returncode == code, done.stderr
        runs: list[dict[str, Any]] = json.loads(done.stdout)["runs"]
        return runs

    def start(self, call: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(call, env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    try:
        yield made
    finally:
        made.close()


def finished(out: Path) -> dict[str, int]:
    return {file.parent.name: file.stat().st_mtime_ns for file in out.glob("runs/*/result.json")}


def everything(out: Path) -> dict[str, Any]:
    """All that is on the disk of every run, but for how long it took."""
    found: dict[str, Any] = {}
    for path in sorted(out.glob("runs/*/**/*")):
        name = path.relative_to(out).as_posix()
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                found[name] = {key: (x.dtype.str, x.shape, x.tobytes()) for key, x in arrays.items()}
        elif path.name == "result.json":
            kept = json.loads(path.read_text()).items()
            found[name] = {key: value for key, value in kept if key not in ("seconds", "times", "sha256")}
        elif path.is_file() and path.name != "made-by":
            found[name] = path.read_bytes()
    return found


TORCH = """
import torch
from neighbour import data


def train(trial):
    torch.manual_seed(trial.seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = trial.optimizer(model, lr=1e-2)
    x, y = data()
    for step in range(60):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        trial.log(step, loss=loss.item())
    torch.save(model.state_dict(), trial.folder / "model.pt")
    print("trained", trial.arm)
    return loss.item()
"""
NEIGHBOUR = """
import torch


def data():
    x = torch.randn(64, 8)
    return x, x.sum(1, keepdim=True).sin()
"""

# Without a framework, so that a worker starts in a fraction of a second.
PLAIN = """
import os, time
from pathlib import Path

def train(trial):
    value = 1.0 + trial.seed
    witness = Path(trial.settings["witness"])
    with (witness / f"{trial.arm}-{trial.seed}").open("a") as file:
        file.write(f"{os.getpid()} {os.getppid()}\\n")
    for step in range(1, 11):
        value = value * 0.9 + len(trial.arm) * 1e-3
        trial.log(step, loss=value)
        time.sleep(0.1)
    (witness / f"{trial.arm}-{trial.seed}-done").touch()
    return value
"""


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    (tmp_path / "witness").mkdir()
    file = tmp_path / "task.py"
    file.write_text(PLAIN)
    return file


def options(file: Path, seeds: str = "0-5") -> list[str]:
    return ["--seeds", seeds, "--set", f"witness={file.parent / 'witness'}"]


def attempts(file: Path) -> dict[str, list[list[str]]]:
    """{arm-seed: [[worker process, Ray worker] of each attempt]}."""
    witnesses = (path for path in (file.parent / "witness").iterdir() if not path.name.endswith("-done"))
    return {path.name: [line.split() for line in path.read_text().splitlines()] for path in witnesses}


def in_the_middle(file: Path, number: int) -> list[list[str]]:
    """The attempts under way after `number` runs have come to their end, or none so far."""
    witness = file.parent / "witness"
    if len(list(witness.glob("*-done"))) < number:
        return []
    return [tries[-1] for run, tries in attempts(file).items() if not (witness / f"{run}-done").exists() and tries]


def test_a_testbed_gives_the_same_files_on_two_nodes_as_in_local_processes(cluster: Cluster, tmp_path: Path) -> None:
    common = ("--seeds", "0-2", "--engine", "torch")
    here = cluster.done(cluster.study("rare_trigger", tmp_path / "here", *common, ray=False))
    there = cluster.done(cluster.study("rare_trigger", tmp_path / "there", *common))
    assert [run["status"] for run in there] == ["ok"] * 6
    assert [run["id"] for run in here] == [run["id"] for run in there]
    assert everything(tmp_path / "here") == everything(tmp_path / "there")
    assert any(name.endswith("trace.npz") for name in everything(tmp_path / "there"))


def test_a_function_of_the_users_is_sent_with_its_modules_and_gives_the_same_files(
    cluster: Cluster, tmp_path: Path
) -> None:
    code = tmp_path / "code"
    code.mkdir()
    (code / "task.py").write_text(TORCH)
    (code / "neighbour.py").write_text(NEIGHBOUR)
    here = cluster.study(f"{code / 'task.py'}:train", tmp_path / "here", "--seeds", "0-2", ray=False)
    there = cluster.study(f"{code / 'task.py'}:train", tmp_path / "there", "--seeds", "0-2")
    assert [run["status"] for run in cluster.done(here)] == ["ok"] * 6
    assert [run["status"] for run in cluster.done(there)] == ["ok"] * 6
    files = everything(tmp_path / "there")
    assert files == everything(tmp_path / "here")
    assert {Path(name).name for name in files} >= {"model.pt", "output.txt", "trace.npz", "metrics.jsonl"}


MINE = {
    "torch": """
import torch
from damping import MOMENTUM

class Mine(torch.optim.SGD):
    def __init__(self, params, lr=1e-3, momentum=MOMENTUM):
        super().__init__(params, lr=lr, momentum=momentum)
""",
    "jax": """
import optax
from damping import MOMENTUM

def Mine(learning_rate, momentum=MOMENTUM):
    return optax.sgd(learning_rate, momentum)
""",
    "mlx": """
import mlx.optimizers
from damping import MOMENTUM

class Mine(mlx.optimizers.SGD):
    def __init__(self, learning_rate, momentum=MOMENTUM):
        super().__init__(learning_rate, momentum)
""",
}


@pytest.mark.parametrize("engine", MINE)
def test_an_optimizer_of_the_users_is_sent_with_its_modules_and_tuned_as_it_is_here(
    cluster: Cluster, tmp_path: Path, engine: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE[engine] + "\nprint('loaded from', __file__)\n")
    (tmp_path / "damping.py").write_text("MOMENTUM = 0.5\n")
    tuned = ["--tune", "lr=1e-2:1e-1", "--tune", "Mine.momentum=0.1:0.9", "--trials", "2", "--tune-seeds", "9"]
    small = ["--set", "steps=30", "--set", "held_out=64", "--seeds", "0-1", "--engine", engine]
    words = ["--optimizers", f"kbeta,{file}:Mine", *small, *tuned]
    here = cluster.done(cluster.study("rare_trigger", tmp_path / "here", *words, ray=False))
    there = cluster.done(cluster.study("rare_trigger", tmp_path / "there", *words))
    assert [(run["id"], run["endpoint"]) for run in there] == [(run["id"], run["endpoint"]) for run in here]
    assert {run["optimizer"] for run in there} == {"kbeta", "Mine"}
    loaded = [path.read_text() for path in (tmp_path / "there").glob("runs/*/output.txt")]
    assert loaded
    assert all("kbeta-ray-" in text for text in loaded)  # a copy on the node


FROM_PYTHON = """
import sys, torch
from kourkoutas.lab import study

DAMPED = 0.5

class Damped(torch.optim.SGD):
    def __init__(self, params, lr=1e-3):
        super().__init__(params, lr=lr, momentum=DAMPED)

def train(trial):
    w = torch.nn.Parameter(torch.full((3,), 1.0 + trial.seed))
    optimizer = trial.optimizer([w], lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        optimizer.step()
        trial.log(step, loss=loss.item())
    return loss.item()

ray = sys.argv[1] or None
result = study(train, optimizers=["torch.SGD", Damped], seeds="0-1", ray=ray, out=sys.argv[2], progress=False,
               settings={"torch.SGD.momentum": DAMPED})
print(result.frame()["endpoint"].tolist())
"""


def test_python_sends_a_function_and_an_optimizer_that_have_no_file_of_their_own(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(FROM_PYTHON)
    env = {**cluster.env, "KBETA_CACHE": str(tmp_path / "cache")}
    ends = []
    for place, out in ((cluster.address, "there"), ("", "here")):
        call = [sys.executable, str(tmp_path / "script.py"), place, str(tmp_path / out)]
        done = subprocess.run(call, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        ends.append(json.loads(done.stdout.splitlines()[-1]))
    assert ends[0] == ends[1]
    assert ends[0][:2] == ends[0][2:]  # both are SGD with the same momentum


def test_both_nodes_make_runs_and_what_was_begun_here_is_finished_there(cluster: Cluster, plain: Path) -> None:
    out = plain.parent / "out"
    cluster.done(cluster.study(f"{plain}:train", out, *options(plain, "0-1"), ray=False))
    kept = finished(out)
    runs = cluster.done(cluster.study(f"{plain}:train", out, *options(plain)))
    assert [run["status"] for run in runs] == ["ok"] * 12
    assert {run: stamp for run, stamp in finished(out).items() if run in kept} == kept
    assert all(len(tries) == 1 for tries in attempts(plain).values())
    made_there = {tries[0][1] for run, tries in attempts(plain).items() if int(run.rpartition("-")[2]) > 1}
    assert len(made_there) == 2


@pytest.mark.parametrize("victim", ["the worker process", "the Ray worker"])
def test_a_killed_worker_costs_one_attempt_of_one_run(cluster: Cluster, plain: Path, victim: str) -> None:
    out = plain.parent / "out"
    call = cluster.study(f"{plain}:train", out, *options(plain))
    with cluster.start(call) as driver:
        worker, ray_worker = wait_for(lambda: in_the_middle(plain, 2))[0]
        os.kill(int(worker if victim == "the worker process" else ray_worker), signal.SIGKILL)
        assert driver.wait(timeout=300) == 0
    assert len(finished(out)) == 12
    assert sorted(len(tries) for tries in attempts(plain).values()) == [1] * 11 + [2]
    whole = plain.parent / "whole"
    cluster.done(cluster.study(f"{plain}:train", whole, *options(plain), ray=False))
    assert everything(out) == everything(whole)


def test_without_retries_a_lost_run_is_recorded_as_failed_and_made_again_on_request(
    cluster: Cluster, plain: Path
) -> None:
    out = plain.parent / "out"
    call = cluster.study(f"{plain}:train", out, *options(plain, "0-1"), "--retries", "0")
    with cluster.start(call) as driver:
        _, ray_worker = wait_for(lambda: in_the_middle(plain, 1))[0]
        os.kill(int(ray_worker), signal.SIGKILL)
        assert driver.wait(timeout=300) == 1
    runs = cluster.done(call, code=1)
    (failed,) = [run for run in runs if run["status"] == "failed"]
    assert failed["error"].startswith("the node or its Ray worker was lost")
    assert [run["status"] for run in cluster.done([*call, "--retry-failed"])] == ["ok"] * 4


def test_the_runs_of_a_killed_node_are_made_by_the_other(cluster: Cluster, plain: Path) -> None:
    out = plain.parent / "out"
    try:
        with cluster.start(cluster.study(f"{plain}:train", out, *options(plain))) as driver:
            wait_for(lambda: in_the_middle(plain, 2))
            cluster.kill_raylet_of_second()
            assert driver.wait(timeout=300) == 0
    finally:
        cluster.add("--address", cluster.address)
    assert len(finished(out)) == 12
    assert sum(len(tries) for tries in attempts(plain).values()) in (12, 13)
    stamps = finished(out)
    assert [run["status"] for run in cluster.done(cluster.study(f"{plain}:train", out, *options(plain)))] == ["ok"] * 12
    assert finished(out) == stamps


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_after_the_driver_is_killed_nothing_runs_on_and_the_same_command_completes_the_study(
    cluster: Cluster, plain: Path, sent: signal.Signals
) -> None:
    out = plain.parent / "out"
    call = cluster.study(f"{plain}:train", out, *options(plain))
    with cluster.start(call) as driver:
        wait_for(lambda: len(finished(out)) >= 3)
        driver.send_signal(sent)
        assert driver.wait(timeout=60) == (-signal.SIGKILL if sent == signal.SIGKILL else 130)
    kept = finished(out)
    assert 3 <= len(kept) < 12
    wait_for(lambda: not cluster.processes("kourkoutas.lab.running.worker"), seconds=30)
    runs = cluster.done(call)
    assert [run["status"] for run in runs] == ["ok"] * 12
    assert {run: stamp for run, stamp in finished(out).items() if run in kept} == kept
    done = {run["id"] for run in runs}
    assert done == finished(out).keys()


def test_a_cluster_of_this_machine_ends_with_a_killed_driver_or_raylet_and_the_study_goes_on(
    cluster: Cluster, plain: Path
) -> None:
    out = plain.parent / "out"
    call = cluster.study(f"{plain}:train", out, *options(plain), ray=False)
    at = call.index("--workers")
    call = [*call[:at], *call[at + 2 :], "--ray"]
    for victim in ("raylet", "driver"):
        before = len(finished(out))
        with cluster.start(call) as driver:
            wait_for(lambda before=before: len(finished(out)) >= before + 2)
            family = children(driver.pid)
            (raylet,) = (pid for pid in family if command_line(pid).split(" ")[0].endswith("raylet/raylet"))
            os.kill(raylet if victim == "raylet" else driver.pid, signal.SIGKILL)
            assert driver.wait(timeout=120) != 0
        # Agents of Ray notice somewhat later.
        ours = [pid for pid in family if "Agent" not in command_line(pid)]
        wait_for(lambda ours=ours: not any(command_line(pid) for pid in ours), seconds=60)
    kept = finished(out)
    assert 4 <= len(kept) < 12
    assert [run["status"] for run in cluster.done(call)] == ["ok"] * 12
    assert {run: stamp for run, stamp in finished(out).items() if run in kept} == kept


def test_a_suite_is_made_on_two_nodes_and_goes_on_after_it_was_terminated(cluster: Cluster, plain: Path) -> None:
    suite, out = plain.with_name("two.toml"), plain.parent / "suite"
    head = f'optimizers = ["kbeta", "adam95"]\nseeds = "0-5"\nsettings = {{ witness = "{plain.parent / "witness"}" }}\n'
    studies = "".join(f'[studies.{name}]\ntrain = "{plain.name}:train"\n' for name in ("first", "second"))
    suite.write_text(head + studies)
    call = [sys.executable, "-m", "kourkoutas", "suite", str(suite), "--out", str(out), "--ray", cluster.address]

    def made() -> dict[str, int]:
        return {file.parent.name + file.parts[-4]: file.stat().st_mtime_ns for file in out.glob("*/runs/*/result.json")}

    with cluster.start(call) as driver:
        wait_for(lambda: len(finished(out / "second")) >= 2)
        driver.terminate()
        assert driver.wait(timeout=60) == 130
    kept = made()
    assert 12 + 2 <= len(kept) < 24
    wait_for(lambda: not cluster.processes("kourkoutas.lab.running.worker"), seconds=30)
    again = subprocess.run([*call, "--json"], env=cluster.env, capture_output=True, text=True, timeout=400)
    assert again.returncode == 0, again.stderr
    assert [problem["finished"] for problem in json.loads(again.stdout)["problems"]] == [True, True]
    assert len(made()) == 24
    assert {run: stamp for run, stamp in made().items() if run in kept} == kept
    assert len({ray_worker for tries in attempts(plain).values() for _, ray_worker in tries}) >= 2
    assert (out / "suite.html").exists()


def test_a_run_that_hangs_is_ended_recorded_with_the_reason_and_the_others_finish(
    cluster: Cluster, tmp_path: Path
) -> None:
    file = tmp_path / "task.py"
    file.write_text(
        "import ctypes\n"
        "def train(trial):\n"
        "    trial.log(1, loss=1.0)\n"
        "    print('made', trial.arm, flush=True)\n"
        "    if trial.seed == 1:\n"
        "        ctypes.PyDLL(None).sleep(3600)  # with the interpreter's lock held\n"
        "    return 0.5\n"
    )
    out = tmp_path / "out"
    runs = cluster.done(cluster.study(f"{file}:train", out, "--seeds", "0-3", "--timeout", "8"), code=1)
    assert {run["seed"]: run["status"] for run in runs} == {0: "ok", 1: "failed", 2: "ok", 3: "ok"}
    failed = [run for run in runs if run["status"] == "failed"]
    assert len(failed) == 2
    for run in failed:
        assert run["error"].startswith("the run was ended after 8 s: --timeout 8")
        assert (out / "runs" / run["id"] / "output.txt").read_text() == f"made {run['optimizer']}\n"
        assert len((out / "runs" / run["id"] / "metrics.jsonl").read_text().splitlines()) == 1


def test_errors_crashes_and_memory_on_a_node_are_recorded_as_they_are_here(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    file.write_text(
        "import os, time\n"
        "def train(trial):\n"
        "    if trial.seed == 0:\n"
        "        raise RuntimeError('no convergence today')\n"
        "    if trial.seed == 1:\n"
        "        import ctypes\n"
        "        ctypes.string_at(0)\n"
        "    held = [b'x' * (32 << 20) for _ in range(30 if trial.seed == 2 else 1)]\n"
        "    time.sleep(3)\n"
        "    return float(len(held))\n"
    )
    call = cluster.study(f"{file}:train", tmp_path / "out", "--seeds", "0-3", "--memory", "0.6")
    runs = [run for run in cluster.done(call, code=1) if run["optimizer"] == "kbeta"]
    assert [run["status"] for run in runs] == ["failed", "failed", "failed", "ok"]
    assert runs[0]["error"].rstrip().endswith("RuntimeError: no convergence today")
    assert "signal 11, SIGSEGV" in runs[1]["error"]
    assert runs[2]["error"].splitlines()[0].endswith("GiB: --memory 0.6")


# Prints the steps of a study's progress: what a resumed run is told by.
DRIVER = """
import contextlib
import sys
from kourkoutas.lab import api
from kourkoutas.lab.running import ray
from kourkoutas.lab.planning import plan as planning

class Watch:
    def planned(self, *counts): pass
    def started(self, spec): pass
    def progress(self, spec, step, steps, loss): print("step", step, flush=True)
    def finished(self, spec, result): print("status", result.status, flush=True)

made = planning.plan_study("char_lm", preset="smoke", engine="torch", optimizers=["kbeta"], seeds=[3],
    options={"steps": sys.argv[3], "width": "16", "layers": "1", "characters": "30000", "eval_windows": "8",
             "evaluate_every": "100"})
with contextlib.closing(ray.on_cluster(sys.argv[1], storage=sys.argv[4] or None)) as executor:
    api.execute(
        made, sys.argv[2], command="test", executor=executor, retries=2, checkpoint_every=50, observer=Watch()
    )
"""


@pytest.mark.parametrize("shared", ["folder", "file://", ""])
def test_a_run_goes_on_from_its_last_checkpoint_where_that_can_be_reached_and_ends_with_the_same_bits(
    cluster: Cluster, tmp_path: Path, shared: str
) -> None:
    storage = tmp_path / "storage"
    place = {"folder": str(storage), "file://": f"file://{storage}", "": ""}[shared]

    def start(out: Path, place: str) -> subprocess.Popen[str]:
        call = [sys.executable, "-c", DRIVER, cluster.address, str(out), "1500", place]
        return subprocess.Popen(call, env=cluster.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    steps: list[int] = []
    before = 0
    with start(tmp_path / "parts", place) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            word, _, value = line.strip().partition(" ")  # Ray prints here too
            assert word != "status" or value == "ok"
            if word == "step":
                steps.append(int(value))
            if not before and len(steps) > 1 and (not place or list(storage.glob("*/*.zip"))):
                (worker,) = cluster.processes("kourkoutas.lab.running.worker")
                ray_worker = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[1]
                os.kill(int(ray_worker), signal.SIGKILL)
                before = len(steps)
        assert driver.wait(timeout=300) == 0
    # The first chunk of an attempt is always told.
    if place:
        assert min(steps[before:]) > steps[0]
        assert list(storage.iterdir()) == []
    else:
        assert min(steps[before:]) == steps[0]
    with start(tmp_path / "whole", "") as driver:
        assert driver.stdout is not None
        driver.stdout.read()
        assert driver.wait(timeout=300) == 0
    parts, whole = everything(tmp_path / "parts"), everything(tmp_path / "whole")
    for files in (parts, whole):  # a checkpoint notes how long the run took
        for name, arrays in files.items():
            if "/checkpoint/" in name:
                arrays.pop("notes")
    assert parts == whole


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--cpus-per-run", "2"], "no node of the Ray cluster has room for a run with --cpus-per-run 2: ask for less"),
        (
            ["--gpus-per-run", "1"],
            "no node of the Ray cluster has room for a run with --cpus-per-run 1, --gpus-per-run 1",
        ),
        (["--cpus-per-run", "0"], "--cpus-per-run must be above 0; got 0"),
        (["--storage", "/proc/no"], "--storage /proc/no cannot be written"),
        (["--ray", "ray://127.0.0.1:10001"], "a study is started on a node of its cluster"),
        (["--ray", "127.0.0.1:9"], "--ray 127.0.0.1:9: no Ray cluster answers there"),
    ],
)
def test_what_the_cluster_cannot_do_is_one_line_and_makes_no_run(
    cluster: Cluster, plain: Path, more: list[str], message: str
) -> None:
    out = plain.parent / "out"
    call = [*cluster.study(f"{plain}:train", out, *options(plain, "0")), *more]
    done = subprocess.run(call, env=cluster.env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not finished(out)
    assert not attempts(plain)


# A driver whose packages are others than those of the nodes.
OTHER = """
import contextlib
import sys
from kourkoutas.lab.results import store
from kourkoutas.lab import api
from kourkoutas.lab.running import ray
from kourkoutas.lab.planning import plan as planning

store.versions = lambda: {"numpy": "0.1"}
made = planning.plan_study(sys.argv[3] + ":train", optimizers=["kbeta"], options={"witness": sys.argv[4]})
try:
    with contextlib.closing(ray.on_cluster(sys.argv[1])) as executor:
        api.execute(made, sys.argv[2], command="test", executor=executor)
except ValueError as error:
    sys.exit(str(error))
"""


def test_a_node_with_other_versions_makes_no_runs(cluster: Cluster, plain: Path) -> None:
    out = plain.parent / "out"
    call = [sys.executable, "-c", OTHER, cluster.address, str(out), str(plain), str(plain.parent / "witness")]
    done = subprocess.run(call, env=cluster.env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert f"has numpy {np.__version__}, not 0.1: install the versions" in done.stderr
    assert not finished(out)
    assert not attempts(plain)


# What stands in for Slurm: every step runs on this machine.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
if [ "$1" = hostname ]; then echo 127.0.0.1; else exec "$@"; fi
"""


def test_the_slurm_script_starts_a_node_per_machine_makes_the_study_and_leaves_nothing(
    cluster: Cluster, plain: Path, tmp_path: Path
) -> None:
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/bash\nprintf 'one\\ntwo\\n'\n"}.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    venv = Path(sys.executable).parents[1]
    env = {name: value for name, value in cluster.env.items() if not name.startswith("RAY_AUTH")} | {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "KBETA_VENV": str(venv),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "one,two",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_PER_TASK": "1",
    }
    script = Path(__file__).parents[3] / "examples" / "ray_slurm.sbatch"
    out = tmp_path / "out"
    arguments = [f"{plain}:train", "--out", str(out), "--optimizers", "kbeta", "--no-report", *options(plain)]
    with subprocess.Popen(["bash", str(script), *arguments], env=env, start_new_session=True) as job:
        try:
            code = job.wait(timeout=300)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
    assert code == 0
    assert len(finished(out)) == 6
    port = str(20000 + os.getpid() % 20000)

    def left() -> list[int]:
        every = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        return [pid for pid in every if f"127.0.0.1:{port}" in command_line(pid)]

    wait_for(lambda: not left(), seconds=30)
