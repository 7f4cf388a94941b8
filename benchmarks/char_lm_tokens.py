"""Whole training steps of the paper-size character model: tokens per second of K-β against Adam, in one run.

    python benchmarks/char_lm_tokens.py [--engine torch] [--rounds 15] [--length 512] [--out FILE.json]

One round is one step of each optimizer on the same windows, in alternating order; reported are the median of the
rounds' ratios (above 1: K-β is faster), its quartiles, median tokens per second, and the peak memory of the process,
which holds both models with their optimizers. `cpu_ratio` is the same of processor time, which other load
on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path

import numpy as np

ARMS = ("kbeta", "adam95")


def measure(
    engine: str, rounds: int, length: int, precision: str = "float32", preset: str = "paper"
) -> dict[str, object]:
    """Ratios and tokens per second of `rounds` rounds after two that are not counted."""
    from kbeta.lab import engines, testbeds
    from kbeta.lab.optimizers import recipe

    testbed = testbeds.get("char_lm")
    changes = {"lengths": "fixed", "longest": length, "eval_length": min(length, 256), "precision": precision}
    problem = testbed.problem(testbeds.settings_of(testbed, preset, changes), seed=0)
    E = engines.get(engine)
    trainers = {arm: E.trainer(problem.loss, problem.params, recipe(arm, testbed.kbeta)) for arm in ARMS}
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    cpu: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for step in range(rounds + 2):
        batch, lr = problem.batches(step, step + 1), problem.lr(np.array([step]))
        for arm in ARMS if step % 2 else reversed(ARMS):
            start, used = time.perf_counter(), time.process_time()
            trainers[arm].run(batch, lr)
            seconds[arm].append(time.perf_counter() - start)
            cpu[arm].append(time.process_time() - used)
    taken = {arm: times[2:] for arm, times in seconds.items()}
    ratios, cpu_ratios = (
        [a / k for k, a in zip(times["kbeta"][-rounds:], times["adam95"][-rounds:], strict=True)]
        for times in (seconds, cpu)
    )
    tokens = problem.batches(0, 1)[0]["ids"][:, 1:].size  # type: ignore[index]
    low, middle, high = statistics.quantiles(ratios, n=4)
    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "engine": engine,
        "preset": preset,
        "precision": precision,
        "parameters": sum(p.size for p in problem.params.values()),
        "tokens_per_step": tokens,
        "rounds": rounds,
        "tokens_per_second": {arm: tokens / statistics.median(times) for arm, times in taken.items()},
        "ratio": middle,
        "ratio_quartiles": [low, high],
        "cpu_ratio": statistics.median(cpu_ratios),
        "seconds": taken,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30,
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="torch", choices=("torch", "jax", "mlx"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--out", type=Path, help="write the JSON here instead of to standard output")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error(f"--rounds must be >= 2, for quartiles; got {given.rounds}")
    text = json.dumps(measure(given.engine, given.rounds, given.length, given.precision, given.preset), indent=1)
    if given.out is None:
        sys.stdout.write(text + "\n")
    else:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
