"""Run the front-end tests against the oldest versions that pyproject.toml allows, or against the pinned ones.

    python release/floors.py [--pinned | --with-cuda] [torch jax mlx]

Each framework has an environment of its own, `.venv-floor-NAME`, with the lower bounds of its extra and of numpy, taken
from pyproject.toml, so that the bounds cannot be said without being tested. JAX asks for a newer numpy than the core,
so numpy is not pinned beside it.

NOTE: on Linux an old torch is several gigabytes, with the CUDA libraries that it needs to be imported. So the pinned
torch is tried there, beside the lowest numpy, and a line says so; `--with-cuda` installs the lowest.

With `--pinned` the environment is `.venv-pinned-NAME-X.Y`, with the versions of constraints.txt: the way to try another
Python, as old versions have no wheels for a new one. The Python is the one that runs this file:
`make test-floors PYTHON=python3.13 FLOORS=--pinned`.
"""

from __future__ import annotations

import argparse
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
OF_THEIR_TIME = {"flax": "0.11.2", "equinox": "0.13.1"}  # newer ones ask for a newer JAX
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


def pin(package: str) -> str:
    """The version of a package in constraints.txt."""
    return dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))[package]


def oldest(name: str, with_cuda: bool) -> list[str]:
    """What is installed to try the floors of a framework, with what its tests need."""
    found = [f"{need}=={OF_THEIR_TIME[need]}" if need in OF_THEIR_TIME else need for need in TESTS[name][1]]
    for floor in floors(name):
        package, _, version = floor.partition("==")
        if package == "torch" and sys.platform == "linux" and not with_cuda:
            print(f"torch {pin('torch')} in place of its floor {version}, which brings CUDA: --with-cuda tries that")
            version = pin("torch")
        found.append(f"{package}=={version}")
    return found


def pinned(name: str) -> list[str]:
    """What `floors` names, in the versions of constraints.txt."""
    packages = [floor.partition("==")[0] for floor in floors(name)]
    return [*packages, "-c", str(ROOT / "constraints.txt")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TESTS)}; all when none is given")
    parser.add_argument("--pinned", action="store_true", help="the versions of constraints.txt, not the lower bounds")
    parser.add_argument("--with-cuda", action="store_true", help="the lowest torch on Linux, too: gigabytes of CUDA")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.names) - set(TESTS)):
        parser.error(f"unknown NAME {', '.join(unknown)}: choose from {', '.join(TESTS)}")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    for name in arguments.names or TESTS:
        tests, needs = TESTS[name]
        environment = ROOT / (f".venv-pinned-{name}-{version}" if arguments.pinned else f".venv-floor-{name}")
        wanted = [*needs, *pinned(name)] if arguments.pinned else oldest(name, arguments.with_cuda)
        python = str(environment / "bin" / "python")
        print(f"{name} on Python {version}: {', '.join(wanted)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *wanted, "pytest>=8", "pytest-xdist", "hypothesis"], check=True)
        subprocess.run([*pip, "--no-deps", "-e", "."], cwd=ROOT, check=True)
        run = [python, "-m", "pytest", "-n", "auto", "-m", "not slow", *tests, *SHARED]
        subprocess.run(run, cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
