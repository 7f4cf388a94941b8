"""One module changes the files of a results folder: its checks and its fault tests hold for all of them."""

import ast
import threading
from pathlib import Path

import pytest

import kourkoutas.lab
from kourkoutas.lab import locks
from kourkoutas.lab.results import files, parcel, store
from kourkoutas.lab.specs.spec import RunResult

LAB = Path(kourkoutas.lab.__file__).parent
# Writers of other places, as the docstring of files.py says: caches, scratch folders, pictures and pipes.
ELSEWHERE = {
    "planning/shipping.py", "results/parcel.py", "results/export.py", "running/node.py", "showing/pictures.py",
    "testbeds/char_lm/corpus.py", "testbeds/char_lm/enwik8.py", "testbeds/darcy/data.py", "testbeds/heat2d/data.py",
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


def test_a_lock_is_waited_for(tmp_path):
    first, second = (tmp_path / "lock").open("w"), (tmp_path / "lock").open("w")
    assert locks.try_lock(first)
    assert not locks.try_lock(second)
    threading.Timer(0.3, first.close).start()
    locks.wait_for_lock(second)
    assert first.closed
    second.close()


def test_json_that_is_nested_without_end_is_damage(tmp_path):
    file = tmp_path / "result.json"
    file.write_text("[" * 100_000)
    with pytest.raises(store.StoreError, match=r"result\.json.*; make it again"):
        files.read_json(file, RunResult, "make it again")


def test_a_run_that_logged_nothing_has_no_rows(tmp_path):
    assert files.read_lines(tmp_path / "metrics.jsonl", finished=True, remedy="") == []


def test_files_that_go_while_a_run_is_read_are_left_out(tmp_path, monkeypatch):
    """Between the listing and the reading a checkpoint makes way for a newer one."""
    (tmp_path / "old.npz").write_bytes(b"1")
    (tmp_path / "new.npz").write_bytes(b"2")
    listed = list(parcel._complete(tmp_path))
    (tmp_path / "old.npz").unlink()
    monkeypatch.setattr(parcel, "_complete", lambda folder: iter(listed))
    assert parcel.of_run(tmp_path) == {"new.npz": b"2"}
    assert {name for name, *_ in parcel.state_of_run(tmp_path)} == {str(tmp_path / "new.npz")}
