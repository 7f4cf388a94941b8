"""Tensors that carry no mesh: FSDP1, ZeroRedundancyOptimizer and pipeline stages, told by `process_group`."""

import pytest
import torch

from kourkoutas.torch import KourkoutasBeta
from kourkoutas.trace import Trace
from tests.torch_sharded import jobs, models
from tests.torch_sharded.ranks import ranks

FULL = {"decay": 0.98, "max_ratio": 3.0, "adaptive_tiny": True, "tiny_denom": 1e-2}


def _inputs(step, dtype=torch.float32):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=dtype)


def _learn(made, optimizer, steps):
    """Real passes, the same on every rank, so that averaged gradients equal those of one process."""
    for step in steps:
        optimizer.zero_grad()
        scale = 30.0 if step in models.SPIKES else 1.0
        (scale * made(_inputs(step)).square().mean()).backward()
        optimizer.step()


def _alone(options, steps=15):
    made = models.model()
    optimizer = KourkoutasBeta(made.named_parameters(), lr=1e-2, **options)
    _learn(made, optimizer, range(steps))
    return {name: p.detach().clone() for name, p in made.named_parameters()}


def _close(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-6, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def _fsdp1_model(world):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(models.model(), use_orig_params=True, device_id=torch.device("cpu"))


def _whole_fsdp1(made):
    from torch.distributed.fsdp import FullyShardedDataParallel

    with FullyShardedDataParallel.summon_full_params(made):
        return {name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in made.named_parameters()}


def _fsdp1(rank, world, options):
    made = _fsdp1_model(world)
    optimizer = KourkoutasBeta(
        made.named_parameters(), lr=1e-2, diagnostics=True, process_group=made.process_group, **options
    )
    _learn(made, optimizer, range(15))
    trace = Trace(optimizer.bucket_names)
    optimizer.pull(trace)
    return _whole_fsdp1(made), torch.from_numpy(trace.beta2)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {**FULL, "buckets": "module"},
        {"buckets": "global", "warmup_steps": 4, "nonfinite": "skip"},
        pytest.param({"foreach": True}, marks=pytest.mark.slow),
        pytest.param({"capturable": True, **FULL}, marks=pytest.mark.slow),
        pytest.param({"bias_correction": "exact", "buckets": "module"}, marks=pytest.mark.slow),
    ],
)
def test_fsdp1_equals_one_process(world, options):
    answers = ranks(world).run(_fsdp1, options)
    expected = _alone(options)
    for found, _ in answers:
        _close(found, expected)
    if options.get("buckets") == "global":
        assert all(torch.equal(answers[0][1], trace) for _, trace in answers)


def _fsdp1_errors(rank, world):
    made = _fsdp1_model(world)
    messages = []
    for options in ({}, {"process_group": "local"}, {"process_group": made.process_group, "buckets": "shape"}):
        optimizer = KourkoutasBeta(made.parameters(), **options)
        made(_inputs(0)).sum().backward()
        try:
            optimizer.step()
        except ValueError as error:
            messages.append(str(error))
        optimizer.zero_grad()
    return messages


def test_fsdp1_without_a_process_group_is_an_error_with_the_remedy():
    for messages in ranks(2).run(_fsdp1_errors):
        assert len(messages) == 3
        assert "process_group=<the FSDP model>.process_group" in messages[0]
        assert "process_group=<the FSDP model>.process_group" in messages[1]
        assert "'shape'" in messages[2]


def _fsdp1_resume(rank, world, options):
    from torch.distributed.fsdp import FullOptimStateDictConfig, StateDictType
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    made = _fsdp1_model(world)
    # With offload_to_cpu=True, torch 2.13 on the CPU gives every optimizer's moments one and the same memory.
    FSDP.set_state_dict_type(
        made,
        StateDictType.FULL_STATE_DICT,
        optim_state_dict_config=FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=False),
    )
    optimizer = KourkoutasBeta(made.named_parameters(), lr=1e-2, process_group=made.process_group, **options)
    _learn(made, optimizer, range(7))
    # The optimizer of the saved state steps by itself no more; a new one takes over.
    state = FSDP.optim_state_dict(made, optimizer)
    again = KourkoutasBeta(made.named_parameters(), lr=1e-2, process_group=made.process_group, **options)
    again.load_state_dict(FSDP.optim_state_dict_to_load(made, again, state))
    _learn(made, again, range(7, 15))
    return _whole_fsdp1(made)


@pytest.mark.parametrize("options", [{}, {**FULL, "buckets": "module", "bias_correction": "exact"}])
def test_fsdp1_resumes_from_optim_state_dict(options):
    expected = _alone(options)
    for found in ranks(2).run(_fsdp1_resume, options):
        _close(found, expected)


def _zero(rank, world, options, resume):
    import torch.distributed as dist

    made = torch.nn.parallel.DistributedDataParallel(models.model())

    if "process_group" in options:
        options = {**options, "process_group": dist.group.WORLD}
    optimizer = _ZeRO.make(made, options)
    _learn(made, optimizer, range(7))
    if resume:
        optimizer.consolidate_state_dict(to=0)
        box = [optimizer.state_dict() if rank == 0 else None]
        dist.broadcast_object_list(box, src=0)
        optimizer = _ZeRO.make(made, options)
        optimizer.load_state_dict(box[0])
    _learn(made, optimizer, range(7, 15))
    return {name.removeprefix("module."): p.detach().clone() for name, p in made.named_parameters()}


class _ZeRO:
    """ZeroRedundancyOptimizer has an argument `process_group` of its own, so ours goes in by partial application."""

    @staticmethod
    def make(made, options):
        from torch.distributed.optim import ZeroRedundancyOptimizer

        group = options.get("process_group")
        rest = {k: v for k, v in options.items() if k != "process_group"}

        class Ours(KourkoutasBeta):
            def __init__(self, params, **keywords):
                super().__init__(params, process_group=group, **keywords)

        return ZeroRedundancyOptimizer(made.parameters(), Ours, lr=1e-2, **rest)


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {**FULL, "buckets": "shape", "process_group": "world"},
        {"buckets": "global", "nonfinite": "skip", "process_group": "world"},
        pytest.param({"buckets": "global", "warmup_steps": 4, "process_group": "world"}, marks=pytest.mark.slow),
    ],
)
def test_zero_redundancy_equals_one_process_and_resumes(options, resume):
    expected = _alone({k: v for k, v in options.items() if k != "process_group"})
    answers = ranks(2).run(_zero, options, resume)
    for found in answers:
        _close(found, expected)
    assert all(torch.equal(answers[0][name], answers[1][name]) for name in expected)


def _stage(rank, world, options):
    """Each rank holds every other parameter, as a pipeline stage holds its layers; chosen gradients."""
    import torch.distributed as dist

    made = models.model()
    named = [(name, p) for i, (name, p) in enumerate(made.named_parameters()) if i % world == rank]
    optimizer = KourkoutasBeta(named, lr=1e-2, process_group=dist.group.WORLD, **options)
    for step in range(15):
        models.feed(made, step)
        if step < 3 and rank == 1:
            for p in made.parameters():
                p.grad = None
        optimizer.step()
    return {name: p.detach().clone() for name, p in named}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"buckets": "global", "warmup_steps": 5},
        {"buckets": "module"},
        {"buckets": "shape", **FULL},
        {"buckets": "global", "beta2_min": 0.999},
    ],
)
def test_buckets_over_pipeline_stages_equal_one_process(options):
    made = models.model()
    optimizer = KourkoutasBeta(made.named_parameters(), lr=1e-2, **options)
    for step in range(15):
        models.feed(made, step)
        for i, p in enumerate(made.parameters()):
            if step < 3 and i % 2 == 1:
                p.grad = None
        optimizer.step()
    expected = dict(made.named_parameters())
    for found in ranks(2).run(_stage, options):
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=2e-6, atol=2e-6)


def _nothing_here(rank, world):
    """Rank 1 holds no parameter of the bucket that both share."""
    import torch.distributed as dist

    p = torch.nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    mine = [p] if rank == 0 else []
    optimizer = KourkoutasBeta([{"params": mine}], buckets="global", process_group=dist.group.WORLD, lr=0.1)
    for _ in range(2):
        optimizer.step()
    return p.detach()


def test_a_rank_without_parameters_takes_part():
    first, second = ranks(2).run(_nothing_here)
    assert (first < 1).all()
    assert torch.equal(second, torch.ones(3))


def _route_on_one(rank, world):
    """Rank 0 asks for its route before the first step; rank 1 does not."""
    import torch.distributed as dist

    made = models.model()
    named = [(name, p) for i, (name, p) in enumerate(made.named_parameters()) if i % world == rank]
    optimizer = KourkoutasBeta(named, lr=1e-2, buckets="global", process_group=dist.group.WORLD)
    models.feed(made, 0)
    reasons = [route.reason for route in optimizer.route()] if rank == 0 else []
    dist.barrier()  # where a rank that still waits for the other's answer would meet nobody
    for step in range(3):
        models.feed(made, step)
        optimizer.step()
    return reasons, {name: p.detach().clone() for name, p in named}


def test_a_route_asked_for_on_one_rank_waits_for_nobody():
    (reasons, _), _ = answers = ranks(2).run(_route_on_one, seconds=30)
    assert reasons == ["parameters or members of their buckets lie on several ranks"]
    made = models.model()
    optimizer = KourkoutasBeta(made.named_parameters(), lr=1e-2, buckets="global")
    for step in range(3):
        models.feed(made, step)
        optimizer.step()
    for _, found in answers:
        for name, value in found.items():
            torch.testing.assert_close(value, dict(made.named_parameters())[name].detach(), rtol=2e-6, atol=2e-6)


def _raise_on_one(rank, world):
    import torch.distributed as dist

    p = torch.nn.Parameter(torch.ones(3))
    optimizer = KourkoutasBeta([(f"p{rank}", p)], nonfinite="raise", process_group=dist.group.WORLD)
    p.grad = torch.full((3,), torch.inf if rank == 0 else 1.0)
    try:
        optimizer.step()
    except ArithmeticError as error:
        return str(error), p.detach().clone()


def test_raise_raises_on_every_stage():
    for message, value in ranks(2).run(_raise_on_one):
        assert "not finite" in message
        assert torch.equal(value, torch.ones(3))


def _unclear(rank, world, buckets):
    made = models.model()
    messages = []
    for group in (None, "local"):
        optimizer = KourkoutasBeta(made.named_parameters(), buckets=buckets, process_group=group)
        models.feed(made, 0)
        try:
            optimizer.step()
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_buckets_that_may_reach_beyond_this_rank_are_an_error_with_the_remedy():
    for messages in ranks(2).run(_unclear, "global"):
        assert "process_group='local'" in messages[0]
        assert messages[1] == ""
    for messages in ranks(2).run(_unclear, "parameter"):
        assert messages == ["", ""]


def test_a_process_group_that_is_none_names_the_argument():
    with pytest.raises(TypeError, match="process_group"):
        KourkoutasBeta([torch.nn.Parameter(torch.ones(1))], process_group="world")


def _ddp(rank, world, options):
    made = torch.nn.parallel.DistributedDataParallel(models.model())
    optimizer = KourkoutasBeta(made.module.named_parameters(), lr=1e-2, process_group="local", **options)
    _learn(made, optimizer, range(15))
    return {name: p.detach().clone() for name, p in made.module.named_parameters()}, {
        name: jobs.hashed(p) for name, p in made.module.named_parameters()
    }


@pytest.mark.parametrize("options", [{}, {"buckets": "global"}])
def test_data_parallel_replicas_stay_equal(options):
    (one, hash_one), (_, hash_two) = ranks(2).run(_ddp, options)
    _close(one, _alone(options))
    assert hash_one == hash_two
