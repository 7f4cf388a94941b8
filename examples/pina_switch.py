"""PINA: a Poisson problem, K-β for the first epochs and L-BFGS for the rest.

python examples/pina_switch.py
"""

import torch
from lightning.pytorch import seed_everything
from pina.callback import SwitchOptimizer
from pina.model import FeedForward
from pina.optim import TorchOptimizer
from pina.problem.zoo import Poisson2DSquareProblem
from pina.solver import PhysicsInformedSingleModelSolver
from pina.trainer import Trainer

from kourkoutas.buckets import by_module
from kourkoutas.torch import KourkoutasBeta


def solver(basis: str | None = None) -> PhysicsInformedSingleModelSolver:
    seed_everything(0, verbose=False)
    problem = Poisson2DSquareProblem()
    problem.discretise_domain(10, "grid", domains="D")
    problem.discretise_domain(10, "grid", domains="boundary")
    model = FeedForward(input_dimensions=2, output_dimensions=1, layers=[20, 20])
    # PINA passes no names to the optimizer, so they come from the model. basis="eigen": in the eigenbasis.
    kbeta = TorchOptimizer(KourkoutasBeta, lr=5e-3, bias_correction="exact", basis=basis, buckets=by_module(model))
    return PhysicsInformedSingleModelSolver(problem, model, optimizer=kbeta)


def trainer(it: PhysicsInformedSingleModelSolver, epochs: int, **options) -> Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        it, max_epochs=epochs, accelerator="cpu", shuffle=False, **{"enable_checkpointing": False, **quiet, **options}
    )


def main(epochs: int = 400) -> tuple[float, float]:
    """The loss after the epochs of K-β, and after 20 more of L-BFGS."""
    it = solver()
    trainer(it, epochs).train()
    before = float(it.trainer.callback_metrics["train_loss"])
    it = solver()
    lbfgs = TorchOptimizer(torch.optim.LBFGS, max_iter=10, line_search_fn="strong_wolfe")
    trainer(it, epochs + 20, callbacks=[SwitchOptimizer(lbfgs, epoch_switch=epochs)]).train()
    after = float(it.trainer.callback_metrics["train_loss"])
    print(f"loss {before:.2e} with K-β, {after:.2e} with L-BFGS after it")
    return before, after


if __name__ == "__main__":
    main()
