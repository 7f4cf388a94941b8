"""Does every front end still give the same bits as it did at another commit?

    python release/same_bits.py REVISION      for example the tag of the last release

Trains the same small model for 200 steps with the code of REVISION, taken from git and built in a temporary folder, and
with the code here, in this environment, and compares the final parameters. The last bits differ between processors and
versions of a framework, so that saved numbers could not tell.

The C kernel, Optax and MLX must give the same bits in every case. The order of torch's own operations may change, so
there the final parameters must lie within TOLERANCE of the oracle's, relative to max(1, largest |θ|) as in the
conformance table. Ends with 1 if not.
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
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
SHAPES = {"w1": (37, 19), "b1": (19,), "w2": (128, 64), "s": ()}
STEPS = 200
TOLERANCE = 2e-6
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


def with_oracle(options: dict) -> dict[str, np.ndarray]:
    from kourkoutas.oracle import Oracle
    from kourkoutas.rule import Hyper

    hyper = Hyper(**{k: x for k, x in options.items() if k != "buckets"})
    oracle = Oracle(start(), hyper, buckets=options.get("buckets", "parameter"), lr=1e-2)
    for g in gradients():
        oracle.step(g)
    return oracle.params


def everything() -> dict[str, Any]:
    """{front end, route and case: digest of the final parameters, and their distance to the oracle's}."""
    import kourkoutas
    from kourkoutas import _native

    fronts = {
        "torch, kernel" if _native.step is not None else "torch": lambda o: with_torch(o, {}),
        "torch, fused=False": lambda o: with_torch(o, {"fused": False}),
        "torch, capturable": lambda o: with_torch(o, {"capturable": True}),
        "optax, jit": with_optax,
        "mlx": with_mlx,
    }
    found: dict[str, Any] = {"from": str(Path(kourkoutas.__file__).parents[2])}
    for case, options in CASES.items():
        truth = with_oracle(options)
        scale = max(1.0, *(float(np.max(np.abs(x))) for x in truth.values()))
        for front, train in fronts.items():
            final = train(options)
            data = b"".join(np.ascontiguousarray(final[k]).tobytes() for k in SHAPES)
            far = max(float(np.max(np.abs(final[k] - x))) for k, x in truth.items()) / scale
            found[f"{front}: {case}"] = hashlib.sha256(data).hexdigest()[:16], far
    return found


def run(tree: Path) -> dict[str, Any]:
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
    failures = 0
    for name, (digest, far) in sorted(new.items()):
        same = name in old and old[name][0] == digest
        needs_bits = name.startswith(("torch, kernel", "optax", "mlx"))
        ok = same if needs_bits else far <= TOLERANCE
        failures += not ok
        what = "the same bits" if same else "other bits"
        print(f"{name:36}{what:15}{far:.1e} from the oracle  {'ok' if ok else 'FAILS'}")
    return 1 if failures else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--here"]:
        print(json.dumps(everything()))
    elif len(sys.argv) == 2:
        sys.exit(main(sys.argv[1]))
    else:
        sys.exit(__doc__)
