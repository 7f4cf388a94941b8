"""Your own MLX task: kbeta study examples/my_task_mlx.py:train --seeds 0-9 --optimizers kbeta,adam95,adam999"""

import mlx.core as mx
import mlx.nn as nn


def train(trial):
    mx.random.seed(trial.seed)
    x = mx.random.normal((256, 8))
    y = mx.sin(x.sum(1, keepdims=True))
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = trial.optimizer(model, lr=1e-2)
    value_and_grad = nn.value_and_grad(model, lambda: nn.losses.mse_loss(model(x), y))
    for step in range(1, int(trial.settings.get("steps", 300)) + 1):
        value, grads = value_and_grad()
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state)
        if step % 10 == 0:
            trial.log(step, loss=value)
    return value
