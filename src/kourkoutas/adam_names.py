"""What users of Adam type: errors that say what to write here instead.

| framework | its Adam's constructor                                        |
|-----------|---------------------------------------------------------------|
| Optax     | learning_rate, b1, b2, eps, eps_root, mu_dtype, nesterov      |
| MLX       | learning_rate, betas, eps, bias_correction                    |
| Keras     | learning_rate, beta_1, beta_2, epsilon, amsgrad, weight_decay |
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_FIXED = (
    "β2 moves between `beta2_min` and `beta2_max`: write beta2_max={0}, and beta2_min={0} too if it is to stay there"
)
_REMEDY = {
    "lr": "write learning_rate={0}",
    "b1": "write beta1={0}",
    "b2": _FIXED,
    "beta_1": "write beta1={0}",
    "beta_2": _FIXED,
    "beta2": _FIXED,
    "betas": "β2 moves between `beta2_min` and `beta2_max`: write for example beta1=0.9, beta2_max=0.999",
    "epsilon": "write eps={0}",
    "eps_root": "nothing is added under the root, `eps` is added outside of it: leave it out",
    "mu_dtype": "m has the dtype of its parameter: leave it out",
    "nesterov": "there is no Nesterov momentum: leave it out",
    "amsgrad": "write decay=1 for AMSGrad, else leave it out",
}


def explain_adams_names(function: Callable[P, R]) -> Callable[P, R]:
    """`function` with a TypeError that names the remedy where Python's own would only say "unexpected argument".

    For arguments that Adam has under another name, and for those that it takes by position and `function` does not.
    """
    parameters = inspect.signature(function).parameters
    by_position = [name for name, each in parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    called = function.__qualname__.removesuffix(".__init__") + "()"

    @functools.wraps(function)
    def explained(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in kwargs.items():
            if name in _REMEDY and name not in parameters:
                remedy = _REMEDY[name].format(repr(value))
                raise TypeError(f"{called} has no argument `{name}`; got {value!r}: {remedy}")
        if len(args) > len(by_position):
            taken = ", ".join(f"`{name}`" for name in by_position if name != "self")
            raise TypeError(
                f"{called} takes {f'only {taken}' if taken else 'nothing'} by position; got also "
                f"{args[len(by_position)]!r}: write its name, for example beta1=0.9, beta2_max=0.999 or eps=1e-8"
            )
        return function(*args, **kwargs)

    return explained
