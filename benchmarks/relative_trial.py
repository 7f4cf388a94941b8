"""The trial of docs/relative-memory-protocol.md: runs of the frozen rule, and its verdict.

    python benchmarks/relative_trial.py run OUT B|D|C|A [ARM ...]   again: goes on where it stopped
    python benchmarks/relative_trial.py keep OUT B|D|C|A            OUT/B.csv into benchmarks/relative_trial
    python benchmarks/relative_trial.py verdict [OUT]               by the protocol, from OUT or from what is kept

An arm tries the learning rates that every arm of the first trial has tried there, with seeds 100 and 101, and takes the
best of them to seeds 0–9. The arms with a fixed β2 come from benchmarks/memory_trial, which has none on A: name them
there. D reads enwik8-4mb.txt in OUT.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import memory_screening
from memory_screening import TESTBEDS, Run
from memory_trial import FIXED, LEVEL, RIVALS, WINS, Half, unpack

from kourkoutas.lab import testbeds
from kourkoutas.lab.judging import comparing, endpoints, tuned
from kourkoutas.lab.judging.comparing import Contrast
from kourkoutas.lab.judging.hypothesis_tests import holm
from kourkoutas.lab.judging.luck import lost_by_tuning
from kourkoutas.lab.planning import search
from kourkoutas.lab.planning.search import Tried
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.specs.spec import Endpoint

KEPT = Path(__file__).parent / "relative_trial"
ORDER = ("B", "D", "C", "A")
RULE = "relative"
OPTIONS = {RULE: "beta2_calm=0.94,memory=noise"}
TUNING_SEEDS, SEEDS = (100, 101), tuple(range(10))
RATES_OF_A = (3e-4, 7.21e-4, 1.732e-3, 4.162e-3, 1e-2)
MARGIN = {"B": 100.0, "D": 5.0, "C": 5.0, "A": 100.0}  # percent worse; 100 is a factor of 2


def rates(testbed: str) -> tuple[float, ...]:
    """The learning rates that an arm tries."""
    first = first_trial(testbed)
    return RATES_OF_A if first is None else tuple(one.values["lr"] for one in tuned.tried(first)["adam95-warm"])


@functools.cache
def first_trial(testbed: str) -> Snapshot | None:
    """The kept runs of the first trial; None on a testbed that it did not come to."""
    with tempfile.TemporaryDirectory() as scratch:
        found = unpack(Path(scratch), testbed)
        return Snapshot.read(Path(scratch) / testbed) if found else None


def endpoint_of(testbed: str) -> Endpoint:
    name, _, metric = TESTBEDS[testbed]
    return next(one for one in testbeds.get(name).endpoints if one.metric == metric)


# Runs


def run(out: Path, testbed: str, arms: Sequence[str]) -> None:
    """The tuning runs of each arm, then those of the learning rate that it chose."""
    memory_screening.register()
    os.chdir(out)
    table = Path(f"{testbed}.csv")
    for arm in arms:
        options = OPTIONS.get(arm, "")
        for lr in rates(testbed):
            for seed in TUNING_SEEDS:
                make(table, Run(testbed, arm, options, lr, seed))
        rows = memory_screening.read(table)
        lr = chosen(rows, testbed, arm, options)
        for seed in SEEDS:
            make(table, Run(testbed, arm, options, lr, seed))


def make(table: Path, one: Run) -> None:
    """Train once, unless the table has the run; the screening has made some of the tuning runs."""
    if one in memory_screening.read(table):
        return
    kept = memory_screening.read(memory_screening.KEPT).get(one)
    memory_screening.add(table, kept or memory_screening.made(one))


Rows = Mapping[Run, Mapping[str, str]]


def tried(rows: Rows, testbed: str, arm: str, options: str) -> list[Tried]:
    """What the tuning runs of an arm gave, by rising learning rate."""
    return [
        Tried({"lr": lr}, tuple(_value(rows[Run(testbed, arm, options, lr, seed)]) for seed in TUNING_SEEDS))
        for lr in rates(testbed)
    ]


def chosen(rows: Rows, testbed: str, arm: str, options: str) -> float:
    endpoint = endpoint_of(testbed)
    best = search.best(tried(rows, testbed, arm, options), endpoint.maximize, endpoint.log)
    return float(best.values["lr"])


def _value(row: Mapping[str, str]) -> float:
    return float(row["endpoint"]) if row["status"] == "ok" else math.nan


# Verdict


@dataclass(frozen=True)
class Shown:
    """What a finished testbed says of the rule."""

    lr: float
    near: Half
    contrasts: Mapping[str, Contrast]  # by rival


def shown(testbed: str, rows: Rows) -> Shown | None:
    """What a testbed says; None while a run is missing that the claim is about."""
    first, endpoint = first_trial(testbed), endpoint_of(testbed)
    values = {} if first is None else endpoints.values(first.runs, endpoint)
    lost = {} if first is None else tuned.lost(first.record, tuned.tried(first), endpoint)
    mine = {RULE: OPTIONS[RULE], **(dict.fromkeys(FIXED, "") if first is None else {})}
    rates_of = {}
    for arm, options in mine.items():
        try:
            found = tried(rows, testbed, arm, options)
            rates_of[arm] = lr = chosen(rows, testbed, arm, options)
            values[arm] = {seed: _value(rows[Run(testbed, arm, options, lr, seed)]) for seed in SEEDS}
        except KeyError:
            return None
        losses = [[endpoints.as_loss(x, endpoint) for x in one.scores] for one in found]
        lost[arm] = lost_by_tuning(losses, [one.values["lr"] for one in found].index(lr))
    scale = {"log": endpoint.log, "higher_is_better": endpoint.maximize, "resamples": 0}
    medians = {arm: of["median"].value for arm, of in comparing.compare_pairs(values, [], **scale).arms.items()}
    best = min(FIXED, key=medians.__getitem__)
    pairs = [(RULE, rival) for rival in dict.fromkeys((*RIVALS, best))]
    contrasts = {c.baseline: c for c in comparing.compare_pairs(values, pairs, lost=lost, **scale).contrasts}
    (alone,) = comparing.compare_pairs(values, [(RULE, best)], lost=lost, **scale).contrasts  # at 95 %, as the protocol
    near = _near(medians[RULE] / medians[best], alone, MARGIN[testbed])
    return Shown(rates_of[RULE], near, contrasts)


def _near(ratio: float, c: Contrast, margin: float) -> Half:
    """Not worse than the best fixed β2 by more than the margin."""
    interval = None if c.percent is None else c.percent.interval
    within = interval is not None and interval.low >= -margin and not (c.diverged[0] or c.failed[0])
    outcome = "fails" if not ratio <= 1 + margin / 100 else "holds" if within else "not shown"
    if interval is None:
        return Half(outcome, f"medians' ratio to {c.baseline} {ratio:.3f}, no interval")
    worst, best = (1 - x / 100 for x in (interval.low, interval.high))
    words = f"medians' ratio to {c.baseline} {ratio:.3f}, 95 % interval of the ratio {best:.3g} to {worst:.3g}"
    return Half(outcome, words)


def wins(found: Mapping[str, Shown], unknown: float | None) -> list[str]:
    """The testbeds on which the rule is better than every rival, by Holm over all contrasts of all testbeds.

    `unknown` is the p of contrasts that have not been made: 0.0 for the best that can come, None for none.
    """
    keys = [(testbed, rival) for testbed in ORDER for rival in RIVALS]
    known = {(t, rival): found[t].contrasts[rival] for t, rival in keys if t in found}
    adjusted = dict(zip(keys, holm([known[key].p if key in known else unknown for key in keys]), strict=True))

    def better(key: tuple[str, str]) -> bool:
        p = adjusted[key]
        return p is not None and p < LEVEL and (key not in known or known[key].side > 0)

    return [testbed for testbed in ORDER if all(better((testbed, rival)) for rival in RIVALS)]


def verdict(found: Mapping[str, Shown]) -> tuple[str, list[str]]:
    """("holds", "does not hold" or "open", the reasons)."""
    lines = []
    for testbed, one in found.items():
        lines.append(f"{testbed}, lr {one.lr:g}: the first half {one.near.outcome}: {one.near.words}")
        for rival in RIVALS:
            c = one.contrasts[rival]
            p = "no p" if c.p is None else f"p = {c.p:.2g}"
            size = "" if c.percent is None else f"{c.percent.value:+.2f} %, "
            lines.append(f"  against {rival}: {size}better on {c.wins} of {c.n} seeds, {p} before Holm")
    lines.append(f"Better than both Adams on {', '.join(wins(found, None)) or 'no testbed'}; {WINS} are needed.")
    if any(one.near.outcome != "holds" for one in found.values()) or len(wins(found, 0.0)) < WINS:
        return "does not hold", lines
    return "holds" if set(found) == set(ORDER) else "open", lines


def report(out: Path) -> str:
    found = {}
    for testbed in ORDER:
        one = shown(testbed, memory_screening.read(out / f"{testbed}.csv"))
        if one is not None:
            found[testbed] = one
    outcome, reasons = verdict(found)
    missing = [testbed for testbed in ORDER if testbed not in found]
    head = f"Finished: {', '.join(found) or 'none'}; not finished: {', '.join(missing) or 'none'}."
    return "\n".join([head, f"The claim: {outcome}.", *reasons]) + "\n"


def main(argv: Sequence[str]) -> int:
    match argv:
        case ["run", out, testbed, *arms] if testbed in ORDER:
            run(Path(out), testbed, arms or [RULE])
        case ["keep", out, testbed] if testbed in ORDER:
            KEPT.mkdir(exist_ok=True)
            (KEPT / f"{testbed}.csv").write_bytes((Path(out) / f"{testbed}.csv").read_bytes())
        case ["verdict", *out]:
            sys.stdout.write(report(Path(out[0]) if out else KEPT))
        case _:
            sys.stderr.write(__doc__ or "")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
