"""Controls of the signals: Adam with exact bias correction whose β2 is dictated at every step, for PyTorch.

* `Shuffled`: β2 of each parameter is what its signal said at a random one of its last `window` steps. Its values and
  their slow drift are those of the signal; that it answers to the gradient of the very step is gone. If this does as
  well as the signal, then timing is not what helps.
* `Adafactor`: β2 = 1 - t^-0.8, Adafactor's schedule (Shazeer and Stern 2018), for all parameters.

NOTE: what they remember stands in the param groups, so that it is saved and loaded with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kourkoutas import signals
from kourkoutas.rule import Hyper
from kourkoutas.torch import KourkoutasBeta


class _Dictated(KourkoutasBeta):
    def __init__(self, params: Iterable[Tensor], lr: float, beta1: float, eps: float, own: dict[str, Any]) -> None:
        """A group per parameter, each with its copy of `own`."""
        groups = [{"params": [p], **own} for p in params]
        super().__init__(groups, lr, beta1=beta1, eps=eps, bias_correction="exact")

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        live = [group for group in self.param_groups if group["params"][0].grad is not None]
        for group, beta2 in zip(live, self._beta2(live), strict=True):
            group["beta2_min"], group["betas"] = beta2, (group["betas"][0], beta2)
        super().step()
        return loss

    def _beta2(self, groups: list[dict[str, Any]]) -> list[float]:
        raise NotImplementedError


class Shuffled(_Dictated):
    """Adam with the β2 that a signal had at a random one of the last `window` steps.

    Args:
      params: tensors.
      signal: one of `kourkoutas.signals.SIGNALS`.
      window: from how many steps, this one included, β2 is drawn.
      beta2_min, beta2_max, alpha: of the signal, see `kourkoutas.Hyper`.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        *,
        signal: str,
        window: int = 200,
        beta1: float = Hyper.beta1,
        beta2_min: float = Hyper.beta2_min,
        beta2_max: float = Hyper.beta2_max,
        alpha: float = Hyper.alpha,
        eps: float = Hyper.eps,
    ) -> None:
        if not isinstance(window, int) or window < 1:
            raise ValueError(f"`window` must be a whole number >= 1, for example 200; got {window!r}")
        self._hyper = Hyper(signal=signal, beta2_min=beta2_min, beta2_max=beta2_max, alpha=alpha)  # type: ignore[arg-type]
        self._window = window
        super().__init__(params, lr, beta1, eps, {"seen": 0, "r": 0.0, "signal_memory": None, "past": ()})

    def _beta2(self, groups: list[dict[str, Any]]) -> list[float]:
        kept = signals.MEMORY[self._hyper.signal]
        norm = np.array([torch.linalg.vector_norm(g["params"][0].grad, dtype=torch.float64).item() for g in groups])
        r = np.array([g["r"] for g in groups])
        memory = np.array([g["signal_memory"] or [0.0] * kept for g in groups]) if kept else None
        with np.errstate(all="ignore"):  # a NaN norm is the caller's to see
            c2, _, r, memory = signals.forgetting(self._hyper, norm, r, memory, np)
        chosen = []
        for i, group in enumerate(groups):
            group["seen"] += 1
            group["r"], group["signal_memory"] = float(r[i]), None if memory is None else memory[i].tolist()
            group["past"] = (*group["past"], 1 - float(c2[i]))[-self._window :]
            draw = np.random.default_rng((i, group["seen"])).integers(len(group["past"]))
            chosen.append(group["past"][draw])
        return chosen


class Adafactor(_Dictated):
    """Adam with β2 = 1 - t^-power.

    Args:
      params: tensors.
      power: how fast the memory grows.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        *,
        power: float = 0.8,
        beta1: float = Hyper.beta1,
        eps: float = Hyper.eps,
    ) -> None:
        self._power = power
        super().__init__(params, lr, beta1, eps, {"seen": 0})

    def _beta2(self, groups: list[dict[str, Any]]) -> list[float]:
        for group in groups:
            group["seen"] += 1
        return [1 - group["seen"] ** -self._power for group in groups]
