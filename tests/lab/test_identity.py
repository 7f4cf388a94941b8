"""What a run is: its id holds what its preset comes down to, and older results neither pass as new nor get lost."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from kourkoutas.lab.judging import analysis
from kourkoutas.lab.planning import plan as planning
from kourkoutas.lab.results import store
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.running import study
from kourkoutas.lab.showing import report
from kourkoutas.lab.specs.spec import RunResult, RunSpec
from kourkoutas.lab.testbeds import rare_trigger

SMALL = {"steps": "20", "held_out": "64"}


def plan(**changes: Any) -> planning.Plan:
    asked: dict[str, Any] = {"preset": "smoke", "engine": "torch", "optimizers": ["kbeta", "adam95"], "options": SMALL}
    return planning.plan_testbed("rare_trigger", **{**asked, **changes})


def ids(made: planning.Plan) -> list[str]:
    return [spec.id for spec in made.specs()]


def change_preset(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    before = rare_trigger.RareTrigger.presets.fget  # type: ignore[attr-defined]
    changed = property(lambda self: {k: dataclasses.replace(v, **settings) for k, v in before(self).items()})
    monkeypatch.setattr(rare_trigger.RareTrigger, "presets", changed)


def test_a_changed_preset_is_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ids(plan())
    assert before == ids(plan())
    change_preset(monkeypatch, tail=7)
    assert set(before).isdisjoint(ids(plan()))


def test_a_newer_version_of_a_testbed_is_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ids(plan())
    monkeypatch.setattr(rare_trigger, "TESTBEDS", (rare_trigger.RareTrigger(version=2),))
    assert set(before).isdisjoint(ids(plan()))


def test_a_changed_option_of_the_testbeds_kbeta_is_another_run_of_kbeta_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    (kbeta, adam) = ids(plan())
    before = rare_trigger.RareTrigger.kbeta.fget  # type: ignore[attr-defined]
    monkeypatch.setattr(rare_trigger.RareTrigger, "kbeta", property(lambda self: {**before(self), "alpha": 0.5}))
    assert ids(plan())[0] != kbeta
    assert ids(plan())[1] == adam


def test_resuming_with_a_changed_preset_names_what_changed_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with study.holding(plan(), tmp_path / "out", "first"):
        pass
    before = (tmp_path / "out" / "study.json").read_bytes()
    change_preset(monkeypatch, tail=7)
    for optimizers in (["kbeta", "adam95"], ["radam"]):  # also an arm that was not there before shares the settings
        with (
            pytest.raises(store.StoreError, match=r"settings\.tail was 50 and is 7 now"),
            study.holding(plan(optimizers=optimizers), tmp_path / "out", "second"),
        ):
            pytest.fail("the folder must not be handed out")
    assert (tmp_path / "out" / "study.json").read_bytes() == before


def test_the_same_configuration_resumes_and_new_arms_and_seeds_extend_it(tmp_path: Path) -> None:
    with study.holding(plan(), tmp_path / "out", "first"):
        pass
    with study.holding(plan(optimizers=["radam"], seeds=[3]), tmp_path / "out", "second") as writer:
        assert [arm.label for arm in writer.record.arms] == ["kbeta", "adam95", "radam"]
        assert writer.record.arms[0].resolved is not None
        assert writer.record.arms[0].resolved["settings"]["steps"] == 20


def version_01(path: Path) -> None:
    """A results folder as version 0.1 wrote it: no `resolved` in study.json and spec.json, and ids without it."""
    path.mkdir()
    arms = [{"label": a, "optimizer": a, "options": {}, "settings": {}} for a in ("kbeta", "adam95")]
    record = {
        "testbed": "rare_trigger", "preset": "smoke", "engine": "torch", "settings": {"steps": 20}, "code": None,
        "arms": arms, "seeds": [0, 1, 2], "command": "kbeta study rare_trigger", "created": "2026-01-01T00:00:00+00:00",
        "environment": {}, "versions": {}, "calls": [],
    }  # fmt: skip
    (path / "study.json").write_text(json.dumps(record))
    for k, arm in enumerate(("kbeta", "adam95")):
        for seed in range(3):
            spec = {
                "testbed": "rare_trigger", "preset": "smoke", "engine": "torch", "optimizer": arm, "seed": seed,
                "settings": {"steps": 20}, "options": {},
            }  # fmt: skip
            canonical = json.dumps(spec, sort_keys=True, separators=(",", ":"))
            run = path / "runs" / f"rare_trigger-{arm}-s{seed}-{hashlib.sha256(canonical.encode()).hexdigest()[:8]}"
            run.mkdir(parents=True)
            (run / "spec.json").write_text(json.dumps(spec))
            value = 1.0 + k + 0.1 * seed * (k + 1)
            metrics = {"last_batch_bce": value, "heldout_bce": value, "train_loss": value}
            result = RunResult(status="ok", endpoint=value, metrics=metrics)
            (run / "result.json").write_text(result.model_dump_json())


def test_results_of_version_01_are_read_and_judged(tmp_path: Path) -> None:
    version_01(tmp_path / "old")
    opened = store.Study.open(tmp_path / "old")
    found = analysis.analyse(Snapshot.read(opened.path), resamples=99)
    assert [arm.ok for arm in found.arms] == [3, 3]
    assert (found.primary.contrasts[0].wins, found.snapshot.damage) == (3, ())
    assert report.write(found).exists()


def test_a_study_of_version_01_is_not_resumed_and_says_why(tmp_path: Path) -> None:
    version_01(tmp_path / "old")
    with (
        pytest.raises(store.StoreError, match=r"written by version 0\.1.*name another --out"),
        study.holding(plan(options={"steps": "20"}), tmp_path / "old", "again"),
    ):
        pytest.fail("the folder must not be handed out")


def test_a_spec_without_resolved_settings_keeps_its_old_id() -> None:
    content = {
        "testbed": "bowl", "preset": "smoke", "engine": "torch", "optimizer": "kbeta", "seed": 0, "settings": {},
        "options": {},
    }  # fmt: skip
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert RunSpec(testbed="bowl").id.endswith(hashlib.sha256(canonical.encode()).hexdigest()[:8])
