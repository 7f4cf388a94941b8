"""The records of the trial in protocol.md: what earlier studies have is reused, and what was made is kept.

    python benchmarks/eigenbasis_trial/trial.py start OUT             what is kept of the trial, and of earlier studies
    kbeta suite benchmarks/eigenbasis_trial/trial.toml --out OUT      makes the rest, or goes on with it
    python benchmarks/eigenbasis_trial/trial.py keep OUT PROBLEM ...  the runs into PROBLEM.csv and .tar.xz here
    python benchmarks/eigenbasis_trial/trial.py claim OUT             the claim of protocol.md, problem by problem

A run is reused if its id is the one that the trial would give it, so with the same optimizer, options, settings, seed.
"""

from __future__ import annotations

import datetime
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
BENCHMARKS = HERE.parent
sys.path.insert(0, str(BENCHMARKS))

from kept_runs import keep, unpack  # noqa: E402

from kourkoutas.lab import load  # noqa: E402
from kourkoutas.lab.judging.analysis import analyse  # noqa: E402
from kourkoutas.lab.judging.comparing import Contrast  # noqa: E402
from kourkoutas.lab.judging.hypothesis_tests import holm  # noqa: E402
from kourkoutas.lab.planning.plan import Plan  # noqa: E402
from kourkoutas.lab.results import files  # noqa: E402
from kourkoutas.lab.running import executor  # noqa: E402
from kourkoutas.lab.suites import asking  # noqa: E402
from kourkoutas.lab.suites.conducting import RECORD, SuiteRecord  # noqa: E402

COMMAND = "kbeta suite benchmarks/eigenbasis_trial/trial.toml"
EARLIER = (BENCHMARKS / "field_study", BENCHMARKS.parent / "archive" / "memory_trial")
OURS, ADAMS = "kbeta-eigen", ("adam95", "adam95-warm", "adam999", "adam999-warm")
EVALUATED = {"B": None, "C": "heldout_bce", "D": "bpc", "A": "train_mse"}  # the curve that is kept; the fields': error


def problems() -> list[str]:
    """The names of the studies."""
    return list(tomllib.loads((HERE / "trial.toml").read_text(encoding="utf-8"))["studies"])


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


@dataclass(frozen=True)
class Found:
    """What the claim asks of one problem.

    Attributes:
      ratios: {optimizer: median end of K-β in the eigenbasis, divided by its own}.
      p: {Adam: p against it, after Holm over the four Adams}.
      ahead: clearly ahead of every Adam, p < 0.01.
      behind_soap: clearly behind SOAP, p < 0.05.
    """

    problem: str
    ratios: Mapping[str, float]
    p: Mapping[str, float | None]
    ahead: bool
    behind_soap: bool

    @property
    def over_best_adam(self) -> float:
        return max(self.ratios[adam] for adam in ADAMS)


def found_in(folder: Path) -> Found | None:
    """The claim's numbers of a study; None unless it is finished."""
    study = analyse(load(folder).snapshot, baseline=OURS, resamples=0)
    if not study.finished:
        return None
    medians = {arm.label: arm.median for arm in study.arms}
    contrasts = {c.treatment: c for c in study.primary.contrasts}
    adjusted = holm([contrasts[adam].p for adam in ADAMS])
    leads = [_share_of_ours(contrasts[adam]) > 0.5 for adam in ADAMS]
    soap = contrasts["soap"]
    return Found(
        problem=folder.name,
        ratios={label: medians[OURS] / median for label, median in medians.items()},
        p=dict(zip(ADAMS, adjusted, strict=True)),
        ahead=all(lead and p is not None and p < 0.01 for lead, p in zip(leads, adjusted, strict=True)),
        behind_soap=soap.p is not None and soap.p < 0.05 and _share_of_ours(soap) < 0.5,
    )


def _share_of_ours(contrast: Contrast) -> float:
    """On which share of the seeds K-β in the eigenbasis is better."""
    return contrast.losses / max(1, contrast.wins + contrast.losses)


def claim(out: Path) -> str:
    """A row per problem that is finished, and how many of the claim's parts hold."""
    rows = [
        "| problem | over the best Adam | over SOAP | over fixed 0.95 | p against each Adam | clearly ahead of all |"
    ]
    rows.append("|---" * 6 + "|")
    done: list[Found] = []
    for name in problems():
        one = found_in(out / name) if (out / name / "study.json").exists() else None
        if one is None:
            rows.append(f"| {name} | not finished |" + " |" * 4)
            continue
        done.append(one)
        ps = ", ".join(f"{p:.2g}" for p in one.p.values() if p is not None)
        r = one.ratios
        cells = [name, f"{one.over_best_adam:.3g}", f"{r['soap']:.3g}", f"{r['eigen95']:.3g}", ps]
        rows.append("| " + " | ".join([*cells, "yes" if one.ahead else "no"]) + " |")
    near = {"A": 2.0, "B": 2.0}
    far = [one.problem for one in done if one.ratios["soap"] > near.get(one.problem, 1.05)]
    late = [one.problem for one in done if one.over_best_adam > 1.05]
    behind = [one.problem for one in done if one.behind_soap]
    rows += [
        "",
        f"Problems finished: {len(done)}.",
        f"Clearly ahead of every Adam: {_named([one.problem for one in done if one.ahead])}.",
        f"More than 5 % behind the best Adam: {_named(late)}.",
        f"Clearly behind SOAP: {_named(behind)}. Further behind it than allowed: {_named(far)}.",
    ]
    return "\n".join(rows) + "\n"


def _named(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names)})" if names else "none"


def main(argv: Sequence[str]) -> int:
    match argv:
        case ["start", out]:
            start(Path(out))
        case ["keep", out, *names] if names:
            for name in names:
                count = keep(Path(out), name, HERE, EVALUATED.get(name, "error"))
                sys.stdout.write(f"{name}: {count} runs kept in {HERE.name}\n")
        case ["claim", out]:
            sys.stdout.write(claim(Path(out)))
        case _:
            sys.stderr.write(__doc__ or "")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
