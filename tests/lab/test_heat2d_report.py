"""The report of a testbed that draws pictures of its own, and the schedule behind the loss curves."""

import base64
import re

import numpy as np
import pytest

from kourkoutas.lab import testbeds
from kourkoutas.lab.results import store
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.showing import pictures
from kourkoutas.lab.specs.spec import RunResult, RunSpec
from tests.lab import made_study
from tests.lab.made_study import rendered

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
    study = Snapshot.read(folder)
    (first, words), (_, more) = pictures.own(Snapshot.read(study.path))
    assert words == "Frame 6 of a test case, truth first: raw, contrast-equalised, and error (seed 1)"
    assert more.endswith("(seed 1)")
    titles = [axes.get_title().partition("\n")[0] for axes in first.axes if axes.get_title()]
    assert titles == ["truth", "K-β", "Adam 0.95"]
    page = rendered(Snapshot.read(folder))
    assert "What was learnt" in page
    assert words in page


def test_the_pictures_follow_a_dark_page_and_keep_their_text(folder):
    page = rendered(Snapshot.read(folder))
    (first, _) = re.findall(r'<img src="data:image/svg\+xml;base64,([^"]*)"', page)
    picture = base64.b64decode(first).decode()
    assert "prefers-color-scheme:dark" in picture
    assert "#000000" not in picture
    assert ">truth</text>" in picture


def test_a_testbed_without_pictures_gets_no_section_for_them(tmp_path):
    study = made_study.own(tmp_path / "out", {"x": {0: 1.0}, "y": {0: 2.0}})
    assert "What was learnt" not in rendered(study)
