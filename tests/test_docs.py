"""Every code block of the README and the documentation is run.

Python blocks of one page run in order, in one namespace. A block that is a file of `examples/` is run by the tests
of that example. Shell lines: a `make` target must exist, a `kbeta` call must parse, also within a sentence. Calls of
`kbeta` and `python` are also run, at the smallest size, by slow tests, but for `kbeta report --follow`, which goes on
until the study has ended, and `kbeta suite`: they have tests of their own. `pip` lines must name extras that exist.
A block of TOML is a suite, and must be one that can be planned. The lines of a `diff` are run before and after. Blocks
marked `text` are no code of ours.
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "benchmarks/README.md"]  # in docs/ by inclusion
PAGES = [*(ROOT / part for part in PARTS), *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
NEEDS = ("torch", "jax", "mlx")


def blocks(page: Path, language: str) -> list[str]:
    found = BLOCK.findall(page.read_text(encoding="utf-8"))
    return [re.sub(rf"^{indent}", "", body, flags=re.MULTILINE) for indent, lang, body in found if lang == language]


def commands() -> list[tuple[str, str]]:
    """(page, command) of every line of a shell block, without comments and without variables set before the command."""
    lines = [(page.name, line) for page in PAGES for block in blocks(page, "sh") for line in block.splitlines()]
    return [
        (page, re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line.partition(" #")[0].strip()))
        for page, line in lines
        if line.strip()
    ]


def calls_in_sentences() -> list[tuple[str, str]]:
    """(page, command) of every `kbeta` call with arguments within a sentence, without what stands in brackets."""
    found = []
    for page in PAGES:
        for span in re.findall(r"(?<!`)`(kbeta [^`]+)`", BLOCK.sub("", page.read_text(encoding="utf-8"))):
            words = re.sub(r"\[.*?\]", "", span).replace("…", "loss").split()
            if len(words) > 2 and not words[2].startswith("-"):
                found.append((page.name, " ".join(words)))
    return found


def included(block: str) -> str | None:
    """The file that a block is, or is a section of."""
    found = re.fullmatch(r'--8<-- "([^:]+)(?::\w+)?"\s*', block)
    return found[1] if found else None


def parameters(lines: list[tuple[str, str]], start: str) -> list:
    return [pytest.param(line, id=f"{page}:{line[:70]}") for page, line in lines if line.startswith(start)]


KBETA = parameters(commands(), "kbeta ")


def test_every_block_says_what_it_is():
    known = {"python", "sh", "toml", "text", "diff"}
    for page in PAGES:
        languages = {language for _, language, _ in BLOCK.findall(page.read_text(encoding="utf-8"))}
        assert languages <= known, f"{page.name} has code blocks of the kinds {languages}"


def test_there_is_no_indented_command():
    for page in PAGES:
        fenced = BLOCK.sub("", page.read_text(encoding="utf-8"))
        start = r"^ {4,}(?:[A-Z_]+=\S+ )*(?:kbeta|make|pip|python|torchrun|sbatch|from|import) .*$"
        assert not re.findall(start, fenced, re.MULTILINE), page.name


def test_what_a_page_includes_is_looked_at():
    for page in PAGES:
        for file in re.findall(r'^--8<-- "([^":]+)(?::\w+)?"$', page.read_text(encoding="utf-8"), re.MULTILINE):
            assert (ROOT / file) in PAGES or (ROOT / file).parent.name == "examples", f"{page.name} includes {file}"


# Importing what the first step of a torch optimizer needs takes two seconds, so it is done once: every page runs in a
# fork of this process, in which nothing else is imported. With one core a study makes its runs in one worker.
FORKS = """
import importlib.util, os, runpy, signal, sys

if importlib.util.find_spec("torch"):
    import torch._dynamo
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        signal.alarm(600)
        os.chdir(line.rstrip())
        with open("printed.txt", "w") as printed:
            os.dup2(printed.fileno(), 1)
            os.dup2(printed.fileno(), 2)
        runpy.run_path("page.py", run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def run_page():
    """Runs page.py of a folder with every warning an error; returns its exit code and what it printed."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-W", "error", "-c", FORKS], **pipes) as process:

        def run(folder):
            print(folder, file=process.stdin, flush=True)
            return int(process.stdout.readline()), (folder / "printed.txt").read_text(encoding="utf-8")

        yield run


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page, tmp_path, run_page):
    code = [block for block in blocks(page, "python") if included(block) is None]
    for file in filter(None, map(included, blocks(page, "python"))):
        assert (ROOT / file).parent.name == "examples"
        assert (ROOT / file).exists()
    if not code:
        return
    for name in NEEDS:
        if any(f"import {name}" in block or f"kourkoutas.{name}" in block for block in code):
            pytest.importorskip(name)
    (tmp_path / "page.py").write_text("\n".join(code), encoding="utf-8")
    status, printed = run_page(tmp_path)
    assert status == 0, printed


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "toml")], ids=lambda page: page.name)
def test_a_suite_of_a_page_can_be_planned(page, tmp_path):
    pytest.importorskip("pydantic")
    from kourkoutas.lab.suites import asking

    source = next(block for block in blocks(ROOT / "README.md", "python") if "def train(trial)" in block)
    (tmp_path / "my_task.py").write_text(source, encoding="utf-8")
    for block in blocks(page, "toml"):
        assert asking.parse(block, "my_suite", tmp_path).plans


def test_the_commands_are_of_a_known_kind():
    starts = {line.split()[0] for _, line in commands()}
    assert starts <= {"kbeta", "make", "pip", "python", "torchrun", "sbatch"}
    for _, line in commands():
        if line.startswith(("torchrun", "sbatch")):  # run by the tests of the example, where they can be
            assert all((ROOT / word).exists() for word in line.split() if word.startswith("examples/"))


def test_make_targets_exist():
    known = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = {target for words in re.findall(r"(?:^|`)make ([a-z- ]+)", text, re.MULTILINE) for target in words.split()}
    assert {"study", "test", "docs"} <= named
    assert named <= known


def test_pip_lines_name_extras_that_exist():
    extras = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    )
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = {extra for words in re.findall(r"kourkoutas-beta\[([\w,]+)\]", text) for extra in words.split(",")}
    assert {"torch", "jax", "mlx", "lab"} <= named
    assert named <= extras


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+\.(?:md|png|gif|py))(?:#[\w-]+)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
        here = "https://github.com/kourkoutas-beta/kourkoutas-beta/blob/main/"
        there = re.findall(re.escape(here) + r"([\w./-]+)", page.read_text(encoding="utf-8"))
        raw = here.replace("github.com", "raw.githubusercontent.com").replace("blob/", "")
        there += re.findall(re.escape(raw) + r"([\w./-]+)", page.read_text(encoding="utf-8"))
        for target in there:
            assert (ROOT / target).exists(), f"{page.name} links to {target}"


def test_the_files_that_contributors_are_sent_to_exist():
    named = re.findall(r"`([\w/]+(?:\.py|/))`", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert "rule.py" in named
    for file in named:
        assert (ROOT / file).exists() or (ROOT / "src" / "kourkoutas" / file).exists(), file


@pytest.mark.parametrize("line", [*KBETA, *parameters(calls_in_sentences(), "kbeta ")])
def test_a_command_parses(line):
    typer = pytest.importorskip("typer")
    from kourkoutas import cli

    name, *rest = cli.with_address(shlex.split(line)[1:])
    command = typer.main.get_command(cli.app).commands[name]
    command.make_context(name, rest)  # raises on an unknown option or a bad value


SMALL = [  # `--ray` is run by the tests of Ray
    p for p in KBETA if p.values[0].split()[1] in ("study", "script") and "--ray" not in p.values[0]
]


@pytest.mark.slow
@pytest.mark.parametrize("line", SMALL)
def test_a_command_runs_at_the_smallest_size(line, tmp_path):
    (tmp_path / "my_task.py").write_text(
        next(block for block in blocks(ROOT / "README.md", "python") if "def train(trial)" in block), encoding="utf-8"
    )
    (tmp_path / "my_script.py").write_text("from kbeta.optim import KourkoutasSoftmaxFlex\n", encoding="utf-8")
    small = re.sub(r"--preset \S+", "--preset smoke", re.sub(r"--seeds \S+", "--seeds 0-1", line))
    run = [sys.executable, "-P", "-m", "kourkoutas", *shlex.split(small)[1:]]
    env = {**os.environ, "KBETA_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=600, env=env)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folder_with_a_study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reading")
    source = next(block for block in blocks(ROOT / "README.md", "python") if "def train(trial)" in block)
    (folder / "my_task.py").write_text(source, encoding="utf-8")
    call = "study my_task.py:train --seeds 0-1 --optimizers kbeta,adam95 --out results/mine"
    run = [sys.executable, "-P", "-m", "kourkoutas", *call.split()]
    subprocess.run(run, cwd=folder, capture_output=True, check=True, timeout=600)
    (folder / "OUT").symlink_to(folder / "results" / "mine")
    return folder


READING = [
    p for p in KBETA if p.values[0].split()[1] not in ("study", "suite", "script") and "--follow" not in p.values[0]
]


@pytest.mark.slow
@pytest.mark.parametrize("line", READING)
def test_a_command_that_reads_a_study_runs(line, folder_with_a_study):
    run = [sys.executable, "-P", "-m", "kourkoutas", *shlex.split(line)[1:]]
    done = subprocess.run(run, cwd=folder_with_a_study, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "diff")], ids=lambda page: page.name)
def test_both_sides_of_a_diff_train_a_model(page):
    torch = pytest.importorskip("torch")
    from kourkoutas.torch import KourkoutasBeta

    for line in "".join(blocks(page, "diff")).splitlines():
        names = {"torch": torch, "KourkoutasBeta": KourkoutasBeta, "model": torch.nn.Linear(4, 3)}
        before = names["model"].weight.clone()
        exec(line[2:], names)
        for _ in range(2):  # the first gradient of a matrix makes its basis and moves nothing
            names["model"](torch.ones(2, 4)).square().sum().backward()
            names["optimizer"].step()
        assert not torch.equal(names["model"].weight, before), line


# That the tables are the suite's is also tested, without the commands, in lab/test_suites.py.
@pytest.mark.slow
def test_the_tables_of_the_field_study_are_what_the_commands_above_them_print(tmp_path):
    pytest.importorskip("pydantic")
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    unpack, answer = (shlex.split(line) for line in blocks(ROOT / "docs" / "results.md", "sh")[0].splitlines())
    for call in ([sys.executable, ROOT / unpack[1], *unpack[2:]], [sys.executable, "-m", "kourkoutas", *answer[1:]]):
        done = subprocess.run(call, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) > 40
    for row in rows:
        assert row in page


TIMED = [p for p in parameters(commands(), "python ") if "field_study.py" not in p.values[0]]


@pytest.mark.slow
@pytest.mark.parametrize("line", TIMED)
def test_a_benchmark_runs_at_the_smallest_size(line, tmp_path):
    script, *words = shlex.split(re.sub(r" --shape \S+", "", line))[1:]
    run = [sys.executable, ROOT / script, *words, "--shape", "tiny", "--rounds", "1", "--seconds", "0.1"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
