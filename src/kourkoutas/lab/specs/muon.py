"""Muon on the matrices of a model, Adam on everything else: one optimizer for PyTorch, one for Optax.

NOTE: Muon's step is scaled to the size of Adam's (0.2·√(longer side)), so that one learning rate suits both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

RMS = 0.2  # of a step of Adam, about


def _check_matrices(axes: Sequence[int]) -> None:
    if 2 not in axes:
        raise ValueError("optimizer 'muon' is for models with matrices, and none of these parameters has two axes")


def torch_muon(
    params: Sequence[Any],
    lr: Any = 1e-3,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    weight_decay: float = 0.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> Any:
    """A torch optimizer of tensors or param groups. A function, so that torch is imported only by those who have it."""
    import torch

    groups = [dict(item) if isinstance(item, Mapping) else {"params": [item]} for item in params]
    _check_matrices([p.ndim for group in groups for p in group["params"]])

    def part(matrices: bool) -> list[dict[str, Any]]:
        split = [{**group, "params": [p for p in group["params"] if (p.ndim == 2) == matrices]} for group in groups]
        return [group for group in split if group["params"]]

    step: dict[str, Any] = {"momentum": momentum, "nesterov": nesterov, "ns_steps": ns_steps}
    step |= {"weight_decay": weight_decay}
    muon = torch.optim.Muon(part(True), lr=lr, adjust_lr_fn="match_rms_adamw", **step)
    parts: list[torch.optim.Optimizer] = [muon]
    if rest := part(False):
        parts.append(torch.optim.Adam(rest, lr=lr, betas=(beta1, beta2), eps=eps))

    class MuonAndAdam(torch.optim.Optimizer):
        """Its groups are those of the two, so that schedulers and `zero_grad` see all; each keeps its own state."""

        def __init__(self) -> None:
            super().__init__([{"params": [p for g in one.param_groups for p in g["params"]]} for one in parts], {})
            self.param_groups = [group for one in parts for group in one.param_groups]

        def step(self, closure: Any = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            for one in parts:
                one.step()
            return loss

        def state_dict(self) -> dict[str, Any]:
            return {str(i): one.state_dict() for i, one in enumerate(parts)}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            for i, one in enumerate(parts):
                one.load_state_dict(state[str(i)])
            self.param_groups = [group for one in parts for group in one.param_groups]

    return MuonAndAdam()


def optax_muon(
    learning_rate: Any,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = 5,
    weight_decay: float = 0.0,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
) -> Any:
    """A gradient transformation. Optax's own leaves the rest to Nesterov's Adam."""
    import jax
    import optax

    def labels(params: Any) -> Any:
        _check_matrices([leaf.ndim for leaf in jax.tree_util.tree_leaves(params)])
        return jax.tree_util.tree_map(lambda leaf: "muon" if leaf.ndim == 2 else "adam", params)

    step = {"beta": momentum, "nesterov": nesterov, "ns_steps": ns_steps, "weight_decay": weight_decay}
    muon = optax.contrib.muon(learning_rate, consistent_rms=RMS, **step)
    return optax.multi_transform({"muon": muon, "adam": optax.adam(learning_rate, b1=beta1, b2=beta2, eps=eps)}, labels)
