"""Write the laboratory's fixtures of the version that is installed: `python -m tests.old_state.write_lab FOLDER v0.2`.

    study/             a results folder: two arms, two seeds
    <engine>/          a run stopped after its first checkpoint, as a kill leaves it, one per engine
    <engine>-end.json  what that version came to from there: the result of the run that was not stopped

The files then stay as they are.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from kourkoutas.lab.running import train
from kourkoutas.lab.specs.spec import RunSpec

# Chunks are of 500 steps, and a checkpoint is taken between chunks.
EVERY = 500
SPECS: dict[str, dict[str, Any]] = {
    "v0.2": {
        "testbed": "sanity1",
        "preset": "smoke",
        "optimizer": "kbeta-exact",
        "options": {"lr_warmup": True},
        "seed": 3,
        "settings": {"steps": 510},
    },
}
STEPS = {"v0.2": ["--set", "steps=50"]}  # of the study


class Stop(Exception):
    pass


def stopped(spec: RunSpec, folder: Path) -> None:
    def on_progress(step: int, steps: int, loss: float) -> None:
        if any(folder.glob("checkpoint/step-*.npz")):
            raise Stop

    try:
        train.run(spec, folder, on_progress=on_progress, checkpoint_every=EVERY)
    except Stop:
        return
    raise AssertionError("the run ended before it was stopped")


def write(to: Path, release: str) -> None:
    to.mkdir(parents=True)
    for engine in ("torch", "jax", "mlx"):
        spec = RunSpec(**SPECS[release], engine=engine)
        stopped(spec, to / engine)
        result = train.run(spec)
        (to / f"{engine}-end.json").write_text(result.model_dump_json(exclude={"seconds"}) + "\n")
    command = "study sanity1 --preset smoke --seeds 0-1 --optimizers kbeta,adam95 --no-report --out study"
    subprocess.run([sys.executable, "-m", "kourkoutas", *command.split(), *STEPS[release]], check=True, cwd=to)
    (to / "study" / ".lock").unlink()
    for printed in (to / "study").rglob("output.txt"):
        printed.unlink()


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2])
