"""PINA's problem zoo, trained by its own `Trainer`.

kbeta suite examples/suite_pina.toml        (pip install pina-mathlab)
"""

import pina.problem.zoo as zoo  # pina.problem gives None for a zoo that was not imported
import torch
from lightning.pytorch import Callback, seed_everything
from pina.model import FeedForward
from pina.optim import TorchOptimizer
from pina.solver import PhysicsInformedSingleModelSolver
from pina.trainer import Trainer


class OfTrial(TorchOptimizer):
    """The optimizer of a trial, which PINA makes when it has the parameters."""

    def __init__(self, make):
        self.make = make

    def hook(self, parameters):
        self._optimizer_instance = self.make(parameters)


class Log(Callback):
    def __init__(self, trial, every):
        self.trial, self.every = trial, every

    def on_train_epoch_end(self, trainer, solver):
        if trainer.global_step % self.every == 0:
            self.trial.log(trainer.global_step, loss=trainer.callback_metrics["train_loss"])


def train(trial):
    s = trial.settings
    epochs, points = int(s.get("epochs", 1000)), int(s.get("points", 30))
    seed_everything(trial.seed, verbose=False)
    problem = getattr(zoo, s["problem"])()
    for domain in problem.domains:  # a square inside, a line at an edge
        problem.discretise_domain(points**2 if domain == "D" else 4 * points, "random", domains=domain)
    width, depth = int(s.get("width", 20)), int(s.get("depth", 2))
    model = FeedForward(len(problem.input_variables), len(problem.output_variables), layers=[width] * depth)
    optimizer = OfTrial(lambda parameters: trial.optimizer(model, lr=5e-3))
    solver = PhysicsInformedSingleModelSolver(problem, model, optimizer=optimizer)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    log = Log(trial, max(1, epochs // 20))
    Trainer(
        solver, max_epochs=epochs, accelerator="cpu", callbacks=[log], enable_checkpointing=False, **quiet
    ).train()
    if not hasattr(problem, "solution"):
        return solver.trainer.callback_metrics["train_loss"]
    problem.discretise_domain(100, "grid", domains="D")
    test = problem.discretised_domains["D"]
    with torch.no_grad():
        exact = problem.solution(test).tensor
        return torch.linalg.norm(model(test).tensor - exact) / torch.linalg.norm(exact)
