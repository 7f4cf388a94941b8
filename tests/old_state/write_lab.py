"""Write the laboratory's fixtures of version 0.1, whose package was called `kbeta`, with that version on the path:

    PYTHONPATH=<version 0.1>/src python tests/old_state/write_lab.py tests/old_state/lab-v0.1

    study/             a results folder: two arms, two seeds
    <engine>/          a run stopped after its first checkpoint, as a kill leaves it, one per engine
    <engine>-end.json  what version 0.1 came to from there: the result of the run that was not stopped

The files then stay as they are. Platform and processor in study.json are replaced by "unknown".
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# Chunks are of 500 steps, and a checkpoint is taken between chunks.
SPEC = {"testbed": "sanity1", "preset": "smoke", "optimizer": "kbeta", "seed": 3, "settings": {"steps": 990}}
EVERY = 500


class Stop(Exception):
    pass


def stopped(spec, folder: Path) -> None:
    from kbeta.lab import train

    def on_progress(step: int, steps: int, loss: float) -> None:
        if any(folder.glob("checkpoint/step-*.npz")):
            raise Stop

    try:
        train.run(spec, folder, on_progress=on_progress, checkpoint_every=EVERY)
    except Stop:
        return
    raise AssertionError("the run ended before it was stopped")


def write(to: Path) -> None:
    from kbeta.lab import train
    from kbeta.lab.spec import RunSpec

    to.mkdir(parents=True)
    for engine in ("torch", "jax", "mlx"):
        spec = RunSpec(**SPEC, engine=engine)
        stopped(spec, to / engine)
        result = train.run(spec)
        (to / f"{engine}-end.json").write_text(result.model_dump_json(exclude={"seconds"}) + "\n")
    command = "study sanity1 --preset smoke --seeds 0-1 --optimizers kbeta,adam95 --no-report --out study"
    subprocess.run([sys.executable, "-m", "kbeta.cli", *command.split()], check=True, cwd=to)
    (to / "study" / ".lock").unlink()
    record = json.loads((to / "study" / "study.json").read_text())
    record["environment"].update(platform="unknown", processor="unknown")
    (to / "study" / "study.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
