"""The entry point of `kbeta`, with and without the laboratory's packages."""

import copy
import json
import subprocess
import sys
import types

import pytest
from typer.testing import CliRunner

from kourkoutas import __main__, __version__, _native, cli
from kourkoutas.lab import doctor

COMMANDS = {
    "module": [sys.executable, "-P", "-m", "kourkoutas"],
    "without the laboratory": [
        sys.executable,
        "-P",
        "-c",
        "import sys; sys.argv[0] = 'kbeta'\n"
        "for name in ('typer', 'rich', 'pydantic', 'scipy', 'statsmodels', 'matplotlib', 'jinja2'):\n"
        "    sys.modules[name] = None\n"
        "from kourkoutas.__main__ import main; main()",
    ],
}


def call(command, *arguments, env=None):
    return subprocess.run([*COMMANDS[command], *arguments], capture_output=True, text=True, timeout=180, env=env)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_version_is_one_line(command):
    done = call(command, "--version")
    assert (done.stdout, done.stderr, done.returncode) == (f"kbeta {__version__}\n", "", 0)


@pytest.fixture(scope="module")
def examined():
    """What the doctor finds here, in the words of the command."""
    done = call("module", "doctor", "--json")
    assert (done.stderr, done.returncode) == ("", 0)
    return json.loads(done.stdout)


def test_doctor_tells_what_is_installed_and_which_front_ends_import(examined):
    assert examined["cores"] >= 1
    assert set(examined["frameworks"]) == {"torch", "jax", "mlx"}
    for one in examined["frameworks"].values():
        assert one["version"] is None or "error" in one or one["front_ends"]
    assert examined["frameworks"]["jax"]["front_ends"]["kourkoutas.optax"] == "ok"
    assert examined["laboratory"]["typer"] is not None
    assert examined["kernels"] == doctor._kernels()
    built = {"step": _native.step is not None, "taylor": _native.taylor is not None}
    assert {name: state.startswith("built") for name, state in examined["kernels"].items()} == built


def test_doctor_answers_without_the_laboratory():
    done = call("without the laboratory", "doctor")
    assert (done.stderr, done.returncode) == ("", 0)
    assert "kourkoutas.optax ok" in done.stdout


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_doctor_prints_what_it_found_as_text_or_as_json(examined, options, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "examine", lambda: examined)
    expected = json.dumps(examined, indent=1) + "\n" if options else doctor.text(examined)
    assert CliRunner().invoke(cli.app, ["doctor", *options]).output == expected
    assert __main__.without_lab(["doctor", *options]) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("arguments", [["study", "rare_trigger"], ["testbeds"]])
def test_a_command_of_the_laboratory_says_in_one_line_what_to_install(arguments):
    done = call("without the laboratory", *arguments)
    assert (done.stdout, done.returncode) == ("", 2)
    assert done.stderr == "kbeta: the laboratory is not installed: pip install 'kourkoutas-beta[lab]'\n"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_without_the_laboratory_names_the_extra_and_what_works(arguments):
    done = call("without the laboratory", *arguments)
    assert (done.stderr, done.returncode) == ("", 0)
    assert "kourkoutas-beta[lab]" in done.stdout
    for command in ("--version", "doctor", "script"):
        assert f"kbeta {command}" in done.stdout


def test_a_script_runs_without_the_laboratory(tmp_path):
    pytest.importorskip("mlx.core")
    (tmp_path / "listing.py").write_text("import sys, kbeta.optim\nprint(kbeta.optim.__name__, sys.argv[1:])\n")
    done = call("without the laboratory", "script", str(tmp_path / "listing.py"), "--help")
    assert (done.stdout, done.returncode) == ("kourkoutas.paper ['--help']\n", 0), done.stderr


def test_a_script_without_a_file_does_not_send_for_the_laboratory():
    done = call("without the laboratory", "script")
    assert (done.stdout, done.returncode) == ("", 2)
    assert done.stderr == "kbeta: script needs a file: kbeta script FILE [ARGS...]\n"


def test_a_framework_that_is_missing_is_one_line_with_its_extra():
    source = "import runpy, sys; sys.modules['mlx'] = sys.modules['mlx.core'] = None\n"
    source += "runpy.run_module('kourkoutas', {}, '__main__')"
    run = [sys.executable, "-P", "-c", source, "script", __file__]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert len(done.stderr.splitlines()) == 1
    assert "kourkoutas-beta[mlx]" in done.stderr


@pytest.mark.parametrize(("package", "words"), [("pydantic", ["study", "sanity1"]), ("markupsafe", ["report", "none"])])
def test_a_package_of_the_laboratory_that_is_missing_is_named_with_the_extra(package, words):
    source = f"import sys; sys.argv[0] = 'kbeta'; sys.modules['{package}'] = None\n"
    run = [sys.executable, "-P", "-c", source + "from kourkoutas.__main__ import main; main()", *words]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert package in done.stderr
    assert "kourkoutas-beta[lab]" in done.stderr


def test_a_missing_framework_is_printed_with_its_extra_in_brackets(examined):
    found = copy.deepcopy(examined)
    found["frameworks"]["torch"] = {"version": None, "error": "not installed: pip install 'kourkoutas-beta[torch]'"}
    assert "torch" in doctor.text(found)
    assert "pip install 'kourkoutas-beta[torch]'" in doctor.text(found)


def test_a_kernel_that_was_not_built_is_told_from_one_that_is_turned_off(monkeypatch):
    monkeypatch.setattr(_native, "step", None)
    monkeypatch.setattr(_native, "taylor", None)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("KBETA_NATIVE", "0")
    assert doctor._kernels() == {"step": "not built", "taylor": "not built"}
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: types.SimpleNamespace(name=name))
    assert set(doctor._kernels().values()) == {"turned off by KBETA_NATIVE=0"}
    monkeypatch.delenv("KBETA_NATIVE")
    monkeypatch.setitem(sys.modules, "kourkoutas._native._step", None)
    assert doctor._kernels()["step"].startswith("built, but it does not load: ")
