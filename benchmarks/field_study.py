"""The study of the field's problems: K-β, Adam and rivals on PINNs and operators that others set, tuned alike.

    python benchmarks/field_study.py run OUT darcy|emulator|burgers|pinnacle [WORKERS]   again: goes on where it stopped
    python benchmarks/field_study.py keep OUT PROBLEM       the runs into benchmarks/field_study/PROBLEM.csv and .tar.xz
    python benchmarks/field_study.py pace PROBLEM           seconds per step, on an idle machine, into pace.csv
    python benchmarks/field_study.py tables                 those of docs/results.md, from what is kept

Five learning rates a factor √10 apart and three seeds tune each optimizer; ten other seeds compare them. If the best
rate of one is at the edge, all get more, once. `run` first unpacks what is kept, unless OUT/PROBLEM is there. The
rivals need `pip install pytorch-optimizer`. Where the runs shared a machine with other work, `pace` times the steps
apart; otherwise a step's time is the median of the compared runs.
"""

from __future__ import annotations

import csv
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from kept_runs import keep, unpack

from kourkoutas.lab.judging.analysis import Analysis, analyse
from kourkoutas.lab.judging.comparing import Contrast
from kourkoutas.lab.optimizers.looks import name_of
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.running import train
from kourkoutas.lab.specs.spec import RunSpec

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
# A third of the laptop presets or less, so that 900 runs take some three core-hours.
SIZES = {
    "burgers": {"steps": 5_000, "interior": 512, "boundary": 40, "initial": 80},
    "pinnacle": {"steps": 5_000, "interior": 512, "boundary": 64, "initial": 32},
    "darcy": {"epochs": 20},
    "emulator": {"steps": 2_000},
}
TUNING_SEEDS, SEEDS, TRIALS, WIDENINGS = "100-102", "0-9", 5, 1
BASELINE, REPEATS = "adam999", 3
PACE = KEPT / "pace.csv"


def command(out: Path, problem: str, workers: int) -> list[str]:
    tuned = ["--tune", f"lr={RATES[problem]}", "--trials", str(TRIALS), "--tune-seeds", TUNING_SEEDS]
    sizes = [word for name, value in SIZES[problem].items() for word in ("--set", f"{name}={value}")]
    return [
        *(sys.executable, "-m", "kourkoutas", "study", problem, "--preset", "laptop", "--engine", "torch", *sizes),
        *("--optimizers", ",".join(ARMS), *tuned, "--tune-budget", str(WIDENINGS), "--seeds", SEEDS),
        *("--workers", str(workers), "--out", str(out / problem)),
    ]


def run(out: Path, problem: str, workers: int) -> int:
    unpack(out, problem, KEPT)
    return subprocess.run(command(out, problem, workers), env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode


def paces() -> dict[tuple[str, str], float]:
    """{(problem, optimizer): microseconds per step} that `pace` has written."""
    if not PACE.exists():
        return {}
    with PACE.open(newline="") as file:
        return {(row["problem"], row["optimizer"]): float(row["microseconds_per_step"]) for row in csv.DictReader(file)}


def pace(problem: str) -> None:
    """Time the steps of every optimizer in turn, several times; nothing else should run."""
    short = {"epochs": 6} if problem == "darcy" else {"steps": 1_000}  # PINNs are compiled from there on
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(REPEATS):
        for arm in ARMS:
            spec = RunSpec(
                testbed=problem,
                preset="laptop",
                engine="torch",
                optimizer=arm,
                seed=100,
                settings={**SIZES[problem], **short},
            )
            found[arm].append(train.run(spec).seconds_per_step or math.nan)
    known = paces() | {(problem, arm): 1e6 * statistics.median(times) for arm, times in found.items()}
    with PACE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["problem", "optimizer", "microseconds_per_step"])
        writer.writerows([*key, f"{value:.0f}"] for key, value in known.items())


def tables() -> str:
    """One table per problem whose runs are kept, every optimizer beside Adam 0.999."""
    parts, known = [], paces()
    with tempfile.TemporaryDirectory() as scratch:
        for problem in RATES:
            if unpack(Path(scratch), problem, KEPT):
                snapshot = Snapshot.read(Path(scratch) / problem)
                first = analyse(snapshot, baseline=BASELINE, resamples=0)
                aim = next(arm.median for arm in first.arms if arm.label == BASELINE)
                found = analyse(snapshot, baseline=BASELINE, endpoints=[f"error:until={aim!r}"], resamples=0)
                own = {arm.label: 1e6 * (arm.seconds_per_step or math.nan) for arm in found.arms}
                parts.append(_table(problem, found, {arm: known.get((problem, arm), own[arm]) for arm in ARMS}))
    return "\n".join(parts)


def _table(problem: str, found: Analysis, microseconds: dict[str, float]) -> str:
    head = ("", "best lr", "error, median [quartiles]", "better than Adam 0.999 by", "seeds won", "p", "µs/step")
    head += ("reach Adam 0.999's error", "median seconds until then")
    lines = [f"### {problem}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    contrasts, until_aim = {c.treatment: c for c in found.primary.contrasts}, found.endpoints[-1]
    for arm in sorted(found.arms, key=lambda one: one.median):
        steps, c = until_aim.values[arm.label], contrasts.get(arm.label)
        cells = [name_of(arm.label), f"{arm.chosen['lr']:.2g}", f"{arm.median:.3g} [{arm.q1:.3g}, {arm.q3:.3g}]"]
        cells += ["", "", ""] if c is None else [_percent(c), f"{c.wins}/{c.n}", f"{c.p_holm:.2g}"]
        reached = sum(math.isfinite(step) for step in steps.values())
        seconds = until_aim.arms[arm.label]["median"].value * microseconds[arm.label] / 1e6
        until = f"{seconds:.2g}" if math.isfinite(seconds) else "–"
        cells += [f"{microseconds[arm.label]:.0f}", f"{reached}/{len(steps)}", until]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _percent(c: Contrast) -> str:
    if c.percent is None or c.percent.interval is None:
        return "–"
    low, high = c.percent.interval.low, c.percent.interval.high
    return f"{c.percent.value:+.0f} % [{low:+.0f}, {high:+.0f}]".replace("-", "−")


def main(argv: Sequence[str]) -> int:
    match argv:
        case ["run", out, problem, *workers] if problem in RATES:
            return run(Path(out), problem, int(workers[0]) if workers else 1)
        case ["keep", out, problem] if problem in RATES:
            sys.stdout.write(f"{keep(Path(out), problem, KEPT, 'error')} runs kept in {KEPT}\n")
        case ["pace", problem] if problem in RATES:
            pace(problem)
        case ["tables"]:
            sys.stdout.write(tables())
        case _:
            sys.stderr.write(__doc__ or "")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
