"""Results folders and checkpoints of the kind that the kept trials have: read, reported on, and gone on with."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from kourkoutas.lab.judging.analysis import analyse
from kourkoutas.lab.results.store import Study
from kourkoutas.lab.running import train
from kourkoutas.lab.showing import report
from kourkoutas.lab.specs.spec import RunSpec
from tests.old_state.write_lab import EVERY, SPECS

FOLDERS = {release: Path(__file__).parent / f"lab-{release}" for release in SPECS}
each = pytest.mark.parametrize("release", SPECS)


@each
def test_a_results_folder_is_read_whole(release):
    study = Study.open(FOLDERS[release] / "study")
    runs = study.runs()
    assert study.damage == []
    assert [(run.spec.optimizer, run.spec.seed) for run in runs] == [
        ("kbeta", 0), ("kbeta", 1), ("adam95", 0), ("adam95", 1),
    ]  # fmt: skip
    for run in runs:
        written = json.loads((run.folder / "result.json").read_text())
        assert "sha256" in written
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


@each
def test_a_results_folder_is_judged_and_reported(release, tmp_path):
    study = Study.open(FOLDERS[release] / "study")
    ends = {
        (run["optimizer"], run["seed"]): json.loads(path.with_name("result.json").read_text())["endpoint"]
        for path in FOLDERS[release].glob("study/runs/*/spec.json")
        for run in [json.loads(path.read_text())]
    }
    judged = analyse(study).primary
    values = {(arm, seed): value for arm, by_seed in judged.values.items() for seed, value in by_seed.items()}
    assert values == ends
    page = report.build(study, tmp_path / "report.html").read_text()
    assert "sanity1" in page
    assert "adam95" in page


@each
@pytest.mark.parametrize("engine", ["torch", "jax", "mlx"])
def test_a_run_goes_on_from_its_checkpoint(engine, release, tmp_path):
    pytest.importorskip({"mlx": "mlx.core"}.get(engine, engine))
    folder = tmp_path / "run"
    shutil.copytree(FOLDERS[release] / engine, folder)
    kept = (folder / "metrics.jsonl").read_text().splitlines()
    seen = []
    spec = RunSpec(**SPECS[release], engine=engine)
    result = train.run(spec, folder, on_progress=lambda step, steps, loss: seen.append(step), checkpoint_every=EVERY)
    assert seen == [spec.settings["steps"] + 10]  # the first 500 steps were not made again
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    before = [line for line in kept if json.loads(line)["step"] <= EVERY]
    assert len(before) > 100
    assert lines[: len(before)] == before
    end = json.loads((FOLDERS[release] / f"{engine}-end.json").read_text())
    assert result.status == end["status"] == "ok"
    np.testing.assert_allclose(result.endpoint, end["endpoint"], rtol=1e-5)
    np.testing.assert_allclose(result.curve["loss"], end["curve"]["loss"], rtol=1e-4, atol=1e-7)
