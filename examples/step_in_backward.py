"""Step each parameter as soon as its gradient is there, and free the gradient: no more than a few live at a time.

One optimizer for all parameters. With buckets by parameter, the default, a parameter's β2 needs its own gradient only,
so the result is that of an ordinary step to the bit. A bucket of several parameters needs the gradients of them all:
then call `optimizer.step()` after `backward()`.
"""

import torch

from kourkoutas.torch import KourkoutasBeta


def step_in_backward(optimizer: KourkoutasBeta) -> None:
    """Let `backward()` take the optimizer's step, parameter by parameter; call neither `step` nor `zero_grad` then.

    Gradients cannot be accumulated over several passes, nor clipped by their common norm: each is used, and gone, when
    it arrives.
    """
    if any(len(group["bucket_names"]) < len(group["params"]) for group in optimizer.param_groups):
        raise ValueError("`buckets` must be 'parameter': a bucket of several parameters needs all their gradients")

    def hook(_: torch.Tensor) -> None:
        optimizer.step()  # only the gradient that has just arrived is there: earlier ones are freed, later ones to come
        optimizer.zero_grad()

    for group in optimizer.param_groups:
        for p in group["params"]:
            p.register_post_accumulate_grad_hook(hook)


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)), torch.nn.Linear(64, 1))
    optimizer = KourkoutasBeta(model.named_parameters(), lr=1e-3)
    step_in_backward(optimizer)
    x = torch.randn(256, 64)
    y = x[:, :1].sin()
    for _ in range(100):
        loss = (model(x) - y).square().mean()
        loss.backward()
    print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
