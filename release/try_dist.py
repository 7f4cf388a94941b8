"""Try the packages of dist/ as strangers would: `python release/try_dist.py dist [torch jax mlx]`.

In a fresh environment for each framework, with that framework's extra and nothing else: the wheel, the sdist, and the
sdist where there is no C compiler. Each time the front end takes 20 steps, and `kbeta --version`, `--help` and `doctor`
answer without a word on standard error. Where MLX is, the author's own package is installed beside ours, both orders,
and either is removed. The sdist is unpacked and its tests are collected; some of them run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEPS = {
    "torch": """
import torch
from kourkoutas.torch import KourkoutasBeta
p = torch.nn.Parameter(torch.ones(3))
optimizer = KourkoutasBeta([p], lr=0.1)
for _ in range(20):
    optimizer.zero_grad(); (p * p).sum().backward(); optimizer.step()
assert abs(p[0]) < 1
""",
    "jax": """
import jax.numpy as jnp, optax
from kourkoutas.optax import kourkoutas_beta
p = {"w": jnp.ones(3)}
optimizer = kourkoutas_beta(0.1)
state = optimizer.init(p)
for _ in range(20):
    updates, state = optimizer.update(p, state, p)
    p = optax.apply_updates(p, updates)
assert abs(p["w"][0]) < 1
""",
    "mlx": """
import mlx.core as mx
from kourkoutas.mlx import KourkoutasBeta
p = {"w": mx.ones(3)}
optimizer = KourkoutasBeta(learning_rate=0.1)
for _ in range(20):
    p = optimizer.apply_gradients(p, p)
assert abs(p["w"][0].item()) < 1
""",
}
THEIRS = "import kbeta; from kbeta.optim import KourkoutasSoftmaxFlex; assert KourkoutasSoftmaxFlex(learning_rate=0.1)"


def run(*command: object, **environment: str) -> str:
    call = [str(word) for word in command]
    done = subprocess.run(call, capture_output=True, text=True, timeout=1800, env={**os.environ, **environment})
    if done.returncode:
        sys.exit(f"{' '.join(call)}\n{done.stdout}{done.stderr}")
    return done.stdout + "".join(line for line in done.stderr.splitlines(True) if call[1:3] != ["-m", "pip"])


class Environment:
    """A fresh virtual environment, outside the repository."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / ("Scripts" if os.name == "nt" else "bin")
        run(sys.executable, "-m", "venv", folder)

    def pip(self, *words: object, **environment: str) -> None:
        run(self.bin / "python", "-m", "pip", *words, "--quiet", "--disable-pip-version-check", **environment)

    def check(self, framework: str, kernel: str) -> None:
        assert run(self.bin / "python", "-P", "-W", "error", "-c", STEPS[framework]) == ""
        assert run(self.bin / "kbeta", "--version").startswith("kbeta 0.")
        assert run(self.bin / "python", "-P", "-m", "kourkoutas", "--version").startswith("kbeta 0.")
        assert "kourkoutas-beta[lab]" in run(self.bin / "kbeta", "--help")
        found = run(self.bin / "kbeta", "doctor")
        front = {"torch": "torch", "jax": "optax", "mlx": "mlx"}[framework]
        assert f"kourkoutas.{front} ok" in found, found
        assert f"step {kernel}" in found, found
        assert "kourkoutas-beta[lab]" in found, found
        for other in STEPS.keys() - {framework}:
            assert f"pip install 'kourkoutas-beta[{other}]'" in found, found


def framework(name: str, wheel: Path, sdist: Path, folder: Path) -> None:
    environment = Environment(folder / name)
    environment.pip("install", "-c", ROOT / "constraints.txt", f"{wheel}[{name}]")
    environment.check(name, "built")
    print(f"{name}: wheel", flush=True)
    again = ("install", "--force-reinstall", "--no-deps", "--no-cache-dir", sdist)
    environment.pip(*again)
    environment.check(name, "built")
    print(f"{name}: sdist", flush=True)
    environment.pip(*again, CC="false")
    environment.check(name, "not built")
    print(f"{name}: sdist without a C compiler", flush=True)
    if name == "mlx":
        beside_the_authors_package(environment, wheel)


def beside_the_authors_package(environment: Environment, wheel: Path) -> None:
    """Both in one environment, in both orders, and either removed."""
    ours = ("kourkoutas-beta", ("install", "--no-deps", wheel), STEPS["mlx"])
    theirs = ("kbeta", ("install", "--no-deps", "kbeta"), THEIRS)
    environment.pip("uninstall", "--yes", ours[0])
    for first, second in ((ours, theirs), (theirs, ours)):
        for removed, kept in ((first, second), (second, first)):
            environment.pip(*first[1])
            environment.pip(*second[1])
            for _, _, code in (first, second):
                run(environment.bin / "python", "-P", "-c", code)
            environment.pip("uninstall", "--yes", removed[0])
            run(environment.bin / "python", "-P", "-c", kept[2])
            environment.pip("uninstall", "--yes", kept[0])
    print("mlx: beside the author's package", flush=True)


def tests_of(sdist: Path, folder: Path) -> None:
    """The unpacked sdist has what its tests need."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    python = ROOT / ".venv" / "bin" / "python"
    if not python.exists():
        sys.exit("the tests of the sdist need .venv: make venv")
    call = [python, "-m", "pytest", "-q", "-m", "not slow", "--import-mode=importlib"]
    for words in (["--collect-only", "--ignore=tests/integrations"], ["tests/test_buckets.py", "tests/test_docs.py"]):
        done = subprocess.run(
            [str(word) for word in [*call, *words]],
            cwd=source,
            env={**os.environ, "PYTHONPATH": str(source / "src")},
            capture_output=True,
            text=True,
            timeout=1800,
        )
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
    print("tests of the sdist", flush=True)


if __name__ == "__main__":
    dist, *names = sys.argv[1:]
    (wheel,), (sdist,) = (sorted(Path(dist).resolve().glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "source").mkdir()
        tests_of(sdist, Path(folder) / "source")
        for name in names or STEPS:
            framework(name, wheel, sdist, Path(folder))
