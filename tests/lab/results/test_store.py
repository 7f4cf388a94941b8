"""The results folder: atomic, locked, and clear about what is broken in it."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kourkoutas.lab.results import store
from kourkoutas.lab.results.snapshot import Snapshot, holder_of
from kourkoutas.lab.specs.spec import Axis, RunResult, RunSpec, SearchSpace

SPEC = RunSpec(testbed="bowl", optimizer="kbeta", seed=0)
RESULT = RunResult(
    status="ok",
    endpoint=0.25,
    metrics={"loss": 0.25, "worst": math.inf},
    curve={"step": [1, 2], "loss": [math.nan, 0.25]},
    seconds=1.0,
)


def configuration(**changes: Any) -> dict[str, Any]:
    arms = [store.Arm(label="kbeta", optimizer="kbeta")]
    same = {"testbed": "bowl", "preset": "smoke", "engine": "torch", "settings": {}, "arms": arms, "seeds": [0]}
    return same | {"command": "kbeta study bowl"} | changes


def make(path: Path, *results: tuple[RunSpec, RunResult | None], **changes: Any) -> Snapshot:
    with store.writing(path, **configuration(**changes)) as study:
        study.plan([spec for spec, _ in results])
        for spec, result in results:
            if result is not None:
                study.finish(spec, result)
    return Snapshot.read(path)


def test_a_result_with_nan_and_infinity_is_read_back_as_it_was(tmp_path: Path) -> None:
    (run,) = Snapshot.read(make(tmp_path / "out", (SPEC, RESULT)).path).runs
    assert run.spec == SPEC
    assert run.result is not None
    assert run.result.metrics == RESULT.metrics
    assert math.isnan(run.result.curve["loss"][0])
    assert run.result.curve["loss"][1] == 0.25


def test_a_planned_run_without_a_result_is_listed_as_unfinished(tmp_path: Path) -> None:
    other = SPEC.model_copy(update={"seed": 1})
    runs = Snapshot.read(make(tmp_path / "out", (SPEC, RESULT), (other, None), seeds=[0, 1]).path).runs
    assert [(run.spec.seed, run.result is None) for run in runs] == [(0, False), (1, True)]


def test_runs_come_in_the_order_of_the_arms_then_the_seeds(tmp_path: Path) -> None:
    labels = ["kbeta", "adam95", "a-rival"]
    specs = [SPEC.model_copy(update={"optimizer": label, "seed": s}) for s in (10, 2) for label in labels]
    arms = [store.Arm(label=label, optimizer=label) for label in labels]
    runs = Snapshot.read(make(tmp_path / "out", *((spec, None) for spec in specs), arms=arms, seeds=[2, 10]).path).runs
    assert [(r.spec.optimizer, r.spec.seed) for r in runs] == [(label, s) for label in labels for s in (2, 10)]


def test_study_json_records_command_environment_and_versions(tmp_path: Path) -> None:
    record = make(tmp_path / "out", (SPEC, None)).record
    assert record.command == "kbeta study bowl"
    assert record.environment["cores"] >= 1
    assert record.versions["numpy"] == np.__version__
    assert record.calls[0].command == record.command


@pytest.mark.parametrize("keep", [0, 30, -4])
def test_a_truncated_result_names_file_line_and_remedy(tmp_path: Path, keep: int) -> None:
    study = make(tmp_path / "out", (SPEC, RESULT))
    file = study.path / "runs" / SPEC.id / "result.json"
    text = file.read_text()[:keep]
    file.write_text(text)
    (run,) = Snapshot.read(study.path).runs
    assert run.result is not None
    assert run.result.status == "failed"
    message = run.result.error or ""
    assert str(file) in message
    assert "--retry-failed" in message
    assert f"line {max(1, text.count(chr(10)) + 1)}" in message
    assert f"delete the folder {file.parent}" in message


def test_a_result_with_a_wrong_value_names_the_line_of_the_value(tmp_path: Path) -> None:
    study = make(tmp_path / "out", (SPEC, RESULT))
    file = study.path / "runs" / SPEC.id / "result.json"
    lines = file.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"seconds"' in line)
    lines[at] = ' "seconds": "soon",'
    file.write_text("\n".join(lines))
    (run,) = Snapshot.read(study.path).runs
    assert run.result is not None
    assert run.result.status == "failed"
    assert f"result.json, line {at + 1}: `seconds`" in (run.result.error or "")


def test_an_edited_spec_is_noticed(tmp_path: Path) -> None:
    study = make(tmp_path / "out", (SPEC, RESULT))
    file = study.path / "runs" / SPEC.id / "spec.json"
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 7'))
    assert Snapshot.read(study.path).runs == ()
    assert len(Snapshot.read(study.path).damage) == 1
    assert "edited or moved" in Snapshot.read(study.path).damage[0]


def test_a_run_folder_left_empty_by_a_kill_is_not_an_error(tmp_path: Path) -> None:
    study = make(tmp_path / "out", (SPEC, RESULT))
    (study.path / "runs" / "half-planned").mkdir()
    (study.path / "runs" / "half-planned" / ".spec.json.1.tmp").write_text("{")
    assert len(Snapshot.read(study.path).runs) == 1


def test_a_broken_line_of_metrics_names_file_and_line(tmp_path: Path) -> None:
    study = make(tmp_path / "out", (SPEC, RESULT))
    file = study.path / "runs" / SPEC.id / "metrics.jsonl"
    file.write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo\n{"step": 3, "loss": 0.5}\n')
    (run,) = Snapshot.read(study.path).runs
    with pytest.raises(store.StoreError, match=r"metrics\.jsonl, line 2: not a JSON object"):
        run.metrics()


def test_a_last_line_cut_by_a_kill_is_left_out_of_an_unfinished_run(tmp_path: Path) -> None:
    study = make(tmp_path / "out", (SPEC, None))
    (study.path / "runs" / SPEC.id / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    assert Snapshot.read(study.path).runs[0].metrics() == [{"step": 1, "loss": 1.0}]


def test_a_truncated_trace_names_the_file(tmp_path: Path) -> None:
    study = make(tmp_path / "out", (SPEC, RESULT))
    file = study.path / "runs" / SPEC.id / "trace.npz"
    np.savez(file, steps=np.arange(1000))
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(store.StoreError, match=r"trace\.npz: not a readable trace"):
        Snapshot.read(study.path).runs[0].trace()


def test_a_folder_of_another_configuration_is_left_alone_and_every_difference_is_listed(tmp_path: Path) -> None:
    study = make(tmp_path / "out", (SPEC, RESULT), settings={"steps": 100})
    before = (study.path / "study.json").read_bytes()
    changed = configuration(
        engine="jax",
        settings={"steps": 200, "lr": 0.1},
        arms=[store.Arm(label="kbeta", optimizer="kbeta", options={"alpha": 0.9})],
    )
    with pytest.raises(store.StoreError) as caught, store.writing(study.path, **changed):
        pytest.fail("the folder must not be handed out")
    message = str(caught.value)
    for part in (
        "engine is 'torch' there and 'jax' here",
        "steps is 100 there and 200 here",
        "settings.lr is None there and 0.1 here",
        "optimizer kbeta.options.alpha is None there and 0.9 here",
    ):
        assert part in message
    assert (study.path / "study.json").read_bytes() == before


def test_edited_user_code_is_another_configuration(tmp_path: Path) -> None:
    code = store.Code(file="my_task.py", function="train", sha256="a" * 64)
    make(tmp_path / "out", (SPEC, RESULT), code=code)
    edited = code.model_copy(update={"sha256": "b" * 64})
    with (
        pytest.raises(store.StoreError, match=r"my_task\.py:train or a value that it uses has changed since"),
        store.writing(tmp_path / "out", **configuration(code=edited)),
    ):
        pytest.fail("the folder must not be handed out")


def test_new_seeds_and_arms_extend_a_study(tmp_path: Path) -> None:
    make(tmp_path / "out", (SPEC, RESULT))
    arms = [store.Arm(label="adam95", optimizer="adam95")]
    record = make(tmp_path / "out", arms=arms, seeds=[1, 2], command="second").record
    assert [arm.label for arm in record.arms] == ["kbeta", "adam95"]
    assert record.seeds == [0, 1, 2]
    assert [call.command for call in record.calls] == ["kbeta study bowl", "second"]


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(store.StoreError, match=r"not a results folder and not empty \(it holds thesis.tex\)"):
        make(tmp_path, (SPEC, None))
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_stale_temporary_files_are_ignored_and_removed(tmp_path: Path) -> None:
    study = make(tmp_path / "out", (SPEC, None))
    stale = [study.path / ".study.json.9.tmp", study.path / "runs" / SPEC.id / ".result.json.9.tmp"]
    for file in stale:
        file.write_text('{"status": "o')
    assert Snapshot.read(study.path).runs[0].result is None
    make(tmp_path / "out", (SPEC, None))
    assert not any(file.exists() for file in stale)


def started(source: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", source, *arguments], stdout=subprocess.PIPE, text=True)


def wait_for(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


HOLD = """
import json, sys, time
from kourkoutas.lab.results import store
with store.writing(sys.argv[1], **json.loads(sys.argv[2])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_in_use_is_refused_until_its_holder_is_killed(tmp_path: Path) -> None:
    asked = configuration(command="kbeta study bowl --seeds 0", arms=[{"label": "kbeta", "optimizer": "kbeta"}])
    holder = started(HOLD, str(tmp_path / "out"), json.dumps(asked))
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(
            store.StoreError, match=rf"being written by process {holder.pid} \(kbeta study bowl --seeds 0\)"
        ):
            make(tmp_path / "out", (SPEC, None))
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    assert make(tmp_path / "out", (SPEC, None)).record.seeds == [0]


REWRITE = """
import sys
from pathlib import Path
from kourkoutas.lab.results import store
from kourkoutas.lab.specs.spec import RunResult
folder = Path(sys.argv[1])
print("started", flush=True)
for n in range(10**9):
    store.write_result(folder, RunResult(status="ok", endpoint=float(n), curve={"step": list(range(2000))}))
"""


def test_kill_9_while_a_result_is_being_rewritten_leaves_a_whole_result(tmp_path: Path) -> None:
    study = make(tmp_path / "out", (SPEC, RESULT))
    for pause in (0.02, 0.05, 0.11):
        writer = started(REWRITE, str(study.path / "runs" / SPEC.id))
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "started\n"
            time.sleep(pause)
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
        (run,) = Snapshot.read(study.path).runs
        assert run.result is not None
        assert run.result.status == "ok"


def refused(path: Path, *parts: str, **changes: Any) -> None:
    before = (path / "study.json").read_bytes()
    with pytest.raises(store.StoreError) as caught, store.writing(path, **configuration(**changes)):
        pytest.fail("the folder must not be handed out")
    for part in parts:
        assert part in str(caught.value)
    assert (path / "study.json").read_bytes() == before


def test_a_folder_without_a_study_and_a_file_in_its_place_are_told(tmp_path: Path) -> None:
    with pytest.raises(store.StoreError, match=r"study\.json: not found; `kbeta study \.\.\. --out .*` makes one"):
        Snapshot.read(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(store.StoreError, match="is a file; name a folder"):
        make(tmp_path / "file", (SPEC, None))


def test_a_folder_that_was_made_for_a_study_that_could_not_start_goes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.files, "write_json", full)
    with pytest.raises(store.DiskFull, match=r"no room left on the disk for .*study\.json .*finished runs are kept"):
        make(tmp_path / "out", (SPEC, None))
    assert not (tmp_path / "out").exists()


def test_the_holder_of_a_folder_is_a_process_that_lives(tmp_path: Path) -> None:
    study = make(tmp_path / "out", (SPEC, None))
    assert holder_of(study.path) is None  # the lock file is empty
    with store.writing(tmp_path / "out", **configuration()):
        holder = holder_of(study.path)
        assert holder is not None
        assert "kbeta study bowl" in holder.text
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    (study.path / ".lock").write_text(f"process {int(ended.stdout)} (kbeta study)")
    assert holder_of(study.path) is None
    (study.path / ".lock").write_text("process 1 (init)")
    assert holder_of(study.path) is not None  # whoever it belongs to


def test_a_stray_file_among_the_runs_is_no_run_and_a_moved_run_is_damage(tmp_path: Path) -> None:
    study = make(tmp_path / "out", (SPEC, RESULT))
    (study.path / "runs" / "notes.txt").write_text("mine")
    assert len(Snapshot.read(study.path).runs) == 1
    assert Snapshot.read(study.path).damage == ()
    (study.path / "runs" / SPEC.id).rename(study.path / "runs" / "elsewhere")
    assert Snapshot.read(study.path).runs == ()
    assert f"describes run {SPEC.id}, not its folder" in Snapshot.read(study.path).damage[0]


def test_a_tuned_study_compares_the_chosen_values_on_test_seeds_only(tmp_path: Path) -> None:
    tuning = tuned()
    specs = [SPEC.model_copy(update={"seed": s, "settings": {"lr": lr}}) for s in (0, 100) for lr in (0.1, 0.2)]
    with store.writing(tmp_path / "out", **configuration(tuning=tuning)) as study:
        study.plan(specs)
        assert Snapshot.read(study.path).runs == ()
        study.choose({"kbeta": {"lr": 0.2}})
    study = Snapshot.read(tmp_path / "out")
    assert [(run.spec.seed, run.spec.settings["lr"]) for run in Snapshot.read(study.path).runs] == [(0, 0.2)]
    assert {run.spec.seed for run in Snapshot.read(study.path).tuning_runs} == {100}


def tuned(**changes: Any) -> SearchSpace:
    axes = (Axis(name="lr", low=0.1, high=0.2),)
    return SearchSpace(**{"axes": axes, "trials": 2, "seeds": (100,), "budget": 0, **changes})


def test_another_tuning_is_another_study(tmp_path: Path) -> None:
    make(tmp_path / "out", (SPEC, None), tuning=tuned())
    refused(tmp_path / "out", "tuning.trials is 2 there and 3 here", tuning=tuned(trials=3))
    refused(tmp_path / "out", "holds a tuned study: add --tune as there, or choose another --out")


def test_another_function_of_the_same_file_is_another_study(tmp_path: Path) -> None:
    code = store.Code(file="my_task.py", function="train", sha256="a" * 64)
    make(tmp_path / "out", (SPEC, RESULT), code=code)
    other = code.model_copy(update={"function": "fit"})
    refused(tmp_path / "out", "function is 'train' there and 'fit' here", code=other)


def resolved_arm(label: str, testbed: int = 1, lr: float = 0.1, resolved: bool = True) -> store.Arm:
    found = {"testbed": testbed, "settings": {"lr": lr, "model": {"width": 8}}}
    return store.Arm(label=label, optimizer=label, resolved=found if resolved else None)


def test_a_preset_that_has_changed_since_is_another_study(tmp_path: Path) -> None:
    make(tmp_path / "out", (SPEC, RESULT), arms=[resolved_arm("kbeta")])
    refused(tmp_path / "out", "settings.lr is 0.1 there and 0.2 here", arms=[resolved_arm("kbeta", lr=0.2)])
    # an arm that comes later shares the settings of those that are there
    refused(
        tmp_path / "out",
        "version of the testbed is 1 there and 2 here",
        "settings.lr is 0.1 there and 0.3 here",
        arms=[resolved_arm("adam95", testbed=2, lr=0.3)],
    )
    assert [arm.label for arm in make(tmp_path / "out", arms=[resolved_arm("adam95")]).record.arms] == [
        "kbeta",
        "adam95",
    ]


def test_a_study_that_did_not_record_its_presets_cannot_be_extended(tmp_path: Path) -> None:
    make(tmp_path / "out", (SPEC, RESULT), arms=[resolved_arm("kbeta", resolved=False)])
    refused(tmp_path / "out", "version of the testbed is None there and 1 here", arms=[resolved_arm("kbeta")])
