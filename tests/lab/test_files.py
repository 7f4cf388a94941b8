"""One module changes the files of a results folder: its checks and its fault tests hold for all of them."""

import ast
from pathlib import Path

import pytest

import kourkoutas.lab
from kourkoutas.lab.results import files, store

LAB = Path(kourkoutas.lab.__file__).parent
# Writers of other places, as the docstring of files.py says: caches, scratch folders, pictures and pipes.
ELSEWHERE = {
    "corpus/__init__.py", "corpus/enwik8.py", "results/snapshots.py", "results/export.py", "running/node.py",
    "shipping.py", "showing/pictures.py", "testbeds/heat2d/data.py",
}  # fmt: skip
CHANGING = {"unlink", "rmdir", "rmtree", "mkdir", "makedirs", "write_text", "write_bytes", "touch", "rename", "savefig"}
OF_OS = {"replace", "rename", "remove", "write", "truncate"}


def changes(source):
    """Lines of a program that change files: by name of the call, or by the mode of an open file."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
            continue
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        of = owner.id if isinstance(owner, ast.Name) else ""
        if of in ("files", "tarfile") or (owner is None and hasattr(files, name)):
            continue
        modes = [x.value for x in (*node.args, *(k.value for k in node.keywords)) if isinstance(x, ast.Constant)]
        to_write = name == "open" and any(isinstance(x, str) and len(x) < 4 and set(x) & set("wax+") for x in modes)
        if name in CHANGING or (of == "os" and name in OF_OS) or to_write:
            yield node.lineno


def test_the_search_finds_every_way_of_changing_a_file():
    for line in ("p.unlink()", "shutil.rmtree(p)", 'p.open("ab")', 'open(p, mode="w")', "os.replace(a, b)"):
        assert list(changes(line)) == [1]
    for line in ("p.read_text()", 'p.open("rb")', "open(p)", "s.replace('a', 'b')", "files.write_text(p, '')"):
        assert list(changes(line)) == []


def test_only_one_module_changes_files_of_a_results_folder():
    found = {}
    for file in LAB.rglob("*.py"):
        name = file.relative_to(LAB).as_posix()
        lines = list(changes(file.read_text(encoding="utf-8")))
        if lines:
            found[name] = lines
    assert found.pop("results/files.py")
    found.pop("running/worker.py")  # opens the pipe to its study, by number
    assert set(found) == ELSEWHERE, found


def test_a_worker_opens_nothing_to_write_but_its_pipe():
    source = (LAB / "running" / "worker.py").read_text(encoding="utf-8").splitlines()
    assert [source[line - 1].strip().split(" as ")[0] for line in changes("\n".join(source))] == [
        'with open(fd, "w", encoding="utf-8", buffering=1)'
    ]


def test_a_folder_that_another_writes_names_who_does(tmp_path):
    with files.locked(tmp_path, "process 7 (kbeta study ...)"):
        with (
            pytest.raises(store.StoreError, match=r"is being written by process 7 \(kbeta study ...\); wait for it"),
            files.locked(tmp_path, "process 8"),
        ):
            pass
        assert (tmp_path / ".lock").read_text() == "process 7 (kbeta study ...)"
    assert (tmp_path / ".lock").read_text() == ""
    with files.locked(tmp_path, "process 8"):
        assert (tmp_path / ".lock").read_text() == "process 8"
