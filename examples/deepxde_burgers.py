"""DeepXDE on PyTorch: Burgers' equation, its viscosity unknown. K-β first, L-BFGS after it; saved and restored.

DDE_BACKEND=pytorch python examples/deepxde_burgers.py
"""

import deepxde as dde
import numpy as np
import torch

from kourkoutas.torch import KourkoutasBeta


def problem() -> tuple[dde.Model, torch.Tensor]:
    dde.config.set_random_seed(0)
    nu = dde.Variable(0.2)  # the truth is 0.05

    def residual(x, u):
        u_x, u_t = dde.grad.jacobian(u, x, j=0), dde.grad.jacobian(u, x, j=1)
        return u_t + u * u_x - nu * dde.grad.hessian(u, x, i=0, j=0)

    domain = dde.geometry.GeometryXTime(dde.geometry.Interval(-1, 1), dde.geometry.TimeDomain(0, 1))
    x = domain.random_points(100)
    front = 0.5 - 0.5 * np.tanh((x[:, :1] - x[:, 1:] / 2) / (4 * 0.05))  # an exact solution, observed
    data = dde.data.TimePDE(domain, residual, [dde.icbc.PointSetBC(x, front)], num_domain=200)
    return dde.Model(data, dde.nn.FNN([2, 20, 20, 1], "tanh", "Glorot normal")), nu


# --8<-- [start:recipe]
def with_kbeta(model: dde.Model, nu: torch.Tensor, basis: str | None = None) -> None:  # or "eigen"
    parameters = [*model.net.named_parameters(), ("nu", nu)]  # without ("nu", nu) it stays where it started
    optimizer = KourkoutasBeta(parameters, lr=5e-3, bias_correction="exact", basis=basis)  # not compile(lr=...)
    model.compile(optimizer, decay=("step", 200, 0.7), external_trainable_variables=[nu])


def save(model: dde.Model, nu: torch.Tensor, path: str) -> str:
    torch.save({"nu": nu.detach(), "schedule": model.lr_scheduler.state_dict()}, f"{path}-rest.pt")
    return model.save(path)  # network and optimizer; DeepXDE leaves out the unknown and the schedule


def restore(model: dde.Model, nu: torch.Tensor, path: str, saved: str) -> None:
    model.restore(saved)  # after with_kbeta
    rest = torch.load(f"{path}-rest.pt")
    nu.data.copy_(rest["nu"])
    model.lr_scheduler.load_state_dict(rest["schedule"])


def main(steps: int = 1000) -> tuple[float, float, float]:
    model, nu = problem()
    with_kbeta(model, nu)
    before = sum(model.train(iterations=steps, verbose=0)[0].loss_train[-1])
    dde.optimizers.set_LBFGS_options(maxiter=200)
    model.compile("L-BFGS", external_trainable_variables=[nu])
    after = sum(model.train(verbose=0)[0].loss_train[-1])
    print(f"nu {nu.item():.4f}, loss {before:.2e} with K-β, {after:.2e} with L-BFGS after it")
    return before, after, nu.item()


# --8<-- [end:recipe]
if __name__ == "__main__":
    main()
