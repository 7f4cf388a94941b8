"""pytorch_optimizer: enter Kourkoutas-β into its list once, then make it by name.

python examples/pytorch_optimizer_registry.py
"""

import torch
from pytorch_optimizer import create_optimizer
from pytorch_optimizer.optimizer import OPTIMIZERS

from kourkoutas.torch import KourkoutasBeta

OPTIMIZERS["kbeta"] = KourkoutasBeta


def main(steps: int = 300) -> float:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer = create_optimizer(model, "kbeta", lr=1e-2, weight_decay=1e-4, buckets="shape")
    x = torch.linspace(-3, 3, 256)[:, None]
    for _ in range(steps):
        loss = torch.nn.functional.mse_loss(model(x), torch.sin(2 * x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{len(optimizer.param_groups)} groups, loss {loss.item():.4f}")
    return loss.item()


if __name__ == "__main__":
    main()
