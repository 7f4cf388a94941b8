"""Rivals that need more than a constructor: Muon beside Adam, schedule-free averages, and their checkpoints."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kourkoutas.lab import engines
from kourkoutas.lab.optimizers.recipes import check, engines_of, recipe
from kourkoutas.lab.running import train
from kourkoutas.lab.specs.spec import RunSpec

START = {"w": np.array([[1.0, -2.0], [0.5, 3.0]], np.float32), "b": np.array([1.0, 2.0], np.float32)}
LR = 0.05


def bowl(E: Any, params: Any, batch: Any) -> Any:
    return E.sum(E.square(params["w"])) + E.sum(E.square(params["b"]) * batch["c"])


def after(label: str, engine: str, options: dict[str, Any] | None = None, n: int = 6) -> dict[str, np.ndarray]:
    made = recipe(label, {}, options)
    check(made, engine)
    it = engines.get(engine).trainer(bowl, START, made, constants={"c": np.array([1, 3], np.float32)})
    it.run({}, np.full(n, LR) * made.lr_factor(np.arange(1, n + 1)))
    return it.params()


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_muon_needs_a_matrix(engine: str) -> None:
    made = recipe("muon")
    with pytest.raises(ValueError, match="'muon' is for models with matrices"):
        engines.get(engine).trainer(lambda E, p, batch: E.sum(p["b"]), {"b": START["b"]}, made)


def test_options_reach_their_part_of_muon() -> None:
    slow = after("muon", "torch", {"beta2": 0.9})
    usual = after("muon", "torch")
    np.testing.assert_array_equal(slow["w"], usual["w"])
    np.testing.assert_allclose(slow["b"], after("adam999", "torch", {"beta2": 0.9})["b"], rtol=1e-6)
    assert np.abs(slow["b"] - usual["b"]).max() > 1e-4


def test_muon_is_where_its_libraries_are() -> None:
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


@pytest.mark.parametrize("label", ["muon", "schedulefree", "soap"])
def test_a_killed_run_of_a_rival_goes_on_to_the_same_bits(label: str, tmp_path: Path) -> None:
    needed = {"schedulefree": "schedulefree", "soap": "pytorch_optimizer"}.get(label, "torch")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    settings = {"steps": 510, "held_out": 64}
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


def by_hand(name: str, n: int = 25) -> np.ndarray:
    """b of `after` by the rival's equations, in NumPy."""
    w, m, v = START["b"].astype(np.float64), np.zeros(2), np.zeros(2)
    for t in range(1, n + 1):
        g = 2 * np.array([1, 3]) * w
        if name == "laprop":
            # normalise, then momentum
            v = 0.999 * v + 0.001 * g * g
            m = 0.9 * m + 0.1 * LR * g / (np.sqrt(v / (1 - 0.999**t)) + 1e-15)
            w = w - m / (1 - 0.9**t)
        else:
            # Adam's step over max(1, RMS of g²/v)
            b1, b2 = ((1 - 0.9**t), (1 - 0.99**t))
            m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
            rms = np.sqrt(np.mean(g * g / np.maximum(v / b2, 1e-16)))
            w = w - LR / max(1, rms) * (m / b1) / (np.sqrt(v / b2) + 1e-8)
    return w


@pytest.mark.skipif(importlib.util.find_spec("pytorch_optimizer") is None, reason="pytorch_optimizer is not installed")
@pytest.mark.parametrize("name", ["laprop", "stableadamw"])
def test_a_rival_of_pytorch_optimizer_takes_the_steps_of_its_paper(name: str) -> None:
    np.testing.assert_allclose(after(name, "torch", n=25)["b"], by_hand(name), rtol=2e-3)
