"""jinns: u' = -a u with u observed and a unknown; `solve` takes K-β like any Optax optimizer.

python examples/jinns_solve.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import jinns
from jinns.parameters import DerivativeKeysODE, Params

from kourkoutas.optax import kourkoutas_beta

BASIS = None  # "eigen": in the eigenbasis
optimizer = kourkoutas_beta(1e-2, bias_correction="exact", basis=BASIS)


class Decay(jinns.loss.ODE):
    def equation(self, t, u, params):
        du = jax.jacfwd(lambda t: u(t, params))(t).reshape(1)
        return du + params.eq_params.a * u(t, params)


def problem() -> dict:
    layers = ((eqx.nn.Linear, 1, 20), (jnp.tanh,), (eqx.nn.Linear, 20, 20), (jnp.tanh,), (eqx.nn.Linear, 20, 1))
    u, start = jinns.nn.PINN_MLP.create(key=jax.random.key(0), eqx_list=layers, eq_type="ODE")
    params = Params(nn_params=start, eq_params={"a": jnp.array(0.5)})  # the truth is 2
    # jinns keeps equation parameters fixed unless a derivative key says otherwise.
    keys = DerivativeKeysODE.from_str(
        dyn_loss="both", observations="nn_params", initial_condition="nn_params", params=params
    )
    weights = jinns.loss.LossWeightsODE(dyn_loss=1.0, initial_condition=1.0, observations=1.0)
    loss = jinns.loss.LossODE(
        u=u, dynamic_loss=Decay(), loss_weights=weights, derivative_keys=keys, initial_condition=(0.0, 1.0)
    )
    t = jnp.linspace(0, 1, 20)[:, None]
    return {
        "init_params": params,
        "loss": loss,
        "data": jinns.data.DataGeneratorODE(key=jax.random.key(1), nt=64, tmin=0, tmax=1, method="grid"),
        "obs_data": jinns.data.DataGeneratorObservations(
            key=jax.random.key(2), observed_pinn_in=t, observed_values=jnp.exp(-2 * t)
        ),
    }


def main(steps: int = 600) -> tuple[float, float]:
    params, losses, *_ = jinns.solve(n_iter=steps, optimizer=optimizer, verbose=False, **problem())
    print(f"loss {losses[-1]:.2e}, a {params.eq_params.a:.3f}")
    return float(losses[-1]), float(params.eq_params.a)


if __name__ == "__main__":
    main()
