"""An inf in one rank's shard is seen alike on every rank."""

import pytest

from kourkoutas.rule import NonFiniteGradient
from kourkoutas.torch import KourkoutasBeta
from tests.torch_sharded import jobs, models
from tests.torch_sharded.ranks import ranks


def _raise(rank, world, layout, options):
    made = models.lay_out(models.model(), layout, world)
    optimizer = KourkoutasBeta(made.named_parameters(), nonfinite="raise", **options)
    models.feed(made, 0)
    optimizer.step()
    before = {name: jobs.hashed(p) for name, p in made.named_parameters()}
    models.feed(made, 1, bad=(1, "up.weight"))
    finite = all(bool(jobs.local(p.grad).isfinite().all()) for p in made.parameters())
    try:
        optimizer.step()
        message = None
    except NonFiniteGradient as error:
        message = str(error)
    same = before == {name: jobs.hashed(p) for name, p in made.named_parameters()}
    models.feed(made, 2)
    optimizer.step()  # and it goes on
    return finite, message, same


@pytest.mark.parametrize(
    ("world", "layout", "options"),
    [(2, "fsdp2", {}), (2, "fsdp2", {"buckets": "module"}), (4, "fsdp2+tp", {"foreach": True})],
)
def test_raise_raises_on_all_ranks_and_changes_nothing(world, layout, options):
    answers = ranks(world).run(_raise, layout, options)
    assert {finite for finite, _, _ in answers} == {True, False}  # the inf lies on some ranks only
    for _, message, same in answers:
        assert message is not None
        assert "up" in message
        assert same


def _skip(rank, world, layout, buckets):
    made = models.lay_out(models.model(), layout, world)
    optimizer = KourkoutasBeta(made.named_parameters(), nonfinite="skip", buckets=buckets, process_group="local")
    before = {name: jobs.hashed(p) for name, p in made.named_parameters()}
    models.feed(made, 0, bad=(0, "up.weight"))
    optimizer.step()
    moved = {name: before[name] != jobs.hashed(p) for name, p in made.named_parameters() if jobs.local(p).numel()}
    return moved, {name: int(optimizer.state[p]["skipped"]) for name, p in made.named_parameters()}


@pytest.mark.parametrize(("world", "layout"), [(2, "fsdp2"), (4, "fsdp2+tp")])
@pytest.mark.parametrize(
    ("buckets", "still"), [("parameter", {"up.weight"}), ("module", {"up.weight", "up.bias"}), ("global", None)]
)
def test_skip_skips_the_bucket_on_all_ranks(world, layout, buckets, still):
    for moved, skipped in ranks(world).run(_skip, layout, buckets):
        for name, did in moved.items():
            stays = still is None or name in still
            assert did is not stays
            assert skipped[name] == int(stays)


def _huge(rank, world):
    made = models.lay_out(models.model(), "fsdp2", world)
    optimizer = KourkoutasBeta(made.named_parameters(), foreach=True)
    models.feed(made, 0)
    for p in made.parameters():
        jobs.local(p.grad).fill_(1e20)  # float32 cannot hold its square
    optimizer.step()
    return [bool(models.full(p).isfinite().all()) for p in made.parameters()]


def test_finite_gradients_whose_squares_overflow_float32_are_not_taken_for_infinite():
    assert all(all(answer) for answer in ranks(2).run(_huge))
