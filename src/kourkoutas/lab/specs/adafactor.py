"""A rival whose β2 follows a schedule: Adam with Adafactor's β2 = 1 - t^-0.8 (Shazeer and Stern 2018), for PyTorch.

NOTE: K-β with β2_min = β2_max, both moved before each step, and exact bias correction. t stands in the param groups, so
that it is saved and loaded with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from kourkoutas.rule import Hyper
from kourkoutas.torch import KourkoutasBeta


class Adafactor(KourkoutasBeta):
    """Adam with β2 = 1 - t^-power, t the steps that a parameter has taken.

    Args:
      params: tensors or param groups.
      power: how fast the memory grows.
    """

    def __init__(
        self,
        params: Iterable[Tensor | Mapping[str, Any]],
        lr: float = 1e-3,
        *,
        power: float = 0.8,
        beta1: float = Hyper.beta1,
        eps: float = Hyper.eps,
    ) -> None:
        self._power = power
        given = [item if isinstance(item, Mapping) else {"params": [item]} for item in params]
        groups = [{**group, "params": [p], "seen": 0} for group in given for p in group["params"]]
        super().__init__(groups, lr, beta1=beta1, eps=eps, bias_correction="exact")

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["params"][0].grad is not None:
                group["seen"] += 1
                beta2 = 1 - group["seen"] ** -self._power
                group["beta2_min"], group["betas"] = beta2, (group["betas"][0], beta2)
        super().step()
        return loss
