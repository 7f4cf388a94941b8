"""Optimizer state written by version 0.3.0 loads in this one and goes on to the same parameters."""

import numpy as np
import pytest

from tests.old_state import write

# Routes and CPUs differ in the last bits of float32.
TOLERANCE = {"rtol": 2e-6, "atol": 2e-6}


def kept(front: str, case: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    with np.load(write.FOLDER / f"params-{front}-{case}.npz") as file:
        return tuple({name: file[f"{when}/{name}"] for name in write.SHAPES} for when in ("before", "after"))


def check(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    for name, expected in want.items():
        np.testing.assert_allclose(got[name], expected, **TOLERANCE, err_msg=name)


@pytest.mark.parametrize("case", [*write.CASES, "bf16"])
def test_torch(case):
    torch = pytest.importorskip("torch")
    from kourkoutas.torch import KourkoutasBeta

    before, after = kept("torch", case)
    params = {name: torch.nn.Parameter(torch.from_numpy(x.copy())) for name, x in before.items()}
    options = {"state_dtype": torch.bfloat16} if case == "bf16" else write.CASES[case]
    optimizer = KourkoutasBeta(params.items(), lr=write.LR, **options)
    optimizer.load_state_dict(torch.load(write.FOLDER / f"torch-{case}.pt", weights_only=True))
    for g in write.grads(case)[write.FIRST :]:
        for name, p in params.items():
            p.grad = torch.from_numpy(g[name])
        optimizer.step()
    check({name: p.detach().numpy() for name, p in params.items()}, after)


@pytest.mark.parametrize("case", write.CASES)
def test_mlx(case):
    mx = pytest.importorskip("mlx.core")
    from mlx.utils import tree_unflatten

    from kourkoutas.mlx import KourkoutasBeta

    before, after = kept("mlx", case)
    params = {name: mx.array(x) for name, x in before.items()}
    optimizer = KourkoutasBeta(write.LR, **write.CASES[case])
    optimizer.state = tree_unflatten(list(mx.load(str(write.FOLDER / f"mlx-{case}.safetensors")).items()))
    for g in write.grads(case)[write.FIRST :]:
        params = optimizer.apply_gradients({name: mx.array(x) for name, x in g.items()}, params)
        mx.eval(params, optimizer.state)
    check({name: np.array(x) for name, x in params.items()}, after)


@pytest.mark.parametrize("case", write.CASES)
def test_optax(case):
    jax = pytest.importorskip("jax")
    optax = pytest.importorskip("optax")
    serialization = pytest.importorskip("flax.serialization")
    from kourkoutas.optax import kourkoutas_beta

    params, after = kept("optax", case)
    solver = kourkoutas_beta(write.LR, **write.CASES[case])
    state = serialization.from_bytes(solver.init(params), (write.FOLDER / f"optax-{case}.msgpack").read_bytes())
    update = jax.jit(solver.update)
    for g in write.grads(case)[write.FIRST :]:
        updates, state = update(g, state, params)
        params = optax.apply_updates(params, updates)
    check(params, after)


@pytest.mark.parametrize("front", ["torch", "optax", "mlx"])
@pytest.mark.parametrize("case", write.CASES)
def test_a_portable_state(case, front, monkeypatch):
    for module in ("safetensors", "mlx.core" if front == "mlx" else front):
        pytest.importorskip(module)
    from tests.state import problem

    monkeypatch.setattr(problem, "LR", write.LR)
    before, after = kept("optax", case)
    file = write.FOLDER / f"portable-{case}.safetensors"
    run = problem.FRAMEWORKS[front](before, write.CASES[case], file)
    for g in write.grads(case)[write.FIRST :]:
        run.step(g)
    check(run.params, after)
