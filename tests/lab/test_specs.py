"""What a run is: its id holds what its preset comes down to, and older results neither pass as new nor get lost."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from kourkoutas.lab.planning import plan as planning
from kourkoutas.lab.results import store
from kourkoutas.lab.running import executor
from kourkoutas.lab.specs.spec import RunSpec
from kourkoutas.lab.testbeds import rare_trigger

SMALL = {"steps": "20", "held_out": "64"}


def plan(**changes: Any) -> planning.Plan:
    asked: dict[str, Any] = {"preset": "smoke", "engine": "torch", "optimizers": ["kbeta", "adam95"], "options": SMALL}
    return planning.plan_study("rare_trigger", **{**asked, **changes})


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
    with executor.holding(plan(), tmp_path / "out", "first"):
        pass
    before = (tmp_path / "out" / "study.json").read_bytes()
    change_preset(monkeypatch, tail=7)
    for optimizers in (["kbeta", "adam95"], ["radam"]):  # also an arm that was not there before shares the settings
        with (
            pytest.raises(store.StoreError, match=r"settings\.tail is 50 there and 7 here"),
            executor.holding(plan(optimizers=optimizers), tmp_path / "out", "second"),
        ):
            pytest.fail("the folder must not be handed out")
    assert (tmp_path / "out" / "study.json").read_bytes() == before


def test_the_same_configuration_resumes_and_new_arms_and_seeds_extend_it(tmp_path: Path) -> None:
    with executor.holding(plan(), tmp_path / "out", "first"):
        pass
    with executor.holding(plan(optimizers=["radam"], seeds=[3]), tmp_path / "out", "second") as writer:
        assert [arm.label for arm in writer.record.arms] == ["kbeta", "adam95", "radam"]
        assert writer.record.arms[0].resolved is not None
        assert writer.record.arms[0].resolved["settings"]["steps"] == 20


def test_a_spec_without_resolved_settings_keeps_its_old_id() -> None:
    content = {
        "testbed": "bowl", "preset": "smoke", "engine": "torch", "optimizer": "kbeta", "seed": 0, "settings": {},
        "options": {},
    }  # fmt: skip
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert RunSpec(testbed="bowl").id.endswith(hashlib.sha256(canonical.encode()).hexdigest()[:8])
