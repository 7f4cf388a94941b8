"""The layers of the laboratory: pyproject.toml names them, import-linter holds them."""

import importlib
import operator
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TREE = "src/kourkoutas"


def linted(root: Path) -> subprocess.CompletedProcess[str]:
    """import-linter on the tree at `root`, which need not be the installed one."""
    first = f"import sys; sys.path.insert(0, {str(root / 'src')!r})"
    code = f"{first}; from importlinter.cli import lint_imports_command; lint_imports_command()"
    return subprocess.run(
        [sys.executable, "-c", code, "--no-cache", "--config", str(ROOT / "pyproject.toml")],
        capture_output=True,
        text=True,
        cwd=root,
    )


def test_every_import_goes_down() -> None:
    done = linted(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


FUNCTION = "\n\ndef late():\n    from kourkoutas.lab.results import store\n"
TYPES = "\n\nif TYPE_CHECKING:\n    from kourkoutas.lab.optimizers.recipes import Recipe\n"
NEIGHBOUR = "\nfrom kourkoutas.lab.judging import endpoints\n"


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        ("lab/specs/spec.py", FUNCTION, "kourkoutas.lab.specs is not allowed to import kourkoutas.lab.results"),
        ("lab/engines/numpy.py", TYPES, "kourkoutas.lab.engines is not allowed to import kourkoutas.lab.optimizers"),
        ("lab/running/worker.py", NEIGHBOUR, "kourkoutas.lab.running is not allowed to import kourkoutas.lab.judging"),
        ("lab/helpers.py", "", "kourkoutas.lab.helpers"),
    ],
)
def test_an_upward_import_breaks_the_contract(tmp_path: Path, file: str, text: str, told: str) -> None:
    """Inside a function and for types only, too; between neighbours; and a new part has to be given a layer."""
    shutil.copytree(ROOT / TREE, tmp_path / TREE, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    with (tmp_path / TREE / file).open("a", encoding="utf-8") as stream:
        stream.write(text)
    done = linted(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert told in " ".join(done.stdout.split())


def test_the_way_of_a_study_names_functions_that_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    steps = re.findall(r"^\d+\. `(\S+): (\S+)`", text, flags=re.M)
    assert 10 <= len(steps) <= 15
    for file, name in steps:
        module = importlib.import_module("kourkoutas." + file.removesuffix(".py").replace("/", "."))
        assert callable(operator.attrgetter(name)(module)), (file, name)
