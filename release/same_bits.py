"""Does every front end still give the same bits as it did at another commit?

    python release/same_bits.py REVISION      for example the last commit of version 0.1

Trains the same small model for 200 steps with the code of REVISION, taken from git and built in a temporary folder, and
with the code here, in this environment, and compares the final parameters. The last bits differ between processors and
versions of a framework, so that saved numbers could not tell. Ends with 1 if the default differs anywhere.
"""

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
SHAPES = {"w1": (37, 19), "b1": (19,), "w2": (128, 64), "s": ()}
STEPS = 200
CASES = {
    "default": {},
    "full": {"decay": 0.98, "max_ratio": 3, "adaptive_tiny": True},
    "exact": {"bias_correction": "exact"},
    "warmup, global": {"warmup_steps": 50, "buckets": "global"},
    "skip, shape": {"nonfinite": "skip", "buckets": "shape"},
    "weight decay": {"weight_decay": 0.1},
}


def gradients() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    sizes = np.exp(rng.normal(size=STEPS))
    return [{k: np.asarray(size * rng.normal(size=s), np.float32) for k, s in SHAPES.items()} for size in sizes]


def start() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {k: np.asarray(rng.normal(size=s), np.float32) for k, s in SHAPES.items()}


def with_torch(options: dict, route: dict) -> dict[str, np.ndarray]:
    import torch

    from kourkoutas.torch import KourkoutasBeta

    params = {k: torch.nn.Parameter(torch.from_numpy(x)) for k, x in start().items()}
    optimizer = KourkoutasBeta(params.items(), lr=1e-2, **options, **route)
    for g in gradients():
        for k, p in params.items():
            p.grad = torch.from_numpy(g[k])
        optimizer.step()
    return {k: p.detach().numpy() for k, p in params.items()}


def with_optax(options: dict) -> dict[str, np.ndarray]:
    import jax
    import optax

    from kourkoutas.optax import kourkoutas_beta

    optimizer = kourkoutas_beta(1e-2, **options)

    @jax.jit
    def step(params, state, g):
        updates, state = optimizer.update(g, state, params)
        return optax.apply_updates(params, updates), state

    params = start()
    state = optimizer.init(params)
    for g in gradients():
        params, state = step(params, state, g)
    return {k: np.asarray(x) for k, x in params.items()}


def with_mlx(options: dict) -> dict[str, np.ndarray]:
    import mlx.core as mx

    from kourkoutas.mlx import KourkoutasBeta

    optimizer = KourkoutasBeta(1e-2, **options)
    params = {k: mx.array(x) for k, x in start().items()}
    for g in gradients():
        params = optimizer.apply_gradients({k: mx.array(x) for k, x in g.items()}, params)
        mx.eval(params, optimizer.state)
    return {k: np.array(x) for k, x in params.items()}


def everything() -> dict[str, str]:
    """{front end, route and case: digest of the final parameters}."""
    import kourkoutas
    from kourkoutas import _native

    fronts = {
        "torch, kernel" if _native.step is not None else "torch": lambda o: with_torch(o, {}),
        "torch, fused=False": lambda o: with_torch(o, {"fused": False}),
        "torch, capturable": lambda o: with_torch(o, {"capturable": True}),
        "optax, jit": with_optax,
        "mlx": with_mlx,
    }
    found = {"from": str(Path(kourkoutas.__file__).parents[2])}
    for front, train in fronts.items():
        for case, options in CASES.items():
            final = train(options)
            data = b"".join(np.ascontiguousarray(final[k]).tobytes() for k in SHAPES)
            found[f"{front}: {case}"] = hashlib.sha256(data).hexdigest()[:16]
    return found


def run(tree: Path) -> dict[str, str]:
    call = [sys.executable, str(Path(__file__).resolve()), "--here"]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(call, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout)
    if Path(found.pop("from")) != tree:
        raise RuntimeError(f"{tree}/src was not the code that ran")
    return found


def main(revision: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        there = Path(folder).resolve()
        packed = subprocess.run(["git", "archive", revision], cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
            tar.extractall(there, filter="data")
        subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=there, check=True)
        old, new = run(there), run(ROOT)
    same = {name: old.get(name) == digest for name, digest in new.items()}
    for name, equal in same.items():
        print(f"{name:40}{'the same bits' if equal else 'differs'}")
    return 0 if all(equal for name, equal in same.items() if name.endswith(": default")) else 1


if __name__ == "__main__":
    if sys.argv[1:] == ["--here"]:
        print(json.dumps(everything()))
    elif len(sys.argv) == 2:
        sys.exit(main(sys.argv[1]))
    else:
        sys.exit(__doc__)
