"""A user's own optimizer: MODULE:NAME, FILE.py:NAME, or the class itself, on three frameworks."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kourkoutas.lab as lab
from kourkoutas.lab import api, engines
from kourkoutas.lab.optimizers import own, recipes
from kourkoutas.lab.planning import shipping
from kourkoutas.lab.planning.plan import Plan, plan_study
from kourkoutas.lab.results import store
from kourkoutas.lab.running import executor, train, trial, worker
from kourkoutas.lab.specs.spec import RunResult, RunSpec

# Heavy-ball momentum on each framework, as each framework's own SGD has it.
TORCH = """
import torch

class Heavy(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, momentum=0.5, nesterov=False):
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be in [0, 1); got {momentum}")
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "velocity" not in state:
                    state["velocity"] = p.grad.clone()
                else:
                    state["velocity"].mul_(group["momentum"]).add_(p.grad)
                p.add_(state["velocity"], alpha=-group["lr"])
"""
JAX = """
import optax

def heavy(learning_rate, momentum=0.5):
    return optax.chain(optax.trace(decay=momentum), optax.scale_by_learning_rate(learning_rate))
"""
MLX = """
import mlx.core as mx
import mlx.optimizers as optim

class HeavyMlx(optim.Optimizer):
    def __init__(self, learning_rate, momentum=0.5):
        super().__init__()
        self._maybe_schedule("learning_rate", learning_rate)
        self.momentum = momentum

    def init_single(self, parameter, state):
        state["velocity"] = mx.zeros_like(parameter)

    def apply_single(self, gradient, parameter, state):
        state["velocity"] = self.momentum * state["velocity"] + gradient
        return parameter - self.learning_rate.astype(gradient.dtype) * state["velocity"]
"""
# engine → (source, name there, the same in the framework's own library)
HEAVY = {
    "torch": (TORCH, "Heavy", "torch.SGD"),
    "jax": (JAX, "heavy", "optax.sgd"),
    "mlx": (MLX, "HeavyMlx", "mlx.SGD"),
}
SMALL = {"steps": 30, "held_out": 64}


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """One file with all three."""
    file = tmp_path / "mine.py"
    file.write_text(TORCH + JAX + MLX)
    return file


def planned(*optimizers: str, engine: str = "torch", **settings: Any) -> Plan:
    return plan_study("rare_trigger", optimizers=optimizers, engine=engine, options={**SMALL, **settings}, seeds=[0])


def made(plan: Plan) -> list[RunResult]:
    return [train.run(spec) for spec in plan.specs()]


@pytest.mark.parametrize("engine", engines.NAMES)
def test_it_trains_as_the_same_optimizer_of_the_framework_does(engine: str, mine: Path) -> None:
    _, name, theirs = HEAVY[engine]
    options = {f"{name}.momentum": 0.8, f"{theirs}.momentum": 0.8}
    one, two = made(planned(f"{mine}:{name}", theirs, engine=engine, **options))
    assert one.curve["loss"] == pytest.approx(two.curve["loss"], rel=1e-5)
    assert one.settings["optimizer"]["momentum"] == 0.8
    assert one.settings["optimizer"]["family"] == f"mine.py:{name}"


# The other engines are slow: that the optimizer trains on all three is the test above.
@pytest.mark.parametrize("engine", ["torch", *(pytest.param(name, marks=pytest.mark.slow) for name in ("jax", "mlx"))])
def test_it_is_compared_and_tuned_like_any_other(engine: str, mine: Path, tmp_path: Path) -> None:
    _, name, _ = HEAVY[engine]
    result = lab.study(
        "rare_trigger",
        optimizers=["kbeta", f"{mine}:{name}"],
        engine=engine,
        seeds="0-1",
        settings=SMALL,
        tune={"lr": (1e-2, 1e-1), f"{name}.momentum": (0.1, 0.9, "linear")},
        trials=2,
        tune_seeds=[9],
        out=tmp_path / "out",
        workers=1,
        progress=False,
    )
    assert set(result.chosen) == {"kbeta", name}
    assert set(result.chosen[name]) == {"lr", f"{name}.momentum"}
    assert [arm.label for arm in result.analysis.arms] == ["kbeta", name]
    assert all(run.result is not None and run.result.status == "ok" for run in result.snapshot.runs)
    (origin,) = {arm.origin for arm in result.snapshot.record.arms if arm.origin is not None}
    assert origin.words == f"mine.py:{name}"
    assert lab.load(tmp_path / "out").analysis.headline == result.analysis.headline


FUNCTION = {
    "torch": """
import torch

def train(trial):
    w = torch.nn.Parameter(torch.full((3, 2), 1.0 + trial.seed))
    optimizer = trial.optimizer([w], lr=0.1)
    for step in range(5):
        optimizer.zero_grad()
        loss = w.square().sum()
        loss.backward()
        optimizer.step()
        trial.log(step, loss=loss.item(), kind=len(type(optimizer).__name__))
    return loss.item()
""",
    "jax": """
import jax, jax.numpy as jnp, optax

def train(trial):
    w = jnp.full((3, 2), 1.0 + trial.seed)
    optimizer = trial.optimizer(w, lr=0.1)
    state = optimizer.init(w)
    for step in range(5):
        loss, grad = jax.value_and_grad(lambda w: jnp.sum(w**2))(w)
        updates, state = optimizer.update(grad, state, w)
        w = optax.apply_updates(w, updates)
        trial.log(step, loss=loss)
    return float(loss)
""",
    "mlx": """
import mlx.core as mx

def train(trial):
    w = {"w": mx.full((3, 2), 1.0 + trial.seed)}
    optimizer = trial.optimizer(w, lr=0.1)
    for step in range(5):
        loss, grad = mx.value_and_grad(lambda w: mx.sum(w["w"] ** 2))(w)
        w = optimizer.apply_gradients(grad, w)
        trial.log(step, loss=loss.item())
    return loss.item()
""",
}


@pytest.mark.parametrize("engine", engines.NAMES)
def test_a_function_of_ones_own_trains_with_an_optimizer_of_ones_own(engine: str, mine: Path, tmp_path: Path) -> None:
    _, name, theirs = HEAVY[engine]
    task = tmp_path / f"task_{engine}.py"
    task.write_text(FUNCTION[engine])
    options = {f"{name}.momentum": 0.8, f"{theirs}.momentum": 0.8}
    plan = plan_study(f"{task}:train", optimizers=[f"{mine}:{name}", theirs], options=options, seeds=[1])
    ends = []
    for spec in plan.specs():
        folder = tmp_path / spec.id
        folder.mkdir()
        ends.append(worker.make(worker.Task(spec=spec, folder=folder, code=plan.code), lambda *_: None).endpoint)
    assert ends[0] == pytest.approx(ends[1], rel=1e-6)
    # 4 entries fewer than all 6 of (1 + seed)² = 4, after four steps of heavy ball with lr 0.1 and momentum 0.8
    w, velocity = 2.0, 0.0
    for _ in range(4):
        velocity = 0.8 * velocity + 2 * w
        w -= 0.1 * velocity
    assert ends[0] == pytest.approx(6 * w**2, rel=1e-5)


def test_a_module_that_is_installed_is_named_by_its_import_and_known_by_its_version() -> None:
    plan = planned("torch.optim:Adagrad")
    (arm,) = plan.arms
    assert arm.label == "Adagrad"
    assert arm.origin is not None
    assert arm.origin.version == f"torch {importlib.metadata.version('torch')}"
    assert made(plan)[0].curve["loss"] == made(planned("torch.Adagrad"))[0].curve["loss"]


def test_a_module_of_the_working_folder_is_found_and_known_by_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "a_package_of_mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "optim.py").write_text(TORCH)
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    (arm,) = planned("a_package_of_mine.optim:Heavy").arms
    assert sys.path == before
    assert arm.origin is not None
    assert arm.origin.version == f"sha256 {hashlib.sha256(TORCH.encode()).hexdigest()[:16]}"


def test_two_of_one_name_are_told_apart_by_where_they_come_from(tmp_path: Path) -> None:
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(TORCH)
    other = tmp_path / "other.py"
    other.write_text(TORCH)
    first, second = (f"{tmp_path / folder}/mine.py:Heavy" for folder in ("first", "second"))
    labels = [arm.label for arm in planned(first, second, f"{other}:Heavy").arms]
    assert labels == ["first/mine.Heavy", "second/mine.Heavy", "other.Heavy"]
    arms = planned(first, f"{other}:Heavy", **{"mine.Heavy.momentum": 0.1}).arms
    assert [arm.options for arm in arms] == [{"momentum": 0.1}, {}]


def test_each_of_two_files_imports_its_own_neighbour_of_the_same_name(tmp_path: Path) -> None:
    source = "import torch\nfrom damping import MOMENTUM\n\nclass Damped(torch.optim.SGD):\n    momentum = MOMENTUM\n"
    for folder, momentum in (("first", 0.1), ("second", 0.2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.py").write_text(source)
        (tmp_path / folder / "damping.py").write_text(f"MOMENTUM = {momentum}\n")
    files = [tmp_path / folder / "mine.py" for folder in ("first", "second")]
    assert [own.load_file(file).Damped.momentum for file in files] == [0.1, 0.2]


def test_one_with_the_name_of_ours_is_told_apart_too(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TORCH.replace("Heavy", "adamw"))
    assert [arm.label for arm in planned("adamw", f"{file}:adamw").arms] == ["adamw", "mine.adamw"]


def test_an_edited_file_is_another_run_and_a_moved_one_the_same(mine: Path, tmp_path: Path) -> None:
    (before,) = planned(f"{mine}:Heavy").specs()
    (tmp_path / "moved").mkdir()
    moved = mine.rename(tmp_path / "moved" / "mine.py")
    (after,) = planned(f"{moved}:Heavy").specs()
    assert after.id == before.id
    moved.write_text(moved.read_text() + "# another word\n")
    (edited,) = planned(f"{moved}:Heavy").specs()
    assert edited.id != before.id


def test_a_run_without_an_origin_keeps_the_id_that_it_had_before_there_were_any() -> None:
    content = {
        "testbed": "bowl", "preset": "smoke", "engine": "torch", "optimizer": "torch.SGD", "seed": 3, "settings": {},
        "options": {"momentum": 0.9}, "resolved": "0123456789abcdef",
    }  # fmt: skip
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    assert RunSpec(**content).id.endswith(hashlib.sha256(canonical.encode()).hexdigest()[:8])  # type: ignore[arg-type]


def test_a_file_that_changes_while_the_study_runs_gives_no_result(mine: Path) -> None:
    (spec,) = planned(f"{mine}:Heavy").specs()
    mine.write_text(mine.read_text() + "# another word\n")
    with pytest.raises(ValueError, match=r"mine\.py is no longer the file that the study was planned with"):
        train.run(spec)


def test_a_study_is_not_continued_with_an_edited_optimizer(mine: Path, tmp_path: Path) -> None:
    with executor.holding(planned("kbeta", f"{mine}:Heavy"), tmp_path / "out", "first"):
        pass
    before = (tmp_path / "out" / "study.json").read_bytes()
    mine.write_text(mine.read_text() + "# another word\n")
    with (
        pytest.raises(store.StoreError, match=r"optimizer Heavy\.optimizer\.comes from is 'sha256 \w+' there and"),
        executor.holding(planned("kbeta", f"{mine}:Heavy"), tmp_path / "out", "second"),
    ):
        pytest.fail("the folder must not be handed out")
    assert (tmp_path / "out" / "study.json").read_bytes() == before


STRICT = """
import torch

class Strict(torch.optim.SGD):
    def __init__(self, params, lr):
        if not lr > 0:
            raise ValueError(f"lr must be above 0; got {lr}")
        super().__init__(params, lr)
"""


def test_one_that_refuses_a_learning_rate_of_nought_is_made(tmp_path: Path) -> None:
    file = tmp_path / "strict.py"
    file.write_text(STRICT)
    assert made(planned(f"{file}:Strict"))[0].curve["loss"] == made(planned("torch.SGD"))[0].curve["loss"]


SHARPNESS = """
import torch

class Sharp(torch.optim.Optimizer):
    '''Climbs first, and takes the gradient there: needs the loss as a function.'''
    def __init__(self, params, lr=1e-3, rho=0.05):
        super().__init__(params, {"lr": lr, "rho": rho})

    def step(self, closure):
        loss = closure()
        with torch.no_grad():
            params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            rho = self.param_groups[0]["rho"]
            climbs = [rho * p.grad / (p.grad.norm() + 1e-12) for p in params]
            for p, climb in zip(params, climbs):
                p.add_(climb)
        closure()
        with torch.no_grad():
            for p, climb in zip(params, climbs):
                p.sub_(climb).sub_(p.grad, alpha=self.param_groups[0]["lr"])
        return loss
"""


def test_an_optimizer_that_needs_a_closure_gets_one(tmp_path: Path) -> None:
    file = tmp_path / "sharp.py"
    file.write_text(SHARPNESS)
    flat, climbing = made(planned(f"{file}:Sharp", **{"Sharp.rho": 0.0}))[0], made(planned(f"{file}:Sharp"))[0]
    plain = made(planned("torch.SGD"))[0]
    assert flat.curve["loss"] == pytest.approx(plain.curve["loss"], rel=1e-6)  # without a climb it is SGD
    assert climbing.curve["loss"] != flat.curve["loss"]


AVERAGED = """
import torch

class Averaged(torch.optim.SGD):
    '''Shows its average between chunks of training, and goes on from where it was.'''
    shows = []

    def train(self):
        Averaged.shows.append("train")

    def eval(self):
        Averaged.shows.append("eval")
"""


def test_train_and_eval_are_called_around_training(tmp_path: Path) -> None:
    file = tmp_path / "averaged.py"
    file.write_text(AVERAGED)
    plan = planned(f"{file}:Averaged")
    assert made(plan)[0].status == "ok"
    shows = own.load_file(file).Averaged.shows
    assert shows[-1] == "eval"
    assert "train" in shows[-2:]


# In Python: the class itself


def test_a_class_is_named_by_its_module_its_file_or_a_file_that_is_written_for_it(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("KBETA_CACHE", str(tmp_path / "cache"))
    assert shipping.optimizer_of("kbeta") == "kbeta"
    assert shipping.optimizer_of(torch.optim.Adagrad) == "torch.optim.adagrad:Adagrad"
    module = own.load_file(mine)
    assert shipping.optimizer_of(module.Heavy) == f"{mine}:Heavy"

    class Local(torch.optim.SGD):  # type: ignore[misc,name-defined]
        pass

    word = shipping.optimizer_of(Local)
    assert word.endswith(".py:Local")
    assert own.engines_of(own.origin_of(word)) == ("torch",)
    with pytest.raises(TypeError, match=r"`optimizers` must be names, classes or functions.*got int 3"):
        api.plan_of(api.StudyOptions("rare_trigger", optimizers=["kbeta", 3]))  # type: ignore[list-item]


SCRIPT = """
import torch
from kourkoutas.lab import study

SLOWER = 0.5

class Slow(torch.optim.SGD):
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] *= SLOWER
        return super().step(closure)

result = study("rare_trigger", optimizers=["torch.SGD", Slow], seeds=[0], workers=1, progress=False,
               settings={"steps": 20, "held_out": 64, "torch.SGD.lr_scale": 0.5})
print(result.frame()[["optimizer", "endpoint"]].to_json(orient="values"))
"""


def test_a_class_of_the_running_script_brings_what_it_refers_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KBETA_CACHE", str(tmp_path / "cache"))
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    (one, end), (two, same) = json.loads(done.stdout)
    assert (one, two) == ("torch.SGD", "Slow")
    assert same == pytest.approx(end)  # half the learning rate, on both ways


# What goes wrong, before any run


WRONG = """
import torch

answer = 42

class Model(torch.nn.Linear):
    pass

def broken(learning_rate):
    return learning_rate

class NoRate(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params, lr=0.1)
"""
BAD = [
    ("nowhere.py:Mine", {}, r"--optimizers nowhere\.py:Mine: there is no file nowhere\.py; .* FILE\.py:NAME"),
    (
        "no_such_package_of_mine:SOAP",
        {},
        r"no_such_package_of_mine, which is not installed: pip install no-such-package",
    ),
    ("mine.py:Hevy", {}, r"unknown optimizer of mine\.py 'Hevy': did you mean 'Heavy'"),
    ("torch.optim:Adm", {}, r"unknown optimizer of torch\.optim 'Adm': did you mean 'Adam'"),
    ("torch.optim:", {}, r"--optimizers torch\.optim:: write MODULE:NAME or FILE\.py:NAME"),
    ("torch.optimm:Adam", {}, r"torch is installed, and has no module torch\.optimm"),
    ("syntax.py:Mine", {}, r"--optimizers syntax\.py:Mine: .*syntax\.py, line 2 cannot be loaded .*correct the file"),
    ("raises.py:Mine", {}, r"raises\.py cannot be loaded \(ZeroDivisionError: division by zero\): correct the file"),
    ("wrong.py:Model", {}, r"wrong\.py:Model is no optimizer: an optimizer is a class of torch\.optim\.Optimizer"),
    ("wrong.py:answer", {}, r"wrong\.py:answer is a int: an optimizer is a class"),
    ("wrong.py:NoRate", {}, r"'wrong\.py:NoRate' cannot be made: NoRate\(…\) gives TypeError: .*'lr'"),
    ("mine.py:heavy", {}, r"optimizer 'heavy' is not available on engine 'torch': use --engine jax or mlx"),
    ("mine.py:Heavy", {"Heavy.momentun": 0.5}, r"unknown option of Heavy .* 'momentun': did you mean 'momentum'"),
    ("mine.py:Heavy", {"Heavy.momentum": 2}, r"Heavy\(…, momentum=2\) gives ValueError: momentum must be in \[0, 1\)"),
    ("mine.py:Heavy", {"Heavy.lr": 2}, r"option lr of Heavy: .* use --set Heavy\.lr_scale=0\.1"),
]


@pytest.fixture
def in_folder(mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "wrong.py").write_text(WRONG)
    (tmp_path / "syntax.py").write_text("import torch\nclass Mine(:\n")
    (tmp_path / "raises.py").write_text("Mine = 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("word", "options", "message"), BAD, ids=[f"{word} {options}" for word, options, _ in BAD])
def test_a_mistake_is_told_in_one_line_with_the_remedy_and_before_any_run(
    word: str, options: dict[str, Any], message: str, in_folder: Path
) -> None:
    with pytest.raises((ValueError, TypeError, ImportError), match=message) as told:
        planned("kbeta", word, **options)
    assert "\n" not in str(told.value)


def test_a_function_that_gives_no_optimizer_is_told_on_its_engine(in_folder: Path) -> None:
    with pytest.raises(TypeError, match=r"wrong\.py:broken gives a float on jax, which is no optimizer"):
        planned("wrong.py:broken", engine="jax")


def test_a_study_of_ones_own_function_checks_the_optimizer_before_any_run(in_folder: Path) -> None:
    (in_folder / "task.py").write_text("def train(trial):\n    return 1.0\n")
    with pytest.raises(ValueError, match=r"momentum must be in \[0, 1\)"):
        plan_study("task.py:train", optimizers=["mine.py:Heavy"], options={"Heavy.momentum": 7})
    with pytest.raises(TypeError, match=r"gives a float on jax, which is no optimizer"):
        plan_study("task.py:train", optimizers=["wrong.py:broken"])


def test_an_option_is_tuned_in_the_numbers_that_it_takes(tmp_path: Path) -> None:
    file = tmp_path / "counted.py"
    file.write_text(TORCH.replace("nesterov=False", "every=4"))
    options = api.StudyOptions(
        "rare_trigger", optimizers=["kbeta", f"{file}:Heavy"], tune=["Heavy.every=1:8", "lr=1e-2:1e-1"], seeds="0-1"
    )
    plan = api.plan_of(options)
    assert plan.tuning is not None
    assert [axis.whole for axis in plan.tuning.axes] == [True, False]
    file.write_text(TORCH)
    with pytest.raises(ValueError, match=r"Heavy\.nesterov: its values are not numbers"):
        api.plan_of(api.StudyOptions("rare_trigger", optimizers=[f"{file}:Heavy"], tune=["Heavy.nesterov=1:8"]))


def test_a_second_beta_leaves_the_first_as_the_optimizer_has_it(tmp_path: Path) -> None:
    file = tmp_path / "betas.py"
    file.write_text(
        "import torch\n\nclass Two(torch.optim.Adam):\n"
        "    def __init__(self, params, lr=1e-3, betas=(0.7, 0.8)):\n        super().__init__(params, lr, betas)\n"
    )
    (arm,) = planned(f"{file}:Two", **{"Two.beta2": 0.95}).arms
    torch = pytest.importorskip("torch")
    optimizer = trial.Trial(
        RunSpec(testbed="own", optimizer=arm.label, options=arm.options, origin=arm.origin), tmp_path
    ).optimizer([torch.nn.Parameter(torch.zeros(2))])
    assert optimizer.param_groups[0]["betas"] == (0.7, 0.95)


def test_a_short_name_is_an_abbreviation() -> None:
    for library, (engine, module) in recipes.ABBREVIATIONS.items():
        name = {"torch": "SGD", "optax": "sgd", "mlx": "SGD", "pytorch_optimizer": "Lamb"}[library]
        short = recipes.recipe(f"{library}.{name}")
        assert recipes.engines_of(short) == (engine,)
        try:
            origin = own.origin_of(f"{module}:{name}")
        except ImportError:
            continue
        whole = recipes.recipe(name, origin=origin)
        assert engine in recipes.engines_of(whole)
        assert recipes._home(short, engine) == recipes._home(whole, engine)


def test_one_beta_of_an_abbreviation_leaves_the_other_as_its_library_has_it() -> None:
    pytest.importorskip("mlx.core")
    import mlx.optimizers as optim

    theirs = optim.Lion(1e-3)
    made_here = recipes.recipe("mlx.Lion", {}, {"beta1": 0.8}).mlx()
    assert list(made_here.betas) == [0.8, theirs.betas[1]]


def test_a_learning_rate_among_the_options_of_a_library_is_refused_before_any_run() -> None:
    with pytest.raises(ValueError, match=r"option lr of torch\.SGD: the study gives every optimizer its learning rate"):
        planned("torch.SGD", **{"torch.SGD.lr": 0.1})
