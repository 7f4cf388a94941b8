"""Results folders and checkpoints of version 0.2: read, reported on, and gone on with; those of 0.1 are refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from kourkoutas.lab.judging.analysis import analyse
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.results.store import StoreError
from kourkoutas.lab.running import train
from kourkoutas.lab.showing import report
from kourkoutas.lab.specs.spec import RunSpec
from tests.old_state.write_lab import EVERY, SPEC

KEPT = Path(__file__).parent / "lab-v0.2"


def test_a_results_folder_is_read_whole():
    snapshot = Snapshot.read(KEPT / "study")
    runs = snapshot.runs
    assert snapshot.damage == ()
    assert [(run.spec.optimizer, run.spec.seed) for run in runs] == [
        ("kbeta", 0), ("kbeta", 1), ("adam95", 0), ("adam95", 1),
    ]  # fmt: skip
    for run in runs:
        written = json.loads((run.folder / "result.json").read_text())
        assert run.result.status == "ok"
        assert run.result.endpoint == written["endpoint"]
        assert run.result.curve["loss"] == written["curve"]["loss"]
        rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        assert run.metrics() == [{key: x for key, x in row.items() if key != "crc32"} for row in rows]
        assert len(rows) >= 50
        trace = run.trace()
        assert (trace is None) == (run.spec.optimizer == "adam95")
        assert trace is None or (np.isfinite(trace["beta2"]).all() and len(trace["steps"]) >= 50)
        assert all(np.isfinite(x).all() for x in run.params().values())


def test_a_results_folder_is_judged_and_reported():
    ends = {
        (run["optimizer"], run["seed"]): json.loads(path.with_name("result.json").read_text())["endpoint"]
        for path in KEPT.glob("study/runs/*/spec.json")
        for run in [json.loads(path.read_text())]
    }
    analysis = analyse(Snapshot.read(KEPT / "study"))
    judged = analysis.primary
    values = {(arm, seed): value for arm, by_seed in judged.values.items() for seed, value in by_seed.items()}
    assert values == ends
    page = report.render(analysis)
    assert "sanity1" in page
    assert "adam95" in page


@pytest.mark.parametrize("engine", ["torch", "jax", "mlx"])
def test_a_run_goes_on_from_its_checkpoint(engine, tmp_path):
    pytest.importorskip({"mlx": "mlx.core"}.get(engine, engine))
    folder = tmp_path / "run"
    shutil.copytree(KEPT / engine, folder)
    kept = (folder / "metrics.jsonl").read_text().splitlines()
    seen = []
    spec = RunSpec(**SPEC, engine=engine)
    result = train.run(spec, folder, on_progress=lambda step, steps, loss: seen.append(step), checkpoint_every=EVERY)
    assert seen == [spec.settings["steps"] + 10]  # the first 500 steps were not made again
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    before = [line for line in kept if json.loads(line)["step"] <= EVERY]
    assert len(before) > 100
    assert lines[: len(before)] == before
    end = json.loads((KEPT / f"{engine}-end.json").read_text())
    assert result.status == end["status"] == "ok"
    np.testing.assert_allclose(result.endpoint, end["endpoint"], rtol=1e-5)
    np.testing.assert_allclose(result.curve["loss"], end["curve"]["loss"], rtol=1e-4, atol=1e-7)


def test_a_folder_of_version_0_1_is_refused_in_one_line(tmp_path):
    shutil.copytree(KEPT / "study", tmp_path / "study")
    file = tmp_path / "study" / "study.json"
    record = json.loads(file.read_text())
    del record["sha256"]
    record["versions"]["kourkoutas-beta"] = "0.1.0"
    file.write_text(json.dumps(record))
    with pytest.raises(StoreError, match=r"study\.json: written by version 0\.1, which is no longer read") as caught:
        Snapshot.read(tmp_path / "study")
    assert "\n" not in str(caught.value)
