"""Time of one Heat2D training step in block mode against full masked attention, as ratios inside one run.

| row       | attention of each layer                                                                   |
|-----------|-------------------------------------------------------------------------------------------|
| block     | keys and values of the known frames only, multiplied into the query and output maps first |
| full      | keys and values of all frames, and a frames × frames mask                                 |

A step is loss, gradient and Adam's update. The rows take turns, and the table gives medians of wall and of processor
time; the paper's size unless --set says otherwise:

    python benchmarks/heat2d_step.py --engine torch --threads 2 --repeats 5 --json heat2d_step.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="torch", choices=("torch", "jax", "mlx"))
    parser.add_argument("--preset", default="paper", choices=("smoke", "laptop", "paper"))
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of the testbed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    # Frameworks read these when they are imported.
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    if options.threads == 1:
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

    import numpy as np

    from kourkoutas.lab import engines, testbeds
    from kourkoutas.lab.optimizers import recipes
    from kourkoutas.lab.testbeds.heat2d import model

    testbed = testbeds.get("heat2d")
    changes = dict(text.split("=", 1) for text in options.set)
    # A step takes as long on any numbers: a few random cases spare the making of the data.
    rng = np.random.default_rng(0)
    E = engines.get(options.engine)
    trainers: dict[str, Any] = {}
    batch: dict[str, Any] = {}
    for row, shortcut in (("block", True), ("full", False)):
        s = testbeds.settings_of(testbed, options.preset, {**changes, "mask": "block", "shortcut": shortcut})
        problem = testbed.problem(s, 0)
        batch = {
            "frames": rng.random((1, s.batch, s.frames, s.nodes), np.float32),
            "alpha": np.full((1, s.batch), 0.05, np.float32),
            "dt": np.full((1, s.batch), 0.1 / (s.grid - 1) ** 2 / 0.05, np.float32),
        }
        trainers[row] = E.trainer(
            model.Objective(s),
            problem.params,
            recipes.recipe("adam95", testbed.kbeta),
            constants=model.constants(s),
        )
        trainers[row].run(batch, np.array([1e-4]))
    wall: dict[str, list[float]] = {row: [] for row in trainers}
    processor: dict[str, list[float]] = {row: [] for row in trainers}
    for _ in range(options.repeats):
        for row, trainer in trainers.items():
            w, p = time.perf_counter(), time.process_time()
            trainer.run(batch, np.array([1e-4]))
            wall[row].append(time.perf_counter() - w)
            processor[row].append(time.process_time() - p)
    seconds = {row: statistics.median(times) for row, times in wall.items()}
    used = {row: statistics.median(times) for row, times in processor.items()}
    found = {
        "engine": options.engine,
        "preset": options.preset,
        "settings": changes,
        "threads": options.threads,
        "repeats": options.repeats,
        "seconds": seconds,
        "processor_seconds": used,
        "full_over_block": seconds["full"] / seconds["block"],
        "full_over_block_processor": used["full"] / used["block"],
    }
    for row in trainers:
        print(f"{row:6} {seconds[row]:8.3f} s   {used[row]:8.3f} s processor")
    print(f"full / block: {found['full_over_block']:.2f} wall, {found['full_over_block_processor']:.2f} processor")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
