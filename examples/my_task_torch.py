"""Your own PyTorch task: kbeta study examples/my_task_torch.py:train --seeds 0-9 --optimizers kbeta,adam95,adam999"""

import torch


def train(trial):
    torch.manual_seed(trial.seed)
    x = torch.randn(256, 8)
    y = torch.sin(x.sum(1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = trial.optimizer(model, lr=1e-2)
    for step in range(1, int(trial.settings.get("steps", 300)) + 1):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            trial.log(step, loss=loss.item())
    return loss.item()
