"""K-β for the first part of a run and L-BFGS for the rest, as PINNs are often trained.

`share` is the first part's share of the steps; `after` its number of steps, for those who know it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHARE = 0.5


def steps_before(options: Mapping[str, Any], steps: int) -> int:
    """The number of steps that the first optimizer takes of `steps`."""
    after = options.get("after")
    return round(options["share"] * steps) if after is None else int(after)


def check_switch(share: Any, after: Any) -> None:
    if not isinstance(share, (int, float)) or not 0 < share < 1:
        raise ValueError(f"`share` must be in (0, 1), for example {SHARE}; got {share!r}")
    if after is not None and (not isinstance(after, int) or after < 1):
        raise ValueError(f"`after` must be a number of steps >= 1, or none for a share of all; got {after!r}")


def torch_switch(first: Any, second: Any, after: int) -> Any:
    """A torch optimizer that is `first` for `after` steps and `second`, an L-BFGS of the same tensors, from then on."""
    import torch

    class Switch(torch.optim.Optimizer):
        """Its groups are those of the first, whose learning rate is set from outside; L-BFGS keeps its own."""

        needs_closure = True

        def __init__(self) -> None:
            super().__init__([p for group in first.param_groups for p in group["params"]], {"lr": 0.0})
            self.param_groups = first.param_groups
            self.taken = 0

        def step(self, closure: Any = None) -> Any:
            if closure is None:
                raise ValueError("K-β then L-BFGS needs the loss as a function: call step(closure)")
            self.taken += 1
            if self.taken > after:
                return second.step(closure)
            with torch.enable_grad():
                loss = closure()
            first.step()
            return loss

        def state_dict(self) -> dict[str, Any]:
            return {"taken": self.taken, "first": first.state_dict(), "second": second.state_dict()}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            first.load_state_dict(state["first"])
            second.load_state_dict(state["second"])
            self.param_groups, self.taken = first.param_groups, state["taken"]

    return Switch()
