"""The step under FSDP2 in two processes: K-β against AdamW fused and AdamW foreach, in one run.

    python benchmarks/sharded_step.py

78 tensors in the shapes of a character-level transformer (12 layers, width 216), 6.8 M parameters, half of them on
each rank. The optimizers take turns, each round in another order; medians over rounds. One thread a process, so that
two processes fit on two cores. It also times the reduction by itself, of vectors of several sizes.
"""

import argparse
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from kourkoutas.torch import KourkoutasBeta

WIDTH, LAYERS = 216, 12


def model():
    """Six tensors a layer, and six around them."""
    layers = [
        nn.ModuleDict(
            {
                "norm": nn.LayerNorm(WIDTH, bias=False),
                "attention": nn.Linear(WIDTH, 3 * WIDTH, bias=False),
                "out": nn.Linear(WIDTH, WIDTH),
                "up": nn.Linear(WIDTH, 4 * WIDTH, bias=False),
                "down": nn.Linear(4 * WIDTH, WIDTH, bias=False),
            }
        )
        for _ in range(LAYERS)
    ]
    ends = [nn.Linear(WIDTH, 64), nn.LayerNorm(WIDTH), nn.Embedding(64, WIDTH), nn.Embedding(256, WIDTH)]
    return nn.Sequential(*layers, *ends)


OPTIMIZERS = {
    "kbeta": lambda named: KourkoutasBeta(named, lr=1e-4),
    "kbeta full": lambda named: KourkoutasBeta(named, lr=1e-4, decay=0.98, max_ratio=3.0, adaptive_tiny=True),
    "adamw fused": lambda named: torch.optim.AdamW(named, lr=1e-4, fused=True),
    "adamw foreach": lambda named: torch.optim.AdamW(named, lr=1e-4, foreach=True),
}


def reduction(size, repeats=200):
    """Microseconds of one all-reduce of `size` doubles."""
    x = torch.ones(size, dtype=torch.float64)
    times = []
    for _ in range(repeats):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(x)
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def worker(rank, world, store, rounds):
    torch.set_num_threads(max(1, (os.cpu_count() or world) // world))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,))
    made = {}
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(0)
        sharded = model()
        fully_shard(sharded, mesh=mesh)
        for p in sharded.parameters():
            p.grad = torch.randn_like(p)
        made[name] = (sharded, make(list(sharded.named_parameters())))
    times = {name: [] for name in made}
    for number in range(rounds + 3):
        order = list(made)[number % len(made) :] + list(made)[: number % len(made)]
        for name in order:
            dist.barrier()
            start = time.perf_counter()
            made[name][1].step()
            dist.barrier()
            if number >= 3:
                times[name].append(time.perf_counter() - start)
    if rank == 0:
        tensors = list(made["kbeta"][0].parameters())
        here = sum(p.to_local().numel() for p in tensors)
        print(f"{world} processes, {len(tensors)} tensors, {here / 1e6:.2f} M parameters a rank, {rounds} rounds")
        medians = {name: statistics.median(ts) for name, ts in times.items()}
        for name, median in medians.items():
            ratios = "  ".join(f"{median / medians[other]:5.2f} x {other}" for other in medians if other[0] == "a")
            print(f"{name:14} {median * 1e3:7.2f} ms   {ratios}")
    for size in (78, 780, 7800, 78000):
        taken = reduction(size)
        if rank == 0:
            print(f"all-reduce of {size:6} doubles ({size * 8 / 1024:7.1f} KiB): {taken:8.0f} us")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    chosen = parser.parse_args()
    file = os.path.join(tempfile.mkdtemp(), "store")
    mp.start_processes(worker, (chosen.world, file, chosen.rounds), chosen.world, start_method="spawn")
