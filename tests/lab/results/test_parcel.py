"""What crosses between machines: run folders, code, backups."""

from __future__ import annotations

from pathlib import Path

import pytest

from kourkoutas.lab.results import parcel
from kourkoutas.lab.results.files import read_json
from kourkoutas.lab.results.parcel import Backups, resolved
from kourkoutas.lab.specs.spec import RunResult


def fill(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def test_a_run_is_unpacked_as_it_was_and_what_it_had_before_goes(tmp_path: Path) -> None:
    result = RunResult(status="ok", endpoint=0.5, curve={"loss": [float("nan"), 1.0]}).model_dump_json()
    node = fill(tmp_path / "node", metrics_DOT_jsonl="{}\n", result_DOT_json=result, tensorboard__events="x")
    home = fill(tmp_path / "home", spec_DOT_json="the spec", metrics_DOT_jsonl="old", checkpoint__step="old")
    parcel.unpack_run(parcel.of_run(node), home)
    assert names(home) == names(node) | {"spec.json"}
    assert (home / "spec.json").read_text() == "the spec"
    assert (home / "metrics.jsonl").read_text() == "{}\n"
    kept = read_json(home / "result.json", RunResult, "")
    assert kept.endpoint == 0.5


def test_files_that_are_being_written_and_the_spec_stay_where_they_are(tmp_path: Path) -> None:
    folder = fill(tmp_path, spec_DOT_json="s", checkpoint__step_DOT_npz="c", metrics_DOT_jsonl="m")
    (folder / "checkpoint" / ".step.npz.part").write_text("half")
    (folder / ".result.json.1.tmp").write_text("half")
    assert list(parcel.of_run(folder)) == ["checkpoint/step.npz", "metrics.jsonl"]  # the log last


def test_logs_alone_are_nothing_to_continue_from(tmp_path: Path) -> None:
    fill(tmp_path, metrics_DOT_jsonl="m", output_DOT_txt="o")
    assert parcel.state_of_run(tmp_path) == frozenset()
    fill(tmp_path, checkpoint__step_DOT_npz="c")
    before = parcel.state_of_run(tmp_path)
    assert before
    fill(tmp_path, metrics_DOT_jsonl="more")
    assert parcel.state_of_run(tmp_path) == before
    fill(tmp_path, checkpoint__step_DOT_npz="changed")
    assert parcel.state_of_run(tmp_path) != before


def test_code_is_the_file_its_neighbours_and_their_packages_but_no_data(tmp_path: Path) -> None:
    fill(tmp_path, task_DOT_py="import a", a_DOT_py="", data_DOT_csv="1", notes__old_DOT_py="")
    fill(tmp_path, package__sub__b_DOT_py="")
    (tmp_path / "package" / "__init__.py").touch()
    assert set(parcel.of_code(tmp_path / "task.py")) == {"task.py", "a.py", "package/__init__.py", "package/sub/b.py"}


def test_a_function_without_a_file_travels_with_its_pickle_and_no_other(tmp_path: Path) -> None:
    for name in ("notebook.py", "notebook.pickle", "data.pickle"):
        (tmp_path / name).write_bytes(b"")
    assert set(parcel.of_code(tmp_path / "notebook.py")) == {"notebook.py", "notebook.pickle"}


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside"])
def test_a_name_that_leads_out_of_the_folder_is_refused_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    files = {"a/b": b"1", name: b""}
    assert parcel.from_zip(parcel.to_zip(files)) == files
    with pytest.raises(ValueError, match="leads out"):
        parcel.unpack_run(files, tmp_path / "run")
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_run_has_one_backup_the_newest_and_a_damaged_one_is_none(tmp_path: Path, scheme: str) -> None:
    pytest.importorskip("fsspec")
    kept = Backups(f"{scheme}{tmp_path}", "study")
    assert not kept.seen()
    kept.prepare()
    assert Backups(f"{scheme}{tmp_path}", "study").seen()
    assert kept.newest("run") is None
    for step in range(4):
        kept.save("run", {"checkpoint/step": b"%d" % step})
    assert {path.name for path in tmp_path.glob("study/*")} == {"seen", "run.zip"}
    kept.close()
    assert kept.newest("run") == {"checkpoint/step": b"3"}
    file = tmp_path / "study" / "run.zip"
    file.write_bytes(file.read_bytes()[:100])
    assert kept.newest("run") is None
    kept.clear("run")
    kept.close()
    assert list(tmp_path.iterdir()) == []


def test_a_relative_folder_is_made_absolute_and_an_address_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolved("shared") == str(tmp_path / "shared")
    assert resolved("s3://bucket/place") == "s3://bucket/place"
