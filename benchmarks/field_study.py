"""The study of the field's problems: K-β, Adam and rivals on PINNs and operators that others set, tuned alike.

    python benchmarks/field_study.py run OUT darcy|emulator|burgers|pinnacle [WORKERS]   again: goes on where it stopped
    python benchmarks/field_study.py keep OUT PROBLEM       the runs into benchmarks/field_study/PROBLEM.csv and .tar.xz
    python benchmarks/field_study.py cost OUT PROBLEM       seconds per run of each arm so far, and core-hours in all

Five learning rates a factor √10 apart and three seeds tune each arm; ten other seeds compare them. If some arm's best
rate is at the edge, all get more, once. `run` first unpacks what is kept, unless OUT/PROBLEM is there. The rivals need
`pip install pytorch-optimizer`. One core for a worker: seconds of arms compare only where the machine was not shared.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from memory_trial import keep, unpack

from kourkoutas.lab.results.store import Study

KEPT = Path(__file__).parent / "field_study"
ARMS = (
    "kbeta",
    "kbeta-exact",
    "adam95",
    "adam95-warm",
    "adam999",
    "adam999-warm",
    "stableadamw",
    "adagc",
    "soap",
)
# The middle of the five rates is near the one that the problem's source takes, or above it.
RATES = {"darcy": "1e-3:1e-1", "emulator": "3e-4:3e-2", "burgers": "3e-4:3e-2", "pinnacle": "3e-4:3e-2"}
TUNING_SEEDS, SEEDS, TRIALS, WIDENINGS = "100-102", "0-9", 5, 1
RUNS = len(ARMS) * (TRIALS * 3 + 10)


def command(out: Path, problem: str, workers: int) -> list[str]:
    tuned = ["--tune", f"lr={RATES[problem]}", "--trials", str(TRIALS), "--tune-seeds", TUNING_SEEDS]
    return [
        *(sys.executable, "-m", "kourkoutas", "study", problem, "--preset", "laptop", "--engine", "torch"),
        *("--optimizers", ",".join(ARMS), *tuned, "--tune-budget", str(WIDENINGS), "--seeds", SEEDS),
        *("--workers", str(workers), "--out", str(out / problem)),
    ]


def run(out: Path, problem: str, workers: int) -> int:
    unpack(out, problem, KEPT)
    return subprocess.run(command(out, problem, workers), env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode


def cost(out: Path, problem: str) -> str:
    seconds = defaultdict(list)
    for one in Study.open(out / problem).every_run():
        if one.result is not None:
            seconds[one.spec.optimizer].append(one.result.seconds)
    if not seconds:
        return f"{problem}: no run is finished\n"
    lines = [f"{arm:14} {sum(s) / len(s):7.1f} s a run, {len(s)} runs" for arm, s in seconds.items()]
    mean = sum(sum(s) / len(s) for s in seconds.values()) / len(seconds)
    lines.append(f"{problem}: about {RUNS * mean / 3600:.1f} core-hours for {RUNS} runs, before any widening")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    match argv:
        case ["run", out, problem, *workers] if problem in RATES:
            return run(Path(out), problem, int(workers[0]) if workers else 1)
        case ["keep", out, problem] if problem in RATES:
            sys.stdout.write(f"{keep(Path(out), problem, KEPT)} runs kept in {KEPT}\n")
        case ["cost", out, problem] if problem in RATES:
            sys.stdout.write(cost(Path(out), problem))
        case _:
            sys.stderr.write(__doc__ or "")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
