"""Kill -9: a run killed at any moment, checkpoint writing included, ends with the bits of one that never stopped.

Every run here is a process of its own, killed with SIGKILL, of a character model whose windows change their length from
step to step.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kourkoutas.lab.specs.spec import RunSpec

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="finds the file of a descriptor in /proc")

STEPS, CHUNK = 240, 10

# Arguments: spec, folder, moment. The moment is "" or CALL:N:WHERE, where the process kills itself in the N-th
# os.fsync of a checkpoint (with half of the file cut off again) or before or after the N-th renaming of one.
SCRIPT = f"""
import os, signal, sys, time
from pathlib import Path
from kourkoutas.lab.running import train
from kourkoutas.lab.specs.spec import RunSpec
from kourkoutas.lab.testbeds.char_lm import CharLMProblem

CharLMProblem.chunk = {CHUNK}
call, number, where = (sys.argv[3] or "none:0:none").split(":")
left = int(number)


def killing(real):
    def wrapped(*args):
        global left
        part = Path(os.readlink(f"/proc/self/fd/{{args[0]}}")) if call == "fsync" else Path(args[0])
        if part.suffix == ".tmp" and part.name.startswith(".step-"):
            left -= 1
            if left == 0:
                if call == "fsync":
                    os.ftruncate(args[0], os.fstat(args[0]).st_size // 2)
                elif where == "after":
                    real(*args)
                os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)
    return wrapped


if call != "none":
    setattr(os, call, killing(getattr(os, call)))


def show(step, steps, loss):
    print(step, flush=True)
    time.sleep(0.002)


result = train.run(RunSpec.model_validate_json(sys.argv[1]), Path(sys.argv[2]), checkpoint_every={CHUNK},
                   on_progress=show)
(Path(sys.argv[2]) / "result.json").write_text(result.model_dump_json(exclude={{"seconds", "times"}}))
"""


@pytest.fixture
def start(tmp_path):
    """Start a process that makes the run of a spec in a folder."""
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "KBETA_CACHE": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    started = []

    def process(spec, folder, moment=""):
        command = [sys.executable, "-c", SCRIPT, spec.model_dump_json(), str(folder), moment]
        started.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield process
    for each in started:
        each.kill()
        each.wait()
        each.stdout.close()


def spec_of(engine, optimizer):
    settings = {"steps": STEPS, "width": 16, "layers": 1, "characters": 30_000, "eval_windows": 8, "evaluate_every": 40}
    # The dynamic β2 is at work from step 10 on, before the first kill.
    options = {"warmup_steps": 10} if optimizer == "kbeta" else {}
    return RunSpec(testbed="char_lm", engine=engine, optimizer=optimizer, seed=3, settings=settings, options=options)


def finish(process):
    process.stdout.read()
    assert process.wait(timeout=300) == 0


def kill_at(process, step, delay):
    """SIGKILL some time after `step` steps; the time decides whether it hits training, an evaluation or a write."""
    for line in process.stdout:
        if int(line) >= step:
            break
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL


def read(path):
    with np.load(path) as saved:
        return {name: saved[name] for name in saved.files}


def assert_same_bits(a: Path, b: Path, how: str) -> None:
    assert (a / "result.json").read_text() == (b / "result.json").read_text(), how
    assert (a / "metrics.jsonl").read_bytes() == (b / "metrics.jsonl").read_bytes(), how
    files = sorted(str(p.relative_to(a)) for p in a.rglob("*.npz"))
    assert files == sorted(str(p.relative_to(b)) for p in b.rglob("*.npz"))
    assert f"checkpoint/step-{STEPS:09d}.npz" in files
    for file in files:
        x, y = read(a / file), read(b / file)
        assert x.keys() == y.keys()
        notes = [json.loads(bytes(saved.pop("notes", np.frombuffer(b"{}", np.uint8)))) for saved in (x, y)]
        for name in x:
            assert x[name].dtype == y[name].dtype
            assert x[name].tobytes() == y[name].tobytes(), f"{file}: {name}; {how}"
        for note in notes:
            note.pop("seconds", None)
            note.pop("times", None)
        assert notes[0] == notes[1]


def half_written(folder):
    return list((folder / "checkpoint").glob(".*.tmp"))


def newest(folder):
    return max(int(p.stem.removeprefix("step-")) for p in (folder / "checkpoint").glob("step-*.npz"))


def survives(start, tmp_path, engine, optimizer, moments, random_kills):
    spec = spec_of(engine, optimizer)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    uninterrupted = start(spec, whole)
    seed = int.from_bytes(os.urandom(4))
    rng = random.Random(seed)
    how = f"kills drawn from seed {seed}"
    steps = sorted(rng.randrange(20, STEPS - 80) for _ in range(random_kills))
    for step in steps:
        kill_at(start(spec, parts), step, rng.uniform(0, 0.03))
        # What a kill in the middle of a write to the log leaves behind.
        with (parts / "metrics.jsonl").open("ab") as log:
            log.write(b'{"step": 7, "lo')
    for moment in moments:
        before = newest(parts) if parts.exists() else 0
        process = start(spec, parts, moment)
        process.stdout.read()
        assert process.wait(timeout=300) == -signal.SIGKILL, moment
        assert bool(half_written(parts)) == ("after" not in moment)
        assert before <= newest(parts) < STEPS
    finish(start(spec, parts))
    finish(uninterrupted)
    assert not half_written(parts)
    assert_same_bits(whole, parts, how)


def test_a_run_killed_at_a_random_moment_and_while_it_writes_a_checkpoint_ends_with_the_same_bits(start, tmp_path):
    # MLX starts in a fraction of a second; the other engines are below.
    survives(start, tmp_path, "mlx", "kbeta", ["fsync:2:half", "replace:2:after"], random_kills=1)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["kbeta", "adam95"])
@pytest.mark.parametrize("engine", ["torch", "jax", "mlx"])
def test_a_run_killed_at_three_random_moments_and_in_every_part_of_a_checkpoint_ends_with_the_same_bits(
    start, tmp_path, engine, optimizer
):
    moments = ["fsync:2:half", "replace:2:before", "replace:1:after"]
    survives(start, tmp_path, engine, optimizer, moments, random_kills=3)
