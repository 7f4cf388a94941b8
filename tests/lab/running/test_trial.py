"""A user's own training function, on three frameworks."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kourkoutas.lab import api
from kourkoutas.lab.judging.analysis import analyse, as_json
from kourkoutas.lab.planning import plan as planning
from kourkoutas.lab.results import store
from kourkoutas.lab.results.snapshot import Snapshot
from kourkoutas.lab.running import trial, worker
from kourkoutas.lab.specs.spec import RunResult, RunSpec
from tests.lab import made_study

EXAMPLES = Path(__file__).parents[3] / "examples"


def trial_of(folder: Path, optimizer: str = "kbeta", **options: Any) -> trial.Trial:
    return trial.Trial(RunSpec(testbed="own", optimizer=optimizer, options=options), folder)


def made(tmp_path: Path, source: str, endpoint: str | None = None, **options: str) -> RunResult:
    """One run of `train` in `source`, in this process."""
    file = tmp_path / f"task_{abs(hash(source))}.py"
    file.write_text(source)
    plan = planning.plan_study(f"{file}:train", optimizers=["kbeta"], options=options, endpoint=endpoint)
    task = worker.Task(spec=plan.specs()[0], folder=tmp_path, code=plan.code)
    return worker.make(task, lambda step, steps, loss: None)


def test_torch_arms_are_the_optimizers_they_are_named_after(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from kourkoutas.torch import KourkoutasBeta

    def model() -> Any:
        torch.manual_seed(0)
        return torch.nn.Linear(3, 2)

    def trained(module: Any, optimizer: Any) -> Any:
        for scale in (1.0, 5.0, 0.1):
            optimizer.zero_grad()
            (module(torch.ones(4, 3)) * scale).pow(2).sum().backward()
            optimizer.step()
        return torch.cat([p.detach().flatten() for p in module.parameters()])

    mine, theirs = model(), model()
    optimizer = trial_of(tmp_path, "adam95").optimizer(mine, lr=0.01)
    other = torch.optim.Adam(theirs.parameters(), lr=0.01, betas=(0.9, 0.95), fused=True)
    assert isinstance(optimizer, torch.optim.Adam)
    assert torch.equal(trained(mine, optimizer), trained(theirs, other))

    mine, theirs = model(), model()
    optimizer = trial_of(tmp_path, "kbeta", alpha=0.8).optimizer(mine, lr=0.01)
    assert isinstance(optimizer, KourkoutasBeta)
    assert optimizer.bucket_names == ["weight", "bias"]
    assert torch.equal(
        trained(mine, optimizer), trained(theirs, KourkoutasBeta(theirs.named_parameters(), lr=0.01, alpha=0.8))
    )


@pytest.mark.parametrize("kind", ["module", "parameters", "named_parameters", "list", "tensor"])
def test_torch_is_recognised_by_what_is_passed(tmp_path: Path, kind: str) -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Linear(3, 2)
    given = {
        "module": module,
        "parameters": module.parameters(),
        "named_parameters": module.named_parameters(),
        "list": list(module.parameters()),
        "tensor": module.weight,
    }[kind]
    optimizer = trial_of(tmp_path).optimizer(given, lr=0.25)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == (1 if kind == "tensor" else 2)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25]


# Adam's first step is lr·g/(|g| + eps): the learning rate itself. The warm arms scale it by √(1 - 0.999).
WARM = math.sqrt(1 - 0.999)


@pytest.mark.parametrize(("arm", "options", "factor"), [("adam95-warm", {}, WARM), ("adam95", {"lr_scale": 0.5}, 0.5)])
def test_the_learning_rate_of_an_arm_is_scaled_on_every_framework(
    tmp_path: Path, arm: str, options: dict[str, Any], factor: float
) -> None:
    torch = pytest.importorskip("torch")
    jnp = pytest.importorskip("jax.numpy")
    optax = pytest.importorskip("optax")
    mx = pytest.importorskip("mlx.core")
    own = trial_of(tmp_path, arm, **options)

    tensor = torch.nn.Parameter(torch.zeros(3))
    optimizer = own.optimizer([tensor], lr=0.1)
    tensor.grad = torch.ones(3)
    optimizer.step()
    assert np.allclose(tensor.detach().numpy(), -0.1 * factor, rtol=1e-5)
    assert optimizer.param_groups[0]["lr"] == 0.1

    params = {"w": jnp.zeros(3)}
    transformation = own.optimizer(params, lr=0.1)
    updates, _ = transformation.update({"w": jnp.ones(3)}, transformation.init(params), params)
    assert np.allclose(optax.apply_updates(params, updates)["w"], -0.1 * factor, rtol=1e-5)

    tree = {"w": mx.zeros(3)}
    stepped = own.optimizer(tree, lr=0.1).apply_gradients({"w": mx.ones(3)}, tree)
    assert np.allclose(np.array(stepped["w"]), -0.1 * factor, rtol=1e-4)


def test_learning_rates_may_be_schedules_on_jax_and_mlx(tmp_path: Path) -> None:
    jnp = pytest.importorskip("jax.numpy")
    mx = pytest.importorskip("mlx.core")
    own = trial_of(tmp_path, "adam999")

    params = {"w": jnp.zeros(3)}
    transformation = own.optimizer(params, lr=lambda count: 0.1 / (count + 1))
    state = transformation.init(params)
    sizes = []
    for _ in range(2):
        updates, state = transformation.update({"w": jnp.ones(3)}, state, params)
        sizes.append(float(updates["w"][0]))
    assert np.allclose(sizes, [-0.1, -0.05], rtol=1e-4)

    tree = {"w": mx.zeros(3)}
    optimizer = own.optimizer(tree, lr=lambda count: 0.1 / (count + 1))
    once = optimizer.apply_gradients({"w": mx.ones(3)}, tree)
    twice = optimizer.apply_gradients({"w": mx.ones(3)}, once)
    assert np.allclose(np.array(once["w"]), -0.1, rtol=1e-4)
    assert np.allclose(np.array(twice["w"]), -0.15, rtol=1e-4)


@pytest.mark.parametrize("given", [3, "model", {}, [], {"w": np.zeros(2)}])
def test_what_no_framework_knows_is_refused(tmp_path: Path, given: Any) -> None:
    with pytest.raises(TypeError, match=r"trial\.optimizer takes a torch module"):
        trial_of(tmp_path).optimizer(given)


def test_the_returned_number_is_the_endpoint(tmp_path: Path) -> None:
    result = made(tmp_path, "def train(trial):\n    trial.log(1, loss=2.0)\n    return 0.5\n")
    assert (result.status, result.endpoint, result.metrics) == ("ok", 0.5, {"loss": 2.0})


def test_without_a_returned_number_the_last_loss_is_the_endpoint(tmp_path: Path) -> None:
    result = made(tmp_path, "def train(trial):\n    trial.log(1, loss=2.0)\n    trial.log(2, loss=1.5)\n")
    assert result.endpoint == 1.5
    assert result.curve == {"step": [1.0, 2.0], "loss": [2.0, 1.5]}


def test_a_named_metric_is_the_endpoint_whatever_is_returned(tmp_path: Path) -> None:
    source = "def train(trial):\n    trial.log(1, val_loss=0.25)\n    trial.log(2, loss=9.0)\n    return 7.0\n"
    result = made(tmp_path, source, endpoint="val_loss")
    assert result.endpoint == 0.25
    assert result.curve["val_loss"][0] == 0.25
    assert math.isnan(result.curve["val_loss"][1])


def test_an_endpoint_that_is_not_finite_is_a_diverged_run(tmp_path: Path) -> None:
    result = made(tmp_path, "def train(trial):\n    trial.log(1, loss=float('inf'))\n    return float('nan')\n")
    assert (result.status, result.endpoint, result.metrics) == ("diverged", None, {"loss": math.inf})


@pytest.mark.parametrize(
    ("source", "endpoint", "message"),
    [
        ("def train(trial):\n    pass\n", None, "returned nothing and logged no `loss`"),
        ("def train(trial):\n    return 'fine'\n", None, "must return a number or None; got str"),
        ("def train(trial):\n    trial.log(1, loss=1.0)\n", "val_loss", "--endpoint val_loss was never logged"),
        ("def train(trial):\n    trial.log(1, loss='low')\n", None, r"trial.log(loss=...) takes a number; got str"),
        ("def fit(trial):\n    return 1.0\ntrain = fit(0)\n", None, "has no function 'train'; it has fit"),
        ("import no_such_package\ndef train(trial):\n    return 1.0\n", None, "No module named 'no_such_package'"),
    ],
)
def test_a_function_that_gives_no_endpoint_fails_with_the_remedy(
    tmp_path: Path, source: str, endpoint: str | None, message: str
) -> None:
    result = made(tmp_path, source, endpoint)
    assert result.status == "failed"
    assert message in (result.error or "")


def test_settings_reach_the_function_and_reserved_names_are_refused(tmp_path: Path) -> None:
    source = "def train(trial):\n    return trial.settings['width'] * 2\n"
    assert made(tmp_path, source, width="21").endpoint == 42
    with pytest.raises(ValueError, match="code: kbeta itself uses that name"):
        made(tmp_path, source, code="x")


def test_the_function_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "a_neighbour_of_the_task.py").write_text("VALUE = 0.125\n")
    assert (
        made(tmp_path, "import a_neighbour_of_the_task as n\ndef train(trial):\n    return n.VALUE\n").endpoint == 0.125
    )


def test_a_long_curve_is_thinned_and_keeps_its_last_point(tmp_path: Path) -> None:
    source = "def train(trial):\n    for step in range(5000):\n        trial.log(step, loss=5000.0 - step)\n"
    curve = made(tmp_path, source).curve
    assert len(curve["step"]) <= trial.CURVE_POINTS
    assert (curve["step"][-1], curve["loss"][-1]) == (4999.0, 1.0)


@pytest.mark.parametrize("target", ["missing.py:train", "missing.py", "{file}:not a name", "{file}"])
def test_a_target_that_names_no_function_of_a_file_is_refused(tmp_path: Path, target: str) -> None:
    (tmp_path / "task.py").write_text("")
    with pytest.raises(ValueError, match=r"FILE\.py:FUNC|is not a function name|there is no file"):
        planning.plan_study(target.format(file=tmp_path / "task.py"))


@pytest.mark.parametrize("framework", ["torch", pytest.param("jax", marks=pytest.mark.slow), "mlx"])
def test_the_example_runs_as_a_study_and_every_arm_learns(tmp_path: Path, framework: str) -> None:
    pytest.importorskip(framework)
    plan = planning.plan_study(
        f"{EXAMPLES / f'my_task_{framework}.py'}:train", optimizers=["kbeta", "adam95"], options={"steps": "60"}
    )
    runs = api.execute(plan, tmp_path / "out", command="test", workers=1).runs
    assert [run.result.error for run in runs if run.result] == [None, None]
    for run in runs:
        assert run.result is not None
        assert run.result.curve["loss"][-1] < 0.9 * run.result.curve["loss"][0]
        assert run.result.settings["framework"] == framework
    trace = runs[0].trace()
    if framework == "jax":
        assert trace is None
    else:
        assert trace is not None
        assert trace["steps"].tolist() == list(range(1, 61))
        assert np.all(trace["norm"] > 0)
        assert np.all((trace["beta2"] >= 0.88) & (trace["beta2"] <= 0.999))
    assert runs[1].trace() is None


def test_the_exact_command_in_the_readme_form_prints_machine_readable_results(tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    file.write_text("def train(trial):\n    return 1.0 + trial.seed + len(trial.arm)\n")
    arguments = [f"{file}:train", "--seeds", "0-2", "--optimizers", "kbeta,adam95", "--out", str(tmp_path / "out")]
    call = [sys.executable, "-m", "kourkoutas", "study", *arguments, "--no-report", "--json"]
    done = subprocess.run(call, capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout)
    assert {(run["optimizer"], run["seed"]): run["endpoint"] for run in found["runs"]} == {
        (name, seed): 1.0 + seed + len(name) for name in ("kbeta", "adam95") for seed in range(3)
    }
    assert [arm["median"] for arm in found["analysis"]["arms"]] == [7.0, 8.0]
    (contrast,) = found["analysis"]["endpoints"][0]["contrasts"]
    assert (contrast["treatment"], contrast["baseline"], contrast["wins"]) == ("kbeta", "adam95", 3)
    assert store.read_record(tmp_path / "out").command.endswith("--no-report --json")


@pytest.mark.parametrize("label", ["kbeta", "adam95", "adam999-nobc", "adafactor-beta2", "radam", "muon"])
def test_param_groups_are_taken_as_torch_optimizers_take_them(tmp_path: Path, label: str) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": list(model[1].named_parameters())}]
    optimizer = trial_of(tmp_path, label).optimizer(groups, lr=0.1)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert [rates[id(p)] for p in model.parameters()] == [0.5, 0.5, 0.1, 0.1]
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(2, 3)).square().sum().backward()
    optimizer.step()
    assert all((p != old).any() for p, old in zip(model.parameters(), before, strict=True))


def test_a_learning_rate_of_the_study_that_no_param_group_would_take_is_refused(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(2, 1)
    it = trial.Trial(RunSpec(testbed="own", settings={"lr": 0.3}), tmp_path)
    with pytest.raises(TypeError, match=r"sets lr=0.3, but every param group brings its own: make them from trial"):
        it.optimizer([{"params": model.parameters(), "lr": 0.5}])


README = """
import mlx.core as mx
import mlx.nn as nn

def train(trial):
    mx.random.seed(trial.seed)
    model = nn.Linear(3, 1)
    x = mx.random.normal((16, 3))
    optimizer = trial.optimizer(model, lr=1e-3)
    step = nn.value_and_grad(model, lambda model: (model(x) ** 2).mean())
    for t in range(5):
        loss, gradients = step(model)
        optimizer.update(model, gradients)
        trial.log(t, loss=loss)
    return loss
"""


def executed(tmp_path: Path, source: str, seeds: str = "0-1", **more: Any) -> Snapshot:
    file = tmp_path / "task.py"
    file.write_text(source)
    optimizers = more.pop("optimizers", ["kbeta", "adam95"])
    made = planning.plan_study(f"{file}:train", optimizers=optimizers, seeds=planning.parse_seeds(seeds), **more)
    return api.execute(made, tmp_path / "out", command="test", workers=2)


def trial_with(folder: Path, **settings: Any) -> trial.Trial:
    return trial.Trial(RunSpec(testbed="own", optimizer="adam95", settings=settings), folder)


def test_a_grid_of_learning_rates_reaches_the_optimizer_of_the_readme_example(tmp_path: Path) -> None:
    pytest.importorskip("mlx.core")
    done = executed(tmp_path, README, grids={"lr": "0.001,0.1"}, optimizers=["adam95"], seeds="0")
    low, high = done.runs
    assert low.result is not None
    assert high.result is not None
    assert [run.result.settings["lr"] for run in (low, high) if run.result] == [0.001, 0.1]
    assert low.result.curve["loss"][0] == high.result.curve["loss"][0]
    assert high.result.curve["loss"][-1] < low.result.curve["loss"][-1]


def test_what_a_function_makes_of_the_setting_itself_stands(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    own = trial_with(tmp_path, lr=0.5)
    tensor = torch.nn.Parameter(torch.zeros(2))
    assert own.optimizer([tensor], lr=1e-3).param_groups[0]["lr"] == 0.5
    own = trial_with(tmp_path, lr=0.5)
    assert own.optimizer([tensor], lr=own.settings["lr"] / 10).param_groups[0]["lr"] == 0.05
    own = trial_with(tmp_path)
    assert own.optimizer([tensor], lr=own.settings.get("lr", 0.25)).param_groups[0]["lr"] == 0.25


def test_a_schedule_cannot_be_replaced_by_a_number_and_says_so(tmp_path: Path) -> None:
    jnp = pytest.importorskip("jax.numpy")
    with pytest.raises(TypeError, match=r"the study sets lr=0.5, but .* make the schedule from trial.settings\['lr'\]"):
        trial_with(tmp_path, lr=0.5).optimizer({"w": jnp.zeros(2)}, lr=lambda count: 0.1 / (count + 1))


def test_settings_are_read_like_any_mapping(tmp_path: Path) -> None:
    own = trial_with(tmp_path, a=1, b=2, c=3)
    assert list(own.settings) == ["a", "b", "c"]
    assert not own.settings.read
    assert (own.settings.get("b"), own.settings.get("z", 9), len(own.settings)) == (2, 9, 3)
    assert own.settings.read == {"b"}
    assert "z" not in own.settings
    assert "a" in own.settings
    assert own.settings.read == {"a", "b"}
    assert dict(**own.settings) == {"a": 1, "b": 2, "c": 3}
    assert own.settings.read == {"a", "b", "c"}


SLEEPY = """
import time
def train(trial):
    if trial.settings.get("long"):
        time.sleep(0.2)
    return 1.0 + trial.seed + len(trial.arm)
"""


@pytest.mark.parametrize("how", ["--set", "--grid", "--tune"])
def test_a_setting_that_nobody_reads_stops_the_study_after_the_first_run(tmp_path: Path, how: str) -> None:
    file = tmp_path / "task.py"
    file.write_text(SLEEPY)
    value = {"--set": "lr=0.1", "--grid": "lr=0.1,0.2", "--tune": "lr=0.1:0.2"}[how]
    out = tmp_path / "out"
    call = [sys.executable, "-m", "kourkoutas", "study", f"{file}:train", "--seeds", "0-19", "--out", str(out)]
    done = subprocess.run(
        [*call, how, value, "--set", "long=1", "--workers", "1"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    said = " ".join(done.stderr.strip().splitlines()[-1].split())
    assert (
        "stopped after the first run: train() never reads trial.settings['lr'], nor does it make its optimizer" in said
    )
    assert "Traceback" not in done.stderr
    assert len(list(out.glob("runs/*/result.json"))) <= 2


def test_a_diverged_run_may_end_before_it_has_read_everything(tmp_path: Path) -> None:
    done = executed(
        tmp_path,
        "def train(trial):\n    if trial.arm == 'kbeta': return float('nan')\n    return trial.settings['width']\n",
        options={"width": "3"},
    )
    assert [run.result.status for run in done.runs if run.result] == ["diverged"] * 2 + ["ok"] * 2


LOGGING = "def train(trial):\n    trial.log(1, loss=1.0 + trial.seed)\n"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (LOGGING + "    return trial.seed\n", "train never asked for trial.optimizer"),
        (LOGGING + "    trial.arm\n", "train returned nothing"),
        (LOGGING + "    trial.arm\n    return trial.seed\n", "K-β and Adam 0.95 logged the same numbers"),
    ],
)
def test_a_study_that_compares_nothing_is_told_and_not_compared(tmp_path: Path, source: str, told: str) -> None:
    done = executed(tmp_path, source, seeds="0-4")
    assert [run.result.status for run in done.runs if run.result] == ["ok"] * 10
    found = analyse(done)
    assert found.primary.contrasts == ()
    assert any(told in line for line in found.fairness)
    json.dumps(as_json(found), allow_nan=False)


def test_arms_that_differ_in_one_seed_are_compared(tmp_path: Path) -> None:
    source = LOGGING + "    return trial.seed + (trial.arm == 'kbeta' and trial.seed == 3)\n"
    done = executed(tmp_path, source, seeds="0-4")
    found = analyse(done)
    assert len(found.primary.contrasts) == len(found.fairness) == 1


def test_a_logged_metric_that_is_named_needs_no_returned_number(tmp_path: Path) -> None:
    source = "def train(trial):\n    trial.log(1, loss=len(trial.arm) + trial.seed)\n"
    assert len(analyse(executed(tmp_path, source, endpoint="loss")).primary.contrasts) == 1


SHORT_RUNS = """
import torch

def train(trial):
    torch.manual_seed(trial.seed)
    model = torch.nn.Linear(2, 1)
    optimizer = trial.optimizer(model, lr=1e-2)
    for step in range(1, 61):
        loss = model(torch.ones(4, 2)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    trial.log(1, loss=loss.item())  # once, as an epoch
    return loss.item()
"""


def test_a_users_own_function_is_warned_of_short_runs_by_the_count_of_steps_but_for_the_exact_correction(
    tmp_path: Path,
) -> None:
    pytest.importorskip("torch")
    study = executed(tmp_path, SHORT_RUNS, optimizers=["kbeta", "kbeta-exact", "adam95"])
    (warning,) = [line for line in analyse(study).fairness if line.startswith("Short runs")]
    # sqrt((1 - 0.999)/(1 - (0.88 + 0.999)/2)) = sqrt(0.001/0.0605) = 0.129
    assert "(60 steps)" in warning
    assert "starts at 13 % of the learning rate" in warning
    others = study.record.model_copy(update={"arms": study.record.arms[1:]})
    runs = [run for run in study.runs if run.spec.optimizer != "kbeta"]
    told = analyse(dataclasses.replace(study, record=others, runs=runs)).fairness
    assert not any(line.startswith("Short runs") for line in told)


def test_a_smoke_preset_says_that_it_is_no_evidence_and_an_untuned_study_says_so_in_its_headline(
    tmp_path: Path,
) -> None:
    study = made_study.rare_trigger(tmp_path / "paper", ("kbeta", "adam95"))
    said = analyse(study, resamples=0).headline
    assert said.endswith("One learning rate for all.")
    assert "Smoke" not in said
    record = study.record.model_copy(update={"preset": "smoke"})
    assert analyse(dataclasses.replace(study, record=record), resamples=0).headline == f"Smoke: not evidence. {said}"
