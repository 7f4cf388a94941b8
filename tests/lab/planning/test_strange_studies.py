"""Studies that nobody would plan, but somebody makes: each is refused in one line, or does what it says."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from rich.console import Console

import kourkoutas.lab as lab
from kourkoutas.lab import api
from kourkoutas.lab.planning import plan as planning
from kourkoutas.lab.planning import shipping
from kourkoutas.lab.results import store
from kourkoutas.lab.results.snapshot import holder_of
from kourkoutas.lab.running import executor
from kourkoutas.lab.running import trial as trial_module
from kourkoutas.lab.showing import progress
from kourkoutas.lab.specs.spec import RunSpec
from kourkoutas.lab.tuning import search


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBETA_CACHE", str(tmp_path / "cache"))


def own(tmp_path: Path, source: str = "def train(trial):\n    return 1.0 + len(trial.arm)\n") -> str:
    file = tmp_path / "task.py"
    file.write_text(textwrap.dedent(source))
    return f"{file}:train"


# Functions without a file


def scaled_by(w: Any, *more: Any) -> Any:
    def helper(x: float) -> float:
        return x + len(more)

    def train(trial: Any) -> float:
        return w * len(trial.arm) + helper(0) + trial.seed

    return train


def of_file(target: str) -> tuple[str, bytes]:
    """What a study records of a function, and what its workers load."""
    file = Path(target.rpartition(":")[0])
    return planning.code_of(target).sha256, file.with_suffix(".pickle").read_bytes()


def test_a_later_call_leaves_the_pickle_of_a_study_that_is_being_made() -> None:
    class Data:  # no plain value, so that it does not make another function
        def __init__(self, x: float) -> None:
            self.x = np.full(3, x)

    made = []
    for x in (8.0, 1000.0):
        data = Data(x)
        made.append(shipping.target_of(lambda trial, data=data: float(data.x[0])))
    first, second = (of_file(target) for target in made)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert made[0] != made[1]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (8, 16),
        (0.1, np.float32(0.1)),
        ("8", 8),
        ([1, {"a": 2}], [1, {"a": 3}]),
        (list(range(500)), list(range(501))),
        ({1, 2}, {1, 3}),
    ],
)
def test_a_function_with_another_value_is_another_study(one: Any, two: Any) -> None:
    def recorded(value: Any) -> str:
        return of_file(shipping.target_of(scaled_by(value)))[0]

    assert recorded(one) == recorded(one)
    assert recorded(one) != recorded(two)
    assert of_file(shipping.target_of(scaled_by(1, 2)))[0] != recorded(1)  # a value that only its helper uses


def test_values_of_globals_defaults_classes_and_objects_count(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(
        textwrap.dedent(
            """
            import sys
            from kourkoutas.lab.planning import shipping
            from kourkoutas.lab.planning import plan
            A, B, C, D, unused = map(int, sys.argv[1])
            endless = [1]
            endless.append(endless)
            class Net:
                @property
                def width(self):
                    return A
                def size(self):
                    return self.width * len(endless)
            class Trainer:
                def __init__(self):
                    self.depth = B
                def train(self, trial, more=C, literal=1e-3):
                    return Net().size() + sum(D for _ in range(2))
            print(plan.code_of(shipping.target_of(Trainer().train)).sha256)
            """
        )
    )
    calls = ["11110", "11119", "21110", "12110", "11210", "11120"]
    processes = [
        subprocess.Popen([sys.executable, str(file), call], stdout=subprocess.PIPE, text=True) for call in calls
    ]
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert said[0] == said[1]
    assert len(set(said)) == 5


def test_a_function_that_uses_no_values_is_recorded_by_its_source_and_default_arguments() -> None:
    def train(trial: Any, lr: float = 1e-3, *, steps: int = 5) -> float:
        return math.sqrt(trial.seed)

    file = Path(shipping.target_of(train).rpartition(":")[0])
    source = (
        """def train(trial: Any, lr: float = 1e-3, *, steps: int = 5) -> float:\n    return math.sqrt(trial.seed)\n"""
        "lr = 0.001\nsteps = 5\n"
    )
    assert file.read_text() == shipping.FILE.format(name="train") + textwrap.indent(source, "# ")


def test_another_value_in_the_same_folder_is_refused_and_its_results_are_kept(tmp_path: Path) -> None:
    def made(w: int) -> list[float]:
        result = lab.study(scaled_by(w), optimizers=["kbeta"], seeds=[0], out=tmp_path / "out", progress=False)
        return list(result.frame()["endpoint"])

    assert made(8) == [40.0]
    with pytest.raises(store.StoreError, match="or a value that it uses has changed since"):
        made(16)
    assert made(8) == [40.0]


# Another command in the same folder

TUNED = """
import functools
import json
import math
import os
import re

def train(trial):
    best = {"kbeta": -3, "adam95": -3, "adam999": -1}[trial.arm]
    return abs(math.log10(trial.settings["lr"]) - best) + 0.01 * trial.seed
"""


def test_an_arm_added_to_a_tuned_study_is_tuned_with_those_that_are_there(tmp_path: Path) -> None:
    def made(*optimizers: str) -> lab.api.Result:
        how = {"tune": {"lr": (1e-4, 1e-2)}, "trials": 3, "tune_seeds": [9], "tune_budget": 1, "progress": False}
        return lab.study(target, optimizers=optimizers, seeds=[0, 1], out=tmp_path / "out", workers=1, **how)  # type: ignore[arg-type]

    target = own(tmp_path, TUNED)
    made("kbeta", "adam95")
    result = made("kbeta", "adam999")
    assert result.chosen == {"kbeta": {"lr": 0.001}, "adam95": {"lr": 0.001}, "adam999": {"lr": 0.1}}
    assert result.frame().groupby("optimizer").size().to_dict() == {"adam95": 2, "adam999": 2, "kbeta": 2}
    assert result.frame(tuning=True).groupby("optimizer")["lr"].apply(frozenset).nunique() == 1


@pytest.mark.parametrize("name", ["log", "higher_is_better"])
def test_the_endpoint_is_not_read_in_another_way_later(tmp_path: Path, name: str) -> None:
    target, out = own(tmp_path), tmp_path / "out"

    def made(**how: bool) -> None:
        plan = planning.plan_study(target, optimizers=["kbeta"], seeds=[0], **how)  # type: ignore[arg-type]
        with executor.holding(plan, out, "test"):
            pass

    made(**{name: True})
    before = (out / "study.json").read_bytes()
    with pytest.raises(store.StoreError, match=f"{name} is True there and False here"):
        made()
    assert (out / "study.json").read_bytes() == before
    kept = store.read_record(out).code
    assert kept is not None
    assert getattr(kept, name)


# Values, seeds and names that cannot be meant


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"options": {"norm": "inf"}}, r"--set norm=inf: a number must be finite; leave norm out"),
        ({"options": {"lr": "nan"}}, r"--set lr=nan: a number must be finite"),
        ({"options": {"kbeta.epsilon": "-1e999"}}, r"--set kbeta.epsilon=-inf: a number must be finite"),
        ({"options": {"x": [1.0, np.float32("nan")]}}, r"--set x=\[1.0, .*nan.*\]: a number must be finite"),
        ({"options": {"x": object}}, r"--set x=<class 'object'>: a value must be a number, text.*; got type"),
        ({"grids": {"lr": "0.1,inf"}}, r"--grid lr=inf: a number must be finite"),
        ({"grids": {"lr": ","}}, r"--grid lr names no value; got ',': write some, for example --grid lr=0.1,0.01"),
        ({"grids": {"lr": []}}, r"--grid lr names no value; got \[\]"),
        ({"grids": {"lr": 0.1}}, r"--grid lr must be a list of values, for example \[0.1, 0.01\]; got 0.1"),
        ({"options": {"lr": "0.5"}, "grids": {"lr": "0.1,0.01"}}, r"--grid lr: --set gives it the value 0.5, too"),
        ({"options": {"kbeta.alpha": 0.5}, "grids": {"kbeta.alpha": [0.9]}}, r"--grid kbeta.alpha: --set gives it"),
        ({"seeds": []}, r"--seeds names no seed; give at least one, for example range\(10\)"),
        ({"seeds": [0, -1]}, r"--seeds must be whole numbers >= 0, for example range\(10\); got -1"),
        ({"seeds": [0.5, 1.5]}, r"--seeds must be whole numbers >= 0, .*; got 0.5"),
        ({"seeds": ["0-9"]}, r"--seeds must be whole numbers >= 0, .*; got '0-9'"),
        ({"seeds": 7}, r"--seeds must be whole numbers >= 0, .*; got 7"),
    ],
)
@pytest.mark.parametrize("testbed", [True, False])
def test_values_and_seeds_that_cannot_be_kept_are_refused(
    tmp_path: Path, how: dict[str, Any], message: str, testbed: bool
) -> None:
    bed: dict[str, Any] = {"target": "rare_trigger", "preset": "smoke", "engine": "torch"}
    with pytest.raises(ValueError, match=message) as told:
        planning.plan_study(**(bed if testbed else {"target": own(tmp_path)}), **how)
    assert "\n" not in str(told.value)


def test_values_of_a_grid_that_are_understood_as_the_same_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kbeta\[quantize=on\] and kbeta\[quantize=True\] are the same optimizer"):
        planning.plan_study("heat2d", preset="smoke", engine="torch", grids={"quantize": "on,true"})


def test_a_study_that_is_refused_writes_nothing(tmp_path: Path) -> None:
    target, out = own(tmp_path), tmp_path / "out"
    for wrong in (
        {"seeds": [-1]},
        {"seeds": []},
        {"grid": {"lr": []}},
        {"settings": {"lr": math.nan}},
        {"tune": {"lr": 0.1}},
        {"tune_seeds": [100.5], "tune": {"lr": (0.1, 1)}},
    ):
        with pytest.raises(ValueError, match=rf"`{next(iter(wrong))}`|\b{next(iter(wrong))}="):
            lab.study(target, out=out, progress=False, **wrong)  # type: ignore[arg-type]
    assert not out.exists()


SHAPED = """
def train(trial):
    return trial.settings["shape"][0] + trial.settings["f"] + len(trial.arm)
"""


def test_settings_of_python_are_kept_as_json_has_them_and_resumed(tmp_path: Path) -> None:
    def made() -> Any:
        how = {"settings": {"f": np.float32(0.5)}, "grid": {"shape": [(1, 2), np.array([3, 4])]}, "seeds": [0, 0]}
        return lab.study(target, optimizers="kbeta", out=tmp_path / "out", progress=False, **how)  # type: ignore[arg-type]

    target = own(tmp_path, SHAPED)
    result = made()
    assert list(result.frame()["optimizer"]) == ["kbeta[shape=[1,2]]", "kbeta[shape=[3,4]]"]
    assert list(result.frame()["endpoint"]) == [1.5 + 18, 3.5 + 18]
    assert made().frame().equals(result.frame())


def test_the_same_seed_twice_is_one_seed(tmp_path: Path) -> None:
    assert planning.plan_study(own(tmp_path), seeds=[3, 0, 3, np.int64(0)]).seeds == [3, 0]
    axes = search.parse_tune(["lr=1e-4:1e-1"])
    assert search.search_space(axes, trials=4, seeds=[100, 100], test_seeds=[0], budget=0).seeds == (100,)


def test_the_values_of_a_narrow_range_differ_and_stay_in_it(tmp_path: Path) -> None:
    def values(text: str, trials: int) -> list[float]:
        (axis,) = search.parse_tune([text])
        return [axis.value(index, trials) for index in range(trials)]

    assert values("mom=0.9999:0.99999:linear", 4) == [0.9999, 0.99993, 0.99996, 0.99999]
    assert values("lr=1e-4:1e-1", 8)[1:3] == [0.0002683, 0.0007197]  # four digits where they suffice
    (axis,) = axes = search.parse_tune([f"x=1:{math.nextafter(1, 2)!r}"])
    question = search.search_space(axes, trials=3, seeds=[100], test_seeds=[0], budget=0)
    with pytest.raises(
        ValueError, match=r"--tune x=1.0:1.0000000000000002 has fewer than --trials 3 different numbers"
    ):
        planning.plan_study(own(tmp_path), tuning=question)
    assert axis.high > 1
    question = search.search_space(
        search.parse_tune(["steps=100:102"]), trials=8, seeds=[100], test_seeds=[0], budget=0
    )
    with pytest.raises(ValueError, match="fewer than --trials 8 different whole numbers"):
        planning.plan_study("rare_trigger", preset="smoke", engine="torch", tuning=question)


# Names


def test_a_metric_may_not_be_named_as_the_checksum_of_its_line(tmp_path: Path) -> None:
    run = trial_module.Trial(RunSpec(testbed="own", optimizer="adam95"), tmp_path)
    with pytest.raises(ValueError, match=r"trial.log\(crc32=...\): 'crc32' is taken by kbeta itself; use another name"):
        run.log(1, crc32=1.0)


@pytest.mark.parametrize(
    ("source", "known"),
    [
        ("def trian(trial):\n    pass\n", False),
        ("if True:\n    def train(trial):\n        pass\n", True),
        ("from elsewhere import fit as train\n", True),
        ("from elsewhere import *\n", True),
        ("import functools\ntrain = functools.partial(print)\n", True),
        ("def define():\n    global train\n    train = print\n", True),
        ("class train:\n    pass\n", True),
    ],
)
def test_a_function_that_a_file_cannot_have_is_refused_before_anything_is_written(
    tmp_path: Path, source: str, known: bool
) -> None:
    target = own(tmp_path, source)
    if known:
        assert planning.code_of(target).function == "train"
    else:
        with pytest.raises(ValueError, match=r"names no function.*task.py defines (trian|no function|other)"):
            planning.code_of(target)


def test_a_name_that_turns_out_to_be_no_function_stops_the_study_at_its_first_run(tmp_path: Path) -> None:
    target = own(tmp_path, "class Task:\n    def train(self):\n        pass\n")
    with pytest.raises(
        ValueError, match=r"stopped after the first run: .*task.py has no function 'train'; it has Task"
    ):
        lab.study(
            target, optimizers=["kbeta", "adam95"], seeds=range(4), workers=1, out=tmp_path / "out", progress=False
        )
    assert len(list(tmp_path.glob("out/runs/*/result.json"))) == 1


def test_an_error_that_only_quotes_a_mistake_of_the_study_stops_nothing(tmp_path: Path) -> None:
    words = r"a log ends in\nkourkoutas.lab.running.trial.StudyError: nothing of ours"
    target = own(tmp_path, f'def train(trial):\n    raise RuntimeError("{words}")\n')
    lab.study(target, optimizers=["kbeta", "adam95"], seeds=[0, 1], workers=1, out=tmp_path / "out", progress=False)
    assert len(list(tmp_path.glob("out/runs/*/result.json"))) == 4


class BreaksAfter(io.StringIO):
    """A terminal that goes away after so many writes."""

    def __init__(self, writes: int) -> None:
        super().__init__()
        self.left = writes

    def write(self, text: str) -> int:
        self.left -= 1
        if self.left < 0:
            raise OSError("the terminal is gone")
        return super().write(text)


@pytest.mark.parametrize(("terminal", "writes"), [(False, 0), (False, 2), (True, 0), (True, 3)])
def test_a_view_that_cannot_be_shown_does_not_stop_the_study(tmp_path: Path, terminal: bool, writes: int) -> None:
    plan = planning.plan_study(own(tmp_path), optimizers=["kbeta", "adam95"], seeds=[0, 1])
    console = Console(file=BreaksAfter(writes), force_terminal=terminal)
    with progress.showing(console, plan) as observer:
        done = api.execute(plan, tmp_path / "out", command="test", workers=1, observer=observer)
    assert [run.result.status for run in done.runs if run.result is not None] == ["ok"] * 4


def test_a_study_goes_on_and_answers_when_nobody_reads_its_progress_any_more(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = ["study", own(tmp_path), "--seeds", "0-1", "--optimizers", "kbeta,adam95", "--workers", "1", "--json"]
    call = [sys.executable, "-m", "kourkoutas", *words, "--out", str(tmp_path / "out")]
    done = subprocess.run(call, stdout=subprocess.PIPE, stderr=writer, text=True, timeout=240)
    os.close(writer)
    assert done.returncode == 0
    assert len(json.loads(done.stdout)["runs"]) == 4


def test_a_view_that_breaks_says_so_once_and_is_told_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[RunSpec] = []

    def breaks(self: progress.Lines, spec: RunSpec) -> None:
        told.append(spec)
        raise KeyError("no such bar")

    monkeypatch.setattr(progress.Lines, "started", breaks)
    plan = planning.plan_study(own(tmp_path), optimizers=["kbeta", "adam95"], seeds=[0, 1])
    text = io.StringIO()
    with progress.showing(Console(file=text, width=200), plan) as observer:
        done = api.execute(plan, tmp_path / "out", command="test", workers=1, observer=observer)
    assert len(told) == 1
    assert all(run.result is not None for run in done.runs)
    assert text.getvalue() == "Progress can no longer be shown (KeyError: 'no such bar'); the study goes on.\n"


# Folders


def test_study_json_is_read_once_and_inside_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = own(tmp_path, "def train(trial):\n    return trial.settings['lr'] + len(trial.arm)\n")
    axes = search.parse_tune(["lr=0.01:0.1"])
    space = search.search_space(axes, trials=2, seeds=[100], test_seeds=[0], budget=0)

    def study(*optimizers: str) -> Any:
        plan = planning.plan_study(target, optimizers=list(optimizers), seeds=[0], tuning=space)
        return api.execute(plan, tmp_path / "out", command="test", workers=1)

    study("kbeta")
    locked: list[bool] = []
    read = store.read_record

    def watched(path: Path) -> store.StudyRecord:
        locked.append(bool((path / ".lock").read_text()))
        return read(path)

    monkeypatch.setattr(store, "read_record", watched)
    found = study("adam95")
    assert locked == [True]
    # the arm that was tuned before is tuned on, together with the new one
    assert [arm.label for arm in found.record.arms] == ["kbeta", "adam95"]
    assert found.record.chosen.keys() == {"kbeta", "adam95"}


def test_a_folder_that_cannot_be_made_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    plan = planning.plan_study(own(tmp_path), seeds=[0])
    with (
        pytest.raises(store.StoreError, match=r"--out .*file/out cannot be made \(Not a directory\); name a folder"),
        executor.holding(plan, tmp_path / "file" / "out", "test"),
    ):
        pass


def test_a_lock_left_by_a_kill_does_not_belong_to_a_later_process_of_that_number(tmp_path: Path) -> None:
    plan = planning.plan_study(own(tmp_path), seeds=[0])
    with executor.holding(plan, tmp_path / "out", "test") as held:
        assert holder_of(held.path) is not None
        began = psutil.Process().create_time()
        os.utime(held.path / ".lock", (began - 90, began - 90))
        assert holder_of(held.path) is None
