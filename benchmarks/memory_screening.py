"""The screening of docs/relative-memory-protocol.md: runs of the laboratory's testbeds with the prototypes, one by one.

    python benchmarks/memory_screening.py run OUT [JOBS]    make what JOBS asks for and OUT/runs.csv does not hold yet
    python benchmarks/memory_screening.py keep OUT          copy OUT/runs.csv to benchmarks/memory_screening.csv
    python benchmarks/memory_screening.py show [CSV]        the tables

JOBS (benchmarks/memory_screening.txt) has a line per job; it is read again before each run, so lines can be added:

    D relative scale=norm,beta2_max=0.995 lr=4e-3,8e-3 seeds=100,101

The training is the laboratory's own: laptop presets, PyTorch; C on JAX. D reads enwik8-4mb.txt in OUT. Only the tuning
seeds 100–107 can be run.
"""

from __future__ import annotations

import csv
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
JOBS, KEPT = HERE / "memory_screening.txt", HERE / "memory_screening.csv"
SEEDS = range(100, 108)
TESTBEDS = {
    "C": ("rare_trigger", "jax", "heldout_bce"),
    "D": ("char_lm", "torch", "bpc"),
    "B": ("heat3d", "torch", "final_loss"),
    "A": ("heat2d", "torch", "train_mse"),
}
COLUMNS = ("testbed", "arm", "options", "lr", "seed", "status", "endpoint", "seconds")


class Run(NamedTuple):
    testbed: str
    arm: str
    options: str  # NAME=VALUE,…, sorted
    lr: float
    seed: int


def jobs(text: str) -> Iterator[Run]:
    """The runs that lines of JOBS ask for, in their order."""
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        testbed, arm, *rest = words
        given = dict(word.split("=", 1) for word in rest if word.startswith(("lr=", "seeds=")))
        options = ",".join(
            sorted(o for word in rest if not word.startswith(("lr=", "seeds=")) for o in word.split(","))
        )
        if testbed not in TESTBEDS:
            raise ValueError(f"the testbed must be one of {', '.join(TESTBEDS)}; got {testbed!r} in {line!r}")
        seeds = [int(seed) for seed in given["seeds"].split(",")]
        if not set(seeds) <= set(SEEDS):
            raise ValueError(f"only seeds {SEEDS[0]} to {SEEDS[-1]} may be screened; got {given['seeds']!r}")
        for lr in given["lr"].split(","):
            for seed in seeds:
                yield Run(testbed, arm, options, float(lr), seed)


def read(path: Path) -> dict[Run, dict[str, str]]:
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {
            Run(row["testbed"], row["arm"], row["options"], float(row["lr"]), int(row["seed"])): row
            for row in csv.DictReader(file)
        }


def made(run: Run) -> dict[str, Any]:
    """Train once; the row of the table."""
    from kourkoutas.lab.running import train
    from kourkoutas.lab.specs.spec import RunSpec

    testbed, engine, metric = TESTBEDS[run.testbed]
    settings: dict[str, Any] = {"lr": run.lr}
    if run.testbed == "D":
        settings["text"] = "enwik8-4mb.txt"
    options = dict(option.split("=", 1) for option in run.options.split(",")) if run.options else {}
    spec = RunSpec(
        testbed=testbed,
        preset="laptop",
        engine=engine,
        optimizer=run.arm,
        seed=run.seed,
        settings=settings,
        options=options,
    )
    start = time.perf_counter()
    result = train.run(spec)
    value = result.metrics.get(metric, math.nan)
    return {
        **run._asdict(),
        "status": result.status,
        "endpoint": repr(value),
        "seconds": round(time.perf_counter() - start, 1),
    }


def register() -> None:
    """Make the prototypes arms of the laboratory, in this process."""
    from kourkoutas.lab.optimizers.rivals import RIVALS, Rival

    sys.path.insert(0, str(HERE))
    homes = {"torch": "relative_memory:Relative", "jax": "relative_memory:relative"}
    RIVALS["relative"] = Rival("relative", homes, {})


def add(table: Path, row: Mapping[str, Any]) -> None:
    """Append a run to a table, and print it."""
    new = not table.exists()
    with table.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)
    sys.stdout.write(" ".join(str(row[name]) for name in COLUMNS) + "\n")
    sys.stdout.flush()


def screen(out: Path, asked: Path) -> None:
    """Run by run until nothing is missing."""
    register()
    os.chdir(out)
    table = out / "runs.csv"
    while True:
        done = read(table)
        missing = next((run for run in jobs(asked.read_text()) if run not in done), None)
        if missing is None:
            return
        add(table, made(missing))


def tables(rows: Mapping[Run, Mapping[str, str]]) -> str:
    """A row per rule and testbed, a column per learning rate: the endpoints of the seeds, in their order."""
    lines = []
    for testbed in TESTBEDS:
        mine = [run for run in rows if run.testbed == testbed]
        rates = sorted({run.lr for run in mine})
        lines += [f"{testbed}", "  rule | " + " | ".join(f"{lr:g}" for lr in rates)]
        for rule in sorted({(run.arm, run.options) for run in mine}):
            cells = []
            for lr in rates:
                found = sorted(
                    (run for run in mine if (run.arm, run.options, run.lr) == (*rule, lr)), key=lambda r: r.seed
                )
                cells.append(" ".join(_short(rows[run]["endpoint"], testbed) for run in found))
            lines.append(f"  {' '.join(rule)} | " + " | ".join(cells))
    return "\n".join(lines) + "\n"


def _short(value: str, testbed: str) -> str:
    return f"{float(value):.4f}" if testbed in "CD" else f"{float(value):.1e}"


def main(argv: Sequence[str]) -> int:
    match argv:
        case ["run", out, *rest]:
            screen(Path(out).resolve(), Path(rest[0]).resolve() if rest else JOBS)
        case ["keep", out]:
            KEPT.write_bytes((Path(out) / "runs.csv").read_bytes())
        case ["show", *rest]:
            sys.stdout.write(tables(read(Path(rest[0]) if rest else KEPT)))
        case _:
            sys.stderr.write(__doc__ or "")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
