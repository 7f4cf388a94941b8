"""What ranks are asked to do: functions of (rank, world, ...) whose answers can be sent back."""

import hashlib

import torch

from kourkoutas.torch import KourkoutasBeta, kernel
from kourkoutas.trace import Trace
from tests.torch_sharded import models


def train(made, options, steps=20, bad=None, partial=False, absent=None):
    """Steps with chosen gradients; every parameter, β2 and r afterwards, whole, and a hash of what lies here."""
    options = {"lr": 1e-2, "diagnostics": True, **options}
    with_kernel = options.pop("kernel", True)
    saved, kernel.extension = kernel.extension, kernel.extension if with_kernel else None
    try:
        optimizer = KourkoutasBeta(made.named_parameters(), **options)
        for step in range(steps):
            models.feed(made, step, bad, partial)
            if absent is not None and step in absent[0]:
                dict(made.named_parameters())[absent[1]].grad = None
            optimizer.step()
        route = [(r.name, r.fused) for r in optimizer.route()]
    finally:
        kernel.extension = saved
    trace = Trace(optimizer.bucket_names)
    optimizer.pull(trace)
    named = dict(made.named_parameters())
    return {
        "params": {name: models.full(p) for name, p in named.items()},
        "beta2": torch.from_numpy(trace.beta2),
        "ema": {name: optimizer.state[p]["norm_ema"].clone() for name, p in named.items()},
        "moments": {name: models.full(optimizer.state[p]["exp_avg_sq"]).float() for name, p in named.items()},
        "skipped": {name: int(optimizer.state[p].get("skipped", 0)) for name, p in named.items()},
        "route": route,
        "here": {name: hashed(p) for name, p in named.items()},
    }


@torch.no_grad()
def local(x):
    """What lies on this rank."""
    return x.to_local() if hasattr(x, "to_local") else x


def hashed(x):
    return hashlib.sha256(local(x).detach().double().contiguous().numpy().tobytes()).hexdigest()


def sharded(rank, world, layout, options, dtype=torch.float32, **how):
    return train(models.lay_out(models.model(dtype), layout, world), options, **how)
