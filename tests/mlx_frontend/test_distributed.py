"""Two processes, each with half of the batch and its gradients averaged, train as one does with the whole."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from kourkoutas.mlx import KourkoutasBeta

SRC = Path(__file__).parents[2] / "src"
FULL = {"decay": 0.98, "max_ratio": 3.0, "adaptive_tiny": True, "bias_correction": "exact", "buckets": "module"}
# In a basis of the axis of 3 only: of the other one, eigenvectors to the eigenvalue 0 are whatever rounding makes them.
EIGEN = {**FULL, "basis": "eigen", "basis_every": 3, "basis_limit": 3}
STEPS = 12


def has_ring():
    try:
        return mx.distributed.is_available("ring")
    except TypeError:  # an older MLX takes no name of a backend
        return False


def train(rank, size, average, options):
    """The parameters and moving averages after `STEPS` steps on the rows of `rank`; a spike at step 6."""
    rng = np.random.default_rng(0)
    params = {
        "enc": {"w": mx.array(rng.normal(size=(3, 5)), mx.float32)},
        "dec": {"w": mx.array(np.ones(5), mx.float32)},
    }
    x, y = rng.normal(size=(STEPS, 8, 3)), rng.normal(size=(STEPS, 8))
    x[6] *= 30
    optimizer = KourkoutasBeta(1e-2, **options)
    rows = slice(rank * 8 // size, (rank + 1) * 8 // size)
    for xs, ys in zip(x, y, strict=True):
        xs, ys = mx.array(xs[rows], mx.float32), mx.array(ys[rows], mx.float32)
        grads = mx.grad(lambda p, xs, ys: mx.mean(mx.square(mx.tanh(xs @ p["enc"]["w"]) @ p["dec"]["w"] - ys)))(
            params, xs, ys
        )
        params = optimizer.apply_gradients(average(grads), params)
        mx.eval(params, optimizer.state)
    return {
        "enc": np.array(params["enc"]["w"]),
        "dec": np.array(params["dec"]["w"]),
        "ema": np.array(optimizer.state["ema"]),
    }


def both(rank, size, average):
    """The same with and without a basis."""
    kept = {}
    for name, options in (("full", FULL), ("eigen", EIGEN)):
        found = train(rank, size, average, options)
        kept.update({f"{name} {what}": x for what, x in found.items()})
    return kept


def worker(out):
    group = mx.distributed.init(strict=True, backend="ring")
    kept = both(group.rank(), group.size(), lambda grads: nn.average_gradients(grads, group))
    np.savez(f"{out}-{group.rank()}.npz", size=group.size(), **kept)


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.mark.skipif(not has_ring(), reason="this MLX has no ring backend, or is too old to be asked for one")
def test_two_processes_with_averaged_gradients_equal_one(tmp_path):
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    processes = []
    for rank in range(2):
        env = {**os.environ, "PYTHONPATH": str(SRC), "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)}
        command = [sys.executable, __file__, str(tmp_path / "rank")]
        processes.append(
            subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    try:
        for process in processes:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()
            process.wait()
    zero, one = ({**np.load(tmp_path / f"rank-{rank}.npz")} for rank in range(2))
    assert zero.pop("size") == one.pop("size") == 2
    whole = both(0, 1, lambda grads: grads)
    for name, want in whole.items():
        assert zero[name].tobytes() == one[name].tobytes()
        np.testing.assert_allclose(zero[name], want, rtol=2e-6, atol=2e-6)


if __name__ == "__main__":
    worker(sys.argv[1])
