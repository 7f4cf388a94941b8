"""What a suite is asked for: several studies with the same optimizers, from a file, a name of ours, or Python.

    about = "PINNs and operators that others set"
    optimizers = ["kbeta", "adam95", "adam999"]
    baseline = "adam999"
    seeds = "0-9"
    preset = "laptop"
    trials = 5

    [studies.darcy]
    tune = { lr = [1e-3, 1e-1] }
    settings = { epochs = 20 }

    [studies.mine]
    train = "my_task.py:train"
    tune = { lr = [1e-4, 1e-1] }

The keys are the arguments of `kourkoutas.lab.study`. What stands above the first study holds for all of them, and a
study may say it otherwise; only the optimizers are the same everywhere. A study trains what `train` names, by default
the testbed of the study's own name; FILE.py is looked for beside the suite's file.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from kourkoutas.lab import api
from kourkoutas.lab.errors import unknown
from kourkoutas.lab.planning.plan import Plan
from kourkoutas.lab.specs.study_options import RUNS, TUNING, WORDS, StudyOptions

KEYS = ("train", *(name for name, words in WORDS.items() if words.panel in (RUNS, TUNING)))
SHARED = tuple(name for name in KEYS if name != "train")
OWN = tuple(name for name in KEYS if name != "optimizers")
OF_SUITE = ("about", "baseline", "studies")


@dataclass(frozen=True)
class Suite:
    """Several studies that are to be answered together.

    Attributes:
      about: what its problems are, in a few words.
      baseline: the optimizer that every other one is compared with.
      plans: {study: what it is to do}.
    """

    name: str
    about: str
    baseline: str
    plans: Mapping[str, Plan]


def shipped() -> dict[str, str]:
    """{name: text of the file} of the suites that come with the laboratory."""
    folder = resources.files("kourkoutas.lab.suites") / "shipped"
    found = {file.name.removesuffix(".toml"): file for file in folder.iterdir() if file.name.endswith(".toml")}
    return {name: found[name].read_text(encoding="utf-8") for name in sorted(found)}


def read(what: str) -> Suite:
    """The suite of a file, FILE.toml, or of one of our names."""
    ours = shipped()
    if what in ours:
        return parse(ours[what], what)
    file = Path(what)
    if file.suffix != ".toml":
        raise unknown("suite", what, [*ours, "FILE.toml"])
    if not file.is_file():
        raise ValueError(f"there is no file {what}; name a suite's file, FILE.toml, or one of {', '.join(ours)}")
    return parse(file.read_text(encoding="utf-8"), file.stem, file.parent, where=what)


def parse(text: str, name: str, folder: Path | None = None, *, where: str | None = None) -> Suite:
    """The suite that a file describes; a study's FILE.py is looked for in `folder`."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where or name}: not a TOML file ({error})") from None
    studies = content.pop("studies", {})
    if not isinstance(studies, dict) or not all(isinstance(own, dict) for own in studies.values()):
        raise ValueError(f"{where or name}: `studies` must be tables, each [studies.NAME]")
    about, baseline = str(content.pop("about", "")), content.pop("baseline", None)
    return make(studies, name=name, about=about, baseline=baseline, folder=folder, **content)


def make(
    studies: Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]],
    *,
    name: str = "suite",
    about: str = "",
    baseline: str | None = None,
    folder: Path | None = None,
    **shared: Any,
) -> Suite:
    """The suite of these studies, every one of them planned, so that a mistake is told before the first run.

    Args:
      studies: {name: arguments of `study`}, or a list of the arguments; then a study has its results folder's name.
      about: what its problems are.
      baseline: the optimizer that the others are compared with; by default the second.
      folder: where a FILE.py is looked for.
      shared: arguments of `study` that hold for all.
    """
    for key in shared:
        if key not in SHARED:
            raise unknown("argument of a suite", key, [*OF_SUITE, *SHARED])
    named = studies.items() if isinstance(studies, Mapping) else [("", own) for own in studies]
    plans: dict[str, Plan] = {}
    for given, own in named:
        for key in own:
            if key == "optimizers":
                raise ValueError(
                    f"study {given or own.get('train')}: `optimizers` are the same in all studies of a suite; write "
                    "them once, above the first"
                )
            if key not in OWN:
                raise unknown(f"argument of study {given or own.get('train')}", key, list(OWN))
        plan = _plan(given, {**shared, **own}, folder)
        key = given or api.results_folder(plan).name
        if key in plans:
            raise ValueError(f"two studies are called {key!r}: give them names, suite({{'NAME': {{...}}, ...}})")
        if not re.fullmatch(r"\w[\w.+-]*", key):
            raise ValueError(f"a study's name is that of its folder: letters, digits, '_', '-' and '.'; got {key!r}")
        plans[key] = plan
    if not plans:
        raise ValueError("a suite needs studies: add a table [studies.NAME] for each problem")
    return Suite(name, about, _baseline(baseline, plans), plans)


def _plan(name: str, arguments: dict[str, Any], folder: Path | None) -> Plan:
    """The plan of one study; an error names the study."""
    train = arguments.pop("train", name)
    if isinstance(train, str) and ":" in train and folder is not None and not Path(train).is_absolute():
        train = str(folder / train)
    if not train:
        raise ValueError("a study needs something to train: train='darcy', or a function of a trial")
    known = {field.name for field in dataclasses.fields(StudyOptions)}
    options = StudyOptions(train, **{key: value for key, value in arguments.items() if key in known})
    try:
        return api.plan_of(options)
    except (ValueError, TypeError) as error:
        error.args = (f"study {name or train}: {error}",)
        raise


def _baseline(asked: str | None, plans: Mapping[str, Plan]) -> str:
    """The baseline's label, which every study has."""
    labels = [[arm.label for arm in plan.arms] for plan in plans.values()]
    shared = [label for label in labels[0] if all(label in own for own in labels)]
    if len(shared) < 2:
        raise ValueError(
            f"a suite compares at least two optimizers that every study has; got {', '.join(shared) or 'none'}: name "
            "them once, optimizers = ['kbeta', 'adam95']"
        )
    if asked is None:
        return shared[1]
    if asked not in shared:
        raise unknown("baseline", asked, shared)
    return asked
