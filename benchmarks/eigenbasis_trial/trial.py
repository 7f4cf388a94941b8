"""The records of the trial in protocol.md: what earlier studies have is reused, and what was made is kept.

    python benchmarks/eigenbasis_trial/trial.py start OUT    the runs of earlier studies, where the trial looks for them
    kbeta suite benchmarks/eigenbasis_trial/trial.toml --out OUT    makes the rest, or goes on with it
    python benchmarks/eigenbasis_trial/trial.py keep OUT     the runs into PROBLEM.csv and PROBLEM.tar.xz beside this file

A run is reused if its id is the one that the trial would give it, so with the same optimizer, options, settings and seed.
"""

from __future__ import annotations

import datetime
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
BENCHMARKS = HERE.parent
sys.path.insert(0, str(BENCHMARKS))

from kept_runs import keep, unpack  # noqa: E402

from kourkoutas.lab.planning.plan import Plan  # noqa: E402
from kourkoutas.lab.results import files  # noqa: E402
from kourkoutas.lab.running import executor  # noqa: E402
from kourkoutas.lab.suites import asking  # noqa: E402
from kourkoutas.lab.suites.conducting import RECORD, SuiteRecord  # noqa: E402

COMMAND = "kbeta suite benchmarks/eigenbasis_trial/trial.toml"
EARLIER = (HERE, BENCHMARKS / "field_study", BENCHMARKS.parent / "archive" / "memory_trial")
EVALUATED = {"B": None, "C": "heldout_bce", "D": "bpc", "A": "train_mse"}  # the curve that is kept; the fields': error


def possible_runs(plan: Plan) -> set[str]:
    """The ids of every run that a study may make: each value of the tuning, its widened range too, on every seed."""
    assert plan.tuning is not None
    (axis,) = plan.tuning.axes
    ids = set()
    for arm in plan.arms:
        for index in range(-plan.tuning.trials, 2 * plan.tuning.trials):
            valued = plan.valued(arm, {axis.name: axis.value(index, plan.tuning.trials)})
            ids |= {plan.spec(valued, seed).id for seed in (*plan.tuning.seeds, *plan.seeds)}
    return ids


def start(out: Path) -> None:
    """Copy the runs that earlier studies have made, and say that they belong to the trial."""
    suite = asking.read(str(HERE / "trial.toml"))
    for name, plan in suite.plans.items():
        wanted = possible_runs(plan)
        with executor.holding(plan, out / name, f"{COMMAND} # {name}"):
            pass  # which makes the folder
        reused = 0
        for source in EARLIER:
            with tempfile.TemporaryDirectory() as scratch:
                if not unpack(Path(scratch), name, source):
                    continue
                for run in (Path(scratch) / name / "runs").iterdir():
                    to = out / name / "runs" / run.name
                    if run.name in wanted and not to.exists():
                        shutil.copytree(run, to)
                        reused += 1
        sys.stdout.write(f"{name}: {reused} runs reused\n")
    record = SuiteRecord(
        name=suite.name,
        about=suite.about,
        baseline=suite.baseline,
        studies=list(suite.plans),
        command=COMMAND,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )
    files.write_json(out / RECORD, record)


def main(argv: Sequence[str]) -> int:
    match argv:
        case ["start", out]:
            start(Path(out))
        case ["keep", out]:
            for name in asking.read(str(HERE / "trial.toml")).plans:
                if (Path(out) / name / "study.json").exists():
                    count = keep(Path(out), name, HERE, EVALUATED.get(name, "error"))
                    sys.stdout.write(f"{name}: {count} runs kept in {HERE}\n")
        case _:
            sys.stderr.write(__doc__ or "")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
