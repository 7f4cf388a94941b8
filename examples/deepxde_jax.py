"""DeepXDE on JAX: a Poisson problem. The schedule goes into the optimizer; DeepXDE ignores `decay=` beside an instance.

DDE_BACKEND=jax python examples/deepxde_jax.py
"""

import deepxde as dde
import jax.numpy as jnp
import numpy as np
import optax

from kourkoutas.optax import kourkoutas_beta


def residual(x, y):
    return dde.grad.hessian(y, x)[0] + jnp.pi**2 * jnp.sin(jnp.pi * x)  # y'' = -π² sin(πx)


def problem() -> dde.Model:
    dde.config.set_random_seed(0)
    line = dde.geometry.Interval(-1, 1)
    ends = dde.icbc.DirichletBC(line, lambda _: 0, lambda _, on_boundary: on_boundary)
    data = dde.data.PDE(line, residual, ends, num_domain=32, num_boundary=2)
    return dde.Model(data, dde.nn.FNN([1, 20, 20, 1], "tanh", "Glorot normal"))


def main(steps: int = 600) -> float:
    """The largest error against sin(πx)."""
    model = problem()
    schedule = optax.cosine_decay_schedule(1e-2, steps)
    model.compile(kourkoutas_beta(schedule, bias_correction="exact"))
    model.train(iterations=steps, verbose=0)
    x = np.linspace(-1, 1, 101)[:, None]
    error = float(abs(model.predict(x) - np.sin(np.pi * x)).max())
    print(f"largest error {error:.4f}")
    return error


if __name__ == "__main__":
    main()
