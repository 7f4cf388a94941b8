"""Whole training steps, model and optimizer, of a testbed at the paper's size: K-β against Adam, in one run.

    python benchmarks/whole_step.py char_lm [--engine torch] [--rounds 15] [--length 512] [--out FILE.json]
    python benchmarks/whole_step.py heat3d

One round is one step of each optimizer on the same batch, in alternating order; reported are the median of the rounds'
ratios of Adam's time to K-β's (above 1: K-β is faster), its quartiles, and the peak memory of the process, which holds
all models with their optimizers. `cpu_ratio` is the same of processor time, which other load on the machine disturbs
less. `tracing` is the ratio of K-β's time with sun and β2 recorded to that without. `eigenbasis` is the ratio of all
rounds' time in the eigenbasis to K-β's, and `eigenbasis_256` that with `basis_limit=256`; it turns every tenth step, so
take a multiple of ten rounds. For the character model there are tokens per second.
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
from typing import Any

import numpy as np

SHORT = "kbeta-eigen[basis_limit=256]"
ARMS = ("kbeta", "adam95", "traced", "kbeta-eigen", SHORT)


def problem_of(testbed: Any, preset: str, length: int | None, precision: str) -> Any:
    from kourkoutas.lab import testbeds

    changes: dict[str, Any] = {}
    if testbed.name == "char_lm":
        changes["precision"] = precision
        if length is not None:
            changes |= {"lengths": "fixed", "longest": length, "eval_length": min(length, 256)}
    return testbed.problem(testbeds.settings_of(testbed, preset, changes), seed=0)


def measure(
    name: str, engine: str, rounds: int, length: int | None = None, precision: str = "float32", preset: str = "paper"
) -> dict[str, Any]:
    """Ratios of `rounds` rounds after two that are not counted."""
    from kourkoutas.lab import engines, testbeds
    from kourkoutas.lab.optimizers.recipes import recipe

    testbed = testbeds.get(name)
    problem = problem_of(testbed, preset, length, precision)
    E = engines.get(engine)
    trainers = {
        arm: E.trainer(
            problem.loss,
            problem.params,
            recipe("kbeta" if arm == "traced" else arm, testbed.kbeta, {"basis_limit": 256} if arm == SHORT else None),
            constants=problem.constants,
            compile=problem.compile,
            trace_every=int(arm == "traced"),
        )
        for arm in ARMS
    }
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

    def ratios(times: dict[str, list[float]], arm: str) -> list[float]:
        """Of an arm's time to K-β's."""
        return [a / k for a, k in zip(times[arm][2:], times["kbeta"][2:], strict=True)]

    low, middle, high = statistics.quantiles(ratios(seconds, "adam95"), n=4)
    unit = 1 if sys.platform == "darwin" else 1024
    found = {
        "testbed": testbed.name,
        "engine": engine,
        "preset": preset,
        "parameters": sum(p.size for p in problem.params.values()),
        "rounds": rounds,
        "ratio": middle,
        "ratio_quartiles": [low, high],
        "cpu_ratio": statistics.median(ratios(cpu, "adam95")),
        "tracing": statistics.median(ratios(seconds, "traced")),
        "eigenbasis": sum(taken["kbeta-eigen"]) / sum(taken["kbeta"]),
        "eigenbasis_256": sum(taken[SHORT]) / sum(taken["kbeta"]),
        "seconds": taken,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30,
        "load_average": os.getloadavg()[0],
    }
    if testbed.name == "char_lm":
        tokens = problem.batches(0, 1)[0]["ids"][:, 1:].size
        speeds = {arm: tokens / statistics.median(times) for arm, times in taken.items()}
        found |= {"precision": precision, "tokens_per_step": tokens, "tokens_per_second": speeds}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("testbed", nargs="?", default="char_lm", choices=("char_lm", "heat3d", "heat2d"))
    parser.add_argument("--engine", default="torch", choices=("torch", "jax", "mlx"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--length", type=int, help="of the character model's windows; without it they are drawn")
    parser.add_argument("--precision", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--preset", default="paper")
    parser.add_argument("--out", type=Path, help="write the JSON here instead of to standard output")
    given = parser.parse_args()
    if given.rounds < 2:
        parser.error(f"--rounds must be >= 2, for quartiles; got {given.rounds}")
    found = measure(given.testbed, given.engine, given.rounds, given.length, given.precision, given.preset)
    text = json.dumps(found, indent=1) + "\n"
    if given.out is None:
        sys.stdout.write(text)
    else:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
