"""Accelerate: an ordinary loop, saved and resumed.

python examples/accelerate_loop.py
"""

import tempfile

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from kourkoutas.torch import KourkoutasBeta


def prepared(accelerator: Accelerator) -> tuple:
    torch.manual_seed(0)
    x = torch.linspace(-3, 3, 256)[:, None]
    loader = DataLoader(TensorDataset(x, torch.sin(2 * x)), batch_size=32, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = KourkoutasBeta(model.named_parameters(), lr=1e-2, buckets="module")
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
    return accelerator.prepare(model, optimizer, loader, scheduler)


def epoch(accelerator: Accelerator, model, optimizer, loader, scheduler) -> float:
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return loss.item()


def main(epochs: int = 50) -> float:
    accelerator = Accelerator(cpu=True)
    parts = prepared(accelerator)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(epochs // 2):
            epoch(accelerator, *parts)
        accelerator.save_state(folder)
        accelerator.load_state(folder)
        for _ in range(epochs - epochs // 2):
            loss = epoch(accelerator, *parts)
    print(f"loss {loss:.5f}")
    return loss


if __name__ == "__main__":
    main()
