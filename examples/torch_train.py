"""PyTorch: train a small network with Kourkoutas-β, look at β2 per layer, save and resume."""

import torch

from kourkoutas.torch import KourkoutasBeta
from kourkoutas.trace import Trace

torch.manual_seed(0)
x = torch.linspace(-3, 3, 256)[:, None]
y = torch.sin(2 * x) + 0.1 * torch.randn_like(x)

model = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = KourkoutasBeta(model.named_parameters(), lr=1e-2, diagnostics=True)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
trace = Trace(optimizer.bucket_names)

for _ in range(1000):
    rows = torch.randint(len(x), (32,))
    loss = (model(x[rows]) - y[rows]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()

optimizer.pull(trace)
print(f"loss {(model(x) - y).square().mean():.4f}")
for name, row in trace.snapshot().items():
    print(f"{name:10s} sun {row['sun']:.3f}  beta2 {row['beta2']:.4f}")

checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
optimizer.load_state_dict(checkpoint["optimizer"])
