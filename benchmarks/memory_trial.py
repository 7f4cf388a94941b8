"""The records of the trial of docs/memory-protocol.md, and its verdict.

    python benchmarks/memory_trial.py keep OUT C      the runs of OUT/C into benchmarks/memory_trial/C.csv and C.tar.xz
    python benchmarks/memory_trial.py unpack OUT C    C.tar.xz into OUT/C, unless that is there; memory_trial.sh does it
    python benchmarks/memory_trial.py verdict [OUT]   by the protocol, from OUT or from what is kept

C.tar.xz is a results folder with its finished runs, from which `kbeta study` goes on; their curves are left out.
"""

from __future__ import annotations

import csv
import io
import math
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kourkoutas import atomic
from kourkoutas.lab.judging import comparing, endpoints, tuned
from kourkoutas.lab.judging.comparing import Contrast
from kourkoutas.lab.judging.hypothesis_tests import holm
from kourkoutas.lab.results import files, store
from kourkoutas.lab.results.snapshot import Snapshot

KEPT = Path(__file__).parent / "memory_trial"
TESTBEDS = ("C", "D", "B", "A")
SIGNALS = ("centred", "predictive")
FIXED = tuple(f"adam{beta2}{form}" for beta2 in (90, 95, 99, 999) for form in ("", "-warm"))
RIVALS = ("adam95", "adam95-warm", "adam999", "adam999-warm")
LEVEL = 0.01
MARGIN = 5.0  # percent
WINS = 2  # testbeds


# Records


def keep(out: Path, testbed: str, to: Path = KEPT, evaluated: str | None = None) -> int:
    """Write the table and the archive of one testbed, with the curve of one metric if named; the number of runs."""
    study = Snapshot.read(out / testbed)
    runs = [run for run in (*study.runs, *study.tuning_runs, *study.other_runs) if run.result is not None]
    if study.damage:
        raise store.StoreError(study.damage[0])
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / testbed
        files.make_folder(copy)
        files.write_json(copy / "study.json", _without_folders(study.record, out))
        for run in runs:
            files.make_folder(folder := copy / "runs" / run.id)
            files.write_json(folder / "spec.json", run.spec)
            store.write_result(folder, run.result.model_copy(update={"curve": _thinned(run.result.curve, evaluated)}))
            rows.append(_row(testbed, study.record, run))
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w:xz", preset=9) as tar:
            for file in sorted(path for path in copy.rglob("*") if path.is_file()):
                entry = tarfile.TarInfo(file.relative_to(scratch).as_posix())  # no owner, no time: the same bytes again
                entry.size = file.stat().st_size
                with file.open("rb") as content:
                    tar.addfile(entry, content)
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    to.mkdir(parents=True, exist_ok=True)
    atomic.replace(to / f"{testbed}.csv", lambda stream: stream.write(table.getvalue().encode()))
    atomic.replace(to / f"{testbed}.tar.xz", lambda stream: stream.write(archive.getvalue()))
    return len(runs)


def _without_folders(record: store.StudyRecord, out: Path) -> store.StudyRecord:
    """The record with its commands as if they had been given in `out`."""

    def shorter(command: str) -> str:
        return command.replace(f"{out.absolute()}/", "")

    calls = [call.model_copy(update={"command": shorter(call.command)}) for call in record.calls]
    return record.model_copy(update={"command": shorter(record.command), "calls": calls})


def _thinned(curve: Mapping[str, Sequence[float]], metric: str | None) -> dict[str, list[float]]:
    """The points of a curve at which the metric was evaluated."""
    if metric is None or metric not in curve:
        return {}
    points = [(step, value) for step, value in zip(curve["step"], curve[metric], strict=True) if math.isfinite(value)]
    return {"step": [step for step, _ in points], metric: [value for _, value in points]}


def _row(testbed: str, record: store.StudyRecord, run: store.StoredRun) -> dict[str, object]:
    """A run of the tuning, of the test, or on a test seed with a value that wider tuning has replaced."""
    spec, result = run.spec, run.result
    phase = "tuning" if record.tunes(spec) else "test" if record.compares(spec) else "replaced"
    return {
        "testbed": testbed,
        "arm": spec.optimizer,
        "phase": phase,
        **record.tuning.values(spec),
        "seed": spec.seed,
        "status": result.status,
        **result.metrics,
        "seconds": round(result.seconds, 1),
    }


def unpack(out: Path, testbed: str, source: Path = KEPT) -> bool:
    """Put the kept runs where the study looks for them; False if there is nothing to do."""
    archive = source / f"{testbed}.tar.xz"
    if (out / testbed).exists() or not archive.exists():
        return False
    with tarfile.open(archive) as tar:
        tar.extractall(out, filter="data")
    return True


# Verdict


@dataclass(frozen=True)
class Half:
    """The first half of the claim, of one arm on one testbed: "holds", "not shown" or "fails", and the numbers."""

    outcome: str
    words: str


@dataclass(frozen=True)
class Shown:
    """What a finished testbed says of the arms of signals: {arm: the first half}, {(arm, rival): contrast}."""

    near: Mapping[str, Half]
    contrasts: Mapping[tuple[str, str], Contrast]


def arms(signal: str) -> tuple[str, str]:
    return signal, f"{signal}-warm"


def shown(snapshot: Snapshot) -> Shown | None:
    """What a testbed says; None while a run is missing of an arm that the claim is about."""
    record = snapshot.record
    here = {arm.label for arm in record.arms}
    mine = [arm for signal in SIGNALS for arm in arms(signal) if arm in here]
    endpoint = endpoints.measures(record)[0].endpoint
    values = endpoints.values(snapshot.runs, endpoint)
    if any(set(values.get(arm, ())) < set(record.seeds) for arm in (*mine, *FIXED)):
        return None
    scale = {"log": endpoint.log, "higher_is_better": endpoint.maximize, "resamples": 0}
    arms_of = comparing.compare_pairs(values, [], **scale).arms
    median = {arm: found["median"].value for arm, found in arms_of.items()}
    best = min(FIXED, key=median.__getitem__)
    whole = set(record.seeds) == set(values.get("kbeta", ()))
    rivals = dict.fromkeys((*RIVALS, best, *(["kbeta"] if whole else [])))
    pairs = [(arm, rival) for arm in mine for rival in rivals]
    lost = tuned.lost(record, tuned.tried(snapshot), endpoint)
    comparison = comparing.compare_pairs(values, pairs, lost=lost, **scale)
    found = {(c.treatment, c.baseline): c for c in comparison.contrasts}
    near = {}
    for arm in mine:  # each alone: the protocol's interval is one of 95 %
        (alone,) = comparing.compare_pairs(values, [(arm, best)], lost=lost, **scale).contrasts
        near[arm] = _near(median[arm] / median[best], alone)
    return Shown(near, found)


def _near(ratio: float, c: Contrast) -> Half:
    """Never worse than the best fixed β2 by more than 5 %."""
    worst = None if c.percent is None or c.percent.interval is None else c.percent.interval.low
    within = worst is not None and worst >= -MARGIN and not (c.diverged[0] or c.failed[0])
    outcome = "fails" if not ratio <= 1 + MARGIN / 100 else "holds" if within else "not shown"
    interval = (
        "no interval" if worst is None else f"{c.percent.value:+.2f} % [{worst:+.2f}, {c.percent.interval.high:+.2f}]"
    )
    return Half(outcome, f"medians' ratio to {c.baseline} {ratio:.4f}, better by {interval}")


def wins(signal: str, rivals: Sequence[str], found: Mapping[str, Shown], unknown: float | None) -> dict[str, list[str]]:
    """{arm: testbeds on which it is better than every rival}, by Holm over all contrasts of the signal on all testbeds.

    `unknown` is the p of contrasts that have not been made: 0.0 for the best that can come, None for none.
    """
    keys = [(testbed, arm, rival) for testbed in TESTBEDS for arm in arms(signal) for rival in rivals]
    known = [found[testbed].contrasts.get((arm, rival)) if testbed in found else None for testbed, arm, rival in keys]
    adjusted = dict(zip(keys, holm([unknown if c is None else c.p for c in known]), strict=True))
    made = dict(zip(keys, known, strict=True))

    def better(key: tuple[str, str, str]) -> bool:
        c = made[key]
        if c is None:
            return unknown is not None
        p = adjusted[key]
        return p is not None and p < LEVEL and c.side > 0

    return {arm: [t for t in TESTBEDS if all(better((t, arm, rival)) for rival in rivals)] for arm in arms(signal)}


def verdict(signal: str, found: Mapping[str, Shown]) -> tuple[str, list[str]]:
    """("holds", "does not hold" or "open", the reasons)."""
    have, could = wins(signal, RIVALS, found, None), wins(signal, RIVALS, found, 0.0)
    lines, stand = [], []
    for arm in arms(signal):
        near = {testbed: one.near[arm] for testbed, one in found.items() if arm in one.near}
        for testbed, half in near.items():
            lines.append(f"{arm} on {testbed}: {half.outcome}: {half.words}")
            for rival in RIVALS:
                c = found[testbed].contrasts[arm, rival]
                p = "no p" if c.p is None else f"p = {c.p:.2g}"
                size = "" if c.percent is None else f"{c.percent.value:+.2f} %, "
                lines.append(f"  against {rival}: {size}better on {c.wins} of {c.n} seeds, {p} before Holm")
        lines.append(f"{arm}: better than both Adams on {', '.join(have[arm]) or 'no testbed'}; {WINS} are needed")
        if all(half.outcome == "holds" for half in near.values()) and len(could[arm]) >= WINS:
            stand.append("holds" if len(near) == len(TESTBEDS) else "open")
    for arm, testbeds in wins(signal, ["kbeta"], found, None).items():
        lines.append(f"{arm}: better than kbeta on {', '.join(testbeds) or 'no testbed'}; {WINS} keep {signal}")
    return min(stand, default="does not hold"), lines  # "holds" comes before "open"


def report(out: Path) -> str:
    """The verdict of every signal, from the testbeds under `out` that are finished."""
    found, unfinished = {}, []
    for testbed in TESTBEDS:
        if (out / testbed / "study.json").exists():
            one = shown(Snapshot.read(out / testbed))
            if one is None:
                unfinished.append(testbed)
            else:
                found[testbed] = one
    lines = [f"Finished: {', '.join(found) or 'none'}; begun and not finished: {', '.join(unfinished) or 'none'}."]
    for signal in SIGNALS:
        outcome, reasons = verdict(signal, found)
        lines += ["", f"The claim for {signal}: {outcome}.", *reasons]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    match argv:
        case ["keep", out, testbed]:
            sys.stdout.write(f"{keep(Path(out), testbed)} runs kept in {KEPT}\n")
        case ["unpack", out, testbed]:
            if unpack(Path(out), testbed):
                sys.stdout.write(f"{out}/{testbed} unpacked from {KEPT}\n")
        case ["verdict", out]:
            sys.stdout.write(report(Path(out)))
        case ["verdict"]:
            with tempfile.TemporaryDirectory() as scratch:
                for testbed in TESTBEDS:
                    unpack(Path(scratch), testbed)
                sys.stdout.write(report(Path(scratch)))
        case _:
            sys.stderr.write(__doc__ or "")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
