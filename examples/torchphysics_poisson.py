"""torchphysics: a Poisson problem with an unknown source; Lightning trains, saves and resumes.

python examples/torchphysics_poisson.py
"""

import pytorch_lightning as pl
import torch
import torchphysics as tp

from kourkoutas.torch import KourkoutasBeta


def solver() -> tp.Solver:
    """u'' = -D π² sin(πx) on (0, 1), with u = sin(πx) observed: D is 1, and starts at 0.5."""
    pl.seed_everything(0, verbose=False)
    X, U, D = tp.spaces.R1("x"), tp.spaces.R1("u"), tp.spaces.R1("D")
    model = tp.models.FCN(X, U, hidden=(20, 20))
    unknown = tp.models.Parameter(init=0.5, space=D)
    points = tp.samplers.GridSampler(tp.domains.Interval(X, 0, 1), n_points=32).make_static()

    def equation(u, x, D):
        return tp.utils.laplacian(u, x) / torch.pi**2 + D * torch.sin(torch.pi * x)

    conditions = [
        tp.conditions.PINNCondition(model, points, equation, parameter=unknown, name="equation"),
        tp.conditions.PINNCondition(model, points, lambda u, x: u - torch.sin(torch.pi * x), name="observed"),
    ]
    # torchphysics passes no names to the optimizer: buckets by shape need none.
    options = {"bias_correction": "exact", "buckets": "shape"}
    return tp.Solver(conditions, optimizer_setting=tp.OptimizerSetting(KourkoutasBeta, 1e-2, options))


def trainer(steps: int, **options) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(max_steps=steps, accelerator="cpu", **{"enable_checkpointing": False, **quiet, **options})


def main(steps: int = 400) -> tuple[float, float]:
    it = solver()
    fit = trainer(steps)
    fit.fit(it)
    loss = float(fit.callback_metrics["train/loss"])
    unknown = it.train_conditions[0].parameter.as_tensor.item()
    print(f"loss {loss:.2e}, D {unknown:.3f}")
    return loss, unknown


if __name__ == "__main__":
    main()
