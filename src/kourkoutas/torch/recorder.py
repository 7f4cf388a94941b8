"""What `diagnostics=True` records: the rows of `kourkoutas.trace`, kept where the parameters are."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kourkoutas.trace import KEYS, WINDOW, Trace


class Row(NamedTuple):
    """Where one group's step writes sun, β2 and n of its buckets: row number `rows` of the ring, at `first` and on."""

    ring: Tensor
    rows: Tensor
    first: int

    def write(self, values: Tensor) -> None:
        """Write (sun, β2, n) of each bucket of the group."""
        row = values.to(self.ring).unsqueeze(0)
        place = (self.rows % WINDOW).view(1)
        self.ring.narrow(2, self.first, values.shape[1]).index_copy_(0, place, row)


class Recorder:
    """The newest rows of all groups' buckets, and how many were ever written."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        count = sum(len(g["bucket_names"]) for g in groups)
        devices = [p.device for g in groups for p in g["params"]]
        cpu = torch.device("cpu")
        device = cpu if cpu in devices or not devices else devices[0]  # the kernel writes on the CPU
        self.ring = torch.full((WINDOW, len(KEYS), count), torch.nan, dtype=torch.float32, device=device)
        self.rows = torch.zeros((), dtype=torch.int64, device=device)

    def widen(self, count: int) -> None:
        """Make room for so many new buckets; the steps recorded so far had none of them."""
        new = self.ring.new_full((WINDOW, len(KEYS), count), torch.nan)
        self.ring = torch.cat([self.ring, new], dim=2)

    def begin(self, counts: list[int]) -> list[Row]:
        """A place in the next row for each group, which has so many buckets."""
        rows, first = [], 0
        for count in counts:
            rows.append(Row(self.ring, self.rows, first))
            first += count
        return rows

    def end(self) -> None:
        """Close the row that every group has written."""
        self.rows.add_(1)

    def pull(self, trace: Trace) -> None:
        """Move the rows written since the last pull into `trace`."""
        trace.pull(self.ring.cpu().numpy(), int(self.rows))
