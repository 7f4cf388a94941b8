"""`kbeta script` runs a script as Python runs it, with the paper's import path being ours."""

import subprocess
import sys

import pytest

pytest.importorskip("mlx.core")

SCRIPT = [sys.executable, "-m", "kourkoutas", "script"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script's text in a folder that also holds a stranger's package named `kbeta`."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    folder = tmp_path / "scripts"
    theirs = tmp_path / "installed" / "kbeta"
    for package in (folder, theirs):
        package.mkdir(parents=True)
    (theirs / "__init__.py").write_text("theirs = True\n")
    (theirs / "optim.py").write_text("class KourkoutasSoftmaxFlex: pass\n")
    (theirs / "other.py").write_text("")
    (folder / "neighbour.py").write_text("value = 7\n")
    monkeypatch.setenv("PYTHONPATH", str(theirs.parent))

    def call(source, *arguments, python=SCRIPT):
        script = folder / "a script.py"
        script.write_text(source, encoding="utf-8")
        return subprocess.run(
            [*python, str(script), *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120
        )

    return call


def test_the_papers_import_path_is_ours_though_another_package_has_that_name(run):
    source = (
        "import kbeta, kbeta.optim\n"
        "from kbeta.optim import KourkoutasSoftmaxFlex\n"
        "import kourkoutas.paper\n"
        "assert kbeta.optim is kourkoutas.paper and not hasattr(kbeta, 'theirs')\n"
        "assert kbeta.KourkoutasSoftmaxFlex is KourkoutasSoftmaxFlex is kourkoutas.paper.KourkoutasSoftmaxFlex\n"
        "try:\n    import kbeta.other\nexcept ModuleNotFoundError as error:\n    print(error.name)\n"
    )
    done = run(source)
    assert (done.stdout, done.stderr, done.returncode) == ("kbeta.other\n", "", 0)
    theirs = run("import kbeta.optim; print(kbeta.theirs)", python=[sys.executable])
    assert theirs.stdout == "True\n"


def test_a_script_sees_what_python_would_give_it(run):
    source = (
        "import dataclasses, os, pickle, sys, neighbour\n"
        "@dataclasses.dataclass\nclass Point:\n    x: int = neighbour.value\n"
        "assert pickle.loads(pickle.dumps(Point())) == Point()\n"
        "print(__name__, __file__, sys.argv, sys.path[0], sys.modules['__main__'].Point is Point)\n"
    )
    arguments = ("--help", "-n", "3", "--", "x")
    done = run(source, *arguments)
    assert done.returncode == 0, done.stderr
    plain = run(source, *arguments, python=[sys.executable])
    assert done.stdout == plain.stdout


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("raise SystemExit(7)", 7),
        ("import sys; sys.exit('no')", 1),
        ("1 / 0", 1),
        ("x = (", 1),
        ("raise KeyboardInterrupt", 130),
    ],
)
def test_a_script_ends_as_python_would_end_it(run, source, code):
    done = run(source)
    assert done.returncode == code
    assert "kourkoutas" not in done.stderr
    plain = run(source, python=[sys.executable])
    if code != 130:  # Python itself ends by the signal
        assert (done.stderr, done.returncode) == (plain.stderr, plain.returncode)


def test_a_file_that_is_not_there_is_one_line(tmp_path):
    done = subprocess.run([*SCRIPT, str(tmp_path / "none.py")], capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "none.py" in done.stderr
    assert len(done.stderr.splitlines()) == 1
