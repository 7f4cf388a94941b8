import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize("name", ["torch_train.py", "jax_flax.py", "mlx_train.py"])
def test_an_example_runs_and_says_what_it_reached(name):
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout
