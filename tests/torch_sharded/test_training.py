"""Real forward and backward passes under FSDP2, and what goes with them."""

import pytest
import torch

from kourkoutas.torch import KourkoutasBeta
from tests.torch_sharded import models
from tests.torch_sharded.ranks import ranks


def _batch(step, rank, world):
    """This rank's rows of the batch of one step."""
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return rows[rank * 4 // world : (rank + 1) * 4 // world]


def _learn(made, optimizer, rank=0, world=1, *, clip=None, accumulate=1, steps=10):
    for step in range(steps):
        if optimizer is not None:
            optimizer.zero_grad()
        for part in range(accumulate):
            scale = 30.0 if step in models.SPIKES else 1.0
            (scale * made(_batch(step * accumulate + part, rank, world)).square().mean() / accumulate).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(made.parameters(), clip)
        if optimizer is not None:
            optimizer.step()
    return {name: models.full(p) for name, p in made.named_parameters()}


def _fsdp2(rank, world, how, offload, options):
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    made = models.model(torch.float64)
    policy = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    for layer in (made.up, made.down):
        fully_shard(layer, **policy)
    fully_shard(made, **policy)
    return _learn(made, KourkoutasBeta(made.named_parameters(), lr=1e-2, **options), rank, world, **how)


@pytest.mark.parametrize(
    ("how", "offload", "options"),
    [
        ({}, False, {"buckets": "module", "adaptive_tiny": True}),
        ({"clip": 0.5}, False, {}),
        ({"accumulate": 3}, False, {}),
        ({}, True, {"buckets": "global"}),
    ],
    ids=["plain", "clipped", "accumulated", "offloaded"],
)
def test_fsdp2_training_equals_one_process(how, offload, options):
    made = models.model(torch.float64)
    expected = _learn(made, KourkoutasBeta(made.named_parameters(), lr=1e-2, **options), **how)
    for answer in ranks(2).run(_fsdp2, how, offload, options):
        for name, value in expected.items():
            torch.testing.assert_close(answer[name], value, rtol=1e-9, atol=1e-9)


def _in_backward(rank, world):
    made = models.lay_out(models.model(torch.float64), "fsdp2", world)
    optimizers = {p: KourkoutasBeta([(name, p)], lr=1e-2) for name, p in made.named_parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in made.parameters():
        p.register_post_accumulate_grad_hook(step)
    return _learn(made, None, rank, world)


def test_an_optimizer_in_backward_equals_one_process():
    made = models.model(torch.float64)
    expected = _learn(made, KourkoutasBeta(made.named_parameters(), lr=1e-2))
    for answer in ranks(2).run(_in_backward):
        for name, value in expected.items():
            torch.testing.assert_close(answer[name], value, rtol=1e-9, atol=1e-9)


def _compiled(rank, world, layout, options):
    torch._dynamo.reset()
    made = models.lay_out(models.model(), layout, world)
    optimizer = KourkoutasBeta(made.named_parameters(), lr=torch.tensor(1e-2), **options)
    step = torch.compile(optimizer.step, backend="aot_eager", fullgraph=True)
    for number in range(8):
        models.feed(made, number)
        step()
    return {name: models.full(p) for name, p in made.named_parameters()}


@pytest.mark.parametrize(
    ("world", "layout", "options"),
    [
        (2, "fsdp2", {}),
        pytest.param(4, "fsdp2+tp", {"adaptive_tiny": True, "buckets": "module"}, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_step_equals_one_process(world, layout, options):
    made = models.model()
    optimizer = KourkoutasBeta(made.named_parameters(), lr=1e-2, **options)
    for number in range(8):
        models.feed(made, number)
        optimizer.step()
    for answer in ranks(world).run(_compiled, layout, options, seconds=300):
        for name, p in made.named_parameters():
            torch.testing.assert_close(answer[name], p.detach(), rtol=2e-6, atol=2e-6)


def _tensor_parallel(rank, world):
    made = models.lay_out(models.model(torch.float64), "tp", world)
    optimizer = KourkoutasBeta(made.named_parameters(), lr=1e-2, buckets="module")
    for step in range(10):
        optimizer.zero_grad()
        made(_batch(step, 0, 1)).square().mean().backward()
        optimizer.step()
    return {name: models.full(p) for name, p in made.named_parameters()}


def test_tensor_parallel_training_equals_one_process():
    made = models.model(torch.float64)
    optimizer = KourkoutasBeta(made.named_parameters(), lr=1e-2, buckets="module")
    for step in range(10):
        optimizer.zero_grad()
        made(_batch(step, 0, 1)).square().mean().backward()
        optimizer.step()
    for answer in ranks(2).run(_tensor_parallel):
        for name, p in made.named_parameters():
            torch.testing.assert_close(answer[name], p.detach(), rtol=1e-9, atol=1e-9)
