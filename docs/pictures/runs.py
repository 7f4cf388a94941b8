"""The runs behind the pictures, kept as tables beside this file.

    kbeta study heat3d --preset laptop --set steps=1500 --seeds 0 --optimizers kbeta --out RESULTS
    python docs/pictures/runs.py norms RESULTS     norms.csv
    kbeta study heat3d --preset laptop --set steps=1500 --seeds 0-9 --out RESULTS
    python docs/pictures/runs.py curves RESULTS    curves.csv
    python docs/pictures/runs.py buckets           buckets.csv, from a small network that is trained here

norms.csv has the gradient norm of one bucket, the hidden matrices, for the first steps of a K-β run of testbed B.
curves.csv has the loss of K-β, Adam 0.95 and Adam 0.999, ten seeds each, a column per run. The network of buckets.csv
solves u'' = -π² sin(πx) on [-1, 1] with u = 0 at both ends; β2 of its twelve parameters, every fourth step.
"""

import csv
import itertools
import sys
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
BUCKET, STEPS = "(128, 128)", 600


def norms(results: Path) -> None:
    (file,) = results.glob("runs/heat3d-kbeta-s0-*/trace.npz")
    with np.load(file) as trace:
        column = trace["norm"][:STEPS, list(trace["names"]).index(BUCKET)]
    with open(HERE / "norms.csv", "w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["step", "norm"])
        writer.writerows((step, f"{norm:.6g}") for step, norm in enumerate(column, start=1))


def curves(results: Path) -> None:
    from kourkoutas.lab import load

    table = load(results).curves()
    run = table["optimizer"] + "-" + table["seed"].astype(str)
    table.assign(run=run).pivot(index="step", columns="run", values="loss").to_csv(
        HERE / "curves.csv", float_format="%.3g", lineterminator="\n"
    )


def buckets() -> None:
    import torch

    from kourkoutas.torch import KourkoutasBeta
    from kourkoutas.trace import Trace

    torch.manual_seed(0)
    torch.set_num_threads(1)
    widths = [1, 32, 32, 32, 32, 32, 1]
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    net = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.Tanh())))[:-1]
    x = torch.linspace(-1, 1, 64)[:, None].requires_grad_()
    optimizer = KourkoutasBeta(net.named_parameters(), lr=1e-2, warmup_steps=20, diagnostics=True)
    trace = Trace(optimizer.bucket_names, every=4)
    for _ in range(1000):
        u = net(x)
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), x, create_graph=True)
        loss = (ddu + torch.pi**2 * torch.sin(torch.pi * x)).square().mean() + 100 * u[[0, -1]].square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer.pull(trace)
    with open(HERE / "buckets.csv", "w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(["step", *optimizer.bucket_names])
        for step, row in zip(trace.steps, trace.beta2, strict=True):
            writer.writerow([step, *(f"{beta2:.4f}" for beta2 in row)])
    print(f"loss {loss.item():.3g}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["norms", results]:
            norms(Path(results))
        case ["curves", results]:
            curves(Path(results))
        case ["buckets"]:
            buckets()
        case _:
            sys.exit(__doc__)
