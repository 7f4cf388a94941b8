"""Two optimizers over the parameters of one model: the first takes what it is made for, the second the rest.

    muon+adam95        Muon on the matrices, Adam on everything else
    --set muon+adam95.takes=blocks --set muon+adam95.rest.beta2=0.99 --set muon+adam95.rest.lr_scale=0.3

`takes` is "matrices" (exactly two axes), "vectors" (fewer), or a regular expression that is looked for in the
parameter's name. Options of the two start with `first.` and `rest.`; `lr_scale` of each multiplies the learning rate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kourkoutas.lab.engines import training

MATRICES, VECTORS = "matrices", "vectors"
Taker = Callable[[str, int], bool]


def taker(takes: str) -> Taker:
    """(name, number of axes) → whether the first optimizer takes a parameter."""
    if takes == MATRICES:
        return lambda name, axes: axes == 2
    if takes == VECTORS:
        return lambda name, axes: axes < 2
    try:
        pattern = re.compile(takes)
    except re.error as error:
        raise ValueError(
            f"`takes` must be {MATRICES}, {VECTORS} or a regular expression of parameter names; got {takes!r} ({error})"
        ) from None
    return lambda name, axes: pattern.search(name) is not None


def parted(names: Sequence[tuple[str, int]], takes: str, label: str) -> list[bool]:
    """Which parameters the first optimizer takes; an error where it takes none or all, which nobody can mean."""
    take = taker(takes)
    taken = [take(name, axes) for name, axes in names]
    if all(taken) or not any(taken):
        what = "all" if all(taken) else "none"
        raise ValueError(
            f"optimizer {label!r}: takes={takes} takes {what} of the parameters "
            f"({', '.join(f'{name} with {axes} axes' for name, axes in names[:5])}{', …' if len(names) > 5 else ''}): "
            f"set {label}.takes, or use one of the two alone"
        )
    return taken


def torch_pair(first: Any, rest: Any, scales: tuple[float, float]) -> Any:
    """One torch optimizer of two; made here so that torch is imported only by those who have it."""
    import torch

    class Pair(torch.optim.Optimizer):
        """Its groups are those of the two, so that schedulers and `zero_grad` see all; each keeps its own state."""

        def __init__(self) -> None:
            groups = [{"params": [p for group in part.param_groups for p in group["params"]]} for part in (first, rest)]
            super().__init__(groups, {"lr": 0.0})
            self.param_groups = [*first.param_groups, *rest.param_groups]

        def step(self, closure: Any = None) -> Any:
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            for part, scale in zip((first, rest), scales, strict=True):
                own = [group["lr"] for group in part.param_groups]
                for group in part.param_groups:
                    group["lr"] = group["lr"] * scale
                part.step()
                for group, lr in zip(part.param_groups, own, strict=True):
                    group["lr"] = lr
            return loss

        def train(self) -> None:
            for part in (first, rest):
                training(part, True)

        def eval(self) -> None:
            for part in (first, rest):
                training(part, False)

        def state_dict(self) -> dict[str, Any]:
            return {"first": first.state_dict(), "rest": rest.state_dict()}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            first.load_state_dict(state["first"])
            rest.load_state_dict(state["rest"])
            self.param_groups = [*first.param_groups, *rest.param_groups]

    return Pair()


def optax_pair(first: Any, rest: Any, takes: str, label: str) -> Any:
    """One Optax transformation of two."""
    import jax
    import optax

    def labels(params: Any) -> Any:
        leaves, tree = jax.tree_util.tree_flatten_with_path(params)
        named = [(jax.tree_util.keystr(path, simple=True, separator="."), leaf.ndim) for path, leaf in leaves]
        taken = parted(named, takes, label)
        return jax.tree_util.tree_unflatten(tree, ["first" if here else "rest" for here in taken])

    return optax.multi_transform({"first": first, "rest": rest}, labels)
