"""Run the front-end tests against the oldest versions that pyproject.toml allows: `python release/floors.py [NAMES]`.

Each framework has an environment of its own, `.venv-floor-NAME`, with the lower bounds of its extra and of numpy, taken
from pyproject.toml, so that the bounds cannot be said without being tested. JAX asks for a newer numpy than the core,
so numpy is not pinned beside it.

NOTE: a torch other than a CPU build is several gigabytes, with the CUDA libraries that it needs to be imported.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = {
    "torch": (["tests/torch_frontend"], ["expecttest"]),
    "jax": (["tests/optax"], ["flax", "equinox", "orbax-checkpoint", "absl-py"]),
    "mlx": (["tests/mlx_frontend"], ["rich", "typer"]),
}
SHARED = ["tests/conformance", "tests/test_rule.py", "tests/test_buckets.py", "tests/test_trace.py"]


def floors(name: str) -> list[str]:
    """`package==lowest` for the requirements of an extra that hold on this platform, and of the core.

    >>> floors("torch")[-1].startswith("numpy==")
    True
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = []
    core = [] if name == "jax" else project["dependencies"]
    for requirement in [*project["optional-dependencies"][name], *core]:
        package, lowest, platform = re.fullmatch(
            r"([\w\[\]-]+)>=([\d.]+)(?:; sys_platform == '(\w+)')?", requirement
        ).groups()
        if platform in (None, sys.platform):
            found.append(f"{package}=={lowest}")
    return found


def main(names: list[str]) -> None:
    for name in names or TESTS:
        tests, needs = TESTS[name]
        environment = ROOT / f".venv-floor-{name}"
        python = str(environment / "bin" / "python")
        print(f"{name}: {', '.join(floors(name))}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *floors(name), *needs, "pytest>=8", "pytest-xdist", "hypothesis"], check=True)
        subprocess.run([*pip, "--no-deps", "-e", "."], cwd=ROOT, check=True)
        run = [python, "-m", "pytest", "-n", "auto", "-m", "not slow", *tests, *SHARED]
        subprocess.run(run, cwd=ROOT, check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
