"""neuraloperator: an FNO, whose spectral weights are complex, learns one step of the heat equation.

python examples/neuralop_fno.py
"""

import torch
from neuralop.models import FNO

from kourkoutas.torch import KourkoutasBeta


def data(samples: int = 32, n: int = 16, time: float = 0.005) -> tuple[torch.Tensor, torch.Tensor]:
    """Random periodic fields before and after diffusion, which damps wave number k by exp(-4π²k² time)."""
    k = torch.fft.fftfreq(n, 1 / n)
    k2 = k[:, None] ** 2 + k[None, :] ** 2
    noise = torch.fft.fft2(torch.randn(samples, 1, n, n, generator=torch.Generator().manual_seed(0)))
    start = noise / (1 + k2)
    return torch.fft.ifft2(start).real, torch.fft.ifft2(start * torch.exp(-4 * torch.pi**2 * k2 * time)).real


def fresh(basis: str | None = None) -> tuple[FNO, KourkoutasBeta]:
    torch.manual_seed(0)
    model = FNO(n_modes=(8, 8), in_channels=1, out_channels=1, hidden_channels=8, n_layers=2)
    options = {"bias_correction": "exact", "buckets": "module", "basis": basis}  # basis="eigen": in the eigenbasis
    return model, KourkoutasBeta(model.named_parameters(), lr=1e-2, **options)


def train(model: FNO, optimizer: KourkoutasBeta, steps: int) -> float:
    before, after = data()
    for _ in range(steps):
        loss = (model(before) - after).square().sum() / after.square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main(steps: int = 100) -> float:
    model, optimizer = fresh()
    loss = train(model, optimizer, steps)
    print(f"{sum(p.is_complex() for p in model.parameters())} complex tensors, relative squared error {loss:.4f}")
    return loss


if __name__ == "__main__":
    main()
