"""How many collectives a step costs, counted in the processes themselves."""

import importlib
import re

import pytest
import torch

from kourkoutas.torch import KourkoutasBeta
from tests.torch_sharded import models
from tests.torch_sharded.ranks import ranks


def _count(rank, world, layout, options):
    """Collectives of one step through the kernel, seen by name, and of one step seen by torch's CommDebugMode."""
    from torch.distributed import _functional_collectives as collectives
    from torch.distributed.tensor.debug import CommDebugMode

    made = models.model()
    if layout is not None:
        made = models.lay_out(made, layout, world)
    optimizer = KourkoutasBeta(made.named_parameters(), **options)
    sent = []
    real = collectives.all_reduce

    def counting(x, how, group):
        sent.append(tuple(x.shape))
        return real(x, how, group)

    models.feed(made, 0)
    optimizer.step()
    models.feed(made, 1)
    collectives.all_reduce = counting
    try:
        optimizer.step()
    finally:
        collectives.all_reduce = real
    models.feed(made, 2)
    with CommDebugMode() as mode:
        optimizer.step()
    return sent, mode.get_total_counts()


@pytest.mark.parametrize(
    ("world", "layout", "expected"),
    [(2, "fsdp2", 1), (4, "fsdp2", 1), (4, "hsdp", 1), (4, "fsdp2+tp", 2), (2, "tp", 1), (2, None, 0)],
)
@pytest.mark.parametrize("options", [{}, {"adaptive_tiny": True, "buckets": "module"}])
def test_a_step_reduces_one_vector_over_each_mesh_dimension_that_shards(world, layout, expected, options):
    for sent, watched in ranks(world).run(_count, layout, options):
        assert len(sent) == expected
        assert watched == expected


def test_the_vector_has_one_entry_for_each_sharded_parameter():
    count = len(list(models.model().parameters()))
    for sent, _ in ranks(2).run(_count, "fsdp2", {}):
        assert sent == [(1, count)]
    for sent, _ in ranks(2).run(_count, "fsdp2", {"adaptive_tiny": True}):
        assert sent == [(2, count)]
    # Under tensor parallelism only the linear layers of the plan are sharded, and down.bias is not.
    for sent, _ in ranks(2).run(_count, "tp", {}):
        assert sent == [(1, 3)]


def _two_groups(rank, world):
    """Two groups on two meshes of the same dimension, one of them without any gradient on rank 1."""
    made = models.lay_out(models.model(), "fsdp2", world)
    named = list(made.named_parameters())
    optimizer = KourkoutasBeta([{"params": named[:3]}, {"params": named[3:], "buckets": "module"}], lr=1e-2)
    for step in range(3):
        models.feed(made, step)
        if rank == 1:
            for _, p in named[3:]:
                p.grad = None
        optimizer.step()
    return {name: float(optimizer.state[p]["norm_ema"]) for name, p in named[:3]}


def test_ranks_without_gradients_still_take_part():
    one, other = ranks(2).run(_two_groups)
    assert one == other
    assert all(value > 0 for value in one.values())


def _plain(rank, world):
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = KourkoutasBeta([p])
    p.grad = torch.ones(3) * (rank + 1)
    if rank == 0:  # alone: nothing is waited for
        optimizer.step()
    return float(p.sum())


def test_a_rank_may_step_alone_when_nothing_is_sharded():
    first, second = ranks(2).run(_plain)
    assert first < second == 3


def _without(rank, world, layout, options, module, name):
    """The moving averages after three steps of a torch that has lost a private name, or the error that says so."""
    made = models.lay_out(models.model(), layout, world)
    models.feed(made, 0)
    module = importlib.import_module(module)
    kept = getattr(module, name)
    delattr(module, name)
    try:
        optimizer = KourkoutasBeta(made.named_parameters(), lr=1e-2, **options)
        for _ in range(3):
            optimizer.step()
    except (RuntimeError, ValueError) as error:
        return str(error)
    finally:
        setattr(module, name, kept)
    return {name: optimizer.state[p]["norm_ema"].item() for name, p in made.named_parameters()}


OFFSET = ("torch.distributed.tensor._utils", "compute_local_shape_and_global_offset")
LOST = [
    (("torch.distributed._functional_collectives", "all_reduce"), {}, None),
    (("torch.distributed._functional_collectives", "wait_tensor"), {"adaptive_tiny": True}, None),
    (OFFSET, {}, None),
    (
        OFFSET,
        {"state_dtype": torch.bfloat16},
        "this torch does not say where the shard of parameter 'even.weight' begins",
    ),
    (
        ("torch.distributed.tensor.placement_types", "_StridedShard"),
        {},
        "which neither shards nor replicates it",
    ),
]


@pytest.mark.parametrize(("name", "options", "refused"), LOST, ids=lambda x: x[1] if isinstance(x, tuple) else "")
def test_ranks_whose_torch_has_lost_a_private_name_step_or_say_what_is_missing(name, options, refused):
    usual = ranks(4).run(_averages, "fsdp2+tp", options)
    for answer, expected in zip(ranks(4).run(_without, "fsdp2+tp", options, *name), usual, strict=True):
        if refused is None:
            assert answer == expected
        else:
            assert re.search(refused, answer)


def _averages(rank, world, layout, options):
    made = models.lay_out(models.model(), layout, world)
    models.feed(made, 0)
    optimizer = KourkoutasBeta(made.named_parameters(), lr=1e-2, **options)
    for _ in range(3):
        optimizer.step()
    return {name: optimizer.state[p]["norm_ema"].item() for name, p in made.named_parameters()}
