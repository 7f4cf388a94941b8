"""The records of the trial of signals, and its verdict on made-up runs whose outcome is known."""

import csv
import functools
import math
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("scipy")
pytest.importorskip("memory_trial", reason="benchmarks/ is not here")

import memory_trial as trial

from kourkoutas.lab import api
from kourkoutas.lab.planning import plan as planning
from kourkoutas.lab.results import store
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.specs import search_space as asking
from kourkoutas.lab.specs.spec import RunResult, RunSpec

RATES = (1e-3, 2e-3, 4e-3)
CHOSEN = 2e-3
ARMS = ("centred", "centred-warm", "predictive", "predictive-warm", *trial.FIXED, "kbeta")
LEVELS = dict.fromkeys(ARMS, 1.0)


def noise(arm, seed):
    """Of the size 1 %, different in every arm and seed."""
    return 0.01 * math.sin(1 + 7 * ARMS.index(arm) + 3 * seed * (1 + ARMS.index(arm)))


def made(levels, *, without=(), ends=None):
    """A tuned study in which every arm ends at its level, up to noise; rates beside the chosen one lose half of it.

    `ends` are {(arm, seed): NaN for a diverged run, None for one that is missing}.
    """
    base = {"testbed": "char_lm", "preset": "laptop", "engine": "torch", "settings": {}}
    labels = [arm for arm in ARMS if arm not in without]
    record = store.StudyRecord(
        **base,
        arms=[store.Arm(label=arm, optimizer=arm) for arm in labels],
        seeds=list(range(10)),
        tuning=asking.search_space(
            asking.parse_tune(["lr=1e-3:4e-3"]), trials=3, seeds=[100, 101], test_seeds=[0], budget=1
        ),
        chosen={arm: {"lr": CHOSEN} for arm in labels},
        command="",
        created="",
        environment={},
        versions={},
        calls=[],
    )
    there = []
    for arm in labels:
        runs = [(lr, seed) for lr in RATES for seed in (100, 101)] + [(CHOSEN, seed) for seed in range(10)]
        for lr, seed in runs:
            spec = RunSpec(**{**base, "settings": {"lr": lr}}, optimizer=arm, seed=seed)
            level = levels[arm] * (1.0 if lr == CHOSEN else 1.5)
            value = (ends or {}).get((arm, seed), level * (1 + noise(arm, seed)))
            result = None
            if value is not None:
                fine = math.isfinite(value)
                result = RunResult(status="ok" if fine else "diverged", metrics={"bpc": value} if fine else {})
            there.append(store.StoredRun(spec, result, Path("nowhere")))
    compared, tuning = ([run for run in there if of(run.spec)] for of in (record.compares, record.tunes))
    return Snapshot(Path("nowhere"), record, tuple(compared), tuple(tuning))


@functools.cache
def shown_of(changed):
    """What a testbed shows whose levels are changed; the cases share most of their testbeds."""
    return trial.shown(made(LEVELS | dict(changed)))


def outcome(by_testbed):
    """The verdict on `centred`, of testbeds {letter: changed levels}."""
    found = {letter: shown_of(tuple(changed.items())) for letter, changed in by_testbed.items()}
    return trial.verdict("centred", found)[0]


WINS = {"centred": 0.9}
NEAR = {"centred": 1.01}
ALL = dict.fromkeys("CDBA", NEAR)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"C": WINS, "A": WINS}, "holds"),
        (dict.fromkeys("CDBA", WINS), "holds"),
        ({"C": WINS}, "does not hold"),  # better on one testbed only
        ({}, "does not hold"),  # never far behind, and never better
        ({"C": WINS, "D": WINS, "B": WINS, "A": {"centred": 1.07}}, "does not hold"),  # 7 % behind on one
        # as good as two, but on A another β2 is 10 % better than all
        ({"C": WINS, "D": WINS, "A": {"adam99-warm": 0.9}}, "does not hold"),
        # better than the plain Adams, and not than a warmed one
        ({"C": WINS, "D": WINS | {"adam95-warm": 0.9}}, "does not hold"),
        ({"C": WINS, "D": WINS | {"adam999": 0.9}}, "does not hold"),
        # one arm on one testbed and the other arm on another: a choice
        ({"C": WINS, "D": {"centred-warm": 0.9}}, "does not hold"),
        ({"C": {"centred-warm": 0.9}, "D": {"centred-warm": 0.9}}, "holds"),
    ],
)
def test_the_claim_holds_if_and_only_if_both_halves_do(changed, expected):
    assert outcome(ALL | changed) == expected


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"C": NEAR}, "open"),
        ({"C": NEAR, "D": NEAR}, "open"),  # B and A could still be won
        ({"C": NEAR, "D": NEAR, "B": NEAR}, "does not hold"),  # one testbed is left, and two are needed
        ({"C": WINS, "D": WINS}, "open"),  # enough, but it may be far behind on B
        ({"C": {"centred": 1.07, "centred-warm": 1.07}}, "does not hold"),
        ({"C": {"centred": 1.07}}, "open"),  # the warmed arm is still in
    ],
)
def test_a_signal_is_given_up_when_nothing_to_come_can_save_it_and_not_before(changed, expected):
    assert outcome(changed) == expected


def test_better_is_judged_by_holm_over_32_contrasts_also_of_testbeds_that_were_not_run():
    found = trial.shown(made(LEVELS | WINS))

    def with_p(p):
        contrasts = {pair: replace(c, p=p if pair[0] == "centred" else None) for pair, c in found.contrasts.items()}
        return {"C": replace(found, contrasts=contrasts)}

    # 32 · 0.0003 = 0.0096 and 32 · 0.0004 = 0.0128
    assert trial.wins("centred", trial.RIVALS, with_p(0.0003), None)["centred"] == ["C"]
    assert trial.wins("centred", trial.RIVALS, with_p(0.0004), None)["centred"] == []
    # at best the 24 contrasts of three testbeds to come have p = 0, and 8 are left: 8 · 0.0012 and 8 · 0.0013
    assert trial.wins("centred", trial.RIVALS, with_p(0.0012), 0.0)["centred"] == list(trial.TESTBEDS)
    assert trial.wins("centred", trial.RIVALS, with_p(0.0013), 0.0)["centred"] == ["D", "B", "A"]


def test_five_percent_that_the_interval_does_not_exclude_is_not_shown():
    wild = {("centred", seed): 1.0 + (0.3 if seed % 2 else -0.3) for seed in range(10)}
    shown = trial.shown(made(LEVELS, ends=wild))
    assert shown.near["centred"].outcome == "not shown"
    assert shown.near["centred-warm"].outcome == "holds"
    one = trial.shown(made(LEVELS | WINS, ends={("centred", 3): math.nan}))
    assert one.near["centred"].outcome == "not shown"
    most = {("centred", seed): math.nan for seed in range(6)}
    assert trial.shown(made(LEVELS | WINS, ends=most)).near["centred"].outcome == "fails"


def test_an_unfinished_testbed_says_nothing(tmp_path):
    for missing in (("centred", 3), ("adam90", 9)):
        assert trial.shown(made(LEVELS, ends={missing: None})) is None
    # one of an arm that does not decide is not waited for
    assert trial.shown(made(LEVELS, ends={("kbeta", 3): None})) is not None
    small(tmp_path / "D")
    text = trial.report(tmp_path)
    assert "begun and not finished: D" in text
    assert text.count(": open.") == 2


def small(out):
    """A study on disk with one run of its tuning."""
    own = made(LEVELS)
    names = ("testbed", "preset", "engine", "settings", "arms", "seeds", "tuning")
    with store.writing(out, **{name: getattr(own.record, name) for name in names}, command="") as writer:
        run = own.tuning_runs[0]
        writer.plan([run.spec])
        writer.finish(run.spec, run.result)
    return writer.folder(run.spec)


def test_a_signal_that_was_given_up_stays_so_and_does_not_hold_up_the_other():
    gone = ("predictive", "predictive-warm")
    bad = dict.fromkeys(gone, 1.2)
    found = {"C": trial.shown(made(LEVELS | WINS | bad))}
    for letter in "DBA":
        found[letter] = trial.shown(made(LEVELS | WINS, without=gone))
    assert trial.verdict("predictive", found)[0] == "does not hold"
    assert trial.verdict("centred", found)[0] == "holds"


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
    assert trial.keep(tmp_path / "one", "D", tmp_path / "kept") == 5
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
    assert trial.keep(tmp_path / "one", "D", tmp_path / "kept") == 5
    assert (tmp_path / "kept" / "D.tar.xz").read_bytes() == before

    assert trial.unpack(tmp_path / "two", "D", tmp_path / "kept")
    assert not trial.unpack(tmp_path / "two", "D", tmp_path / "kept")  # what is there is left alone
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
    (small(tmp_path / "D") / "spec.json").write_text("{}")
    with pytest.raises(store.StoreError, match=r"spec\.json"):
        trial.keep(tmp_path, "D", tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
