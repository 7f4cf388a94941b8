"""What a study can be asked for: one table for the command line and for Python.

A field of `StudyOptions` is an argument of `kourkoutas.lab.study`, and an option of `kbeta study` of the same name,
which is given in words: `seeds="0-9"` and `seeds=range(10)` are the same. To add one, write the field here and use it
in `kourkoutas.lab.api`.

NOTE: `kbeta --help` reads this file and has to answer at once: nothing but Python is imported here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

Range = tuple[float, float] | tuple[float, float, Literal["log", "linear"]]

RUNS, TUNING, PLACE, OUTPUT = "What to run", "Tuning", "Where and how it runs", "Output"


@dataclass(frozen=True)
class Words:
    """How an argument is given on a command line.

    Attributes:
      help: what it is for.
      panel: of the help that it stands in.
      kind: type of its words.
      flag: its name there, where that is another than the argument's.
      metavar: how its value looks.
      show_default: what happens without it, where the default does not say so.
      minimum: of a number.
      completes: what the shell completes it with: "optimizer", "engine" or "preset".
      in_python: what to know besides `help` about the argument in Python.
    """

    help: str
    panel: str
    kind: Any
    flag: str | None = None
    metavar: str | None = None
    show_default: str | None = None
    minimum: int | None = None
    completes: str | None = None
    in_python: str = ""


def option(default: Any, help: str, panel: str = RUNS, kind: Any = str | None, **more: Any) -> Any:
    """A field with its words."""
    return dataclasses.field(default=default, metadata={"words": Words(help, panel, kind, **more)})


@dataclass(frozen=True)
class StudyOptions:
    """A study, as it was asked for and not yet understood."""

    train: str | Callable[..., Any]
    _: KW_ONLY
    seeds: str | Iterable[int] = option("0-9", "Seeds of the runs that are compared: 0-9 or 0,3,7.", kind=str)
    optimizers: str | Sequence[str | Callable[..., Any]] = option(
        (),
        "Separated by commas, your own as MODULE:NAME or FILE.py:NAME; the first is compared with the others.",
        show_default="the testbed's",
        completes="optimizer",
        in_python='A list, too, also of classes and functions: ["kbeta", Mine].',
    )
    engine: str | None = option(
        None,
        "torch, jax or mlx.",
        show_default="torch; your own function brings its framework",
        completes="engine",
    )
    preset: str | None = option(
        None, "smoke (seconds), laptop (minutes) or paper.", show_default="smoke", completes="preset"
    )
    settings: Mapping[str, Any] | Sequence[str] = option(
        (),
        "A setting (steps=500) or an optimizer's option (kbeta.alpha=0.9). Repeat for several.",
        kind=list[str] | None,
        flag="--set",
        metavar="NAME=VALUE",
        in_python='{"steps": 500, "kbeta.alpha": 0.9}.',
    )
    grid: Mapping[str, Any] | Sequence[str] = option(
        (),
        "One optimizer per value: kbeta.alpha=0.85,0.9 or a setting, lr=0.1,0.01.",
        kind=list[str] | None,
        metavar="NAME=V1,V2",
        in_python='{"lr": [0.1, 0.01]}.',
    )
    endpoint: str | None = option(
        None,
        "The logged metric that decides.",
        metavar="METRIC",
        show_default="what your function returns; a testbed's first endpoint",
    )
    log: bool = option(False, "For your own function: compare ratios instead of differences.", kind=bool)
    higher_is_better: bool = option(False, "For your own function: more is better, as for accuracies.", kind=bool)
    margin: str | None = option(
        None, "Differences smaller than this do not matter, and are called equal: 1%.", metavar="PERCENT"
    )
    count_failed: bool = option(
        False, "Count a failed run as the worst, for example with --timeout as a budget.", kind=bool
    )
    tune: Mapping[str, Range] | Sequence[str] = option(
        (),
        "Tune every optimizer alike on other seeds, then compare the best: lr=1e-4:1e-1. Repeat to tune several "
        "options.",
        TUNING,
        list[str] | None,
        metavar="NAME=LOW:HIGH",
        in_python='{"lr": (1e-4, 1e-1)}; a third entry "linear" spaces by difference instead of by ratio.',
    )
    trials: int = option(8, "How many values to try for each optimizer.", TUNING, int)
    tune_seeds: str | Iterable[int] = option(
        "100-102", "Seeds for tuning, none of those that are compared.", TUNING, str
    )
    tune_budget: int = option(2, "How often to widen the range when a best value is at its edge.", TUNING, int)
    workers: int | None = option(
        None, "How many runs at once; they share the cores.", PLACE, int | None, show_default="one per core", minimum=1
    )
    timeout: float | None = option(
        None, "Stop a run after SECONDS; it counts as failed.", PLACE, float | None, metavar="SECONDS"
    )
    memory: float | None = option(
        None, "Stop a run that takes more than GIB of memory; it counts as failed.", PLACE, float | None, metavar="GIB"
    )
    checkpoint_every: int | None = option(
        None,
        "Steps between checkpoints of a testbed run; 0 for none.",
        PLACE,
        int | None,
        show_default="one a minute",
        minimum=0,
    )
    retries: int | None = option(
        None, "How often to repeat a run whose worker was lost.", PLACE, int | None, show_default="0; on Ray 2"
    )
    retry_failed: bool = option(False, "Make failed runs again.", PLACE, bool)
    ray: str | None = option(
        None,
        "Make the runs on a Ray cluster: HOST:PORT, or auto for the one that runs here; without ADDRESS $RAY_ADDRESS, "
        "else a cluster of this machine.",
        PLACE,
        metavar="[ADDRESS]",
        in_python='"" is without ADDRESS.',
    )
    cpus_per_run: float | None = option(
        None, "Cores for each run on a Ray cluster.", PLACE, float | None, show_default="1"
    )
    gpus_per_run: float | None = option(
        None, "GPUs for each run on a Ray cluster.", PLACE, float | None, show_default="0"
    )
    storage: str | None = option(
        None,
        "A folder that all nodes of the Ray cluster share, or an fsspec address: runs of a lost node go on from there.",
        PLACE,
        metavar="PLACE",
    )
    out: str | Path | None = option(  # noqa: RUF009 - a field
        None, "Results folder.", OUTPUT, Path | None, show_default="results/TESTBED or results/FILE"
    )
    progress: bool = True


FIELDS = dataclasses.fields(StudyOptions)
WORDS: dict[str, Words] = {one.name: one.metadata["words"] for one in FIELDS if "words" in one.metadata}
DEFAULTS: dict[str, Any] = {one.name: one.default for one in FIELDS if one.default is not dataclasses.MISSING}
