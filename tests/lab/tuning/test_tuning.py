"""Tune every arm alike, then confirm on fresh seeds: the decisions, and studies in real processes that are killed."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kourkoutas.lab import api
from kourkoutas.lab.judging import endpoints
from kourkoutas.lab.judging.analysis import analyse
from kourkoutas.lab.judging.values import to_json
from kourkoutas.lab.planning import plan as planning
from kourkoutas.lab.results import store
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.specs.spec import Axis, RunResult, RunSpec, SearchSpace
from kourkoutas.lab.tuning import search, trials
from kourkoutas.lab.tuning.trials import Tried

ARMS = ["kbeta", "adam95"]
NAN = math.nan
PAUSE = {"pause": "0.02"}

# The best lr is 1e-2 for kbeta and 1e-3 for the others, and 0.5 and more diverges. A file tells who made each run, and
# how often. The pauses are there to be killed in; a file `hurry` beside the task ends them.
TASK = """
import math, pathlib, random, time

hurry = pathlib.Path(__file__).with_name("hurry")

def train(trial):
    with (trial.folder / "made").open("a") as file:
        file.write("x")
    lr = trial.settings["lr"]
    for step in range(1, 4):
        trial.log(step, loss=1 / step)
        if "pause" in trial.settings and not hurry.exists():
            time.sleep(trial.settings["pause"])
    if lr >= 0.5:
        return float("nan")
    best = 1e-2 if trial.arm == "kbeta" else 1e-3
    noise = 0.01 * random.Random(f"{trial.arm} {lr} {trial.seed}").random()
    return 1 + abs(math.log10(lr / best)) + noise + (0.1 if trial.arm == "adam95" else 0)
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("task") / "task.py"
    file.write_text(TASK)
    return file


@pytest.fixture(scope="module")
def whole(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    """A tuned study that was never stopped, in a folder that stays as it is."""
    with hurrying(task):
        return execute(plan(task, options=PAUSE), tmp_path_factory.mktemp("whole") / "out")


@contextlib.contextmanager
def hurrying(task: Path) -> Iterator[None]:
    task.with_name("hurry").touch()
    yield
    task.with_name("hurry").unlink()


def question(
    *tune: str, trials: int = 5, seeds: str = "100-102", test: Sequence[int] = (0, 1), budget: int = 2
) -> SearchSpace:
    return search.search_space(
        search.parse_tune(tune or ("lr=1e-4:1e-2",)),
        trials=trials,
        seeds=planning.parse_seeds(seeds),
        test_seeds=test,
        budget=budget,
    )


def plan(file: Path, *tune: str, seeds: str = "0-3", options: dict[str, str] | None = None, **more: Any) -> Any:
    return planning.plan_study(
        f"{file}:train",
        seeds=planning.parse_seeds(seeds),
        optimizers=ARMS,
        options=options,
        tuning=question(*tune, test=planning.parse_seeds(seeds), **more),
    )


def axis(low: float, high: float, **more: Any) -> Axis:
    return Axis(name="lr", low=low, high=high, **more)


def all_tried(
    asked: SearchSpace, objective: Callable[[str, Any], Sequence[float]], axes: Any = None, **more: Any
) -> dict[str, list[Tried]]:
    """{arm: everything that a tuning of two arms on an objective asks for}."""
    tried: dict[str, list[Tried]] = {arm: [] for arm in ARMS}
    while requests := search.next_requests(asked, axes or dict.fromkeys(ARMS, asked.axes), tried, **more):
        for arm, values in requests:
            tried[arm].append(Tried(values, tuple(objective(arm, values))))
    return tried


def tuned(objective: Callable[[str, float], Sequence[float]], asked: SearchSpace, **more: Any) -> dict[str, Any]:
    """{arm: (chosen value, values tried)} of two arms on an objective."""
    tried = all_tried(asked, lambda arm, values: objective(arm, values["lr"]), **more)
    return {
        arm: (trials.best(own, more.get("maximize", False)).values["lr"], sorted(one.values["lr"] for one in own))
        for arm, own in tried.items()
    }


def test_the_values_of_a_range_are_evenly_spaced_in_ratio_or_difference() -> None:
    assert [axis(1e-4, 1e-1).value(i, 4) for i in range(4)] == [1e-4, 1e-3, 1e-2, 1e-1]
    assert [axis(0, 1, scale="linear").value(i, 5) for i in range(5)] == [0, 0.25, 0.5, 0.75, 1]
    assert [axis(1, 100, whole=True).value(i, 3) for i in range(3)] == [1, 10, 100]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr", "must look like NAME=LOW:HIGH"),
        ("lr=1e-3", "must look like NAME=LOW:HIGH"),
        ("=1:2", "must look like NAME=LOW:HIGH"),
        ("lr=a:b", "must look like NAME=LOW:HIGH"),
        ("lr=1e-3:inf", "must look like NAME=LOW:HIGH"),
        ("lr=1e-1:1e-3", "the range must rise; write lr=1e-3:1e-1"),
        ("lr=0:1", "log-spaced values need LOW > 0"),
        ("lr=1:2:cubic", "log .the default. or linear"),
    ],
)
def test_a_range_that_cannot_be_read_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        search.parse_tune([text])


def test_seeds_of_tuning_and_test_must_not_overlap() -> None:
    with pytest.raises(ValueError, match="--tune-seeds and --seeds share 2, 3"):
        question(seeds="2-5", test=range(4))


@pytest.mark.parametrize(
    ("more", "message"),
    [({"trials": 1}, "--trials must be at least 2"), ({"budget": -1}, "--tune-budget must be")],
)
def test_a_tuning_of_no_size_is_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        question(**more)


def test_an_option_is_tuned_once() -> None:
    with pytest.raises(ValueError, match="--tune names lr twice"):
        question("lr=1e-3:1", "lr=1e-4:1")


def test_the_value_with_the_fewest_lost_runs_is_chosen_and_of_those_the_best_mean() -> None:
    one, two, three = Tried({"lr": 1}, (0.1, NAN, NAN)), Tried({"lr": 2}, (5, 6, NAN)), Tried({"lr": 3}, (7, 7, 1))
    assert trials.best([one, two]).values == {"lr": 2}
    assert trials.best([one, two, three]).values == {"lr": 3}
    assert trials.best([three, Tried({"lr": 4}, (6, 5, 5))]).values == {"lr": 3}
    assert trials.best([three, Tried({"lr": 4}, (6, 5, 5))], maximize=True).values == {"lr": 4}
    assert trials.best([one]).values == {"lr": 1}


def test_a_value_with_a_failed_run_cannot_be_chosen_unless_failures_count() -> None:
    failed, other = Tried({"lr": 1}, (0.1, 0.1, NAN), failed=1), Tried({"lr": 2}, (5, NAN, NAN))
    assert trials.best([failed, other]).values == {"lr": 2}
    assert trials.best([Tried({"lr": 1}, (0.1, 0.1, NAN)), other]).values == {"lr": 1}
    with pytest.raises(ValueError, match="every value that was tried has a failed run"):
        trials.best([failed])


def test_an_arm_of_which_every_value_has_a_failed_run_stops_the_study() -> None:
    tried = [Tried({"lr": 1}, (0.1, NAN), failed=1), Tried({"lr": 2}, (NAN, NAN), failed=2)]
    failed = RunResult(status="failed", error="OSError: no data")
    runs = [store.StoredRun(RunSpec(testbed="t", optimizer="kbeta"), failed, Path())]
    with pytest.raises(
        ValueError, match=r"every value that K-β tried has a tuning run that failed \(3 of 4\).*OSError"
    ):
        search._check_some_value("kbeta", tried, runs)
    search._check_some_value("kbeta", [*tried, Tried({"lr": 3}, (9.0, NAN))], runs)


@pytest.mark.parametrize("worse", [1e-3, 1e9])
def test_on_a_logarithmic_endpoint_nothing_is_better_than_nought(worse: float) -> None:
    perfect, far = Tried({"lr": 1}, (0.0, 0.0, 0.0)), Tried({"lr": 2}, (worse, worse, worse))
    assert trials.best([perfect, far], log=True).values == {"lr": 1}
    assert trials.best([Tried({"lr": 1}, (0.0, 0.0, 1e-12)), far], log=True).values == {"lr": 1}
    assert perfect.standing(maximize=False, log=False) == (0, 0.0)


def test_a_score_without_a_logarithm_makes_the_means_of_all_arms_arithmetic() -> None:
    uneven, even = Tried({"lr": 1}, (1e-6, 1e-6, 10.0)), Tried({"lr": 2}, (1.0, 1.0, 1.0))
    assert trials.choose({"a": [uneven, even]}, log=True)["a"].values == {"lr": 1}  # geometric
    both = trials.choose({"a": [uneven, even], "b": [Tried({"lr": 1}, (0.0, 1.0, 1.0))]}, log=True)
    assert both["a"].values == {"lr": 2}  # by the same mean as b


def test_of_two_runs_one_that_diverged_makes_the_value_the_worse() -> None:
    assert trials.best([Tried({"lr": 1}, (0.1, NAN)), Tried({"lr": 2}, (9, 9))]).values == {"lr": 2}


def test_every_arm_tries_the_same_values_also_when_only_one_of_them_is_at_the_edge() -> None:
    where = {"kbeta": 1e-2, "adam95": 1e-3}
    found = tuned(lambda arm, lr: [abs(math.log10(lr / where[arm]))], question(seeds="9"))
    assert found["kbeta"][0] == 1e-2
    assert found["adam95"][0] == 1e-3
    assert found["kbeta"][1] == found["adam95"][1] == [1e-4, 3.162e-4, 1e-3, 3.162e-3, 1e-2, 3.162e-2, 1e-1]


def test_the_range_is_widened_on_both_sides_within_the_budget() -> None:
    found = tuned(lambda arm, lr: [lr if arm == "kbeta" else -lr], question(seeds="9", trials=3, budget=2))
    assert found["kbeta"] == (1e-5, [10.0**k for k in range(-5, 0)])
    assert found["adam95"][0] == 0.1
    assert found["adam95"][1] == found["kbeta"][1]


@pytest.mark.parametrize("trials", [2, 5, 7, 20])
def test_a_range_is_widened_by_a_factor_of_ten_at_most(trials: int) -> None:
    """Seven values in 1e-3 to 1e-1 would reach 2.15, and two would reach 1e7."""
    _, values = tuned(lambda arm, lr: [-lr], question("lr=1e-3:1e-1", trials=trials, seeds="9", budget=9))["kbeta"]
    assert max(values) <= 1.001
    linear = question("lr=1:3:linear", trials=trials, seeds="9", budget=9)
    assert max(tuned(lambda arm, lr: [-lr], linear)["kbeta"][1]) <= 5


def test_the_range_ends_where_the_option_ends() -> None:
    found = tuned(
        lambda arm, lr: [-lr],
        question("lr=0.8:0.9:linear", trials=2, seeds="9", budget=5),
        takes=lambda arm, values: values["lr"] < (1 if arm == "adam95" else 2),
    )
    assert found["kbeta"] == found["adam95"] == (0.9, [0.8, 0.9])


def test_a_best_value_at_the_edge_is_named() -> None:
    tried = [Tried({"lr": lr}, (lr,)) for lr in (1, 2, 3)]
    assert [trials.edge(question(), tried, {"lr": lr}) for lr in (1, 2, 3)] == ["lowest", None, "highest"]


def bowl(values: Any) -> float:
    return float((math.log10(values["lr"]) + 2) ** 2 + 10 * (values["kbeta.alpha"] - 0.9) ** 2)


def test_several_options_fill_their_ranges_evenly_and_every_arm_tries_the_same_values_of_those_it_has() -> None:
    asked = question("lr=1e-4:1", "kbeta.alpha=0.5:0.99:linear", trials=9, seeds="9")
    axes = {"kbeta": asked.axes, "adam95": asked.axes[:1]}
    whole = all_tried(asked, lambda arm, values: (bowl({"kbeta.alpha": 0.9, **values}),), axes)
    points = [
        (math.log10(one.values["lr"]) / 4 + 1, (one.values["kbeta.alpha"] - 0.5) / 0.49) for one in whole["kbeta"]
    ]
    assert [one.values["lr"] for one in whole["adam95"]] == [one.values["lr"] for one in whole["kbeta"]]
    # Halton's points: 1/2, 1/4, 3/4, … in base 2 and 1/3, 2/3, 1/9, … in base 3
    assert points[:3] == [pytest.approx(point, abs=1e-3) for point in [(1 / 2, 1 / 3), (1 / 4, 2 / 3), (3 / 4, 1 / 9)]]
    for column in zip(*points, strict=True):
        thirds = [int(3 * part + 1e-3) for part in column]
        assert min(thirds.count(third) for third in range(3)) >= 2


def test_only_what_is_missing_of_several_options_is_tried_after_a_stop() -> None:
    asked = question("lr=1e-4:1", "kbeta.alpha=0.5:0.99:linear", trials=6)
    axes = dict.fromkeys(ARMS, asked.axes)
    whole = all_tried(asked, lambda arm, values: (bowl(values),), axes)
    part = {"kbeta": whole["kbeta"][:2], "adam95": []}
    missing = [(arm, one.values) for arm, n in (("kbeta", 2), ("adam95", 0)) for one in whole[arm][n:]]
    assert search.next_requests(asked, axes, part) == missing


def test_a_whole_number_that_comes_up_again_is_tried_once() -> None:
    asked = question("lr=1e-4:1", "kbeta.warmup_steps=1:3:linear", trials=12)
    whole = asked.axes[1].model_copy(update={"whole": True})
    asked = asked.model_copy(update={"axes": (asked.axes[0], whole)})
    tried = all_tried(asked, lambda arm, values: (1.0,), {"kbeta": asked.axes, "adam95": (whole,)})
    assert len(tried["kbeta"]) == 12
    assert sorted(one.values["kbeta.warmup_steps"] for one in tried["adam95"]) == [1, 2, 3]


def test_an_arm_with_nothing_to_tune_is_refused(task: Path) -> None:
    with pytest.raises(ValueError, match=r"leaves nothing to tune for adam95"):
        plan(task, "kbeta.alpha=0.8:0.95")


def test_an_option_cannot_be_set_and_tuned(task: Path) -> None:
    with pytest.raises(ValueError, match=r"--tune lr: it is also given the value 0.1"):
        plan(task, options={"lr": "0.1"})


def test_values_that_an_optimizer_does_not_take_are_refused_before_anything_is_run(task: Path) -> None:
    with pytest.raises(ValueError, match="alpha"):
        plan(task, "lr=1e-3:1", "kbeta.alpha=0.8:1.5:linear")


def of_testbed(*tune: str, name: str = "rare_trigger", **more: Any) -> planning.Plan:
    options = {"preset": "smoke", "engine": "mlx", "optimizers": ARMS, "tuning": question(*tune), **more}
    return planning.plan_study(name, **options)


def test_a_setting_that_a_testbed_does_not_have_cannot_be_tuned() -> None:
    with pytest.raises(ValueError, match=r"unknown setting of rare_trigger 'lrr': did you mean 'lr'"):
        of_testbed("lrr=1e-3:1")


def test_a_setting_that_is_not_a_number_cannot_be_tuned() -> None:
    with pytest.raises(ValueError, match=r"--tune schedule: its values are not numbers"):
        of_testbed("schedule=1:2", name="heat2d")


def test_whole_numbers_stay_whole() -> None:
    made = of_testbed("lr=1e-3:1e-1", "kbeta.warmup_steps=10:1000")
    assert made.tuning is not None
    assert [a.whole for a in made.tuning.axes] == [False, True]


@pytest.mark.parametrize("name", ["rare_trigger", "heat2d", "heat3d", "char_lm", "sanity1"])
def test_the_learning_rate_of_every_testbed_can_be_tuned(name: str) -> None:
    import numpy as np

    from kourkoutas.lab import testbeds

    bed = testbeds.get(name)
    made = of_testbed("lr=1e-3:1e-1", name=name)
    rates = []
    for lr in (1e-3, 2e-3):
        arm = made.valued(made.arms[0], {"lr": lr})
        problem = bed.problem(testbeds.settings_of(bed, "smoke", arm.settings), 0)
        rates.append(problem.lr(np.arange(problem.steps)))
    assert rates[0][0] == pytest.approx(1e-3)
    assert rates[1][0] == pytest.approx(2e-3)
    if name != "heat3d":  # its cosine has an end of its own
        assert rates[1] == pytest.approx(2 * rates[0])


def execute(made: Any, out: Path, **more: Any) -> Snapshot:
    return api.execute(made, out, command="test", workers=2, **more)


def stamps(out: Path) -> dict[str, int]:
    return {file.parent.name: file.stat().st_mtime_ns for file in out.glob("runs/*/result.json")}


def account(done: Snapshot) -> Any:
    """All that a study says, but for how long it took and when, and for the next command, which names its folder."""
    runs = {
        run.id: run.result.model_dump_json(exclude={"seconds", "times"})
        for run in [*done.tuning_runs, *done.runs]
        if run.result
    }
    said = to_json(analyse(done))
    for arm in said["arms"]:
        del arm["seconds"], arm["seconds_per_step"]
    del said["next_step"]
    return runs, done.record.chosen, said


def test_the_winners_alone_are_compared_under_their_plain_names_on_fresh_seeds(whole: Snapshot) -> None:
    done = whole
    assert done.record.chosen == {"kbeta": {"lr": 0.01}, "adam95": {"lr": 0.001}}
    assert [(run.spec.optimizer, run.spec.seed) for run in done.runs] == [(arm, s) for arm in ARMS for s in range(4)]
    assert {(run.spec.optimizer, run.spec.settings["lr"]) for run in done.runs} == {
        ("kbeta", 0.01),
        ("adam95", 0.001),
    }
    # kbeta's best of five values is the highest: two more for both arms.
    assert len(done.tuning_runs) == 2 * (5 + 2) * 3
    found = analyse(done)
    assert [(c.n, c.tuned, c.verdict) for c in found.primary.contrasts] == [
        (4, True, "untested")
    ]  # four seeds are too few for a verdict
    assert "7 after widening" in found.fairness[0]


def test_a_best_value_that_is_still_at_the_edge_is_said(task: Path, tmp_path: Path) -> None:
    done = execute(plan(task, budget=0, seeds="0"), tmp_path / "out")
    told = " ".join(analyse(done).fairness)
    assert "K-β (highest lr tried, 0.01)" in told
    assert "adam95: its best" not in told


def test_more_test_seeds_are_added_without_tuning_again(task: Path, tmp_path: Path, whole: Snapshot) -> None:
    shutil.copytree(whole.path, tmp_path / "out")
    before = stamps(tmp_path / "out")
    done = execute(plan(task, seeds="0-5", options=PAUSE), tmp_path / "out")
    after = stamps(tmp_path / "out")
    assert len(after) == len(before) + 4
    assert all(after[run] == stamp for run, stamp in before.items())
    assert len(done.runs) == 12


def test_a_folder_of_another_tuning_or_of_none_is_left_alone(task: Path, whole: Snapshot) -> None:
    before = (whole.path / "study.json").read_bytes()
    with pytest.raises(store.StoreError, match=r"tuning\.trials is 5 there and 6 here"):
        execute(plan(task, trials=6, options=PAUSE), whole.path)
    plain = planning.plan_study(f"{task}:train", seeds=[0], optimizers=ARMS, options={"lr": "0.01"})
    with pytest.raises(store.StoreError, match="holds a tuned study: add --tune as there, or choose another --out"):
        execute(plain, whole.path)
    assert (whole.path / "study.json").read_bytes() == before


def test_a_study_at_one_learning_rate_says_so_first_and_needs_no_record_of_a_tuning(task: Path, tmp_path: Path) -> None:
    plain = planning.plan_study(f"{task}:train", seeds=[0], optimizers=ARMS, options={"lr": "0.01"})
    assert analyse(execute(plain, tmp_path / "out")).fairness[0].startswith("One learning rate for all")
    file = tmp_path / "out" / "study.json"
    old = json.loads(file.read_text())
    del old["tuning"], old["chosen"], old["sha256"]
    file.write_text(json.dumps(old))
    assert len(Snapshot.read(tmp_path / "out").runs) == 2


def test_tuning_runs_that_fail_rank_last_and_are_told_and_all_of_an_arm_are_an_error(tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    file.write_text(
        "def train(trial):\n    lr, bad = trial.settings['lr'], trial.settings.get('bad')\n"
        "    if lr > 5e-3 or (trial.arm == 'adam95' and bad): raise OSError('no data')\n"
        "    return lr if trial.arm == 'kbeta' else -lr\n"
    )
    done = execute(plan(file, trials=3, budget=0, seeds="0"), tmp_path / "out")
    assert done.record.chosen == {"kbeta": {"lr": 1e-4}, "adam95": {"lr": 1e-3}}
    assert "6 of 18 tuning runs failed" in analyse(done).fairness[-1]
    with pytest.raises(ValueError, match=r"all 9 tuning runs of Adam 0\.95 failed.*OSError: no data"):
        execute(plan(file, trials=3, budget=2, seeds="0", options={"bad": "1"}), tmp_path / "other")
    # It stops there: the range is not widened for kbeta, whose best value is at the edge.
    assert len(stamps(tmp_path / "other")) == 2 * 3 * 3


def command(file: Path, out: Path, *more: str) -> list[str]:
    options = ["--seeds", "0-3", "--optimizers", ",".join(ARMS), "--workers", "2", "--no-report", "--out", str(out)]
    tune = ["--tune", "lr=1e-4:1e-2", "--trials", "5", "--tune-seeds", "100-102", "--set", "pause=0.02"]
    return [sys.executable, "-m", "kourkoutas", "study", f"{file}:train", *options, *tune, *more]


def made_twice(out: Path) -> list[str]:
    """Runs that were finished once and started again: a started run that was killed has no result and may be."""
    return [file.parent.name for file in out.glob("runs/*/made") if len(file.read_text()) > 1]


TUNING, WIDENED = 2 * 5 * 3, 2 * 7 * 3


# In the tuning, between its rounds, in the second round, in the comparison.
@pytest.mark.parametrize(
    "when", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (TUNING, WIDENED - 3)), WIDENED + 3]
)
def test_after_kill_9_the_study_ends_as_one_that_never_stopped_and_repeats_nothing(
    task: Path, tmp_path: Path, whole: Snapshot, when: int
) -> None:
    out = tmp_path / "out"
    with subprocess.Popen(command(task, out), stderr=subprocess.DEVNULL) as process:
        end = time.monotonic() + 60
        while len(stamps(out)) < when:
            assert time.monotonic() < end, "nothing happened"
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    time.sleep(0.3)  # its workers end with it
    kept = stamps(out)
    assert when <= len(kept) < WIDENED + 8

    with hurrying(task):
        again = subprocess.run([*command(task, out), "--json"], capture_output=True, text=True, timeout=120)
    assert again.returncode == 0, again.stderr
    now = stamps(out)
    assert len(now) == WIDENED + 8
    assert all(now[run] == stamp for run, stamp in kept.items())
    assert not set(made_twice(out)) & set(kept)
    assert account(Snapshot.read(out)) == account(whole)
    printed = json.loads(again.stdout)
    assert printed["chosen"] == {"kbeta": {"lr": 0.01}, "adam95": {"lr": 0.001}}
    assert len(printed["tuning_runs"]) == WIDENED
    assert {run["seed"] for run in printed["runs"]} == {0, 1, 2, 3}


def test_several_options_are_tuned_in_processes_and_resumed(task: Path, tmp_path: Path) -> None:
    tune = ("lr=1e-4:1e-1", "kbeta.alpha=0.8:0.96:linear")
    done = execute(plan(task, *tune, trials=4, seeds="0"), tmp_path / "out")
    assert set(done.record.chosen["kbeta"]) == {"lr", "kbeta.alpha"}
    assert set(done.record.chosen["adam95"]) == {"lr"}
    found = trials.of_study(done, endpoints.measures_of(done.record)[0].score)
    assert {arm: len(own) for arm, own in found.items()} == {
        "kbeta": 4,
        "adam95": 4,
    }
    before = stamps(tmp_path / "out")
    execute(plan(task, *tune, trials=4, seeds="0"), tmp_path / "out")
    assert stamps(tmp_path / "out") == before
