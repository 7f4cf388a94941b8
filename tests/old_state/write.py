"""Write the fixtures of the version that is installed: `python -m tests.old_state.write tests/old_state/v0.2 v0.2`.

Run it once per release, with that release installed; the files then stay as they are. For each of the release's cases
and each front end it trains `FIRST` steps, saves parameters and optimizer state the way users of the framework do,
trains `MORE` steps, and saves the parameters again: what a later version must arrive at from the saved state.

    torch-<case>.pt          torch.save of the optimizer's state_dict
    optax-<case>.msgpack     flax.serialization.to_bytes of the state
    mlx-<case>.safetensors   mx.save_safetensors of the flattened state
    params-<frontend>-<case>.npz   before/NAME and after/NAME: the parameters at both moments
    portable-<case>.safetensors    from version 0.2 on, kourkoutas.state.torch.save of the optimizer
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

FIRST, MORE = 9, 6
LR = 1e-2
SHAPES = {"dec.bias": (3,), "dec.weight": (4, 3), "enc.bias": (4,), "enc.weight": (4, 3)}

CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "amsgrad": {"decay": 1.0},
    "leaky": {"decay": 0.98},
    "clip": {"decay": 0.0, "max_ratio": 0.5},
    "full": {"decay": 0.98, "max_ratio": 3.0, "adaptive_tiny": True},
    "exact": {"bias_correction": "exact"},
    "none": {"bias_correction": "none"},
    "warmup": {"warmup_steps": 12},
    "weight-decay": {"weight_decay": 0.1},
    "skip": {"nonfinite": "skip"},
    "diagnostics": {"diagnostics": True},
    "module": {"buckets": "module"},
    "shape": {"buckets": "shape"},
    "global": {"buckets": "global"},
    "fixed": {"beta2_min": 0.95, "beta2_max": 0.95},
}
# What version 0.2 brought, and one case with everything that a state can hold.
LATER: dict[str, dict[str, Any]] = {
    "plain": {},
    "lr-warmup": {"bias_correction": "none", "lr_warmup": True},
    "everything": {
        "decay": 0.98,
        "bias_correction": "exact",
        "lr_warmup": True,
        "nonfinite": "skip",
        "buckets": "module",
    },
}
RELEASES = {"v0.1": CASES, "v0.2": LATER}


def folder_of(case: str) -> Path:
    """Where the fixtures of a case lie."""
    (release,) = (name for name, cases in RELEASES.items() if case in cases or (case, name) == ("bf16", "v0.1"))
    return Path(__file__).parent / release


def options_of(case: str) -> dict[str, Any]:
    return {**CASES, **LATER}[case]


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


def write(folder: Path, release: str, package: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for case, options in RELEASES[release].items():
        for front, run in {"torch": torch_run, "optax": optax_run, "mlx": mlx_run}.items():
            keep(folder / f"params-{front}-{case}.npz", *run(package, folder, case, options))
    # Moments in bfloat16 are PyTorch's alone.
    if release == "v0.1":
        keep(folder / "params-torch-bf16.npz", *torch_run(package, folder, "bf16", {"state_dtype": "bfloat16"}))


def keep(file: Path, before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> None:
    np.savez(file, **{f"before/{k}": x for k, x in before.items()}, **{f"after/{k}": x for k, x in after.items()})


def torch_run(package: str, folder: Path, case: str, options: dict[str, Any]) -> tuple[dict, dict]:
    import torch

    if "state_dtype" in options:
        options = {**options, "state_dtype": getattr(torch, options["state_dtype"])}
    tensors = {name: torch.nn.Parameter(torch.from_numpy(x)) for name, x in params().items()}
    optimizer = importlib.import_module(f"{package}.torch").KourkoutasBeta(tensors.items(), lr=LR, **options)
    kept = []
    for t, g in enumerate(grads(case)):
        if t == FIRST:
            torch.save(optimizer.state_dict(), folder / f"torch-{case}.pt")
            if case in LATER:
                from kourkoutas.state.torch import save

                save(optimizer, folder / f"portable-{case}.safetensors")
            kept.append({name: p.detach().numpy().copy() for name, p in tensors.items()})
        for name, p in tensors.items():
            p.grad = torch.from_numpy(g[name])
        optimizer.step()
    kept.append({name: p.detach().numpy().copy() for name, p in tensors.items()})
    return kept[0], kept[1]


def optax_run(package: str, folder: Path, case: str, options: dict[str, Any]) -> tuple[dict, dict]:
    import jax
    import jax.numpy as jnp
    import optax
    from flax import serialization

    solver = importlib.import_module(f"{package}.optax").kourkoutas_beta(LR, **options)
    tree = {name: jnp.asarray(x) for name, x in params().items()}
    state = solver.init(tree)
    update = jax.jit(solver.update)
    kept = []
    for t, g in enumerate(grads(case)):
        if t == FIRST:
            (folder / f"optax-{case}.msgpack").write_bytes(serialization.to_bytes(state))
            kept.append({name: np.asarray(x) for name, x in tree.items()})
        updates, state = update(g, state, tree)
        tree = optax.apply_updates(tree, updates)
    kept.append({name: np.asarray(x) for name, x in tree.items()})
    return kept[0], kept[1]


def mlx_run(package: str, folder: Path, case: str, options: dict[str, Any]) -> tuple[dict, dict]:
    import mlx.core as mx
    from mlx.utils import tree_flatten

    optimizer = importlib.import_module(f"{package}.mlx").KourkoutasBeta(LR, **options)
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
    write(Path(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else "kourkoutas")
