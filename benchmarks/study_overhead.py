"""What an executor costs: runs that only wait, made by local processes or by Ray.

    python benchmarks/study_overhead.py [--ray [ADDRESS]] [--runs 500] [--seconds 1] [--workers 2]

The overhead of a run is the time of a worker that is not the run's own: workers · (time of the study) / runs - seconds.
The time goes from when the executor is there to the last result; starting it (Ray) is shown beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from pathlib import Path
from typing import Any

from kourkoutas.lab import api
from kourkoutas.lab.planning import plan as planning
from kourkoutas.lab.running.executor import choose_executor

TASK = """
import time

def train(trial):
    time.sleep(trial.settings["seconds"])
    return 1.0
"""


class Clock:
    """Notes when the executor was there, and how many runs it makes at once."""

    def planned(self, total: int, kept: int, failed: int, workers: int) -> None:
        self.ready, self.workers = time.perf_counter(), workers

    def started(self, *_: Any) -> None: ...

    def progress(self, *_: Any) -> None: ...

    def finished(self, *_: Any) -> None:
        self.last = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--ray", nargs="?", const="", default=None, metavar="ADDRESS")
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--workers", type=int, default=2, help="local processes, without --ray")
    given = parser.parse_args()
    workers = given.workers if given.ray is None else None
    executor, retries = choose_executor(ray=given.ray, workers=workers)
    with contextlib.closing(executor), tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "task.py"
        file.write_text(TASK)
        seeds = range(given.runs)
        made = planning.plan_study(
            f"{file}:train", seeds=seeds, optimizers=["kbeta"], options={"seconds": str(given.seconds)}
        )
        clock, start = Clock(), time.perf_counter()
        out = api.execute(
            made, Path(folder) / "out", command="benchmark", executor=executor, retries=retries, observer=clock
        )
        ends = [run.result.status for run in out.runs if run.result is not None]
    took = clock.last - clock.ready
    overhead = clock.workers * took / given.runs - given.seconds
    print(f"{'Ray' if given.ray is not None else 'local processes'}: {ends.count('ok')} of {given.runs} runs ok")
    print(f"{clock.workers} workers there after {clock.ready - start:.1f} s, runs took {took:.1f} s")
    print(f"overhead per run: {1000 * overhead:.1f} ms")


if __name__ == "__main__":
    main()
