"""Steps and seconds until a metric is reached, an endpoint like any other: runs that never get there are the worst."""

from __future__ import annotations

import html
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kourkoutas.lab.judging import endpoints
from kourkoutas.lab.judging.comparing import Comparison
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.results.store import Arm, Code, StoredRun, writing
from kourkoutas.lab.specs.spec import RunResult, RunSpec
from kourkoutas.lab.tuning import search
from tests.lab import made_study
from tests.lab.made_study import analysed, rendered


def run(arm: str, seed: int, losses: list[float], pace: float | None = 0.5, status: str = "ok") -> StoredRun:
    curve = {"step": [10.0 * (k + 1) for k in range(len(losses))], "loss": losses} if losses else {}
    times = {} if pace is None else {"per_step": pace}
    result = RunResult(status=status, curve=curve, times=times)  # type: ignore[arg-type]
    return StoredRun(RunSpec(testbed="t", optimizer=arm, seed=seed), result, Path())


def until(what: str, losses: list[float], **more: Any) -> float | None:
    return endpoints.parse(what).value(run("a", 0, losses, **more))


# The number of one run


@pytest.mark.parametrize(("value", "step"), [(3.0, 10), (1.0, 30), (0.7, 50)])
def test_the_first_logged_step_that_is_good_enough_counts_and_gaps_do_not(value: float, step: float) -> None:
    assert until(f"loss:until={value}", [3.0, math.nan, 1.0, 2.0, 0.5]) == step


def test_with_max_the_metric_is_to_be_at_least_the_value() -> None:
    assert until("loss:until=2:max", [1.0, 3.0, 2.0]) == 20
    known = [endpoints.Endpoint("loss", "loss", maximize=True, threshold=9.0)]
    measure = endpoints.parse("loss:until=2", known)
    assert measure.value(run("a", 0, [1.0, 3.0])) == 20  # the known direction of the metric
    assert (measure.endpoint.maximize, measure.endpoint.threshold) == (False, None)  # fewer steps are better


def test_seconds_are_steps_times_the_pace_of_the_run_itself() -> None:
    assert until("loss:seconds_until=1", [3.0, 1.0], pace=0.5) == 10
    assert until("loss:seconds_until=1", [3.0, 1.0], pace=0.25) == 5
    assert until("loss:seconds_until=1", [3.0, 1.0], pace=None) is None


@pytest.mark.parametrize("pace", [0.5, None])
@pytest.mark.parametrize("what", ["loss:until=1", "loss:seconds_until=1"])
def test_a_run_that_never_gets_there_is_no_number_and_not_missing(what: str, pace: float | None) -> None:
    assert math.isnan(until(what, [3.0, 3.0], pace=pace) or 0.0)
    assert math.isnan(until(what, [9.0], pace=pace, status="diverged") or 0.0)
    assert math.isnan(until(what, [], pace=pace, status="diverged") or 0.0)  # it had no time to log anything
    assert math.isnan(until(what, [1.0], pace=pace, status="failed") or 0.0)
    assert until(what, [], pace=pace) is None  # nobody knows


# The verdict


NEVER = None  # the step at which the loss falls to 1, of 100, or never


def made(path: Path, arrivals: dict[str, dict[int, int | None]], pace: float = 0.5) -> Snapshot:
    steps = [20.0 * k for k in range(1, 6)]
    ends: dict[str, dict[int, RunResult]] = {}
    for arm, by_seed in arrivals.items():
        ends[arm] = {}
        for seed, at in by_seed.items():
            losses = [1.0 if at is not None and step >= at else 3.0 for step in steps]
            curve = {"step": steps, "loss": losses}
            ends[arm][seed] = made_study.finished(1.0 + seed, curve=curve, times={"per_step": pace})
    return made_study.own(path, ends)


def judged(path: Path, a: list[int | None], b: list[int | None], what: str = "loss:until=1") -> Comparison:
    study = made(path, {"a": dict(enumerate(a)), "b": dict(enumerate(b))})
    return analysed(study, endpoints=[what]).endpoints[-1]


def test_two_that_never_arrive_tie_and_one_that_does_wins(tmp_path: Path) -> None:
    (c,) = judged(tmp_path, [20] * 8 + [NEVER], [60] * 6 + [NEVER] * 3).contrasts
    assert (c.wins, c.ties, c.losses) == (8, 1, 0)
    # Eight pairs of one sign out of 2⁸ equally likely ones, two-sided; the study has one endpoint of its own.
    assert c.test == "Wilcoxon"
    assert (c.p, c.p_holm) == (pytest.approx(2 / 2**8), pytest.approx(2 * 2 / 2**8))
    assert c.verdict == "better"
    assert (c.diverged, c.absent) == ((1, 3), "never got there")


def test_there_is_no_verdict_where_more_than_half_of_the_pairs_tie(tmp_path: Path) -> None:
    ahead, behind = [20] * 9, [60] * 8 + [NEVER]
    for never, verdict in ((9, "better"), (10, "untested")):  # of 18 and 19
        (c,) = judged(tmp_path / str(never), ahead + [NEVER] * never, behind + [NEVER] * never).contrasts
        assert (c.wins, c.ties, c.verdict) == (9, never, verdict)
    assert c.why == "10 of 19 pairs tie, more than half"


def test_an_arm_that_never_gets_there_is_behind_one_that_always_does(tmp_path: Path) -> None:
    (c,) = judged(tmp_path, [20] * 8, [NEVER] * 8).contrasts
    assert (c.wins, c.verdict) == (8, "better")


def test_where_nobody_gets_there_nothing_is_said_and_nothing_is_an_error(tmp_path: Path) -> None:
    (c,) = judged(tmp_path, [NEVER] * 8, [NEVER] * 8).contrasts
    assert (c.verdict, c.why, c.ties) == ("untested", "no run gave a value", 8)


def test_times_are_compared_as_ratios_unless_asked_for_as_differences(tmp_path: Path) -> None:
    early, late = [20, 40] * 4, [40, 80] * 4
    ratio = judged(tmp_path / "ratio", early, late)
    assert ratio.log
    assert ratio.arms["b"]["geometric_mean"].value == pytest.approx(math.sqrt(40 * 80))
    (c,) = ratio.contrasts
    assert c.effect is not None
    assert c.effect.value == pytest.approx(2)
    (c,) = judged(tmp_path / "difference", early, late, "loss:until=1:linear").contrasts
    assert c.effect is not None
    assert c.effect.value == pytest.approx(30)


def test_a_metric_that_no_run_logged_and_a_pace_that_none_recorded_are_errors(tmp_path: Path) -> None:
    study = made(tmp_path / "out", {"a": {0: 20}})
    with pytest.raises(ValueError, match="unknown metric in --endpoint 'los': did you mean 'loss'"):
        analysed(study, endpoints=["los:until=1"])
    paceless = made_study.own(
        tmp_path / "paceless", {"a": {0: made_study.finished(1.0, curve={"step": [1.0], "loss": [1.0]})}}
    )
    with pytest.raises(ValueError, match="no run has recorded its seconds per step; ask for until= in steps"):
        analysed(paceless, endpoints=["loss:seconds_until=1"])
    assert analysed(paceless, endpoints=["loss:until=1"]).endpoints[-1].values == {"a": {0: 1.0}}


def test_a_run_without_the_metric_is_named_and_left_out_of_its_contrast(tmp_path: Path) -> None:
    logged = made_study.finished(1.0, curve={"step": [1.0], "loss": [1.0]})
    silent = made_study.finished(1.0)
    study = made_study.own(tmp_path / "out", {"a": {0: logged, 1: logged}, "b": {0: logged, 1: silent}})
    time = analysed(study, endpoints=["loss:until=1"]).endpoints[-1]
    assert "b has no steps until loss ≤ 1 for seed 1" in time.notes
    assert [c.n for c in time.contrasts] == [1]


@pytest.mark.parametrize("unsure", [False, True])
def test_the_luck_of_the_tuning_is_counted_for_times_too(tmp_path: Path, unsure: bool) -> None:
    """The baseline takes 60 to 80 steps at the chosen value, and another value may take only 20 on a tuning seed."""
    space = search.search_space(
        search.parse_tune(["lr=0.1:1"]), trials=2, seeds=(100, 101), test_seeds=range(8), budget=0
    )
    setup: dict[str, Any] = {"testbed": "task.train", "preset": "own", "engine": "own", "settings": {}}
    arms = [Arm(label=name, optimizer=name) for name in ("a", "b")]
    code = Code(file="task.py", function="train", sha256="0" * 64)

    def ended(at: int) -> RunResult:
        steps = [float(k) for k in range(1, 101)]
        losses = [1.0 if step >= at else 3.0 for step in steps]
        return made_study.finished(1.0, curve={"step": steps, "loss": losses})

    with writing(
        tmp_path, **setup, arms=arms, seeds=range(8), command="kbeta study", code=code, tuning=space
    ) as writer:
        for arm in ("a", "b"):
            for seed, lr in ((100, 0.1), (100, 1.0), (101, 0.1), (101, 1.0)):
                spec = RunSpec(**{**setup, "settings": {"lr": lr}}, optimizer=arm, seed=seed)
                writer.plan([spec])
                at = 70 if lr == 0.1 else 20 + 60 * (seed == 101) if unsure else 100
                writer.finish(spec, ended(at))
        writer.choose({arm: {"lr": 0.1} for arm in ("a", "b")})
        for arm, first in (("a", 40), ("b", 50)):
            for seed in range(8):
                spec = RunSpec(**{**setup, "settings": {"lr": 0.1}}, optimizer=arm, seed=seed)
                writer.plan([spec])
                writer.finish(spec, ended(first + seed * (1 + (arm == "b")) % 7))
    (c,) = analysed(Snapshot.read(tmp_path), endpoints=["loss:until=1"]).endpoints[-1].contrasts
    assert c.tuned
    assert c.p is not None
    plain = c.statistics["paired_t"].p
    assert plain is not None
    assert plain < 0.01
    # 70 steps on both tuning seeds against 100 at the other value, or against 20 and 80, whose geometric mean is 40
    assert (c.p > 0.05) is unsure


# What is shown


# The first is earlier on 3 seeds, equal on 1.
ARRIVALS: dict[str, dict[int, int | None]] = {
    "quick": {0: 20, 1: 20, 2: 40, 3: NEVER},
    "slow<b>": {0: 40, 1: 60, 2: NEVER, 3: NEVER},
}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    return made(tmp_path_factory.mktemp("until") / "out", ARRIVALS)


def text_of(page: str) -> str:
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page)))


def test_the_page_says_that_a_run_never_got_there_and_not_that_it_diverged(study: Snapshot) -> None:
    page = rendered(study, endpoints=["loss:until=1"])
    found = re.search(r'<details id="endpoint-1".*?</details>', page, re.DOTALL)
    assert found is not None
    section = text_of(found[0])
    assert "steps until loss ≤ 1 (secondary, asked for after the runs)" in section
    # the median of 20, 20, 40 and never is 30; that of 40, 60, never and never lies between 60 and never
    assert "quick 4, 1 lost 30 [20, never got there]" in section
    assert "slow<b> 4, 2 lost never got there [55, never got there]" in section
    assert "2 of 4 of slow<b> never got there, 1 of 4 of quick never got there" in section
    assert "steps are those that were logged" in section
    assert "diverged" not in section
    assert "“By ranks”: a run never got there" in text_of(page)


def test_the_line_of_an_arm_rises_where_a_run_arrives_and_stays_below_the_top_where_one_never_does(
    study: Snapshot,
) -> None:
    page = rendered(study, endpoints=["loss:until=1:linear"])
    drawn = page[page.index("Percent of the runs that have got there</figcaption>") :]
    drawn = drawn[: drawn.index("</figure>")]
    lines = re.findall(r'<path d="(M[^"]+)" class="curve"', drawn)
    assert len(lines) == 2
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", lines[0])]
    found = re.findall(r'y="([\d.]+)" text-anchor="end" class="soft">(\d+)<', drawn)
    axis = {text: float(y) - 4 for y, text in reversed(found)}  # the y axis comes first
    shares = [round((axis["0"] - y) / (axis["0"] - axis["100"]), 2) for y in heights]
    assert [share for k, share in enumerate(shares) if share not in shares[:k]] == [0, 0.25, 0.5, 0.75]


def test_without_being_asked_for_no_time_is_shown(study: Snapshot) -> None:
    assert "got there" not in rendered(study)


def kbeta(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kourkoutas", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_report_takes_a_time_and_refuses_one_of_what_no_run_logged_leaving_the_page_as_it_was(study: Snapshot) -> None:
    done = kbeta("report", str(study.path), "--endpoint", "loss:until=1")
    assert done.returncode == 0, done.stderr
    page = (study.path / "report.html").read_text(encoding="utf-8")
    assert "steps until loss ≤ 1" in page
    done = kbeta("report", str(study.path), "--endpoint", "acc:until=1:max")
    assert done.returncode == 2
    assert "unknown metric in --endpoint 'acc'" in " ".join(done.stderr.split())
    assert (study.path / "report.html").read_text(encoding="utf-8") == page


SLOW_DATA = """
import functools, time

@functools.lru_cache
def data(seed):
    time.sleep(0.5)

def train(trial):
    data(trial.seed)
    trial.arm
    value = 4.0 + trial.seed
    for step in range(1, 11):
        time.sleep(0.01)
        value *= 0.8 if trial.arm == "kbeta" else 0.9
        trial.log(step, loss=value)
    return value
"""


def test_the_first_arm_of_a_seed_pays_for_the_data_but_its_steps_are_not_slower(tmp_path: Path) -> None:
    file, out = tmp_path / "task.py", str(tmp_path / "out")
    file.write_text(SLOW_DATA)
    arguments = [f"{file}:train", "--optimizers", "kbeta,adam95", "--seeds", "0-1", "--workers", "1", "--no-report"]
    done = kbeta("study", *arguments, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    first, second = (run for run in json.loads(done.stdout)["runs"] if run["seed"] == 0)
    # 0.5 s of sleep for the data is in the run's seconds, and 5 times what all ten steps sleep.
    assert first["seconds"] > 0.6
    assert all(run["times"]["per_step"] >= 0.01 for run in (first, second))
    assert first["times"]["per_step"] * 10 < first["seconds"] - 0.3
    asked = ["--endpoint", "loss:until=2", "--endpoint", "loss:seconds_until=2"]
    _, steps, seconds = json.loads(kbeta("stats", out, *asked, "--json").stdout)["endpoints"]
    # 4·0.8⁴ = 1.64 and 4·0.9⁷ = 1.91; 5·0.8⁵ = 1.64 and 5·0.9⁹ = 1.94
    assert steps["values"] == {"kbeta": {"0": 4, "1": 5}, "adam95": {"0": 7, "1": 9}}
    assert steps["contrasts"][0]["wins"] == 2
    assert seconds["values"]["kbeta"]["0"] == pytest.approx(4 * first["times"]["per_step"])
