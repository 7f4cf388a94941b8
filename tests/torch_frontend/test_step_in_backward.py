"""examples/step_in_backward.py: each parameter steps as its gradient arrives."""

import runpy
import weakref
from pathlib import Path

import pytest
import torch

from kourkoutas.torch import KourkoutasBeta
from tests.torch_frontend.routes import on

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "step_in_backward.py"))


def model_and_loss():
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (torch.nn.Linear(32, 32), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(32, 1))
    x = torch.randn(16, 32)
    return model, lambda t: (model(x) - x[:, :1] * t).square().mean()


@on("kernel", "fused", "plain", "foreach", "capturable")
@pytest.mark.parametrize("options", [{}, {"decay": 0.98, "adaptive_tiny": True, "bias_correction": "exact"}], ids=str)
def test_it_equals_the_ordinary_step_to_the_bit(route, options):
    (ordinary, loss), (early, early_loss) = model_and_loss(), model_and_loss()
    optimizer = KourkoutasBeta(ordinary.named_parameters(), **options, **route)
    EXAMPLE["step_in_backward"](KourkoutasBeta(early.named_parameters(), **options, **route))
    for t in range(10):
        optimizer.zero_grad()
        loss(t).backward()
        optimizer.step()
        early_loss(t).backward()
    assert all(torch.equal(p, q) for p, q in zip(ordinary.parameters(), early.parameters(), strict=True))


def test_gradients_are_gone_and_never_many_at_a_time():
    model, loss = model_and_loss()
    optimizer = KourkoutasBeta(model.named_parameters())
    alive, gradients = [], []

    def look(p):
        alive.append(sum(q.grad is not None for q in model.parameters()))
        gradients.append(weakref.ref(p.grad))

    for p in model.parameters():  # before the hook that steps
        p.register_post_accumulate_grad_hook(look)
    EXAMPLE["step_in_backward"](optimizer)
    for t in range(3):
        loss(t).backward()
    assert len(alive) == 3 * len(list(model.parameters()))
    assert max(alive) == 1
    assert all(gradient() is None for gradient in gradients)


@on("kernel", "fused", "plain", "foreach", "capturable")
@pytest.mark.parametrize("options", [{}, {"bias_correction": "exact", "nonfinite": "skip", "decay": 1}], ids=str)
def test_a_group_is_packed_once_however_many_of_its_parameters_step_for_the_first_time(route, options, monkeypatch):
    model, loss = model_and_loss()
    optimizer = KourkoutasBeta(model.named_parameters(), **options, **route)
    (group,) = optimizer._groups
    packs, pack = [], group.pack
    monkeypatch.setattr(group, "pack", lambda *args: (packs.append(args), pack(*args)))
    EXAMPLE["step_in_backward"](optimizer)
    loss(0).backward()
    loss(1).backward()
    assert [optimizer.state[p]["step"].item() for p in model.parameters()] == [2] * 14
    assert len(packs) == 1


@on("kernel", "fused", "plain", "foreach", "capturable")
def test_a_parameter_whose_state_was_deleted_starts_afresh_and_the_others_go_on(route):
    p, q = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = KourkoutasBeta([p, q], bias_correction="exact", **route)
    for _ in range(3):
        p.grad, q.grad = torch.ones(3), torch.ones(3)
        optimizer.step()
    del optimizer.state[p]
    optimizer.step()
    assert optimizer.state[p]["step"].item() == 1
    assert optimizer.state[q]["step"].item() == 4
    assert optimizer.state[p]["norm_ema"].item() == pytest.approx(0.07 * 3**0.5)  # r = (1-α)·n, from 0


def test_a_bucket_of_several_parameters_is_refused():
    model, _ = model_and_loss()
    with pytest.raises(ValueError, match="`buckets` must be 'parameter'"):
        EXAMPLE["step_in_backward"](KourkoutasBeta(model.named_parameters(), buckets="module"))
