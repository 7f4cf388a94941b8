"""The suites of other people's problems, at small size: their own programs train, with our and others' optimizers."""

import tomllib
from pathlib import Path

import pytest

from kourkoutas.lab import suite

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {
    "pina": {"epochs": 40, "points": 6},
    "apebench": {"steps": 30, "points": 32, "samples": 4, "network": "Conv;8;2;relu"},
}


@pytest.mark.parametrize("name", SMALL)
def test_every_problem_of_another_project_is_learned_by_each_optimizer_and_answered_over(name, tmp_path):
    pytest.importorskip(name)
    content = tomllib.loads((EXAMPLES / f"suite_{name}.toml").read_text(encoding="utf-8"))
    studies = {}
    for study, own in content["studies"].items():
        settings = {**own["settings"], **SMALL[name]}
        studies[study] = {"train": str(EXAMPLES / own["train"]), "settings": settings}
    # One of them is tuned.
    next(iter(studies.values())).update(tune=content["tune"], trials=2, tune_seeds=[100], tune_budget=0)
    result = suite(
        studies,
        optimizers=["kbeta-exact", "adam999"],
        seeds=[0],
        log=content["log"],
        out=tmp_path / "out",
        workers=2,
        progress=False,
    )
    assert result.snapshots.keys() == content["studies"].keys()
    for study, snapshot in result.snapshots.items():
        runs = [*snapshot.runs, *snapshot.tuning_runs]
        assert len(runs) == (6 if "tune" in studies[study] else 2)
        for run in runs:
            assert run.result.status == "ok", run.result.error
            first, *_, last = run.result.curve["loss"]
            assert last < first, (study, run.id)
    assert set(result.problems()["optimizer"]) == {"kbeta-exact"}
