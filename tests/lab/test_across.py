"""Two results folders against each other, and a folder as a table."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
from pathlib import Path

import pytest

from kourkoutas.lab.judging.across import compare_studies
from kourkoutas.lab.results import export, store
from kourkoutas.lab.specs.spec import RunResult
from tests.lab.test_analysis import folder


def test_two_studies_are_compared_arm_by_arm_on_their_common_seeds(tmp_path: Path) -> None:
    one = folder(tmp_path / "new", {"kbeta": {0: 1.0, 1: 1.1, 2: 1.3}, "adam95": {0: 2.0, 1: 2.0, 2: 2.0}})
    two = folder(
        tmp_path / "old",
        {"kbeta": {1: 2.0, 2: 2.1, 3: 2.2}, "adam95": {1: 2.0, 2: 2.0}},
        settings={"width": 8},
    )
    found = compare_studies(one, two)
    assert [(f.treatment, f.baseline) for f in found.findings] == [
        ("kbeta in new", "kbeta in old"),
        ("adam95 in new", "adam95 in old"),
    ]
    first, second = found.findings
    assert (first.n, first.wins, second.verdict) == (2, 2, "identical")
    assert first.effect == pytest.approx((0.9 + 0.8) / 2)
    text = " ".join(found.notes)
    assert 'setting width is "the preset\'s" in the first and 8 in the second' in text
    assert "kbeta in new has no partner in kbeta in old for seed 0" in text


def test_studies_without_a_common_seed_or_arm_are_refused(tmp_path: Path) -> None:
    one = folder(tmp_path / "a", {"kbeta": {0: 1.0}, "adam95": {0: 1.0}})
    with pytest.raises(ValueError, match="nothing can be paired; run both with the same --seeds"):
        compare_studies(one, folder(tmp_path / "b", {"kbeta": {1: 1.0}}))
    with pytest.raises(ValueError, match="none is in both"):
        compare_studies(one, folder(tmp_path / "c", {"lion": {0: 1.0}}))


def test_two_studies_of_one_arm_each_are_compared_whatever_its_name(tmp_path: Path) -> None:
    one, two = folder(tmp_path / "a", {"kbeta": {0: 1.0, 1: 2.0}}), folder(tmp_path / "b", {"lion": {0: 2.0, 1: 4.0}})
    assert compare_studies(one, two).findings[0].wins == 2


def test_a_table_has_one_row_per_run_and_an_empty_cell_where_a_run_has_no_value(tmp_path: Path) -> None:
    values = {"kbeta": {0: {"loss": [3.0, 1.0], "acc": [0.1, 0.5]}, 1: math.nan}, "adam95": {0: 2.0, 1: None}}
    study = folder(tmp_path / "o", values)
    assert export.write(study, tmp_path / "t" / "runs.csv") == 4
    with (tmp_path / "t" / "runs.csv").open(newline="") as file:
        rows = {(row["optimizer"], row["seed"]): row for row in csv.DictReader(file)}
    assert (rows["kbeta", "0"]["endpoint"], rows["kbeta", "0"]["acc"]) == ("1.0", "0.5")
    assert (rows["kbeta", "1"]["status"], rows["kbeta", "1"]["endpoint"]) == ("diverged", "")
    assert rows["adam95", "1"]["status"] == "unfinished"
    assert export.write(study, tmp_path / "curves.csv", "curves") == 2
    with (tmp_path / "curves.csv").open(newline="") as file:
        assert [(row["step"], row["loss"]) for row in csv.DictReader(file)] == [("1.0", "3.0"), ("2.0", "1.0")]


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")
def test_a_parquet_table_reads_back_as_the_runs(tmp_path: Path) -> None:
    from pyarrow import parquet

    study = folder(tmp_path / "o", {"kbeta": {0: 1.5, 1: math.nan}, "adam95": {0: 2.5, 1: None}})
    export.write(study, tmp_path / "runs.parquet")
    rows = parquet.read_table(tmp_path / "runs.parquet").to_pylist()
    assert [(r["optimizer"], r["seed"], r["status"], r["endpoint"]) for r in rows] == [
        ("kbeta", 0, "ok", 1.5),
        ("kbeta", 1, "diverged", None),
        ("adam95", 0, "ok", 2.5),
        ("adam95", 1, "unfinished", None),
    ]


def test_parquet_without_pyarrow_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    study = folder(tmp_path / "o", {"kbeta": {0: 1.5}})
    with pytest.raises(ImportError, match="pip install pyarrow, or export CSV"):
        export.write(study, tmp_path / "runs.parquet")
    assert not (tmp_path / "runs.parquet").exists()


def test_another_ending_is_refused(tmp_path: Path) -> None:
    study = folder(tmp_path / "o", {"kbeta": {0: 1.5}})
    with pytest.raises(ValueError, match=r"must end in \.csv or \.parquet"):
        export.write(study, tmp_path / "runs.xlsx")
    assert json.loads((tmp_path / "o" / "study.json").read_text())["testbed"] == "task.train"


def test_nested_settings_are_columns_with_dots_and_lists_are_json(tmp_path: Path) -> None:
    study = folder(tmp_path / "o", {"kbeta": {0: 1.5}})
    spec = study.runs()[0].spec
    settings = {"lr": 0.1, "model": {"width": 8, "sizes": [1, 2]}}
    store.write_result(study.folder(spec), RunResult(status="ok", endpoint=1.5, settings=settings, seconds=1.0))
    (row,) = export.rows(study)
    assert (row["settings.lr"], row["settings.model.width"], row["settings.model.sizes"]) == (0.1, 8, "[1, 2]")


def test_a_study_without_curves_writes_no_table_of_them(tmp_path: Path) -> None:
    study = folder(tmp_path / "o", {"kbeta": {0: None}})
    with pytest.raises(store.StoreError, match="holds no curves yet: nothing was written"):
        export.write(study, tmp_path / "curves.csv", "curves")
    assert not (tmp_path / "curves.csv").exists()


def test_a_column_of_a_parquet_table_has_one_type() -> None:
    rows = [{"a": 1, "b": 1, "c": "x", "d": None}, {"a": 2.5, "b": "auto", "c": None, "d": 3}]
    assert export._columns(rows) == {"a": [1.0, 2.5], "b": ["1", "auto"], "c": ["x", None], "d": [None, 3]}
    assert [type(x) for x in export._columns(rows)["a"]] == [float, float]
