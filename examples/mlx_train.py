"""Train a small network with Kourkoutas-β in MLX: compiled step, learning-rate schedule, β2 per layer, checkpoint.

python examples/mlx_train.py
"""

import tempfile
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_unflatten

from kourkoutas.mlx import KourkoutasBeta
from kourkoutas.trace import Trace

STEPS = 400


def main() -> None:
    mx.random.seed(0)
    x = mx.random.uniform(-3, 3, (256, 1))
    y = mx.sin(2 * x)
    model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    schedule = optim.cosine_decay(2e-2, STEPS)
    optimizer = KourkoutasBeta(learning_rate=schedule, buckets="module", diagnostics=True)
    optimizer.init(model.trainable_parameters())
    state = [model.state, optimizer.state]
    loss_and_grad = nn.value_and_grad(model, lambda model, x, y: nn.losses.mse_loss(model(x), y))

    def step(x: mx.array, y: mx.array) -> mx.array:
        loss, grads = loss_and_grad(model, x, y)
        optimizer.update(model, grads)
        return loss

    compiled = mx.compile(step, inputs=state, outputs=state)
    for t in range(1, STEPS + 1):
        loss = compiled(x, y)
        mx.eval(state, loss)
        if t % 100 == 0:
            print(f"step {t:4d}  loss {loss.item():.6f}")

    trace = Trace(optimizer.bucket_names)
    optimizer.pull(trace)
    print("  ".join(f"{name} beta2 {row['beta2']:.4f}" for name, row in trace.snapshot().items()))

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "optimizer.safetensors")
        mx.save_safetensors(path, dict(tree_flatten(optimizer.state)))
        resumed = KourkoutasBeta(learning_rate=schedule, buckets="module", diagnostics=True)
        resumed.state = tree_unflatten(list(mx.load(path).items()))
        print("resumed at step", resumed.step.item())


if __name__ == "__main__":
    main()
