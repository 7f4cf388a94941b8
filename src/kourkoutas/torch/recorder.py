"""What `diagnostics=True` records: the rows of `kourkoutas.trace`, kept where the parameters are."""

from __future__ import annotations

from typing import Any

import torch

from kourkoutas.torch.kernel import KernelStep
from kourkoutas.trace import KEYS, WINDOW, Trace


class Recorder:
    """The newest rows of all groups' buckets, and how many were ever written."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        count = sum(len(g["bucket_names"]) for g in groups)
        params = [p for g in groups for p in g["params"]]
        device = "cpu" if any(p.is_cpu for p in params) else params[0].device  # the kernel writes on the CPU
        self.ring = torch.full((WINDOW, len(KEYS), count), torch.nan, dtype=torch.float32, device=device)
        self.rows = torch.zeros((), dtype=torch.int64, device=device)

    def widen(self, count: int) -> None:
        """Make room for so many new buckets; the steps recorded so far had none of them."""
        new = self.ring.new_full((WINDOW, len(KEYS), count), torch.nan)
        self.ring = torch.cat([self.ring, new], dim=2)

    def apply(self, steps: list[Any], groups: list[dict[str, Any]]) -> None:
        """Let each group's step move its parameters, and write (sun, β2, n) of its buckets into a new row."""
        first = 0
        for step, group in zip(steps, groups, strict=True):
            count = len(group["bucket_names"])
            if type(step) is KernelStep:
                step.apply(self.ring, self.rows, first)
            else:
                step.apply()
                row = step.rows().to(self.ring).unsqueeze(0)
                self.ring.narrow(2, first, count).index_copy_(0, (self.rows % WINDOW).view(1), row)
            first += count
        self.rows.add_(1)

    def pull(self, trace: Trace) -> None:
        """Move the rows written since the last pull into `trace`."""
        trace.pull(self.ring.cpu().numpy(), int(self.rows))
