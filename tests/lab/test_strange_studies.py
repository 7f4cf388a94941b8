"""Studies that nobody would plan, but somebody makes: each is refused in one line, or does what it says."""

from __future__ import annotations

import math
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kourkoutas.lab as lab
from kourkoutas.lab import shipping
from kourkoutas.lab.results import store
from kourkoutas.lab.specs import plan as planning


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
            from kourkoutas.lab import shipping
            from kourkoutas.lab.specs import plan
            A, B, C, D, unused = map(int, sys.argv[1:])
            class Net:
                width = A
                def size(self):
                    return self.width
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
        subprocess.Popen([sys.executable, str(file), *call], stdout=subprocess.PIPE, text=True) for call in calls
    ]
    said = [process.communicate(timeout=60)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert said[0] == said[1]
    assert len(set(said)) == 5


def test_a_function_that_uses_no_values_is_recorded_as_ever() -> None:
    def train(trial: Any, lr: float = 1e-3, *, steps: int = 5) -> float:
        return math.sqrt(trial.seed)

    file = Path(shipping.target_of(train).rpartition(":")[0])
    source = (
        """def train(trial: Any, lr: float = 1e-3, *, steps: int = 5) -> float:\n    return math.sqrt(trial.seed)\n"""
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
