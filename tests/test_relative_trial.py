"""The verdict on the relative memory, for made-up runs of the rule beside the kept runs of the first trial."""

import math

import pytest

pytest.importorskip("pydantic")
pytest.importorskip("scipy")
pytest.importorskip("relative_trial", reason="benchmarks/ is not here")

import relative_trial as trial

from kourkoutas.lab.judging import endpoints, tuned


def rows_like(testbed, arm, factor, *, diverged=()):
    """Runs of the rule that end at `factor` times those of an arm of the first trial, at its learning rates."""
    first, endpoint = trial.first_trial(testbed), trial.endpoint_of(testbed)
    options = trial.OPTIONS[trial.RULE]
    rows = {}

    def put(lr, seed, value):
        status = "diverged" if seed in diverged or not math.isfinite(value) else "ok"
        row = {"status": status, "endpoint": repr(factor * value)}
        rows[trial.Run(testbed, trial.RULE, options, lr, seed)] = row

    for one in tuned.tried(first)[arm]:
        for seed, value in zip(trial.TUNING_SEEDS, one.scores, strict=True):
            put(one.values["lr"], seed, value)
    lr = trial.chosen(rows, testbed, trial.RULE, options)
    assert lr == first.record.chosen[arm]["lr"]
    for seed, value in endpoints.values(first.runs, endpoint)[arm].items():
        put(lr, seed, value)
    return rows


@pytest.mark.parametrize(
    ("testbed", "arm", "factor", "outcome"),
    [
        ("D", "adam999-warm", 0.9, "holds"),
        ("D", "adam999-warm", 1.2, "fails"),
        ("C", "adam999-warm", 1.0, "holds"),
        ("B", "adam90-warm", 1e-3, "holds"),
        ("B", "adam90-warm", 1.0, "not shown"),  # its runs scatter by more than the factor of 2
        ("B", "adam90-warm", 50.0, "fails"),
    ],
)
def test_first_half(testbed, arm, factor, outcome):
    assert trial.shown(testbed, rows_like(testbed, arm, factor)).near.outcome == outcome


def test_a_diverged_run_shows_nothing():
    rows = rows_like("D", "adam999-warm", 0.9, diverged=(3,))
    assert trial.shown("D", rows).near.outcome == "not shown"


def test_missing_runs_are_not_judged():
    rows = rows_like("D", "adam999-warm", 0.9)
    rows.popitem()
    assert trial.shown("D", rows) is None


def test_verdict():
    far = {t: trial.shown(t, rows_like(t, "adam999-warm", f)) for t, f in (("D", 0.5), ("C", 0.5))}
    assert trial.wins(far, None) == ["D", "C"]
    assert trial.verdict(far)[0] == "open"
    assert trial.verdict(dict.fromkeys(trial.ORDER, far["D"]))[0] == "holds"
    # Two testbeds to come could still win; one could not, and a first half that fails ends it.
    same = trial.shown("D", rows_like("D", "adam999-warm", 1.0))
    assert trial.verdict({"B": same, "D": same})[0] == "open"
    assert trial.verdict({"B": same, "D": same, "C": same})[0] == "does not hold"
    bad = trial.shown("D", rows_like("D", "adam999-warm", 1.2))
    assert trial.verdict({"D": bad, "C": far["C"]})[0] == "does not hold"
