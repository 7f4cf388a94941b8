"""Sharded training: `eight_devices.py`, in a process that has eight devices."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_eight_devices():
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        str(HERE / "eight_devices.py"),
    ]
    done = subprocess.run(command, env=env, cwd=HERE.parents[1], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-4000:]
