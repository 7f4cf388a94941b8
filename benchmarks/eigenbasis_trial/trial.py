"""The records of the trial in protocol.md: what earlier studies have is reused, and what was made is kept.

    python benchmarks/eigenbasis_trial/trial.py start OUT             what is kept of the trial, and of earlier studies
    kbeta suite benchmarks/eigenbasis_trial/trial.toml --out OUT      makes the rest, or goes on with it
    python benchmarks/eigenbasis_trial/trial.py longer OUT PROBLEM    the best Adam with our seconds, on A, B or D
    python benchmarks/eigenbasis_trial/trial.py keep OUT STUDY ...    the runs into STUDY.csv and .tar.xz here
    python benchmarks/eigenbasis_trial/trial.py claim OUT             the claim of protocol.md, problem by problem

A run is reused if its id is the one that the trial would give it, so with the same optimizer, options, settings, seed.
The study of `longer` is called PROBLEM-longer, and `keep` takes it, too.
"""

from __future__ import annotations

import datetime
import math
import shutil
import statistics
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BENCHMARKS = HERE.parent
sys.path.insert(0, str(BENCHMARKS))

from kept_runs import keep, unpack  # noqa: E402

from kourkoutas.lab import load, study  # noqa: E402
from kourkoutas.lab.judging.analysis import Analysis, analyse  # noqa: E402
from kourkoutas.lab.judging.comparing import Contrast, compare  # noqa: E402
from kourkoutas.lab.judging.endpoints import parse  # noqa: E402
from kourkoutas.lab.judging.hypothesis_tests import holm  # noqa: E402
from kourkoutas.lab.planning.plan import Plan  # noqa: E402
from kourkoutas.lab.results import files  # noqa: E402
from kourkoutas.lab.running import executor  # noqa: E402
from kourkoutas.lab.suites import asking  # noqa: E402
from kourkoutas.lab.suites.conducting import RECORD, SuiteRecord  # noqa: E402

COMMAND = "kbeta suite benchmarks/eigenbasis_trial/trial.toml"
EARLIER = (BENCHMARKS / "field_study", BENCHMARKS.parent / "archive" / "memory_trial")
OURS, ADAMS = "kbeta-eigen", ("adam95", "adam95-warm", "adam999", "adam999-warm")
EVALUATED = {
    "B": "loss",
    "C": "heldout_bce",
    "D": "bpc",
    "A": "train_mse",
}  # the curve that is kept; the fields': error

LONGER: dict[str, dict[str, Any]] = {
    "B": {"steps": 8_500, "ramp": 3_400},
    "D": {"steps": 4_250},
    "A": {"epochs": 300, "schedule": "1:1e-3 88:5e-4 118:1e-4 178:1e-5"},
}
"""What makes an Adam take the seconds of K-β in the eigenbasis: its schedule stretched by what a whole training step of
ours takes over one of Adam's, 1.7 on B and D and 3 on A (`benchmarks/whole_step.py`)."""


def described() -> dict[str, Any]:
    """What trial.toml says."""
    return tomllib.loads((HERE / "trial.toml").read_text(encoding="utf-8"))


def problems() -> list[str]:
    """The names of the studies."""
    return list(described()["studies"])


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
    """Unpack what is kept of the trial, copy the runs of earlier studies, and say that they belong together."""
    suite = asking.read(str(HERE / "trial.toml"))
    out.mkdir(parents=True, exist_ok=True)
    for problem in LONGER:
        unpack(out, f"{problem}-longer", HERE)
    for name, plan in suite.plans.items():
        if unpack(out, name, HERE):
            sys.stdout.write(f"{name}: as the trial left it\n")
            continue
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


def make_longer(out: Path, problem: str) -> None:
    """The study of the best Adam with more steps, its learning rate tuned anew, on the same seeds."""
    asked = described()
    own = asked["studies"][problem]
    shared = {name: asked[name] for name in ("seeds", "preset", "engine", "trials", "tune_seeds", "tune_budget")}
    study(
        **{**shared, **own, "settings": {**own.get("settings", {}), **LONGER[problem]}},
        optimizers=[best_adam(analyse(load(out / problem).snapshot, baseline=OURS, resamples=0))],
        out=out / f"{problem}-longer",
    )


def best_adam(analysis: Analysis) -> str:
    """The Adam with the lowest median end."""
    medians = {arm.label: arm.median for arm in analysis.arms if arm.label in ADAMS}
    return min(medians, key=lambda label: math.inf if medians[label] is None else medians[label])


@dataclass(frozen=True)
class Found:
    """What the claim asks of one problem.

    Attributes:
      ratios: {optimizer: median end of K-β in the eigenbasis, divided by its own}.
      p: {Adam: p against it, after Holm over the four Adams}.
      ahead: clearly ahead of every Adam, p < 0.01.
      behind_soap: clearly behind SOAP, p < 0.05.
      time: the median share of its steps after which K-β in the eigenbasis is where the best Adam ends; infinite where
        fewer than half of its runs get there, None where their curves are not kept.
      longer: K-β in the eigenbasis against the best Adam at equal seconds; None where that was not asked or not run.
    """

    problem: str
    ratios: Mapping[str, float]
    p: Mapping[str, float | None]
    ahead: bool
    behind_soap: bool
    time: float | None
    longer: Longer | None

    @property
    def over_best_adam(self) -> float:
        return max(self.ratios[adam] for adam in ADAMS)


@dataclass(frozen=True)
class Longer:
    """K-β in the eigenbasis against an Adam with as many seconds.

    Attributes:
      ratio: of their median ends.
      wins: on how many of the `seeds` K-β in the eigenbasis ends lower.
      p: of the test that decides a study.
    """

    adam: str
    ratio: float
    wins: int
    seeds: int
    p: float | None


def found_in(folder: Path) -> Found | None:
    """The claim's numbers of a study; None unless it is finished."""
    analysis = analyse(load(folder).snapshot, baseline=OURS, resamples=0)
    if not analysis.finished:
        return None
    medians = {arm.label: arm.median for arm in analysis.arms}
    contrasts = {c.treatment: c for c in analysis.primary.contrasts}
    adjusted = holm([contrasts[adam].p for adam in ADAMS])
    leads = [_share_of_ours(contrasts[adam]) > 0.5 for adam in ADAMS]
    soap = contrasts["soap"]
    return Found(
        problem=folder.name,
        ratios={label: medians[OURS] / median for label, median in medians.items()},
        p=dict(zip(ADAMS, adjusted, strict=True)),
        ahead=all(lead and p is not None and p < 0.01 for lead, p in zip(leads, adjusted, strict=True)),
        behind_soap=soap.p is not None and soap.p < 0.05 and _share_of_ours(soap) < 0.5,
        time=_time_to(medians[best_adam(analysis)], analysis),
        longer=_at_equal_seconds(analysis, folder.with_name(f"{folder.name}-longer")),
    )


def _time_to(target: float, analysis: Analysis) -> float | None:
    """See `Found.time`. A curve is evaluated now and then, so the share is rounded up to the next evaluation."""
    curve = EVALUATED.get(analysis.snapshot.path.name, "error")
    until = parse(f"{curve}:until={target!r}")
    shares = []
    for run in analysis.snapshot.runs:
        if run.spec.optimizer != OURS or run.result is None:
            continue
        if curve not in run.result.curve:
            return None
        reached = until.value(run)
        last = run.result.curve["step"][-1]
        shares.append(math.inf if reached is None or math.isnan(reached) else reached / last)
    return statistics.median(shares)


def _at_equal_seconds(analysis: Analysis, folder: Path) -> Longer | None:
    if not (folder / "study.json").exists():
        return None
    longer = analyse(load(folder).snapshot, resamples=0)
    if not longer.finished:
        return None
    (adam,) = (arm.label for arm in longer.arms)
    values = {
        OURS: analysis.judged[0].counted[OURS],
        adam: longer.judged[0].counted[adam],
    }
    comparison = compare(values, baseline=adam, log=analysis.primary.log, resamples=0)
    (contrast,) = comparison.contrasts
    medians = [statistics.median(by_seed.values()) for by_seed in values.values()]
    return Longer(adam, medians[0] / medians[1], contrast.wins, contrast.n, contrast.p)


def _share_of_ours(contrast: Contrast) -> float:
    """On which share of the seeds K-β in the eigenbasis is better."""
    return contrast.losses / max(1, contrast.wins + contrast.losses)


HEAD = (
    "problem",
    "over the best Adam",
    "over SOAP",
    "over fixed 0.95",
    "p against each Adam",
    "clearly ahead of all",
    "where the best Adam ends after",
    "over the best Adam at equal seconds",
)


def claim(out: Path) -> str:
    """A row per problem that is finished, and how many of the claim's parts hold."""
    rows = [list(HEAD), ["---"] * len(HEAD)]
    done: list[Found] = []
    for name in problems():
        one = found_in(out / name) if (out / name / "study.json").exists() else None
        if one is None:
            rows.append([name, "not finished", *[""] * (len(HEAD) - 2)])
        else:
            done.append(one)
            rows.append(row(one))
    near = {"A": 2.0, "B": 2.0}
    far = [one.problem for one in done if one.ratios["soap"] > near.get(one.problem, 1.05)]
    late = [one.problem for one in done if one.over_best_adam > 1.05]
    behind = [one.problem for one in done if one.behind_soap]
    still = [one.problem for one in done if one.longer is not None and one.longer.ratio < 1]
    parts = [
        f"Problems finished: {len(done)}.",
        f"Clearly ahead of every Adam: {_named([one.problem for one in done if one.ahead])}.",
        f"More than 5 % behind the best Adam: {_named(late)}.",
        f"Clearly behind SOAP: {_named(behind)}. Further behind it than allowed: {_named(far)}.",
        f"Ahead at equal seconds: {_named(still)}.",
    ]
    table = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([*table, "", *parts]) + "\n"


def row(one: Found) -> list[str]:
    """What the table says of a problem."""
    if one.time is None:
        time = "not kept"
    elif math.isinf(one.time):
        time = "never"
    else:
        time = f"{one.time:.0%} of the steps"
    seconds = ""
    if one.longer is not None:
        p = "–" if one.longer.p is None else f"{one.longer.p:.2g}"
        seconds = f"{one.longer.ratio:.3g} ({one.longer.wins} of {one.longer.seeds} seeds, p = {p})"
    return [
        one.problem,
        f"{one.over_best_adam:.3g}",
        f"{one.ratios['soap']:.3g}",
        f"{one.ratios['eigen95']:.3g}",
        ", ".join(f"{p:.2g}" for p in one.p.values() if p is not None),
        "yes" if one.ahead else "no",
        time,
        seconds,
    ]


def _named(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names)})" if names else "none"


def main(argv: Sequence[str]) -> int:
    match argv:
        case ["start", out]:
            start(Path(out))
        case ["longer", out, problem] if problem in LONGER:
            make_longer(Path(out), problem)
        case ["keep", out, *names] if names:
            for name in names:
                count = keep(Path(out), name, HERE, EVALUATED.get(name.removesuffix("-longer"), "error"))
                sys.stdout.write(f"{name}: {count} runs kept in {HERE.name}\n")
        case ["claim", out]:
            sys.stdout.write(claim(Path(out)))
        case _:
            sys.stderr.write(__doc__ or "")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
