"""The rivals: what K-β and Adam are compared with. An entry of `RIVALS` is all that a new one needs.

Most of them are what a library makes of them. Those that no library has are functions below, so that a framework is
imported only by those who have it:

- Muon on the matrices of a model, Adam on everything else. Muon's step is scaled to the size of Adam's (0.2·√(longer
  side)), so that one learning rate suits both.
- Adam with Adafactor's β2 = 1 - t^-0.8 (Shazeer and Stern 2018): K-β with β2_min = β2_max, both moved before each step,
  and exact bias correction.
- SOAP, which neither Optax nor MLX has: K-β in the eigenbasis with β2_min = β2_max, and exact bias correction.
- K-β for the first part of a run and L-BFGS for the rest, as PINNs are often trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Rival:
    """An optimizer that others have made.

    Attributes:
      name: for people.
      homes: engine → "module:function", where it lives.
      options: what it gets unless told otherwise, in the names that all rivals share: beta1, beta2, eps, …
      fixed: engine → keywords that only this home needs.
    """

    name: str
    homes: Mapping[str, str]
    options: Mapping[str, Any]
    fixed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


# What most of Adam's relatives start from; an entry says where it differs.
USUAL: Mapping[str, Any] = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
DECAYED: Mapping[str, Any] = {**USUAL, "weight_decay": 0.0}

RIVALS: dict[str, Rival] = {
    "radam": Rival("RAdam", {"torch": "torch.optim:RAdam", "jax": "optax:radam"}, USUAL),
    "adabelief": Rival(
        "AdaBelief", {"torch": "pytorch_optimizer:AdaBelief", "jax": "optax:adabelief"}, {**USUAL, "eps": 1e-16}
    ),
    "yogi": Rival("Yogi", {"torch": "pytorch_optimizer:Yogi", "jax": "optax:yogi"}, {**USUAL, "eps": 1e-3}),
    "rmsprop": Rival(
        "RMSprop",
        {"torch": "torch.optim:RMSprop", "jax": "optax:rmsprop", "mlx": "mlx.optimizers:RMSprop"},
        {"decay": 0.99, "eps": 1e-8},
    ),
    "nadam": Rival("NAdam", {"torch": "torch.optim:NAdam", "jax": "optax:nadam"}, USUAL),
    "amsgrad": Rival(
        "AMSGrad", {"torch": "torch.optim:Adam", "jax": "optax:amsgrad"}, USUAL, fixed={"torch": {"amsgrad": True}}
    ),
    "lion": Rival(
        "Lion",
        {"torch": "pytorch_optimizer:Lion", "jax": "optax:lion", "mlx": "mlx.optimizers:Lion"},
        {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0},
    ),
    "adamw": Rival(
        "AdamW",
        {"torch": "torch.optim:AdamW", "jax": "optax:adamw", "mlx": "mlx.optimizers:AdamW"},
        {**USUAL, "weight_decay": 1e-2},
    ),
    "muon": Rival(
        "Muon",
        {"torch": f"{__name__}:torch_muon", "jax": f"{__name__}:optax_muon"},
        {"momentum": 0.95, "nesterov": True, "ns_steps": 5, **DECAYED},
    ),
    "schedulefree": Rival("schedule-free", {"torch": "schedulefree:AdamWScheduleFree"}, DECAYED),
    "soap": Rival(
        "SOAP",
        {"torch": "pytorch_optimizer:SOAP", "jax": f"{__name__}:optax_soap", "mlx": f"{__name__}:mlx_soap"},
        {**DECAYED, "beta1": 0.95, "beta2": 0.95},
    ),
    "adagc": Rival("AdaGC", {"torch": "pytorch_optimizer:AdaGC"}, DECAYED),
    "stable-spam": Rival("Stable-SPAM", {"torch": "pytorch_optimizer:StableSPAM"}, DECAYED),
    "stableadamw": Rival("StableAdamW", {"torch": "pytorch_optimizer:StableAdamW"}, {**DECAYED, "beta2": 0.99}),
    "laprop": Rival("LaProp", {"torch": "pytorch_optimizer:LaProp"}, {**DECAYED, "eps": 1e-15}),
    # One iteration per step; the line search evaluates the loss and its gradient two or more times.
    "lbfgs": Rival(
        "L-BFGS",
        {"torch": "torch.optim:LBFGS"},
        {
            "max_iter": 1,
            "max_eval": 20,
            "history_size": 50,
            "tolerance_grad": 0.0,
            "tolerance_change": 0.0,
            "line_search_fn": "strong_wolfe",
        },
    ),
    "adafactor-beta2": Rival(
        "Adafactor's β2",
        {"torch": f"{__name__}:torch_adafactor", "jax": f"{__name__}:optax_adafactor"},
        {"beta1": 0.9, "eps": 1e-8, "power": 0.8},
    ),
}

RMS = 0.2  # of a step of Adam, about


def _check_matrices(axes: Sequence[int]) -> None:
    if 2 not in axes:
        raise ValueError("optimizer 'muon' is for models with matrices, and none of these parameters has two axes")


def param_groups(params: Sequence[Any]) -> list[dict[str, Any]]:
    """What torch makes of the tensors or groups that it is given: each tensor is a group of its own."""
    return [dict(item) if isinstance(item, Mapping) else {"params": [item]} for item in params]


def tensors_in(groups: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The tensors of param groups."""
    tensors = []
    for group in groups:
        tensors += group["params"]
    return tensors


def _loss(closure: Any) -> Any:
    """What the closure of a torch step gives, if there is one."""
    import torch

    with torch.enable_grad():
        return None if closure is None else closure()


def torch_muon(params: Sequence[Any], lr: Any, **options: Any) -> Any:
    """A torch optimizer of tensors or param groups."""
    import torch

    groups = param_groups(params)
    _check_matrices([p.ndim for p in tensors_in(groups)])

    def part(matrices: bool) -> list[dict[str, Any]]:
        split = [{**group, "params": [p for p in group["params"] if (p.ndim == 2) == matrices]} for group in groups]
        return [group for group in split if group["params"]]

    adam = {"betas": (options.pop("beta1"), options.pop("beta2")), "eps": options.pop("eps")}
    parts: list[torch.optim.Optimizer] = [
        torch.optim.Muon(part(True), lr=lr, adjust_lr_fn="match_rms_adamw", **options)
    ]
    if rest := part(False):
        parts.append(torch.optim.Adam(rest, lr=lr, **adam))

    class MuonAndAdam(torch.optim.Optimizer):
        """Its groups are those of the two, so that schedulers and `zero_grad` see all; each keeps its own state."""

        def __init__(self) -> None:
            super().__init__([{"params": tensors_in(one.param_groups)} for one in parts], {})
            self.param_groups = _groups_of(parts)

        def step(self, closure: Any = None) -> Any:
            loss = _loss(closure)
            for one in parts:
                one.step()
            return loss

        def state_dict(self) -> dict[str, Any]:
            return {str(i): one.state_dict() for i, one in enumerate(parts)}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            for i, one in enumerate(parts):
                one.load_state_dict(state[str(i)])
            self.param_groups = _groups_of(parts)

    return MuonAndAdam()


def _groups_of(optimizers: Sequence[Any]) -> list[dict[str, Any]]:
    groups = []
    for one in optimizers:
        groups += one.param_groups
    return groups


def optax_muon(learning_rate: Any, **options: Any) -> Any:
    """A gradient transformation. Optax's own leaves the rest to Nesterov's Adam."""
    import jax
    import optax

    def labels(params: Any) -> Any:
        _check_matrices([leaf.ndim for leaf in jax.tree_util.tree_leaves(params)])
        return jax.tree_util.tree_map(lambda leaf: "muon" if leaf.ndim == 2 else "adam", params)

    adam = optax.adam(learning_rate, options.pop("beta1"), options.pop("beta2"), options.pop("eps"))
    muon = optax.contrib.muon(learning_rate, beta=options.pop("momentum"), consistent_rms=RMS, **options)
    return optax.multi_transform({"muon": muon, "adam": adam}, labels)


def torch_adafactor(params: Sequence[Any], lr: Any, *, power: float, beta1: float, eps: float) -> Any:
    """Adam with β2 = 1 - t^-power, t the steps that a parameter has taken; t is saved with the param groups."""
    from kourkoutas.torch import KourkoutasBeta

    class Adafactor(KourkoutasBeta):
        def step(self, closure: Any = None) -> Any:
            loss = _loss(closure)
            for group in self.param_groups:
                if group["params"][0].grad is not None:
                    group["seen"] += 1
                    beta2 = 1 - group["seen"] ** -power
                    group["beta2_min"], group["betas"] = beta2, (group["betas"][0], beta2)
            super().step()
            return loss

    groups: list[dict[str, Any]] = []
    for group in param_groups(params):
        groups += [{**group, "params": [p], "seen": 0} for p in group["params"]]
    return Adafactor(groups, lr, beta1=beta1, eps=eps, bias_correction="exact")


def optax_adafactor(learning_rate: Any, *, power: float, beta1: float, eps: float) -> Any:
    """A gradient transformation: Adam with β2 = 1 - t^-power."""
    import jax.numpy as jnp
    import optax

    from kourkoutas.optax import kourkoutas_beta

    def at(beta2: Any) -> Any:
        return kourkoutas_beta(
            learning_rate, beta1=beta1, beta2_min=beta2, beta2_max=beta2, eps=eps, bias_correction="exact"
        )

    def init(params: Any) -> Any:
        return {"seen": jnp.zeros((), jnp.int32), "inner": at(0.9).init(params)}

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        beta2 = 1 - (state["seen"] + 1.0) ** -power
        updates, inner = at(beta2).update(updates, state["inner"], params)
        return updates, {"seen": state["seen"] + 1, "inner": inner}

    return optax.GradientTransformation(init, update)


def _soap(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of SOAP as those of K-β."""
    beta2 = options["beta2"]
    rest = {name: value for name, value in options.items() if name != "beta2"}
    return {**rest, "beta2_min": beta2, "beta2_max": beta2, "bias_correction": "exact", "basis": "eigen"}


def optax_soap(learning_rate: Any, **options: Any) -> Any:
    """A gradient transformation."""
    from kourkoutas.optax import kourkoutas_beta

    return kourkoutas_beta(learning_rate, **_soap(options))


def mlx_soap(learning_rate: Any, **options: Any) -> Any:
    """An optimizer of MLX."""
    from kourkoutas.mlx import KourkoutasBeta

    return KourkoutasBeta(learning_rate, **_soap(options))


def torch_switch(first: Any, options: Mapping[str, Any], after: int) -> Any:
    """A torch optimizer that is `first` for `after` steps and then L-BFGS of the same tensors, with `options`."""
    import torch

    tensors = tensors_in(first.param_groups)
    second = torch.optim.LBFGS(tensors, lr=1.0, **options)

    class Switch(torch.optim.Optimizer):
        """Its groups are those of the first, whose learning rate is set from outside; L-BFGS keeps its own."""

        needs_closure = True

        def __init__(self) -> None:
            super().__init__(tensors, {"lr": 0.0})
            self.param_groups = first.param_groups
            self.taken = 0

        def step(self, closure: Any = None) -> Any:
            if closure is None:
                raise ValueError("K-β then L-BFGS needs the loss as a function: call step(closure)")
            self.taken += 1
            if self.taken > after:
                return second.step(closure)
            loss = _loss(closure)
            first.step()
            return loss

        def state_dict(self) -> dict[str, Any]:
            return {"taken": self.taken, "first": first.state_dict(), "second": second.state_dict()}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            first.load_state_dict(state["first"])
            second.load_state_dict(state["second"])
            self.param_groups, self.taken = first.param_groups, state["taken"]

    return Switch()
