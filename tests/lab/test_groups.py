"""Two optimizers over one model: who takes which parameter, and that each takes its own step."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kourkoutas.lab import engines
from kourkoutas.lab.running import train
from kourkoutas.lab.specs import groups
from kourkoutas.lab.specs.optimizers import check, engines_of, parts, recipe
from kourkoutas.lab.specs.spec import RunSpec

START = {"w": np.array([[1.0, -2.0], [0.5, 3.0]], np.float32), "b": np.array([1.0, 2.0], np.float32)}
LR = 0.05


def bowl(E: Any, params: Any, batch: Any) -> Any:
    return E.sum(E.square(params["w"])) + E.sum(E.square(params["b"]) * batch["c"])


def after(label: str, engine: str, options: dict[str, Any] | None = None, n: int = 6) -> dict[str, np.ndarray]:
    made = recipe(label, {}, options)
    check(made, engine)
    it = engines.get(engine).trainer(bowl, START, made, constants={"c": np.array([1, 3], np.float32)})
    it.run({}, LR * made.lr_factor(np.arange(1, n + 1)))
    return it.params()


@pytest.mark.parametrize("engine", ["torch", "jax"])
@pytest.mark.parametrize("takes", ["matrices", "^w$"])
def test_each_optimizer_steps_its_own_parameters_as_it_does_alone(engine: str, takes: str) -> None:
    # the parameters do not meet in this loss, so each must end where its optimizer alone takes it
    pair = after("kbeta+adam95", engine, {"takes": takes, "rest.lr_scale": 0.5})
    first = after("kbeta", engine)
    rest = after("adam95", engine, {"lr_scale": 0.5})
    np.testing.assert_allclose(pair["w"], first["w"], rtol=1e-6)
    np.testing.assert_allclose(pair["b"], rest["b"], rtol=1e-6)
    assert np.abs(pair["b"] - after("adam95", engine)["b"]).max() > 1e-3


def test_options_reach_their_part_alone() -> None:
    first, rest = parts(recipe("lion+adam95", {}, {"first.beta2": "0.9", "rest.beta2": "0.7", "rest.lr_scale": "3"}))
    assert (first.family, first.options["beta2"], first.lr_scale) == ("lion", 0.9, 1.0)
    assert (rest.family, rest.options["beta2"], rest.lr_scale) == ("adam", 0.7, 3.0)


@pytest.mark.parametrize(
    ("label", "options", "message"),
    [
        ("kbeta+adam95", {"momentum": 1}, "unknown option of kbeta.adam95 'momentum'"),
        ("kbeta+adam95", {"takes": "("}, "`takes` must be matrices, vectors or a regular expression"),
        ("kbeta+adam95+lion", {}, "must be two joined by"),
        ("kbeta+", {}, "must be two joined by"),
        ("kbeta+adam95-warm", {}, "cannot be one of two"),
        ("kbta+adam95", {}, "unknown optimizer 'kbta': did you mean 'kbeta'"),
    ],
)
def test_a_pair_that_cannot_be_is_an_error(label: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(label, {}, options)


def test_taking_all_or_nothing_is_an_error_that_names_parameters() -> None:
    for takes, what in (("nobody", "none"), (".", "all")):
        with pytest.raises(ValueError, match=rf"takes={takes} takes {what} of the parameters \(w with 2 axes"):
            after("kbeta+adam95", "torch", {"takes": takes})
    assert groups.taker("vectors")("scale", 0)


def test_a_pair_is_only_where_both_are() -> None:
    made = recipe("muon")
    assert engines_of(made) == ("torch", "jax")
    with pytest.raises(ValueError, match="not available on engine 'mlx': use --engine torch or jax"):
        check(made, "mlx")


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_muon_turns_a_matrix_by_its_orthogonal_factor_and_leaves_the_rest_to_adam(engine: str) -> None:
    # from rest, the first Nesterov momentum is a multiple of the gradient g = 2w; Newton–Schulz sends its singular
    # values near 1, and the step is scaled by 0.2·√2
    moved = after("muon", engine, n=1)
    step = (START["w"] - moved["w"]) / (LR * 0.2 * np.sqrt(2))
    u, _, vt = np.linalg.svd(START["w"].astype(np.float64))
    values = np.linalg.svd(step, compute_uv=False)
    assert ((values > 0.65) & (values < 1.25)).all()
    direction = u.T @ step @ vt.T
    np.testing.assert_allclose(direction - np.diag(np.diag(direction)), 0, atol=0.05)
    np.testing.assert_allclose(moved["b"], after("adam999", engine, n=1)["b"], rtol=1e-6)


@pytest.mark.parametrize("label", ["muon", "schedulefree", "soap", "kbeta+adam95"])
def test_a_killed_run_of_a_rival_goes_on_to_the_same_bits(label: str, tmp_path: Path) -> None:
    needed = {"schedulefree": "schedulefree", "soap": "pytorch_optimizer"}.get(label, "torch")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    settings = {"steps": 1_000, "held_out": 64}
    spec = RunSpec(testbed="rare_trigger", optimizer=label, settings=settings)
    whole = train.run(spec, tmp_path / "whole", checkpoint_every=0)

    class Killed(Exception):
        pass

    def kill(step: int, steps: int, loss: float) -> None:
        if step >= steps:
            raise Killed

    with pytest.raises(Killed):
        train.run(spec, tmp_path / "cut", checkpoint_every=1, on_progress=kill)
    assert list((tmp_path / "cut" / "checkpoint").glob("step-*"))
    resumed = train.run(spec, tmp_path / "cut", checkpoint_every=1)
    assert (resumed.endpoint, resumed.metrics) == (whole.endpoint, whole.metrics)


@pytest.mark.skipif(importlib.util.find_spec("schedulefree") is None, reason="schedulefree is not installed")
def test_schedule_free_is_evaluated_at_its_average() -> None:
    import schedulefree
    import torch

    w = torch.tensor(START["b"]).requires_grad_()
    reference = schedulefree.AdamWScheduleFree([w], lr=LR, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    reference.train()
    for _ in range(6):
        w.grad = 2 * w.detach() * torch.tensor([1.0, 3.0])
        reference.step()
    reference.eval()
    np.testing.assert_allclose(after("schedulefree", "torch")["b"], w.detach().numpy(), rtol=1e-6)
