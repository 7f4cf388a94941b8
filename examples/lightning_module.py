"""Lightning: `configure_optimizers` returns Kourkoutas-β; β2 per layer is logged like any metric.

python examples/lightning_module.py
"""

import lightning
import torch
from torch.utils.data import DataLoader, TensorDataset

from kourkoutas.torch import KourkoutasBeta
from kourkoutas.trace import Trace


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> dict:
        optimizer = KourkoutasBeta(self.named_parameters(), lr=1e-2, buckets="module", diagnostics=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 400)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_train_epoch_end(self) -> None:
        optimizer = self.optimizers().optimizer
        trace = Trace(optimizer.bucket_names)
        optimizer.pull(trace)
        for name, row in trace.snapshot().items():
            self.log(f"beta2/{name}", row["beta2"])


def data() -> DataLoader:
    x = torch.linspace(-3, 3, 256)[:, None]
    return DataLoader(TensorDataset(x, torch.sin(2 * x)), batch_size=32)


def trainer(epochs: int, **options) -> lightning.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", **{"enable_checkpointing": False, **quiet, **options}
    )


def main(epochs: int = 50) -> float:
    lightning.seed_everything(0, verbose=False)
    it = trainer(epochs)
    it.fit(Regression(), data())
    print("  ".join(f"{name} {float(value):.5f}" for name, value in it.callback_metrics.items()))
    return float(it.callback_metrics["loss"])


if __name__ == "__main__":
    main()
