"""Optimizer state written by version 0.1 loads in this version and goes on to the same parameters."""

from pathlib import Path

import numpy as np
import pytest

from tests.old_state import write

FOLDER = Path(__file__).parent / "v0.1"
# Routes and CPUs differ in the last bits of float32.
TOLERANCE = {"rtol": 2e-6, "atol": 2e-6}


def kept(front: str, case: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    with np.load(FOLDER / f"params-{front}-{case}.npz") as file:
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
    optimizer.load_state_dict(torch.load(FOLDER / f"torch-{case}.pt", weights_only=True))
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
    optimizer.state = tree_unflatten(list(mx.load(str(FOLDER / f"mlx-{case}.safetensors")).items()))
    for g in write.grads(case)[write.FIRST :]:
        params = optimizer.apply_gradients({name: mx.array(x) for name, x in g.items()}, params)
        mx.eval(params, optimizer.state)
    check({name: np.array(x) for name, x in params.items()}, after)
