"""How often the laboratory's verdicts are wrong, and how often they find a planted difference, on simulated studies.

    PYTHONPATH=. python benchmarks/error_rates.py [STUDIES]      from the repository's root; 1,000 studies of each kind

Two optimizers or three, 8 learning rates, 3 tuning seeds and 10 test seeds, noise of size 1 at a loss of 100, and a
seed's own effect of size 3, which all optimizers share (`tests/lab/simulated_study.py`). Each cell is in percent of the
studies, first where the loss depends little on the learning rate, then where it depends much.

    primary      equal optimizers: a clear difference on the endpoint that decides
    any          equal optimizers: a clear difference anywhere, which a headline could say
    equal        optimizers that differ by just more than a margin of 2 %: they are called equal
    found 2, 3   the first optimizer is better by 2 or 3: it is called better

    PYTHONPATH=. python benchmarks/error_rates.py suites [SUITES]

Suites of four such studies (`tests/lab/simulated_suite.py`), every optimizer against the last: in percent of the suites
of equal optimizers, a clear difference over all problems, on any problem, and anywhere; then how often an optimizer
that is better by 2 on every problem is called better over all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tests.lab import simulated_suite
from tests.lab.simulated_study import KINDS, counts

CURVATURES = (2.0, 10.0)  # little, much
# 2 % of the baseline's loss at the best of its learning rates is 2.0003 where it depends little, 2.003 where much.
AT_MARGIN = 2.01


COLUMNS: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "primary": ("primary", {}),
    "any": ("any", {}),
    "equal": ("equal", {"gap": AT_MARGIN, "margin": 2.0}),
    "found 2": ("better", {"gap": 2.0}),
    "found 3": ("better", {"gap": 3.0}),
}


def table(studies: int, tell: Callable[[str], object]) -> str:
    """The table; every row of cells is told as soon as it is known."""
    cells: dict[str, dict[str, list[float]]] = {name: {column: [] for column in COLUMNS} for name in KINDS}
    for changes in ({}, COLUMNS["equal"][1], COLUMNS["found 2"][1], COLUMNS["found 3"][1]):
        own = {column: said for column, (said, needs) in COLUMNS.items() if needs == changes}
        for name, of in KINDS.items():
            for curvature in CURVATURES:
                found = counts(replace(of, curvature=curvature, **changes), studies)
                for column, said in own.items():
                    cells[name][column].append(100 * found[said] / studies)
            tell("; ".join([name, *(f"{column} {_shown(cells[name][column])}" for column in own)]))
    lines = [f"| studies | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    lines += [f"| {name} | {' | '.join(map(_shown, row.values()))} |" for name, row in cells.items()]
    return "\n".join(lines)


def table_of_suites(suites: int, tell: Callable[[str], object]) -> str:
    lines = ["| suites | over all | on a problem | any | found 2 |", "|---|---|---|---|---|"]
    for name, of in simulated_suite.KINDS.items():
        equal = simulated_suite.counts(of, suites)
        better = simulated_suite.counts(replace(of, gap=2.0), suites)
        counts = [equal["across"], equal["problem"], equal["any"], better["first"]]
        lines.append(f"| {name} | {' | '.join(f'{100 * count / suites:.1f}' for count in counts)} |")
        tell(lines[-1])
    return "\n".join(lines)


def _shown(shares: Sequence[float]) -> str:
    return " / ".join(f"{share:.1f}" for share in shares)


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    words = sys.argv[1:]
    of_suites = words[:1] == ["suites"]
    count = int(words[-1]) if words and words[-1].isdigit() else 1_000
    sys.stdout.write((table_of_suites if of_suites else table)(count, _tell) + "\n")
