"""The report of a testbed that draws pictures of its own, and the schedule behind the loss curves."""

import re

import numpy as np
import pytest

from kourkoutas.lab import testbeds
from kourkoutas.lab.results import store
from kourkoutas.lab.showing import figures, report
from kourkoutas.lab.specs.spec import RunResult, RunSpec

SETTINGS = {"samples": 20, "frames": 14}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A study of two arms and two seeds, of which adam95 finished the second only."""
    monkeypatch.setenv("KBETA_CACHE", str(tmp_path / "cache"))
    setup = {"testbed": "heat2d", "preset": "smoke", "engine": "torch", "settings": SETTINGS}
    arms = [store.Arm(label=name, optimizer=name) for name in ("kbeta", "adam95")]
    testbed = testbeds.get("heat2d")
    settings = testbeds.settings_of(testbed, "smoke", SETTINGS)
    with store.writing(tmp_path / "out", **setup, arms=arms, seeds=range(2), command="kbeta study heat2d") as writer:
        for arm, seed in (("kbeta", 0), ("kbeta", 1), ("adam95", 1)):
            spec = RunSpec(**setup, optimizer=arm, seed=seed)
            writer.plan([spec])
            run = writer.folder(spec)
            np.savez(run / "params.npz", **testbed.problem(settings, seed).params)
            curve = {"step": [35.0, 70.0], "loss": [1.0, 0.5], "lr": [1e-3, 1e-4]}
            metrics = {"train_mse": 0.1, "validation_mse": 0.1, "test_mse": 0.1, "rollout_mse": 0.1}
            store.write_result(run, RunResult(status="ok", endpoint=0.1, metrics=metrics, curve=curve))
    return tmp_path / "out"


def test_a_report_shows_the_testbeds_pictures_of_the_seed_that_most_arms_finished(folder):
    data = report.from_study(store.Study.open(folder))
    (first, words), (_, more) = data.pictures
    assert words == "Frame 6 of a test case, truth first: raw, contrast-equalised, and error (seed 1)"
    assert more.endswith("(seed 1)")
    titles = [axes.get_title().partition("\n")[0] for axes in first.axes if axes.get_title()]
    assert titles == ["truth", "kbeta", "adam95"]
    page = report.build(store.Study.open(folder)).read_text()
    assert "What was learnt" in page
    assert words in page


def test_a_testbed_without_pictures_gets_no_section_for_them():
    data = report.ReportData("t", {}, "c", (), (), (), (), ())
    assert "What was learnt" not in report.render(data)


def test_a_learning_rate_that_changes_is_drawn_behind_the_losses_and_a_constant_one_is_not():
    curves = {"kbeta": {0: ([1, 2, 3], [3.0, 2.0, 1.0])}}
    for rates, drawn in (([1e-3, 1e-3, 1e-5], True), ([1e-3, 1e-3, 1e-3], False)):
        figure = figures.loss_curves(curves, lr=([1, 2, 3], rates))
        legend = [text.get_text() for text in figure.legends[0].get_texts()]
        assert legend == ["kbeta", *(["learning rate"] if drawn else [])]
        assert bool(re.search(r"learning rate", figures.svg(figure).decode())) == drawn
