"""Sharded training: `eight_devices.py` and the example, in processes that have eight devices."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def with_eight_devices(*command, flags=""):
    flags = f"--xla_force_host_platform_device_count=8 {flags}"
    env = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *command], env=env, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False
    )
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
    return done.stdout


# The fast ones take most of their time to compile. What they test, how XLA divides a step among devices, is settled
# before LLVM optimizes; the slow ones run optimized code.
@pytest.mark.parametrize(
    ("which", "flags"),
    [
        pytest.param("not slow", "--xla_backend_optimization_level=0", id="fast"),
        pytest.param("slow", "", marks=pytest.mark.slow, id="slow"),
    ],
)
def test_sharded_training_equals_that_of_one_device(which, flags):
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-m", which, "tests/optax/eight_devices.py"]
    with_eight_devices(*command, flags=flags)


def test_the_mesh_example_reaches_the_same_loss_under_jit_and_in_shard_map():
    out = with_eight_devices("examples/jax_mesh.py")
    losses = re.fullmatch(r"8 devices, loss after 200 steps: (\S+) under jit, (\S+) in shard_map\n", out)
    by_xla, by_hand = map(float, losses.groups())
    assert by_xla < 0.3  # the mean square of the data is 0.5
    assert abs(by_xla - by_hand) < 0.01 * by_xla
