"""What `diagnostics=True` records: the rows of `kourkoutas.trace`, kept where the parameters are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kourkoutas.torch import private
from kourkoutas.torch.group import is_capturing
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


def most_steps(state: Mapping[Tensor, Mapping[str, Any]]) -> int:
    """The most steps that a parameter has taken, as far as that can be read."""
    counts = [0]
    for p, entries in state.items():
        if "step" in entries and not (p.is_meta or private.is_fake(p) or is_capturing(p.device)):
            counts.append(int(entries["step"]))
    return max(counts)


class Recorder:
    """The newest rows of all groups' buckets, how many were written, and how many steps were taken before the first.

    NOTE: rows are not saved with the optimizer. One that was loaded has taken steps before, and its trace counts on
    from there.
    """

    def __init__(self, groups: list[dict[str, Any]], before: int) -> None:
        count = sum(len(g["bucket_names"]) for g in groups)
        devices = [p.device for g in groups for p in g["params"]]
        cpu = torch.device("cpu")
        device = cpu if cpu in devices or not devices else devices[0]  # the kernel writes on the CPU
        self.ring = torch.full((WINDOW, len(KEYS), count), torch.nan, dtype=torch.float32, device=device)
        self.rows = torch.zeros((), dtype=torch.int64, device=device)
        self.before = before

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
        """Move the rows written since the last pull into `trace`; what is not a `Trace` counts the steps itself."""
        ring, count = self.ring.cpu().numpy(), int(self.rows)
        if isinstance(trace, Trace):
            trace.pull(ring, count, self.before)
        else:
            trace.pull(ring, count)
