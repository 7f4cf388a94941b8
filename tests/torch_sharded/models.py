"""One small model, the gradients that tests feed it, and the ways to lay it out over ranks."""

import torch
from torch import nn

SPIKES = (6, 13)


class Model(nn.Module):
    """Over 4 ranks: rows that divide evenly (even), do not (up), and leave ranks with nothing (down, norm, head)."""

    def __init__(self):
        super().__init__()
        self.even = nn.Linear(6, 8, bias=False)
        self.up = nn.Linear(8, 10)
        self.down = nn.Linear(10, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 1, bias=False)

    def forward(self, x):
        return self.head(self.norm(self.down(torch.relu(self.up(self.even(x))))))


def model(dtype=torch.float32):
    torch.manual_seed(0)
    made = Model().to(dtype)
    with torch.no_grad():
        made.up.weight.mul_(8)  # so that its mean size is above 1, where adaptive_tiny looks
    return made


def gradients(step, dtype, bad=None):
    """Chosen gradients of the whole model at one step, by name; `bad` names a step and a parameter to get an inf."""
    generator = torch.Generator().manual_seed(1000 + step)
    out = {}
    for i, (name, p) in enumerate(model().named_parameters()):
        scale = 50.0 if step in SPIKES and i % 2 else 1.0
        out[name] = (scale * torch.randn(p.shape, generator=generator, dtype=torch.float64)).to(dtype)
    if bad is not None and bad[0] == step:
        out[bad[1]].view(-1)[-1] = torch.inf
    return out


def lay_out(made, layout, world):
    """Spread a model over the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if layout == "fsdp2":
        fully_shard(made, mesh=init_device_mesh("cpu", (world,)))
    elif layout == "hsdp":
        fully_shard(made, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
    elif layout == "tp":
        parallelize_module(made, init_device_mesh("cpu", (world,)), plan)
    elif layout == "tp+sp":
        parallelize_module(made, init_device_mesh("cpu", (world,)), {**plan, "norm": SequenceParallel()})
    elif layout == "fsdp2+tp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(made, mesh["tp"], plan)
        fully_shard(made, mesh=mesh["dp"])
    else:
        raise ValueError(layout)
    return made


def part_of(full, p, partial=False):
    """`full` laid out as the parameter `p`; `partial`: as summands that lie on every rank of a replicated dimension."""
    from torch.distributed.tensor import DTensor, Partial, Replicate
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not isinstance(p, DTensor):
        return full.clone()
    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    here = full[tuple(slice(o, o + n) for n, o in zip(shape, offset, strict=True))].clone()
    placements = p.placements
    if partial and all(isinstance(x, Replicate) for x in placements):
        placements = [Partial()] * len(placements)
        rank, size = p.device_mesh.get_rank(), p.device_mesh.size()
        here = here * 3 if rank == 0 else here * (-2 / (size - 1))
    return DTensor.from_local(
        here, p.device_mesh, placements, run_check=False, shape=p.shape, stride=tuple(full.stride())
    )


def feed(made, step, bad=None, partial=False):
    """Set the chosen gradients of one step."""
    from torch.distributed.tensor import DTensor

    chosen = gradients(step, next(made.parameters()).dtype, bad)
    for name, p in made.named_parameters():
        p.grad = part_of(chosen[name], p, partial) if isinstance(p, DTensor) else chosen[name]


def full(x):
    """The whole of a tensor, on every rank."""
    return x.full_tensor().detach().clone() if hasattr(x, "full_tensor") else x.detach().clone()
