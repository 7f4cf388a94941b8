"""The `kbeta` command, called as a user calls it."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from kourkoutas.cli import running
from kourkoutas.cli.command import app
from kourkoutas.lab import api
from kourkoutas.lab.judging import analysis
from kourkoutas.lab.planning import plan as planning
from kourkoutas.lab.results import snapshot

DATA = Path(__file__).parent / "data"
TESTBED = ["--preset", "smoke", "--set", "steps=120"]


def kbeta(*arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    paths = [str(Path(path).resolve()) for path in sys.path if path]
    full = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "COLUMNS": "140", **(env or {})}
    call = [sys.executable, "-P", "-m", "kourkoutas", *arguments]
    return subprocess.run(call, capture_output=True, text=True, timeout=180, cwd=cwd, env=full)


def inside(*arguments: str) -> Any:
    """The command in this process: no second Python has to import what this one has."""
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def test_help_names_every_command_and_imports_no_framework_and_no_laboratory() -> None:
    source = (
        "import sys; sys.argv = ['kbeta', '--help']\n"
        "from kourkoutas.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code in (0, None), end.code\n"
        "heavy = {'torch', 'jax', 'mlx', 'scipy', 'matplotlib', 'pandas', 'pydantic'}\n"
        "heavy |= {'kourkoutas.lab.running.executor'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for command in (
        "study",
        "stats",
        "report",
        "export",
        "testbeds",
        "doctor",
        "--install-completion",
    ):
        assert command in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["study", "rare_triger"], "unknown testbed 'rare_triger': did you mean 'rare_trigger'"),
        (["study", "rare_trigger", "--engine", "jaxx"], "unknown engine 'jaxx': did you mean 'jax'"),
        (["study", "rare_trigger", "--preset", "papr"], "unknown preset of rare_trigger 'papr': did you mean 'paper'"),
        (["study", "rare_trigger", "--optimizers", "adamm95"], "unknown optimizer 'adamm95': did you mean 'adam95'"),
        (["study", "rare_trigger", "--set", "step=5"], "unknown setting of rare_trigger 'step': did you mean 'steps'"),
        (["study", "rare_trigger", "--set", "steps=few"], "`steps` must be a whole number"),
        (["study", "rare_trigger", "--set", "kbeta.alfa=0.9"], "unknown option of kbeta 'alfa': did you mean 'alpha'"),
        (["study", "rare_trigger", "--set", "kbeta.alpha=2"], "`alpha` must be in (0, 1)"),
        (
            ["study", "rare_trigger", "--optimizers", "kbeta", "--set", "adam95.eps=1"],
            "unknown optimizer in `adam95.eps` 'adam95'",
        ),
        (["study", "rare_trigger", "--seeds", "-1"], "--seeds must be numbers and ranges"),
        (["study", "rare_trigger", "--workers", "many"], "'many'"),
        (["study", "no_task.py:train"], "there is no file no_task.py"),
        (["study", "rare_trigger", "--seeds", "all"], "--seeds must be numbers and ranges"),
        (["study", "rare_trigger", "--optimizers", ","], "--optimizers must name at least one"),
        (["study", "rare_trigger", "--workers", "0"], "Invalid value for '--workers'"),
        (["study", "rare_trigger", "--workers", "1.5"], "'1.5'"),
        (["study", "rare_trigger", "--endpoint", "val_loss"], "choose from last_batch_bce, heldout_bce, train_loss"),
        (["studdy"], "No such command 'studdy'. Did you mean 'study'"),
        (["report", "no-such-folder"], "no-such-folder/study.json: not found"),
        (["stats", "no-such-table.csv"], "no-such-table.csv"),
        (["stats", str(DATA / "rare_trigger.csv"), "--baseline", "adam96"], "adam95"),
    ],
)
def test_bad_input_is_one_line_on_standard_error_and_exit_code_2(
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    from kourkoutas import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["kbeta", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr()
    assert ended.value.code == 2
    assert printed.out == ""
    assert printed.err.startswith("kbeta: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_papers_table_gives_the_papers_statistics() -> None:
    done = inside("stats", str(DATA / "rare_trigger.csv"), "--baseline", "adam95", "--log", "--json")
    found = {c["treatment"]: c for c in json.loads(done.stdout)["contrasts"]}["kbeta"]
    # t(9) = 4.288, p = 0.00203, Wilcoxon p = 0.00977, ratio 1.0987 [1.0455, 1.1546]
    statistics = found["statistics"]
    assert statistics["paired_t"]["value"] == pytest.approx(4.288, abs=5e-4)
    assert statistics["paired_t"]["p"] == found["p"] == pytest.approx(0.00203, abs=5e-6)
    assert statistics["wilcoxon"]["p"] == pytest.approx(0.00977, abs=5e-6)
    assert statistics["mean"]["value"] == found["effect"]["value"] == pytest.approx(1.0987, abs=5e-5)
    interval = statistics["mean"]["interval"]
    assert (interval["low"], interval["high"]) == pytest.approx((1.0455, 1.1546), abs=5e-5)
    shown = inside("stats", str(DATA / "rare_trigger.csv"), "--baseline", "adam95", "--log").stdout
    for number in ("t(9) = 4.288", "0.00203", "1.099 [1.045, 1.155]"):
        assert number in shown


def test_a_study_of_one_run_prints_its_endpoint_metrics_and_settings_as_json(tmp_path: Path) -> None:
    one = ["--optimizers", "kbeta", "--seeds", "0", "--set", "kbeta.alpha=0.9"]
    done = kbeta("study", "rare_trigger", *one, *TESTBED, "--engine", "mlx", "--json", "--no-report", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["runs"]
    assert found["status"] == "ok"
    assert found["endpoint"] == found["metrics"]["last_batch_bce"]
    assert found["settings"]["steps"] == 120
    assert found["settings"]["optimizer"]["alpha"] == 0.9


@pytest.mark.slow  # tests/lab/running kills studies of functions, and runs of testbeds
@pytest.mark.parametrize("engine", ["mlx", "jax", "torch"])
def test_a_testbed_study_killed_and_resumed_equals_an_uninterrupted_one(tmp_path: Path, engine: str) -> None:
    arms = ["--seeds", "0-2", "--optimizers", "kbeta,adam95", "--workers", "1"]
    options = ["rare_trigger", *arms, *TESTBED, "--engine", engine, "--no-report"]
    whole = kbeta("study", *options, "--out", "whole", "--json", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr

    paths = os.pathsep.join(str(Path(path).resolve()) for path in sys.path if path)
    call = [sys.executable, "-P", "-m", "kourkoutas", "study", *options, "--out", "out"]
    with subprocess.Popen(
        call, cwd=tmp_path, env={**os.environ, "PYTHONPATH": paths}, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("[2/6]"):
                break
        process.kill()
    kept = {file: file.stat().st_mtime_ns for file in tmp_path.glob("out/runs/*/result.json")}
    assert 2 <= len(kept) < 6

    resumed = kbeta("study", *options, "--out", "out", "--json", cwd=tmp_path)
    assert f"{len(kept)} already finished" in resumed.stderr
    assert all(file.stat().st_mtime_ns == stamp for file, stamp in kept.items())

    def results(done: subprocess.CompletedProcess) -> list[dict]:
        return [
            {k: v for k, v in run.items() if k not in ("seconds", "times")} for run in json.loads(done.stdout)["runs"]
        ]

    assert results(resumed) == results(whole)
    for name in ("metrics.jsonl", "params.npz"):
        ours = sorted(tmp_path.glob(f"out/runs/*/{name}"))
        assert len(ours) == 6
        for file in ours:
            assert file.read_bytes() == (tmp_path / "whole" / file.relative_to(tmp_path / "out")).read_bytes()

    other = kbeta("study", *options, "--out", "out", "--set", "lr=0.5", cwd=tmp_path)
    assert other.returncode == 2
    assert re.search(r"settings\.lr is [\d.]+ there and 0\.5 here", " ".join(other.stderr.split()))


def test_a_finished_study_prints_its_table_and_comparison(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(
        "def train(trial):\n"
        "    if trial.seed == 2 and trial.arm == 'adam95':\n"
        "        raise RuntimeError('out of luck')\n"
        "    return 1.0 + trial.seed + len(trial.arm)\n"
    )
    arguments = ["study", "task.py:train", "--seeds", "0-3", "--optimizers", "kbeta,adam95"]
    done = kbeta(*arguments, cwd=tmp_path)
    assert done.returncode == 1
    words = " ".join(done.stdout.split())
    # kbeta ends at 6, 7, 8, 9; adam95 at 7, 8, 10 and once not at all, which says nothing about it
    assert "K-β 7.5 4 0 0 –" in words
    assert "Adam 0.95 8 3 0 1 –" in words
    assert "No verdict yet on K-β against Adam 0.95: runs failed." in words
    assert "1 failed (Adam 0.95, seed 2): RuntimeError: out of luck. To repeat: python -m kourkoutas study" in words
    assert "3/4" in words
    assert "[1/8]" in done.stderr
    assert done.stderr.strip().endswith("--optimizers kbeta,adam95 --retry-failed")
    assert "Report: results/task/report.html" in words
    page = tmp_path / "results" / "task" / "report.html"
    assert "out of luck" in page.read_text()

    page.unlink()
    again = kbeta("report", "results/task", cwd=tmp_path)
    assert (again.returncode, again.stdout) == (0, "results/task/report.html\n")
    assert page.exists()


def test_a_results_folder_is_judged_and_exported_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "task.py").write_text(
        "def train(trial):\n"
        "    noise = ((trial.seed * 7919 + len(trial.arm) * 104729) % 100) / 1000\n"
        "    for step in range(1, 6):\n"
        "        trial.log(step, acc=1 - len(trial.arm) / (10 * step) - noise)\n"
        "    return len(trial.arm) + noise\n"
    )
    words = ("study", "task.py:train", "--seeds", "0-7", "--optimizers", "kbeta,adam95", "--no-report", "--out", "one")
    inside(*words)
    shown = inside("stats", "one", "--endpoint", "acc:best:max").stdout
    assert "Endpoint: value of train (decides)" in shown
    assert "Endpoint: best acc (secondary, asked for after the runs)" in shown
    assert "K-β is ahead of Adam 0.95 (17 % lower)" in " ".join(shown.split())
    found = json.loads(inside("stats", "one", "--endpoint", "acc:max", "--json").stdout)
    assert [one["name"] for one in found["endpoints"]] == ["endpoint", "acc:max"]
    assert inside("export", "one", "--to", "runs.csv").stdout == "runs.csv: 16 rows\n"
    inside("report", "one", "--endpoint", "acc:max")
    assert "acc (secondary, asked for after the runs)" in (tmp_path / "one" / "report.html").read_text()


def test_a_study_has_ten_seeds_unless_told_otherwise_and_few_are_doubted_at_once(tmp_path: Path) -> None:
    usual = inspect.signature(running.study).parameters["seeds"].default
    assert usual == inspect.signature(api.study).parameters["seeds"].default
    assert planning.parse_seeds(usual) == [*range(10)]
    (tmp_path / "task.py").write_text("def train(trial):\n    return 1.0 + trial.seed\n")
    done = kbeta("study", "task.py:train", "--seeds", "0-2", "--optimizers", "kbeta,adam95", cwd=tmp_path)
    said = done.stderr.index("3 seeds are too few for a verdict on 1 comparison")
    assert said < done.stderr.index("6 runs")


def test_a_command_scans_the_folder_once_and_analyses_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuned study, its answer and its page included, and every command that reads one."""
    seen = {"scan": 0, "analyse": 0}

    def counted(owner: Any, name: str, key: str) -> None:
        kept = getattr(owner, name)

        def call(*given: Any, **more: Any) -> Any:
            seen[key] += 1
            return kept(*given, **more)

        monkeypatch.setattr(owner, name, call)

    counted(snapshot, "read_runs", "scan")
    counted(analysis, "analyse", "analyse")
    task = tmp_path / "task.py"
    task.write_text("def train(trial):\n    return trial.settings['lr'] * (1 + trial.seed) + len(trial.arm)\n")
    out = str(tmp_path / "out")
    options = ["--seeds", "0-2", "--optimizers", "kbeta,adam95", "--tune", "lr=1:2", "--trials", "2"]
    for call, analysed in (
        (["study", f"{task}:train", *options, "--tune-budget", "0", "--out", out], 1),
        (["report", out], 1),
        (["stats", out], 1),
        (["stats", out, "--json"], 1),
        (["export", out], 0),
    ):
        seen.update(scan=0, analyse=0)
        done = CliRunner().invoke(app, call, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert seen == {"scan": 1, "analyse": analysed}, call


def test_testbeds_are_listed_with_their_presets() -> None:
    found = json.loads(inside("testbeds", "--json").stdout)
    assert found["rare_trigger"]["presets"]["paper"]["steps"] == 30_000
    assert found["rare_trigger"]["optimizers"][0] == "kbeta"


@pytest.mark.parametrize(
    ("command", "name", "typed", "expected"),
    [
        ("study", "target", "rare", "rare_trigger"),
        ("study", "optimizers", "kbeta-st", "kbeta-static"),
        ("study", "optimizers", "kbeta,adam99", "kbeta,adam999"),
        ("study", "engine", "to", "torch"),
        ("study", "preset", "la", "laptop"),
    ],
)
def test_the_shell_completes_names(command: str, name: str, typed: str, expected: str) -> None:
    words = typer.main.get_command(app).commands[command]  # type: ignore[attr-defined]
    (option,) = [one for one in words.params if one.name == name]
    found = option.shell_complete(words.make_context(command, ["x"], resilient_parsing=True), typed)
    assert expected in [one.value for one in found]


def test_the_shell_is_answered() -> None:
    source = "import sys; sys.argv = ['kbeta']; from kourkoutas.cli import main; main()"
    words = "kbeta study rare"
    env = {**os.environ, "_KBETA_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": "2"}
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, env=env)
    assert "rare_trigger" in done.stdout.split()


def test_the_help_of_a_study_has_panels_defaults_and_an_example() -> None:
    words = " ".join(re.sub(r"[│╭╮╰╯─]", " ", inside("study", "--help").stdout).split())
    panels = [words.index(title) for title in ("What to run", "Tuning", "Where and how it runs", "Output")]
    assert panels == sorted(panels)
    for default in (
        "[default: 0-9]",
        "[default: 8]",
        "[default: 100-102]",
        "(one per core)",
        "(results/TESTBED or results/FILE)",
        "(smoke)",
    ):
        assert default in words
    assert words.index("Example: kbeta study rare_trigger") > panels[-1]


def test_the_help_names_no_type_for_a_flag() -> None:
    for command in ([], ["study"], ["stats"], ["report"]):
        shown = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "120"})
        assert shown.exit_code == 0
        assert "--help" in shown.output
        assert "<bool>" not in shown.output


def test_a_folder_of_a_tuned_study_says_so_to_one_that_is_not(tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    file.write_text(
        "def train(trial):\n    return trial.seed + trial.settings.get('lr', 1.0) + (trial.arm == 'kbeta')\n"
    )
    call = ["study", f"{file}:train", "--seeds", "0-1", "--out", str(tmp_path / "out"), "--optimizers", "kbeta,adam95"]
    plain = CliRunner().invoke(app, call)
    assert plain.exit_code == 0, plain.output
    tuned = CliRunner().invoke(app, [*call, "--tune", "lr=1:2", "--trials", "2"])
    said = " ".join(str(tuned.exception or tuned.output).split())
    assert "holds a study that was not tuned: leave out --tune, or choose another --out" in said
