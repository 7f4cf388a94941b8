"""How often the laboratory's verdicts are wrong, and how often they find a planted difference, on simulated studies.

    PYTHONPATH=. python benchmarks/error_rates.py [STUDIES]      from the repository's root; 1,000 studies of each kind

Two optimizers or three, 8 learning rates, 3 tuning seeds and 10 test seeds, noise of size 1 at a loss of 100, and a
seed's own effect of size 3, which all optimizers share (`tests/lab/simulated_study.py`). Each cell is in percent of the
studies, first where the loss depends little on the learning rate, then where it depends much.

    primary    equal optimizers: a clear difference on the endpoint that decides
    any        equal optimizers: a clear difference anywhere, which a headline could say
    found 2, 3 the first optimizer is better by 2 or 3: it is called better
    equal      optimizers that differ by just more than a margin of 2 %: they are called equal
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from tests.lab.simulated_study import KINDS, Simulation, counts

CURVATURES = (2.0, 10.0)  # little, much
# 2 % of the baseline's loss at the best of its learning rates is 2.0003 where it depends little, 2.003 where much.
AT_MARGIN = 2.01


def cell(of: Simulation, said: str, studies: int) -> str:
    shares = [100 * counts(replace(of, curvature=curvature), studies)[said] / studies for curvature in CURVATURES]
    return " / ".join(f"{share:.1f}" for share in shares)


def table(studies: int, tell: Callable[[str], object]) -> None:
    """Every line as soon as it is known."""
    tell("| studies | primary | any | found 2 | found 3 | equal |\n|---|---|---|---|---|---|\n")
    for name, of in KINDS.items():
        cells = [cell(of, said, studies) for said in ("primary", "any")]
        cells += [cell(replace(of, gap=gap), "better", studies) for gap in (2.0, 3.0)]
        cells.append(cell(replace(of, gap=AT_MARGIN, margin=2.0), "equal", studies))
        tell(f"| {name} | {' | '.join(cells)} |\n")


if __name__ == "__main__":

    def told(line: str) -> None:
        sys.stdout.write(line)
        sys.stdout.flush()

    table(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000, told)
