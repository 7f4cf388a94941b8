"""What the commands print: results on standard output, words about them on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kourkoutas.cli.app import err, out

if TYPE_CHECKING:
    from kourkoutas.lab.judging.analysis import Analysis
    from kourkoutas.lab.judging.targets import Target as Aim
    from kourkoutas.lab.planning.plan import Plan
    from kourkoutas.lab.results.store import StoredRun, Study
    from kourkoutas.lab.specs.spec import RunResult


def say(text: str) -> None:
    err.print(text, markup=False, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1, allow_nan=False) + "\n")


def print_run(plan: Plan, result: RunResult) -> None:
    from kourkoutas.lab.judging.fitting import Fitting
    from kourkoutas.lab.showing.progress import outcome

    spec = plan.specs()[0]
    shown = Fitting("", ["metric", "value"])
    for name, value in result.metrics.items():
        shown.add_row(name, f"{value:.6g}")
    title = f"{spec.testbed} {spec.optimizer} seed {spec.seed}: {outcome(result)} ({result.seconds:.1f} s)"
    out.print(title, markup=False, highlight=False, soft_wrap=True)
    if result.metrics:
        out.print(shown)


def print_study(runs: Sequence[StoredRun], judged: Analysis) -> None:
    from kourkoutas.lab.judging import tables
    from kourkoutas.lab.showing.progress import outcome

    for line in judged.fairness:
        out.print(line, markup=False, highlight=False)
    out.print(tables.render_arms(judged))
    for stored in runs:
        if stored.result is not None and stored.result.status == "failed":
            what = f"{stored.spec.optimizer} seed {stored.spec.seed}: {outcome(stored.result)}"
            out.print(f"{what} ({stored.folder / 'result.json'})", markup=False, highlight=False, soft_wrap=True)
    out.print(tables.render_analysis(judged))
    print_sensitivity(judged)


def print_sensitivity(judged: Analysis) -> None:
    from kourkoutas.lab.showing import sensitivity

    if judged.sensitivity:
        option = judged.sensitivity[0].option
        print_table(f"Sensitivity to {option}, on the tuning seeds", *sensitivity.table(judged.sensitivity))


def print_target(done: Study, runs: Sequence[StoredRun], aim: Aim) -> None:
    from kourkoutas.lab.judging import tuned
    from kourkoutas.lab.showing import reaching

    found, races = tuned.to_target(done, runs, aim)
    print_table(f"Until {aim}", *reaching.table(found))
    for race in races:
        out.print(race.sentence, markup=False, highlight=False)


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from kourkoutas.lab.judging.fitting import Fitting

    shown = Fitting("", head)
    for row in rows:
        shown.add_row(*row)
    out.print(f"\n{title}", style="bold", markup=False, highlight=False)
    out.print(shown)
