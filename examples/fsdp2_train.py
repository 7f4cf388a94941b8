"""A small transformer layer trained under FSDP2 with Kourkoutas-β, saved, and loaded again.

Two processes on this machine, without a GPU:

    torchrun --nproc-per-node 2 examples/fsdp2_train.py

Nothing about the optimizer is special: parameters are sharded by `fully_shard`, and each bucket's norm is that of the
whole tensors, wherever their parts are. On GPUs, `cpu` becomes `cuda` and `gloo` becomes `nccl`.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from kourkoutas.torch import KourkoutasBeta


def make(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(32, 24), nn.TransformerEncoderLayer(24, 4, 48, dropout=0.0, batch_first=True), nn.Linear(24, 32)
    )
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # Each entry of a step is at most 3 learning rates, so that gradients need no clip: β2 should see their spikes.
    return model, KourkoutasBeta(model.named_parameters(), lr=3e-3, buckets="module", decay=0, max_ratio=3)


def train(model, optimizer, steps):
    """Learn to say 5·token + 1 modulo 32; each rank has its own batch."""
    for step in steps:
        torch.manual_seed(1000 * step + dist.get_rank())
        tokens = torch.randint(32, (8, 16))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), (5 * tokens + 1).flatten() % 32)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def states(model, optimizer):
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model, optimizer = make(mesh)
    first = train(model, optimizer, range(1))
    train(model, optimizer, range(1, 60))

    # A checkpoint that any number of ranks can load, or one process without any.
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    dcp.save(states(model, optimizer), checkpoint_id=folder[0])
    model, optimizer = make(mesh)
    loaded = states(model, optimizer)
    dcp.load(loaded, checkpoint_id=folder[0])
    set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])

    last = train(model, optimizer, range(60, 120))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: loss {first:.3f} -> {last:.3f}")
    dist.barrier()  # nobody leaves while another still talks to it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
