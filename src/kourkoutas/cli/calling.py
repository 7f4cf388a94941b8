"""From words of the command line to what the laboratory takes: plan, tuning, target, analysis, report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kourkoutas.lab.judging.analysis import Analysis
    from kourkoutas.lab.judging.targets import Target as Aim
    from kourkoutas.lab.specs.search_space import SearchSpace


def with_text(sets: list[str] | None, text: str | None) -> list[str]:
    """`--set` with the text of `--text`, named by its content too, so that a changed file is another configuration."""
    if text is None:
        return sets or []
    from kourkoutas.lab import corpus

    return [*(sets or []), *(f"{name}={value}" for name, value in corpus.pin(text).items())]


def make_tuning(
    tune: list[str] | None, trials: int | None, tune_seeds: str | None, budget: int | None, test_seeds: Sequence[int]
) -> SearchSpace | None:
    from kourkoutas.lab.planning import plan as planning
    from kourkoutas.lab.specs import search_space

    if not tune:
        for name, given in (("--trials", trials), ("--tune-seeds", tune_seeds), ("--tune-budget", budget)):
            if given is not None:
                raise ValueError(f"{name} {given} needs something to tune: add --tune lr=1e-4:1e-1, for example")
        return None
    return search_space.search_space(
        search_space.parse_tune(tune),
        trials=8 if trials is None else trials,
        seeds=planning.parse_seeds(tune_seeds or "100-102", "--tune-seeds"),
        test_seeds=test_seeds,
        budget=2 if budget is None else budget,
    )


def aim_of(target: str | None) -> Aim | None:
    from kourkoutas.lab.judging import targets

    return None if target is None else targets.parse_target(target)


def called_as() -> str:
    """This call, quoted for a shell."""
    name = Path(sys.argv[0]).name
    program = ["kbeta"] if name == "kbeta" else ["python", "-m", "kourkoutas"]
    return shlex.join([*program, *sys.argv[1:]])


def analyse_folder(
    folder: Path, endpoints: Sequence[str] | None = None, baseline: str | None = None, aim: Aim | None = None
) -> Analysis:
    from kourkoutas.lab.judging import analysis  # scipy takes a second, which the workers of a study need not wait for
    from kourkoutas.lab.results.snapshot import Snapshot

    return analysis.analyse(Snapshot.read(folder), endpoints=endpoints or (), baseline=baseline, target=aim)
