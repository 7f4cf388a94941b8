"""Checkpoints: what ranks save continues on other numbers of ranks, and on one, as if nothing had happened."""

import pytest
import torch

from kourkoutas.torch import KourkoutasBeta
from tests.torch_sharded import jobs, models
from tests.torch_sharded.ranks import ranks

OPTIONS = {
    "default": {"lr": 1e-2},
    "full": {"lr": 1e-2, "decay": 0.9, "max_ratio": 2.0, "adaptive_tiny": True, "buckets": "module"},
    "exact, bf16": {"lr": 1e-2, "bias_correction": "exact", "state_dtype": torch.bfloat16, "nonfinite": "skip"},
}


def _states(made, optimizer):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(made, optimizer)
    return {"model": model_state, "optimizer": optimizer_state}


def _go(made, optimizer, steps):
    for step in steps:
        models.feed(made, step)
        optimizer.step()


def _save(rank, world, layout, options, folder):
    import torch.distributed.checkpoint as dcp

    made = models.lay_out(models.model(), layout, world)
    optimizer = KourkoutasBeta(made.named_parameters(), **options)
    _go(made, optimizer, range(7))
    dcp.save(_states(made, optimizer), checkpoint_id=folder)


def _load(made, options, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    optimizer = KourkoutasBeta(made.named_parameters(), **options)
    states = _states(made, optimizer)
    dcp.load(states, checkpoint_id=folder)
    set_state_dict(made, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    _go(made, optimizer, range(7, 15))
    return _answer(made, optimizer)


def _answer(made, optimizer):
    return {
        name: {"": models.full(p), **{k: models.full(v).float() for k, v in optimizer.state[p].items()}}
        for name, p in made.named_parameters()
    }


def _continue(rank, world, layout, options, folder):
    made = models.model()
    with torch.no_grad():
        for p in made.parameters():
            p.add_(1)  # what is loaded must come from the checkpoint
    return _load(made if layout is None else models.lay_out(made, layout, world), options, folder)


@pytest.mark.parametrize(
    ("options", "onto"),
    [
        ("default", (2, "fsdp2")),
        pytest.param("default", (4, "fsdp2"), marks=pytest.mark.slow),
        ("full", (4, "fsdp2+tp")),
        ("full", (2, "fsdp2")),
        ("exact, bf16", (4, "fsdp2")),
        ("default", (1, "fsdp2")),
        ("exact, bf16", (1, None)),
        ("full", (1, None)),
    ],
)
def test_two_ranks_continue_on_other_ranks_as_an_uninterrupted_run(options, onto, tmp_path):
    world, layout = onto
    chosen = OPTIONS[options]
    made = models.model()
    optimizer = KourkoutasBeta(made.named_parameters(), **chosen)
    _go(made, optimizer, range(15))
    expected = _answer(made, optimizer)
    ranks(2).run(_save, "fsdp2", chosen, str(tmp_path))
    for answer in ranks(world).run(_continue, layout, chosen, str(tmp_path)):
        for name, states in expected.items():
            for key, value in states.items():
                torch.testing.assert_close(answer[name][key], value, rtol=2e-6, atol=2e-6, msg=f"{name} {key}")


def _bits(rank, world, folder, options):
    """Saved and loaded on the same ranks against uninterrupted, to the bit."""
    import torch.distributed as dist

    straight = models.lay_out(models.model(), "fsdp2", world)
    optimizer = KourkoutasBeta(straight.named_parameters(), **options)
    _go(straight, optimizer, range(15))
    _save(rank, world, "fsdp2", options, folder)
    dist.barrier()
    again = models.lay_out(models.model(), "fsdp2", world)
    _load(again, options, folder)
    return [(jobs.hashed(p), jobs.hashed(q)) for p, q in zip(straight.parameters(), again.parameters(), strict=True)]


@pytest.mark.parametrize("options", list(OPTIONS))
def test_the_same_ranks_resume_bit_for_bit(options, tmp_path):
    for answer in ranks(2).run(_bits, str(tmp_path), OPTIONS[options]):
        for one, other in answer:
            assert one == other


def _mismatched(rank, world):
    whole = models.model()
    optimizer = KourkoutasBeta(whole.named_parameters())
    _go(whole, optimizer, range(2))
    made = models.lay_out(models.model(), "fsdp2", world)
    loaded = KourkoutasBeta(made.named_parameters())
    loaded.load_state_dict(optimizer.state_dict())
    models.feed(made, 2)
    try:
        loaded.step()
    except RuntimeError as error:
        return str(error)


def test_unsharded_state_for_sharded_parameters_is_refused_with_the_remedy():
    for message in ranks(2).run(_mismatched):
        assert "set_optimizer_state_dict" in message
