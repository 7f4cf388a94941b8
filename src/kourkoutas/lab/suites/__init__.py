"""Suites: several studies with the same optimizers, and one answer over all of them.

    from kourkoutas.lab import load_suite, suite

    problems = [{"train": "darcy", "tune": {"lr": (1e-3, 1e-1)}}, {"train": "burgers", "tune": {"lr": (3e-4, 3e-2)}}]
    result = suite(problems, optimizers=["kbeta", "adam999"], seeds=range(10), out="results/field")
    result                       # in a notebook: the answer, the ratios and the problems
    result.summary()             # one row per optimizer
    result.problems()            # one row per optimizer and problem

`asking` says what a suite is, `conducting` makes it, `across` and `judging` have its statistics, `analysis` the answer,
`showing` and `page` its views. A suite stands above the study: everything here is made of ordinary results folders.
"""

from __future__ import annotations

import contextlib
import functools
import html
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kourkoutas.lab.errors import in_python
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.running.executor import choose_executor
from kourkoutas.lab.specs.study_options import PLACE, WORDS
from kourkoutas.lab.suites import asking, conducting
from kourkoutas.lab.suites.asking import Suite

if TYPE_CHECKING:  # scipy takes a second, which the workers need not wait for
    import pandas as pd
    from rich.console import Console

    from kourkoutas.lab.suites.analysis import SuiteAnalysis

PLACES = tuple(name for name, words in WORDS.items() if words.panel == PLACE)


def suite(
    studies: str | Path | Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]],
    *,
    baseline: str | None = None,
    out: str | Path | None = None,
    progress: bool = True,
    **shared: Any,
) -> SuiteResult:
    """Make several studies with the same optimizers, and answer them together; the same call again resumes.

    Args:
      studies: FILE.toml, the name of a suite that is shipped ("paper", "field", "smoke"), or the arguments of `study`
        for each problem: a list of them, or {name: arguments}.
      baseline: the optimizer that the others are compared with; by default the second.
      out: folder of the suite; by default results/NAME.
      progress: show it, on standard error.
      shared: arguments of `study` that hold for all studies, `optimizers` and `seeds` among them, and those that say
        where runs are made, as `workers` and `ray`.
    """
    from rich.console import Console

    place = {name: shared.pop(name) for name in PLACES if name in shared}
    with in_python():
        if not isinstance(studies, str | Path):
            asked = asking.make(studies, baseline=baseline, **shared)
        elif shared:
            raise ValueError(f"`{next(iter(shared))}` is said in the suite's file; change it there")
        else:
            asked = asking.read(str(studies))
        folder = Path("results") / asked.name if out is None else Path(out)
        console = Console(stderr=True, quiet=not progress)
        run(asked, folder, console=console, command=f"kourkoutas.lab.suite({asked.name!r}, ...)", **place)
        return load_suite(folder, baseline=baseline)


def run(
    asked: Suite,
    out: Path,
    *,
    console: Console,
    command: str,
    pages: bool = True,
    retry_failed: bool = False,
    checkpoint_every: int | None = None,
    memory: float | None = None,
    **place: Any,
) -> None:
    """Make the studies of a suite by one executor, which ends with it."""
    executor, retries = choose_executor(memory_per_run=memory, **place)
    with contextlib.redirect_stdout(sys.stderr), contextlib.closing(executor):  # Ray tells there of lost nodes
        conducting.conduct(
            asked,
            out,
            executor=executor,
            retries=retries,
            retry_failed=retry_failed,
            checkpoint_every=checkpoint_every,
            console=console,
            command=command,
            pages=pages,
        )


def load_suite(
    out: str | Path | Sequence[str | Path], *, baseline: str | None = None, margin: float | None = None
) -> SuiteResult:
    """The suite in a folder, or several studies' folders, to be answered together."""
    if not isinstance(out, str | Path):
        from kourkoutas.lab.suites.analysis import snapshots_of

        return SuiteResult(snapshots_of([Path(one) for one in out]), Path.cwd(), baseline=baseline, margin=margin)
    folder = Path(out)
    record = conducting.read_record(folder)
    found = conducting.read_studies(folder, record)
    missing = [name for name in record.studies if name not in found]
    about = {"name": record.name, "about": record.about, "missing": missing}
    return SuiteResult(found, folder, baseline=baseline or record.baseline, margin=margin, **about)


class SuiteResult:
    """A suite and what it shows; in a notebook, its display.

    Attributes:
      path: its folder.
    """

    def __init__(self, studies: Mapping[str, Snapshot], path: Path, **how: Any) -> None:
        self.snapshots, self.path, self._how = studies, path, how

    @functools.cached_property
    def analysis(self) -> SuiteAnalysis:
        """The answer: the object that every view here is made from."""
        from kourkoutas.lab.suites.analysis import analyse_suite

        return analyse_suite(self.snapshots, **self._how)

    def summary(self) -> pd.DataFrame:
        """One row per optimizer: its ratio to the baseline over all problems, and on how many it is ahead."""
        import pandas as pd

        from kourkoutas.lab.suites.page import standing_rows

        return pd.DataFrame(standing_rows(self.analysis.standings))

    def problems(self) -> pd.DataFrame:
        """One row per optimizer and problem."""
        import pandas as pd

        from kourkoutas.lab.suites.page import rows

        return pd.DataFrame(rows(self.analysis))

    def profile(self) -> pd.DataFrame:
        """One row per optimizer and problem: its factor of the best, in order, and the share of problems so far."""
        import pandas as pd

        rows = []
        for arm, factors in self.analysis.profile.items():
            for k, factor in enumerate(factors, start=1):
                rows.append({"optimizer": arm, "factor": factor, "share": k / len(factors)})
        return pd.DataFrame(rows)

    def markdown(self) -> str:
        """The answer and every problem as tables of Markdown."""
        from kourkoutas.lab.suites.showing import markdown

        return markdown(self.analysis)

    def report(self) -> Path:
        """Write suite.html into the folder, and say where."""
        from kourkoutas.lab.suites import page

        return page.write(self.analysis, self.path)

    def to_json(self) -> dict[str, Any]:
        """The answer for machines."""
        from kourkoutas.lab.judging.values import to_json

        found: dict[str, Any] = to_json(self.analysis)
        return found

    def __repr__(self) -> str:
        found = self.analysis
        return "\n".join([f"Suite {found.name} in {self.path}", found.headline, *found.answers])

    def _repr_html_(self) -> str:
        """For notebooks: the answer, the ratios, and every problem."""
        from kourkoutas.lab.suites import page, showing

        found = self.analysis
        parts = [f"<p><b>{html.escape(found.headline)}</b></p>"]
        if found.standings:
            parts.append(str(page.ratios(found).svg))
            head, rows = showing.on_each(found)
            cells = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
            parts.append(f"<table><tr>{''.join(f'<th>{html.escape(name)}</th>' for name in head)}</tr>{cells}</table>")
        return f"<div>{''.join(parts)}</div>"
