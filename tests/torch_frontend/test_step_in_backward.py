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


def test_a_bucket_of_several_parameters_is_refused():
    model, _ = model_and_loss()
    with pytest.raises(ValueError, match="`buckets` must be 'parameter'"):
        EXAMPLE["step_in_backward"](KourkoutasBeta(model.named_parameters(), buckets="module"))
