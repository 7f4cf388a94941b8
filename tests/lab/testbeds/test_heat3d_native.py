"""Testbed B through the C kernel: the same loss and gradient on every kind of CPU, and no reading out of bounds."""

from __future__ import annotations

import functools
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from kourkoutas import _native
from kourkoutas.lab import engines
from kourkoutas.lab.testbeds.heat3d import Heat3DProblem, Settings, geometry, network
from kourkoutas.lab.testbeds.heat3d.geometry import Points
from kourkoutas.lab.testbeds.heat3d.squares import plan
from tests.lab.testbeds.gradients import value_and_grad

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(_native.taylor is None, reason="the kernel was not built")
VARIANTS = _native.taylor.VARIANTS if _native.taylor is not None else []


def case(
    points: Points, width: int, depth: int = 6, name: str = "harmonic", dtype: Any = np.float32
) -> tuple[Any, Any]:
    """Parameters with weights scaled up, as in test_heat3d.py, and the batch."""
    params = {
        k: torch.tensor((p * 2.5 if k.endswith(".w") else p).astype(dtype))
        for k, p in network.init(width, depth, 3).items()
    }
    return params, {k: torch.tensor(x.astype(dtype)) for k, x in geometry.constants(points, "harmonic").items()}


def both(points: Points, params: Any, batch: Any, use: bool = True) -> tuple[Any, Any]:
    E = engines.get("torch")
    loss = functools.partial(network.Composite(points, native=use), E)
    return value_and_grad(E, loss)(params, batch)


def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    made: list[Any] = []
    real = _native.taylor.loss
    fake = type("Kernel", (), {"ROWS": _native.taylor.ROWS, "VARIANTS": VARIANTS})

    def loss(*args: Any) -> float:
        made.append(args)
        return real(*args)

    fake.loss = staticmethod(loss)  # type: ignore[attr-defined]
    monkeypatch.setattr(_native, "taylor", fake)
    return made


# Less than a block, blocks that are not full, pairs on both sides of a block's end, one hidden layer, odd widths.
CASES = [
    (Points(interior=60, boundary=24, pairs=10), 24, 6),
    (Points(interior=1, boundary=1, pairs=1), 1, 2),
    (Points(interior=24, boundary=29, pairs=40), 32, 3),
    (Points(interior=101, boundary=61, pairs=33), 33, 5),
]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(("points", "width", "depth"), CASES)
def test_loss_and_gradient_equal_the_formulas(
    points: Points, width: int, depth: int, threads: int, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = calls(monkeypatch)
    monkeypatch.setattr(_native.taylor, "VARIANTS", [variant])
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    params, batch = case(points, width, depth)
    value, grads = both(points, params, batch)
    assert len(made) == 1
    exact_params, exact_batch = ({k: t.double() for k, t in d.items()} for d in (params, batch))
    expected, exact = both(points, exact_params, exact_batch, use=False)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    for name, g in grads.items():
        assert float((g - exact[name]).norm()) <= 1e-5 * float(exact[name].norm()), name


def test_a_number_of_threads_has_its_bits() -> None:
    points = CASES[3][0]
    params, batch = case(points, 33)
    (first, grads), (second, again) = both(points, params, batch), both(points, params, batch)
    assert torch.equal(first, second)
    assert all(torch.equal(grads[name], again[name]) for name in grads)


def test_large_and_non_finite_weights_are_passed_on() -> None:
    points = CASES[0][0]
    params, batch = case(points, 24)
    params["layer00.b"][:] = 1e4  # σ is 1 to the last bit, exp(-a) underflows
    params["layer01.b"][:] = -1e4
    value, grads = both(points, params, batch)
    expected, exact = both(points, params, batch, use=False)
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    assert all(torch.isfinite(g).all() for g in grads.values())
    torch.testing.assert_close(grads["layer05.w"], exact["layer05.w"], rtol=1e-4, atol=1e-6)
    params["layer02.w"][3, 5] = float("nan")
    assert not torch.isfinite(both(points, params, batch)[0])


def test_what_the_kernel_cannot_read_goes_the_torch_way(monkeypatch: pytest.MonkeyPatch) -> None:
    made = calls(monkeypatch)
    points = CASES[0][0]
    both(points, *case(points, 24, dtype=np.float64))
    params, batch = case(points, 24)
    params["layer01.w"] = params["layer01.w"].T
    value, _ = both(points, params, batch)
    assert not made
    params["layer01.w"] = params["layer01.w"].contiguous()
    assert float(both(points, params, batch)[0]) == pytest.approx(float(value), rel=1e-5)
    assert len(made) == 1


def test_without_gradient_only_the_loss_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = calls(monkeypatch)
    points = CASES[0][0]
    params, batch = case(points, 24)
    value = network.Composite(points, native=True)(engines.get("torch"), params, batch)
    assert made[0][4] is None
    assert float(value) == float(both(points, params, batch)[0])


def test_the_gradient_follows_what_is_done_with_the_loss() -> None:
    points = CASES[0][0]
    params, batch = case(points, 24)
    leaves = {name: p.requires_grad_() for name, p in params.items()}
    (3 * network.Composite(points, native=True)(engines.get("torch"), leaves, batch)).backward()
    _, grads = both(points, {name: p.detach() for name, p in params.items()}, batch)
    for name, p in leaves.items():
        torch.testing.assert_close(p.grad, 3 * grads[name])


def test_runs_use_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    made = calls(monkeypatch)
    problem = Heat3DProblem(Settings(steps=2, ramp=1, width=8, depth=3, interior=5, boundary=3, pairs=2), seed=0)
    E = engines.get("torch")
    params, batch = ({k: torch.tensor(x) for k, x in d.items()} for d in (problem.params, problem.constants))
    problem.loss(E, params, batch)
    assert len(made) == 1


def test_the_kernel_can_be_turned_off() -> None:
    script = "from kourkoutas import _native; print(_native.taylor)"
    out = subprocess.run(
        [sys.executable, "-c", script], env={"KBETA_NATIVE": "0"}, capture_output=True, text=True, check=True
    )
    assert out.stdout == "None\n"


def arguments(points: Points = CASES[0][0]) -> list[Any]:
    params, batch = case(points, 24)
    squares = plan(points, tuple(network.WEIGHTS.items()), _native.taylor.ROWS)
    targets = torch.cat([batch["value"], batch["outlet"], batch["outer"]]).numpy()
    arrays = [p.numpy() for p in params.values()]
    return [batch["x"].numpy(), targets, squares, arrays, [np.empty_like(a) for a in arrays], 2, VARIANTS[0]]


@pytest.mark.parametrize(
    ("place", "change", "error", "message"),
    [
        (0, lambda x: x[:-1], IndexError, "`rows` holds .*must be from -1 to"),
        (1, lambda x: x[:-1], IndexError, "`target` holds .*must be from -1 to"),
        (2, lambda x: x[:-1], ValueError, "`plan` must hold 6 arrays"),
        (2, lambda x: (x[0] * 0 + 3, *x[1:]), ValueError, "`channels` holds 3; it must be 1, 2 or 5"),
        (2, lambda x: (*x[:3], x[3] + 1000, *x[4:]), IndexError, "`partner` holds .*must be from -1 to 119"),
        (2, lambda x: (*x[:5], x[5][:-1]), ValueError, "`bias` has .* bytes; it must hold"),
        (3, lambda x: x[:-1], ValueError, "`parameters` holds 11 arrays; it must be a weight and a bias"),
        (3, lambda x: [*x[:4], x[4][:-1], *x[5:]], ValueError, "`parameters` has .* bytes; it must hold 576 numbers"),
        (4, lambda x: x[2:], ValueError, "`gradients` holds 10 arrays"),
        (4, lambda x: [x[0].T[::2], *x[1:]], (ValueError, BufferError), "contiguous"),
        (5, lambda x: 0, ValueError, "`threads` is 0; it must be at least 1"),
        (6, lambda x: "mmx", ValueError, '`variant` is "mmx", which this CPU does not have'),
    ],
)
def test_bad_input_is_refused(place: int, change: Any, error: Any, message: str) -> None:
    args = arguments()
    args[place] = change(args[place])
    with pytest.raises(error, match=message):
        _native.taylor.loss(*args)
