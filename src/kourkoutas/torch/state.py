"""A parameter's state: names and dtypes of its entries, and the statistics that the members of a bucket share.

The form of it that other frameworks read is `kourkoutas.state`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
BUCKET_STATE = ("norm_ema", "skipped")
SCALAR_STATE = ("step", "log_beta2", *BUCKET_STATE)
STATE = (*MOMENTS, *SCALAR_STATE)  # in the order of `Work`

Shared = dict[tuple[int, int], dict[str, Tensor]]
"""(number of the group, bucket): the statistics of that bucket, the same tensors as in its members' state."""


def _stat(p: Tensor) -> torch.dtype:
    """The dtype of norms and moving averages: float64 for float64 parameters, else float32."""
    return torch.float64 if p.dtype in (torch.float64, torch.complex128) else torch.float32


def _dtype(name: str, p: Tensor) -> torch.dtype:
    return {"step": torch.float32, "skipped": torch.int64}.get(name, _stat(p))


def _zero(name: str, p: Tensor) -> Tensor:
    return torch.zeros((), dtype=_dtype(name, p), device=p.device)


def tie(shared: Shared, state: Mapping[Any, dict[str, Any]], groups: Iterable[dict[str, Any]]) -> None:
    """Make the members of each bucket share one tensor per statistic: what is in `shared`, else the first member's."""
    for number, group in enumerate(groups):
        for p, b in zip(group["params"], group.get("bucket_index", ()), strict=False):
            if p in state:
                of_bucket = shared.setdefault((number, b), {})
                for name in BUCKET_STATE:
                    if name in state[p]:
                        state[p][name] = of_bucket.setdefault(name, state[p][name])


def fill(
    entries: dict[str, Any], names: Iterable[str], p: Tensor, of_bucket: dict[str, Tensor], group: dict[str, Any]
) -> None:
    """Make what is missing in the state of `p`; `of_bucket` is what its bucket shares."""
    for name in names:
        if name in entries:
            continue
        if name in MOMENTS:
            entries[name] = torch.zeros_like(p, dtype=group["state_dtype"], memory_format=torch.preserve_format)
        elif name in BUCKET_STATE:
            entries[name] = statistic(of_bucket, name, p)
        else:
            entries[name] = _zero(name, p)
            if name == "log_beta2" and group["betas"][1]:  # of the steps taken before "exact" was asked for
                entries[name] += entries["step"] * math.log(float(group["betas"][1]))


def statistic(of_bucket: dict[str, Tensor], name: str, p: Tensor) -> Tensor:
    """A statistic of a bucket, made like those of its member `p` if there is none."""
    if name not in of_bucket:
        of_bucket[name] = _zero(name, p)
    return of_bucket[name]


def recast(name: str, value: Any, p: Tensor, state_dtype: torch.dtype | None) -> Tensor | None:
    """A loaded entry in its own dtype; None where that is the parameter's, to which torch has cast it."""
    if name in MOMENTS and state_dtype is not None:
        return value.detach().to(p.device, state_dtype, copy=True)  # type: ignore[no-any-return]
    if name in SCALAR_STATE:
        value, own = torch.as_tensor(value).detach(), _dtype(name, p)
        kept = own if name == "skipped" else torch.promote_types(value.dtype, own)
        return value.to(p.device, kept, copy=True)  # type: ignore[no-any-return]
    return None


def log_beta2_of_adam(step: Tensor, beta2: float, p: Tensor) -> Tensor:
    """Σ log β2 of a parameter that Adam has trained: its v holds 1 - β2^t."""
    return step.to(_stat(p)) * (math.log(beta2) if beta2 else -math.inf)
