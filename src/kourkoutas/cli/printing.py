"""What the commands print: results on standard output, words about them on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kourkoutas.cli.app import err, out

if TYPE_CHECKING:
    from kourkoutas.lab.planning.plan import Plan
    from kourkoutas.lab.specs.spec import RunResult


def say(text: str) -> None:
    err.print(text, markup=False, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1, allow_nan=False) + "\n")


def print_run(plan: Plan, result: RunResult) -> None:
    from kourkoutas.lab.showing.fitting import Fitting
    from kourkoutas.lab.showing.progress import outcome

    spec = plan.specs()[0]
    shown = Fitting("", ["metric", "value"])
    for name, value in result.metrics.items():
        shown.add_row(name, f"{value:.6g}")
    title = f"{spec.testbed} {spec.optimizer} seed {spec.seed}: {outcome(result)} ({result.seconds:.1f} s)"
    out.print(title, markup=False, highlight=False, soft_wrap=True)
    if result.metrics:
        out.print(shown)


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from kourkoutas.lab.showing.fitting import Fitting

    shown = Fitting("", head)
    for row in rows:
        shown.add_row(*row)
    out.print(f"\n{title}", style="bold", markup=False, highlight=False)
    out.print(shown)
