"""Write the fixtures of the version that is installed: `python -m tests.old_state.write tests/old_state/v0.3`.

Run it once per release, with that release installed; the files then stay as they are, and later versions must read
them. For each case and each front end (or those named behind the folder) it trains `FIRST` steps, saves parameters and
optimizer state the way users of the framework do, trains `MORE` steps, and saves the parameters again: what a later
version must arrive at from the saved state.

    torch-<case>.pt          torch.save of the optimizer's state_dict
    optax-<case>.msgpack     flax.serialization.to_bytes of the state
    mlx-<case>.safetensors   mx.save_safetensors of the flattened state
    portable-<case>.safetensors    kourkoutas.state.optax.save of the state
    params-<front end>-<case>.npz  before/NAME and after/NAME: the parameters at both moments
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

FIRST, MORE = 9, 6
LR = 1e-2
SHAPES = {"dec.bias": (3,), "dec.weight": (4, 3), "enc.bias": (4,), "enc.weight": (4, 3)}

FOLDER = Path(__file__).parent / "v0.3"

# Everything that a state can hold, and each kind of bucket.
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "full": {"decay": 0.98, "max_ratio": 3.0, "adaptive_tiny": True, "buckets": "shape"},
    "clip": {"decay": 0.0, "max_ratio": 0.5, "warmup_steps": 12, "weight_decay": 0.1, "buckets": "global"},
    "exact": {"bias_correction": "exact", "diagnostics": True},
    "lr-warmup": {"bias_correction": "none", "lr_warmup": True},
    "skip": {"nonfinite": "skip", "beta2_min": 0.95, "beta2_max": 0.95},
    "everything": {
        "decay": 0.98,
        "bias_correction": "exact",
        "lr_warmup": True,
        "nonfinite": "skip",
        "buckets": "module",
    },
}


def params() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(21)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def grads(case: str) -> list[dict[str, np.ndarray]]:
    """Calm steps and one spike before and one after the save; with nonfinite="skip" also a NaN on either side."""
    rng = np.random.default_rng(22)
    steps = []
    for t in range(FIRST + MORE):
        scale = 100.0 if t in (4, 11) else 1.0
        g = {name: (scale * rng.normal(size=shape)).astype(np.float32) for name, shape in SHAPES.items()}
        if case in ("skip", "everything") and t in (3, 12):
            g["enc.bias"][1] = np.nan
        steps.append(g)
    return steps


def write(folder: Path, *fronts: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    runs = {"torch": torch_run, "optax": optax_run, "mlx": mlx_run}
    for front in fronts or runs:
        for case, options in CASES.items():
            keep(folder / f"params-{front}-{case}.npz", *runs[front](folder, case, options))
    if not fronts or "torch" in fronts:  # moments in bfloat16 are PyTorch's alone
        keep(folder / "params-torch-bf16.npz", *torch_run(folder, "bf16", {"state_dtype": "bfloat16"}))


def keep(file: Path, before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> None:
    np.savez(file, **{f"before/{k}": x for k, x in before.items()}, **{f"after/{k}": x for k, x in after.items()})


def torch_run(folder: Path, case: str, options: dict[str, Any]) -> tuple[dict, dict]:
    import torch

    from kourkoutas.torch import KourkoutasBeta

    if "state_dtype" in options:
        options = {**options, "state_dtype": getattr(torch, options["state_dtype"])}
    tensors = {name: torch.nn.Parameter(torch.from_numpy(x)) for name, x in params().items()}
    optimizer = KourkoutasBeta(tensors.items(), lr=LR, **options)
    kept = []
    for t, g in enumerate(grads(case)):
        if t == FIRST:
            torch.save(optimizer.state_dict(), folder / f"torch-{case}.pt")
            kept.append({name: p.detach().numpy().copy() for name, p in tensors.items()})
        for name, p in tensors.items():
            p.grad = torch.from_numpy(g[name])
        optimizer.step()
    kept.append({name: p.detach().numpy().copy() for name, p in tensors.items()})
    return kept[0], kept[1]


def optax_run(folder: Path, case: str, options: dict[str, Any]) -> tuple[dict, dict]:
    import jax
    import jax.numpy as jnp
    import optax
    from flax import serialization

    from kourkoutas.optax import kourkoutas_beta
    from kourkoutas.state.optax import save

    solver = kourkoutas_beta(LR, **options)
    tree = {name: jnp.asarray(x) for name, x in params().items()}
    state = solver.init(tree)
    update = jax.jit(solver.update)
    kept = []
    for t, g in enumerate(grads(case)):
        if t == FIRST:
            (folder / f"optax-{case}.msgpack").write_bytes(serialization.to_bytes(state))
            save(state, folder / f"portable-{case}.safetensors", buckets=options.get("buckets", "parameter"))
            kept.append({name: np.asarray(x) for name, x in tree.items()})
        updates, state = update(g, state, tree)
        tree = optax.apply_updates(tree, updates)
    kept.append({name: np.asarray(x) for name, x in tree.items()})
    return kept[0], kept[1]


def mlx_run(folder: Path, case: str, options: dict[str, Any]) -> tuple[dict, dict]:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from kourkoutas.mlx import KourkoutasBeta

    optimizer = KourkoutasBeta(LR, **options)
    tree = {name: mx.array(x) for name, x in params().items()}
    kept = []
    for t, g in enumerate(grads(case)):
        if t == FIRST:
            mx.save_safetensors(str(folder / f"mlx-{case}.safetensors"), dict(tree_flatten(optimizer.state)))
            kept.append({name: np.array(x) for name, x in tree.items()})
        tree = optimizer.apply_gradients({name: mx.array(x) for name, x in g.items()}, tree)
        mx.eval(tree, optimizer.state)
    kept.append({name: np.array(x) for name, x in tree.items()})
    return kept[0], kept[1]


if __name__ == "__main__":
    write(Path(sys.argv[1]), *sys.argv[2:])
