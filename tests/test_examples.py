import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def printed(name):
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", ["torch_train.py", "mlx_train.py"])
def test_an_example_runs_and_says_what_it_reached(name):
    assert "loss" in printed(name)


def test_the_flax_example_trains_and_shows_its_beta2():
    *_, last = re.findall(r"step +\d+  loss (\S+)  β2: hidden 0\.9", printed("jax_flax.py"))
    assert float(last) < 0.1


def test_the_fsdp2_example_runs_on_two_processes_and_learns():
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, EXAMPLES / "fsdp2_train.py"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"2 ranks: loss ([0-9.]+) -> ([0-9.]+)", done.stdout)
    assert found, done.stdout
    assert float(found[2]) < 0.7 * float(found[1])
