"""The screening of `basis="eigen"`: runs that settle its defaults, before anything is compared.

    python benchmarks/eigenbasis_screening.py run OUT [PROBLEM ...]   make what JOBS asks for and OUT/runs.csv lacks
    python benchmarks/eigenbasis_screening.py keep OUT                copy OUT/runs.csv beside this file
    python benchmarks/eigenbasis_screening.py show [CSV]              a table per problem

JOBS (benchmarks/eigenbasis_screening.txt) has a line per job; it is read again before each run, so lines can be added,
and several processes can share one OUT:

    D kbeta-eigen beta1=0.95,basis_every=5 lr=2e-3,4e-3 seeds=100,101

Training is the laboratory's own, on PyTorch, at the sizes of the trial. D reads OUT/enwik8-4mb.txt. Only the tuning
seeds 100–107 can be run.
"""

from __future__ import annotations

import csv
import fcntl
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
JOBS, KEPT = HERE / "eigenbasis_screening.txt", HERE / "eigenbasis_screening.csv"
SEEDS = range(100, 108)


class Problem(NamedTuple):
    """A testbed of the laboratory, its endpoint, and the settings of the trial."""

    testbed: str
    endpoint: str
    settings: dict[str, Any]


PROBLEMS = {
    "A": Problem("heat2d", "train_mse", {}),
    "B": Problem("heat3d", "final_loss", {}),
    "C": Problem("rare_trigger", "heldout_bce", {}),
    "D": Problem("char_lm", "bpc", {"text": "enwik8-4mb.txt"}),
    "darcy": Problem("darcy", "error", {"epochs": 20}),
    "emulator": Problem("emulator", "error", {"steps": 2_000}),
    "burgers": Problem("burgers", "error", {"steps": 5_000, "interior": 512, "boundary": 40, "initial": 80}),
    "wave": Problem("pinnacle", "error", {"steps": 5_000, "interior": 512, "boundary": 64, "initial": 32}),
}


class Run(NamedTuple):
    """One run, as a line of the table names it."""

    problem: str
    optimizer: str
    options: str  # NAME=VALUE,…, sorted
    lr: float
    seed: int


COLUMNS = (*Run._fields, "status", "endpoint", "seconds")


def asked(text: str) -> Iterator[Run]:
    """The runs that lines of JOBS ask for, in their order."""
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if not words:
            continue
        problem, optimizer, *rest = words
        if problem not in PROBLEMS:
            raise ValueError(f"the problem must be one of {', '.join(PROBLEMS)}; got {problem!r} in {line!r}")
        given = {"lr": "", "seeds": ""}
        options: list[str] = []
        for word in rest:
            name, _, value = word.partition("=")
            if name in given:
                given[name] = value
            else:
                options += word.split(",")
        seeds = [int(seed) for seed in given["seeds"].split(",")]
        if not set(seeds) <= set(SEEDS):
            raise ValueError(f"only seeds {SEEDS[0]} to {SEEDS[-1]} may be screened; got {given['seeds']!r}")
        for lr in given["lr"].split(","):
            for seed in seeds:
                yield Run(problem, optimizer, ",".join(sorted(options)), float(lr), seed)


def read(path: Path) -> dict[Run, dict[str, str]]:
    """The runs of a table."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {}
    for row in rows:
        found[Run(row["problem"], row["optimizer"], row["options"], float(row["lr"]), int(row["seed"]))] = row
    return found


def made(run: Run) -> dict[str, Any]:
    """Train once; the row of the table."""
    from kourkoutas.lab.running import train
    from kourkoutas.lab.specs.spec import RunSpec

    problem = PROBLEMS[run.problem]
    options = dict(option.split("=", 1) for option in run.options.split(",")) if run.options else {}
    spec = RunSpec(
        testbed=problem.testbed,
        preset="laptop",
        engine="torch",
        optimizer=run.optimizer,
        seed=run.seed,
        settings={**problem.settings, "lr": run.lr},
        options=options,
    )
    start = time.perf_counter()
    result = train.run(spec)
    value = result.metrics.get(problem.endpoint, math.nan)
    seconds = round(time.perf_counter() - start, 1)
    return {**run._asdict(), "status": result.status, "endpoint": repr(value), "seconds": seconds}


class Table:
    """OUT/runs.csv, and which runs other processes are making: these hold a lock on a file each."""

    def __init__(self, out: Path) -> None:
        self.path, self.locks = out / "runs.csv", out / "running"
        self.locks.mkdir(parents=True, exist_ok=True)

    def take(self, wanted: list[Run]) -> tuple[Run, Any] | None:
        """A run that nobody has made or is making, with the lock that says so."""
        for run in wanted:
            if run in read(self.path):
                continue
            lock = (self.locks / "_".join(map(str, run)).replace("/", "-")).open("a")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                continue
            if run not in read(self.path):
                return run, lock
        return None

    def add(self, row: dict[str, Any]) -> None:
        with self.path.open("a", newline="") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if file.tell() == 0:
                writer.writeheader()
            writer.writerow(row)
        sys.stdout.write(" ".join(str(row[name]) for name in COLUMNS) + "\n")
        sys.stdout.flush()


def screen(out: Path, problems: Sequence[str]) -> None:
    """Run by run until nothing is missing."""
    out.mkdir(parents=True, exist_ok=True)
    table = Table(out)
    os.chdir(out)
    while True:
        wanted = [run for run in asked(JOBS.read_text()) if not problems or run.problem in problems]
        found = table.take(wanted)
        if found is None:
            return
        run, lock = found
        table.add(made(run))
        lock.close()


def tables(rows: dict[Run, dict[str, str]]) -> str:
    """A row per optimizer and its options, a column per learning rate: the endpoints of the seeds, in their order."""
    lines = []
    for problem in PROBLEMS:
        mine = [run for run in rows if run.problem == problem]
        if not mine:
            continue
        rates = sorted({run.lr for run in mine})
        lines += [
            "",
            f"{problem}",
            "| | " + " | ".join(f"{lr:g}" for lr in rates) + " |",
            "|---" * (len(rates) + 1) + "|",
        ]
        for optimizer, options in sorted({(run.optimizer, run.options) for run in mine}):
            cells = []
            for lr in rates:
                same = [run for run in mine if (run.optimizer, run.options, run.lr) == (optimizer, options, lr)]
                cells.append(", ".join(f"{float(rows[run]['endpoint']):.4g}" for run in sorted(same)))
            lines.append(f"| {optimizer} {options} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    match argv:
        case ["run", out, *problems]:
            screen(Path(out).resolve(), problems)
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
