"""One run: what it records, what divergence gives, and that a killed run ends with the same bits."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kourkoutas.lab import engines
from kourkoutas.lab.results.files import Checkpoints, row_of
from kourkoutas.lab.running import train
from kourkoutas.lab.running.train import run
from kourkoutas.lab.specs.spec import RunResult, RunSpec

SPEC = RunSpec(testbed="sanity1", engine="torch", settings={"steps": 700, "samples": 40, "width": 5})


def read(path):
    with np.load(path) as saved:
        return {name: saved[name] for name in saved.files}


def lines(folder):
    return [row_of(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Killed(BaseException):
    pass


def kill_after(step):
    def on_progress(done, total, loss):
        if done >= step:
            raise Killed

    return on_progress


def same_files(a, b):
    """The final parameters, optimizer state, losses, metrics and trace of two folders, bit for bit."""
    assert (a / "metrics.jsonl").read_bytes() == (b / "metrics.jsonl").read_bytes()
    names = ["params.npz", f"checkpoint/{max(p.name for p in (a / 'checkpoint').iterdir())}"]
    names += ["trace.npz"] if (a / "trace.npz").exists() else []
    for name in names:
        x, y = read(a / name), read(b / name)
        assert x.keys() == y.keys()
        for key in x.keys() - {"notes"}:  # which hold the seconds taken
            np.testing.assert_array_equal(x[key], y[key], err_msg=f"{name}: {key}")


def test_a_result_has_the_endpoint_the_metrics_and_the_resolved_settings():
    result = run(RunSpec(testbed="sanity2", engine="jax", settings={"steps": 90}, options={"alpha": "0.9"}))
    assert result.status == "ok"
    assert result.endpoint == result.metrics["final_loss"]
    assert {"exact_loss", "accuracy", "train_loss"} <= result.metrics.keys()
    assert result.settings["steps"] == 90
    assert result.settings["lr"] == 1e-2
    assert result.settings["optimizer"]["alpha"] == 0.9
    assert result.settings["optimizer"]["bias_correction"] == "none"
    assert result.seconds > 0


def test_a_curve_is_block_means_with_the_last_loss_exact(tmp_path):
    result = run(SPEC, tmp_path, checkpoint_every=700)
    losses = read(max((tmp_path / "checkpoint").iterdir()))["losses"]
    assert len(losses) == 710
    curve = result.curve
    assert len(curve["step"]) == 237
    assert {len(column) for column in curve.values()} == {237}
    assert curve["step"][:2] == [3, 6]
    assert curve["step"][-1] == 710
    np.testing.assert_allclose(curve["loss"][0], losses[:3].mean())
    np.testing.assert_allclose(curve["loss"][-2], losses[705:708].mean())
    assert curve["loss"][-1] == losses[-1]
    assert result.metrics["train_loss"] == pytest.approx(losses[-100:].mean())
    assert curve["final_loss"][-1] == result.endpoint
    assert math.isnan(curve["final_loss"][0])


def test_the_learning_rate_of_a_warm_arm_is_in_its_curve():
    spec = SPEC.model_copy(update={"optimizer": "adam95-warm"})
    lr = run(spec).curve["lr"]
    np.testing.assert_allclose(lr, [1e-3 * math.sqrt(1 - 0.999**t) for t in (*range(3, 710, 3), 710)], rtol=1e-9)


def test_metrics_are_lines_of_json_with_one_row_per_block(tmp_path):
    result = run(SPEC, tmp_path)
    rows = lines(tmp_path)
    blocks = [row for row in rows if "loss" in row]
    assert [row["step"] for row in blocks] == result.curve["step"]
    assert rows[-1] == {"step": 710, **{k: v for k, v in result.metrics.items() if k != "train_loss"}}
    assert not (tmp_path / "checkpoint").exists()


def test_a_kbeta_run_leaves_its_trace_and_final_parameters(tmp_path):
    run(SPEC, tmp_path)
    trace = read(tmp_path / "trace.npz")
    assert trace["steps"].tolist() == list(range(1, 711))
    assert trace["sun"].shape == trace["beta2"].shape == (710, 1)
    np.testing.assert_allclose(trace["beta2"], 0.999 - 0.119 * trace["sun"], rtol=1e-5)
    assert read(tmp_path / "params.npz")["w"].shape == (5,)


def test_a_long_trace_is_thinned(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "TRACE_ROWS", 100)
    run(SPEC, tmp_path)
    assert read(tmp_path / "trace.npz")["steps"].tolist() == list(range(8, 711, 8))


@pytest.mark.parametrize("engine", engines.NAMES)
def test_a_run_that_diverges_is_a_result_with_its_step(engine, tmp_path):
    settings = {"steps": 60, "lr": 1e30, "samples": 40, "width": 5}
    result = run(RunSpec(testbed="sanity1", engine=engine, settings=settings), tmp_path)
    assert result.status == "diverged"
    assert result.endpoint is None
    # The first update moves w to 1e30, whose square does not fit in float32: the second loss is infinite.
    assert result.metrics == {"diverged_at": 2}
    assert result.curve["step"] == [1, 2]
    assert result.curve["loss"][-1] == math.inf
    assert lines(tmp_path)[-1]["loss"] == "Infinity"
    again = RunResult.model_validate_json(result.model_dump_json())
    assert again.curve["loss"][-1] == math.inf


def test_parameters_that_stop_being_finite_in_the_last_update_are_a_divergence():
    settings = {"steps": 1, "first": 0, "lr": 1e39, "samples": 40, "width": 5}
    result = run(RunSpec(testbed="sanity1", engine="torch", settings=settings))
    assert (result.status, result.metrics) == ("diverged", {"diverged_at": 1})


def test_progress_counts_up_to_the_number_of_steps():
    seen = []
    run(SPEC, on_progress=lambda done, total, loss: seen.append((done, total, math.isfinite(loss))))
    assert seen == [(500, 710, True), (710, 710, True)]


@pytest.mark.parametrize("engine", engines.NAMES)
@pytest.mark.parametrize("label", ["kbeta", "adam999"])
def test_an_interrupted_run_ends_with_the_same_bits(engine, label, tmp_path, monkeypatch):
    monkeypatch.setattr("kourkoutas.lab.testbeds.sanity.SanityProblem.chunk", 30)
    monkeypatch.setattr("kourkoutas.lab.testbeds.sanity.SanityProblem.evaluate_every", 50)
    spec = SPEC.model_copy(
        update={"engine": engine, "optimizer": label, "settings": {"steps": 190, "samples": 40, "width": 5}}
    )
    whole = run(spec, tmp_path / "whole", checkpoint_every=60)
    for step in (60, 120, 180):
        with pytest.raises(Killed):
            run(spec, tmp_path / "parts", checkpoint_every=60, on_progress=kill_after(step))
    parts = run(spec, tmp_path / "parts", checkpoint_every=60)
    same_files(tmp_path / "whole", tmp_path / "parts")
    assert parts.metrics == whole.metrics
    np.testing.assert_equal(parts.curve, whole.curve)
    evaluated = [row["step"] for row in lines(tmp_path / "parts") if "final_loss" in row]
    assert evaluated == [60, 120, 180, 200]


SCRIPT = """
import sys
from pathlib import Path
from kourkoutas.lab.specs.spec import RunSpec
from kourkoutas.lab.testbeds.rare_trigger import RareTriggerProblem
from kourkoutas.lab.running.train import run
RareTriggerProblem.chunk = 20
run(RunSpec.model_validate_json(sys.argv[1]), Path(sys.argv[2]), checkpoint_every=20)
"""


def newest(folder):
    return max((int(p.stem[5:]) for p in (folder / "checkpoint").glob("step-*.npz")), default=0)


@pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_run_killed_with_sigkill_continues_to_the_same_bits(engine, tmp_path, monkeypatch):
    settings = {"steps": 590, "held_out": 64, "batch": 4}
    spec = RunSpec(testbed="rare_trigger", engine=engine, settings=settings)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, spec.model_dump_json(), str(tmp_path / "parts")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    deadline = time.monotonic() + 500
    while newest(tmp_path / "parts") < 200 and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert 200 <= newest(tmp_path / "parts") < 600

    monkeypatch.setattr("kourkoutas.lab.testbeds.rare_trigger.RareTriggerProblem.chunk", 20)
    for name in ("parts", "whole"):
        run(spec, tmp_path / name, checkpoint_every=20)
    same_files(tmp_path / "whole", tmp_path / "parts")


def test_without_a_checkpoint_a_run_starts_again_from_nothing(tmp_path):
    with pytest.raises(Killed):
        run(SPEC, tmp_path, checkpoint_every=0, on_progress=kill_after(500))
    assert lines(tmp_path)
    assert not (tmp_path / "checkpoint").exists()
    result = run(SPEC, tmp_path, checkpoint_every=0)
    assert [row["step"] for row in lines(tmp_path) if "loss" in row] == result.curve["step"]


def test_a_checkpoint_is_taken_about_once_a_minute_unless_asked_otherwise(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "SECONDS_BETWEEN_CHECKPOINTS", 0.0)
    with pytest.raises(Killed):
        run(SPEC, tmp_path, on_progress=kill_after(710))
    assert Checkpoints(tmp_path / "checkpoint").steps() == [500]
    run(SPEC, tmp_path)
    assert not (tmp_path / "checkpoint").exists()


def test_only_the_newest_checkpoints_are_kept_and_leftovers_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (10, 20, 30):
        checkpoints.save(step, {"x": np.array([step])})
    (tmp_path / ".step-000000040.npz.part").write_bytes(b"half")
    assert Checkpoints(tmp_path).steps() == [20, 30]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000020.npz", "step-000000030.npz"]


def test_a_checkpoint_damaged_on_the_disk_is_passed_over_for_an_older_one(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(10, {"x": np.arange(1000)})
    checkpoints.save(20, {"x": np.arange(1000)})
    newest = tmp_path / "step-000000020.npz"
    newest.write_bytes(newest.read_bytes()[:500])
    step, saved = checkpoints.newest()
    assert step == 10
    np.testing.assert_array_equal(saved["x"], np.arange(1000))


def test_a_folder_with_checkpoints_of_another_run_is_refused(tmp_path):
    run(SPEC, tmp_path, checkpoint_every=500)
    other = SPEC.model_copy(update={"seed": 1})
    with pytest.raises(ValueError, match=f"holds checkpoints of run '{SPEC.id}', not of '{other.id}'"):
        run(other, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"testbed": "rare_triger"}, "unknown testbed 'rare_triger': did you mean 'rare_trigger'"),
        ({"preset": "papr"}, "unknown preset of sanity1 'papr': did you mean 'paper'"),
        ({"engine": "tensorflow"}, "unknown engine 'tensorflow'"),
        ({"optimizer": "adm95"}, "unknown optimizer 'adm95'"),
        ({"settings": {"step": 3}}, "unknown setting of sanity1 'step': did you mean 'steps'"),
    ],
)
def test_a_spec_that_names_nothing_known_lists_the_near_names(change, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run(SPEC.model_copy(update=change), tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_run_id_is_readable_and_depends_on_everything():
    ids = {SPEC.model_copy(update=u).id for u in ({}, {"seed": 1}, {"options": {"alpha": 0.9}}, {"preset": "paper"})}
    assert len(ids) == 4
    assert all(name.startswith("sanity1-kbeta-s") for name in ids)
    assert RunSpec.model_validate_json(SPEC.model_dump_json()).id == SPEC.id
    tagged = SPEC.model_copy(update={"optimizer": "kbeta[alpha=0.9]/x"}).id
    assert Path(tagged).name == tagged


def test_the_pace_leaves_out_first_calls_of_a_length_which_compile():
    assert train.pace_of([(100, 5.0), (100, 1.0), (100, 1.0), (50, 2.5)]) == pytest.approx(0.01)
    assert train.pace_of([(100, 5.0)]) == pytest.approx(0.05)
    assert train.pace_of([]) is None


def test_a_run_records_its_pace(tmp_path):
    pytest.importorskip("mlx.core")
    spec = RunSpec(testbed="rare_trigger", engine="mlx", settings={"steps": 1500})
    result = run(spec, tmp_path)
    assert 0 < 1500 * result.seconds_per_step < 2 * result.seconds
