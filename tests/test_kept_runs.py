"""Runs that are kept in the repository: a study goes on from them."""

import csv

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("scipy")
pytest.importorskip("kept_runs", reason="benchmarks/ is not here")

import kept_runs

from kourkoutas.lab import api
from kourkoutas.lab.planning import plan as planning
from kourkoutas.lab.results import store
from kourkoutas.lab.specs.spec import RunResult, RunSpec
from kourkoutas.lab.tuning import search as asking

TASK = """
def train(trial):
    lr = trial.settings["lr"]
    for step in range(1, 4):
        trial.log(step, loss=1 / step)
    return abs(lr - 0.02) + 0.001 * trial.seed
"""


class Counting:
    """What a study starts, and what it finds already made."""

    def __init__(self):
        self.started_runs, self.kept = [], []

    def planned(self, total, kept, failed, workers):
        self.kept.append((total, kept))

    def started(self, spec):
        self.started_runs.append(spec)

    def progress(self, spec, step, steps, loss):
        pass

    def finished(self, spec, result):
        pass


def test_a_study_goes_on_from_the_kept_archive_without_repeating_a_run(tmp_path):
    file = tmp_path / "task.py"
    file.write_text(TASK)
    question = asking.search_space(
        asking.parse_tune(["lr=0.01:0.04"]), trials=3, seeds=[100], test_seeds=[0, 1], budget=0
    )

    def study(out, arms, observer):
        plan = planning.plan_study(f"{file}:train", optimizers=arms, seeds=[0, 1], tuning=question)
        return api.execute(plan, out, command=f"kbeta study --out {out}", workers=1, observer=observer)

    first = study(tmp_path / "one" / "D", ["kbeta"], Counting())
    assert kept_runs.keep(tmp_path / "one", "D", tmp_path / "kept") == 5
    with (tmp_path / "kept" / "D.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert [(row["arm"], row["phase"], row["lr"], row["seed"], row["status"]) for row in rows] == [
        ("kbeta", "test", "0.02", "0", "ok"),
        ("kbeta", "test", "0.02", "1", "ok"),
        *(
            ("kbeta", "tuning", lr, "100", "ok")
            for lr in sorted(("0.01", "0.02", "0.04"), key=lambda lr: rows_id(first, lr))
        ),
    ]
    before = (tmp_path / "kept" / "D.tar.xz").read_bytes()
    assert kept_runs.keep(tmp_path / "one", "D", tmp_path / "kept") == 5
    assert (tmp_path / "kept" / "D.tar.xz").read_bytes() == before

    assert kept_runs.unpack(tmp_path / "two", "D", tmp_path / "kept")
    assert not kept_runs.unpack(tmp_path / "two", "D", tmp_path / "kept")  # what is there is left alone
    record = store.read_record(tmp_path / "two" / "D")
    assert [record.command, *(call.command for call in record.calls)] == ["kbeta study --out D"] * (
        1 + len(record.calls)
    )
    again = Counting()
    second = study(tmp_path / "two" / "D", ["kbeta", "adam95"], again)
    assert {spec.optimizer for spec in again.started_runs} == {"adam95"}
    assert again.kept == [(6, 3), (4, 2)]
    assert second.record.chosen["kbeta"] == first.record.chosen["kbeta"]


def rows_id(study, lr):
    return next(run.id for run in study.tuning_runs if str(run.spec.settings["lr"]) == lr)


def test_a_damaged_run_is_not_kept_as_if_it_were_whole(tmp_path):
    spec = RunSpec(testbed="char_lm", preset="laptop", engine="torch", optimizer="adam95", seed=0, settings={})
    names = ("testbed", "preset", "engine", "settings")
    arms = [store.Arm(label="adam95", optimizer="adam95")]
    with store.writing(
        tmp_path / "D", **{name: getattr(spec, name) for name in names}, arms=arms, seeds=[0], command=""
    ) as writer:
        writer.plan([spec])
        writer.finish(spec, RunResult(status="ok", metrics={"bpc": 3.5}))
    (writer.folder(spec) / "spec.json").write_text("{}")
    with pytest.raises(store.StoreError, match=r"spec\.json"):
        kept_runs.keep(tmp_path, "D", tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
