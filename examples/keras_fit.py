"""Keras 3: compile, fit, save and load; KERAS_BACKEND is torch or jax.

KERAS_BACKEND=torch python examples/keras_fit.py
"""

import tempfile
from pathlib import Path

import keras
import numpy as np

from kourkoutas.keras import KourkoutasBeta


def main(epochs: int = 60) -> float:
    keras.utils.set_random_seed(0)
    x = np.linspace(-3, 3, 256, dtype="float32")[:, None]
    y = np.sin(2 * x)
    model = keras.Sequential([keras.layers.Dense(64, activation="tanh"), keras.layers.Dense(1)])
    schedule = keras.optimizers.schedules.CosineDecay(2e-2, 8 * epochs)
    model.compile(optimizer=KourkoutasBeta(schedule, buckets="module"), loss="mse")
    model.fit(x, y, batch_size=32, epochs=epochs // 2, verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model.keras")
        model = keras.models.load_model(Path(folder) / "model.keras")
    history = model.fit(x, y, batch_size=32, epochs=epochs - epochs // 2, verbose=0)
    for name, row in model.optimizer.snapshot().items():
        print(f"{name:20s} sun {row['sun']:.3f}  beta2 {row['beta2']:.4f}")
    print(f"{keras.backend.backend()}: loss {history.history['loss'][-1]:.5f}")
    return history.history["loss"][-1]


if __name__ == "__main__":
    main()
