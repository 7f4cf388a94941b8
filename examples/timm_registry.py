"""timm: register Kourkoutas-β once, then name it like any other optimizer, with layer decay and the rest.

python examples/timm_registry.py
"""

import timm
import torch
from timm.optim import create_optimizer_v2
from timm.optim._optim_factory import OptimInfo, default_registry

from kourkoutas.torch import KourkoutasBeta

default_registry.register(
    OptimInfo(
        name="kbeta",
        opt_class=KourkoutasBeta,
        description="Adam with a second-moment memory that shortens when gradients spike",
        defaults={"buckets": "shape"},
    )
)


def main(steps: int = 30) -> float:
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=2, in_chans=1)
    optimizer = create_optimizer_v2(model, opt="kbeta", lr=1e-3, weight_decay=0.05, layer_decay=0.75)
    images = torch.randn(16, 1, 32, 32)
    labels = (images.mean((1, 2, 3)) > 0).long()
    model.train()
    for _ in range(steps):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{len(optimizer.param_groups)} groups, loss {loss.item():.4f}")
    return loss.item()


if __name__ == "__main__":
    main()
