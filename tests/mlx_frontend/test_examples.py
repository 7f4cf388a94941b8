import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "mlx_train.py"


def test_the_example_runs_and_says_what_it_reached():
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout
