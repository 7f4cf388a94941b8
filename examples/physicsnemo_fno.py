"""PhysicsNeMo: an FNO learns to solve -u'' = f with periodic ends.

python examples/physicsnemo_fno.py
"""

import torch
from physicsnemo.models.fno import FNO

from kourkoutas.torch import KourkoutasBeta


def data(samples: int = 64, n: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Random f and their u, scaled to a variance near 1; the wave number k of u is that of f over 4π²k²."""
    k = torch.fft.rfftfreq(n, 1 / n)
    noise = torch.fft.rfft(torch.randn(samples, 1, n, generator=torch.Generator().manual_seed(0)))
    f = noise * (k > 0) / (1 + k)
    u = f / (4 * torch.pi**2 * k.clamp(min=1) ** 2)
    f, u = torch.fft.irfft(f), torch.fft.irfft(u)
    return f / f.std(), u / u.std()


def fresh() -> tuple[FNO, KourkoutasBeta]:
    torch.manual_seed(0)
    model = FNO(1, 1, dimension=1, latent_channels=8, num_fno_layers=2, num_fno_modes=8, padding=0)
    return model, KourkoutasBeta(model.named_parameters(), lr=1e-2, bias_correction="exact", buckets="module")


def train(model: FNO, optimizer: KourkoutasBeta, steps: int) -> float:
    f, u = data()
    for _ in range(steps):
        loss = (model(f) - u).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main(steps: int = 200) -> float:
    model, optimizer = fresh()
    loss = train(model, optimizer, steps)
    print(f"{len(optimizer.bucket_names)} buckets, mean squared error {loss:.4f}")
    return loss


if __name__ == "__main__":
    main()
