"""Write the laboratory's fixtures of the version that is installed, or of 0.1, whose package was called `kbeta`:

    python -m tests.old_state.write_lab tests/old_state/lab-v0.2 v0.2
    PYTHONPATH=<version 0.1>/src python tests/old_state/write_lab.py tests/old_state/lab-v0.1 v0.1

    study/             a results folder: two arms, two seeds
    <engine>/          a run stopped after its first checkpoint, as a kill leaves it, one per engine
    <engine>-end.json  what that version came to from there: the result of the run that was not stopped

The files then stay as they are. In study.json of 0.1 platform and processor were replaced by "unknown".
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

# Chunks are of 500 steps, and a checkpoint is taken between chunks.
SPEC = {"testbed": "sanity1", "preset": "smoke", "optimizer": "kbeta", "seed": 3, "settings": {"steps": 990}}
EVERY = 500
SPECS = {
    "v0.1": SPEC,
    "v0.2": {**SPEC, "optimizer": "kbeta-exact", "options": {"lr_warmup": True}, "settings": {"steps": 510}},
}
STEPS = {"v0.1": [], "v0.2": ["--set", "steps=50"]}  # of the study


class Stop(Exception):
    pass


def lab(release: str) -> tuple[Any, Any, str]:
    """The training module, the class of specs and the module of the command."""
    if release == "v0.1":
        from kbeta.lab import train
        from kbeta.lab.spec import RunSpec

        return train, RunSpec, "kbeta.cli"
    from kourkoutas.lab.running import train
    from kourkoutas.lab.specs.spec import RunSpec

    return train, RunSpec, "kourkoutas"


def stopped(train: Any, spec: Any, folder: Path) -> None:
    def on_progress(step: int, steps: int, loss: float) -> None:
        if any(folder.glob("checkpoint/step-*.npz")):
            raise Stop

    try:
        train.run(spec, folder, on_progress=on_progress, checkpoint_every=EVERY)
    except Stop:
        return
    raise AssertionError("the run ended before it was stopped")


def write(to: Path, release: str) -> None:
    train, run_spec, program = lab(release)
    to.mkdir(parents=True)
    for engine in ("torch", "jax", "mlx"):
        spec = run_spec(**SPECS[release], engine=engine)
        stopped(train, spec, to / engine)
        result = train.run(spec)
        (to / f"{engine}-end.json").write_text(result.model_dump_json(exclude={"seconds"}) + "\n")
    command = "study sanity1 --preset smoke --seeds 0-1 --optimizers kbeta,adam95 --no-report --out study"
    subprocess.run([sys.executable, "-m", program, *command.split(), *STEPS[release]], check=True, cwd=to)
    (to / "study" / ".lock").unlink()
    for printed in (to / "study").rglob("output.txt"):
        printed.unlink()


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2])
