"""The records of the field's problems (docs/results.md): K-β, Adam and rivals on PINNs and operators, tuned alike.

    python benchmarks/field_study.py unpack OUT       what is kept, as the folder of the suite `field`
    kbeta suite OUT                                   its answer; --markdown: the tables of docs/results.md
    kbeta suite field --out OUT                       goes on with the runs, or makes them
    python benchmarks/field_study.py keep OUT         the runs into benchmarks/field_study/PROBLEM.csv and .tar.xz
    python benchmarks/field_study.py pace PROBLEM     microseconds per step, on an idle machine

`kourkoutas/lab/suites/shipped/field.toml` says what is made. Where runs shared a machine with other work, `pace` times
the steps of all optimizers in turn; what it found for Burgers is in pace.csv.
"""

from __future__ import annotations

import datetime
import math
import statistics
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kept_runs import keep, unpack

from kourkoutas.lab.results import files
from kourkoutas.lab.running import train
from kourkoutas.lab.specs.spec import RunSpec
from kourkoutas.lab.suites import asking
from kourkoutas.lab.suites.conducting import RECORD, SuiteRecord

KEPT = Path(__file__).parent / "field_study"
REPEATS = 3


def asked() -> dict[str, Any]:
    """The suite's file."""
    return tomllib.loads(asking.shipped()["field"])


def unpack_all(out: Path) -> list[str]:
    """Unpack every problem that OUT does not hold, and say that they belong together; their names."""
    suite = asked()
    out.mkdir(parents=True, exist_ok=True)
    done = [problem for problem in suite["studies"] if unpack(out, problem, KEPT)]
    if not (out / RECORD).exists():
        record = SuiteRecord(
            name="field",
            about=suite["about"],
            baseline=suite["baseline"],
            studies=list(suite["studies"]),
            command="kbeta suite field",
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )
        files.write_json(out / RECORD, record)
    return done


def pace(problem: str) -> str:
    """Time the steps of every optimizer in turn, several times; nothing else should run."""
    suite = asked()
    short = {"epochs": 6} if problem == "darcy" else {"steps": 1_000}  # PINNs are compiled from there on
    found: dict[str, list[float]] = {arm: [] for arm in suite["optimizers"]}
    for _ in range(REPEATS):
        for arm, times in found.items():
            spec = RunSpec(
                testbed=problem,
                preset=suite["preset"],
                engine=suite["engine"],
                optimizer=arm,
                seed=100,
                settings={**suite["studies"][problem]["settings"], **short},
            )
            times.append(train.run(spec).seconds_per_step or math.nan)
    rows = [f"{problem},{arm},{1e6 * statistics.median(times):.0f}" for arm, times in found.items()]
    return "\n".join(["problem,optimizer,microseconds_per_step", *rows, ""])


def main(argv: Sequence[str]) -> int:
    match argv:
        case ["unpack", out]:
            sys.stdout.write(f"unpacked into {out}: {', '.join(unpack_all(Path(out))) or 'nothing, all is there'}\n")
        case ["keep", out]:
            for problem in asked()["studies"]:
                sys.stdout.write(f"{problem}: {keep(Path(out), problem, KEPT, 'error')} runs kept in {KEPT}\n")
        case ["pace", problem] if problem in asked()["studies"]:
            sys.stdout.write(pace(problem))
        case _:
            sys.stderr.write(__doc__ or "")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
