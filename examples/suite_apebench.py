"""APEBench's scenarios, trained by its own loop; its example is Adam with a warmup and a cosine.

kbeta suite examples/suite_apebench.toml        (pip install apebench)
"""

import apebench
import equinox as eqx
import jax
import jax.numpy as jnp
from apebench.components import optimizer_dict


def train(trial):
    s = trial.settings
    steps = int(s.get("steps", 10_000))
    scenario = apebench.scenarios.scenario_dict[s["scenario"]](
        # The name of the optimizer, then of the schedule with its start, its peak and the steps until that.
        optim_config=f"trial;{steps};warmup_cosine;0.0;{s.get('lr', 1e-3)};{steps // 5}",
        num_points=int(s.get("points", 160)),
        num_train_samples=int(s.get("samples", 50)),
    )
    for_init, for_batches = jax.random.split(jax.random.PRNGKey(trial.seed))
    network = s.get("network", "Conv;34;10;relu")
    stepper = scenario.get_neural_stepper(task_config="predict", network_config=network, key=for_init)
    params = eqx.filter(stepper, eqx.is_array)
    optimizer_dict["trial"] = lambda config: lambda schedule: trial.optimizer(params, lr=schedule)
    trainer = scenario.get_trainer(train_config=s.get("task", "one"))
    loss = eqx.filter_jit(trainer.full_loss)
    every = max(1, steps // 20)

    def log(step, stepper, data):
        if step % every == 0:
            trial.log(step, loss=loss(stepper))

    trainer = eqx.tree_at(lambda one: one.callback_fn, trainer, log)
    stepper, _ = trainer(stepper, for_batches, return_loss_history=False, spawn_tqdm=False)
    # The error of a rollout on new initial conditions, by its steps; APEBench's figure is the geometric mean of 100.
    errors = scenario.perform_tests(stepper, remove_singleton_axis=True)["mean_nRMSE"][0, :100]
    error = jnp.exp(jnp.mean(jnp.log(errors)))
    trial.log(steps, loss=loss(stepper), error=error)
    return error
