"""Norms of parameters and buckets that lie on several ranks: one vector of sums for all of them, added up over ranks.

    Σ g², ⟨|θ|⟩   per parameter that is divided: all-reduced once over each process group that divides any of them
    Σ g², t       per bucket whose members lie on the ranks of `process_group`: one sum and one maximum

NOTE: a parameter's entry goes only through the groups that divide it, so that replicas are not counted twice; it ends
up whole, and alike, on every rank that holds a part or a replica. Replicas are equal to the bit if the backend adds in
the same order in groups of the same size.

NOTE: what is sent depends on the parameters, not on which gradients are there: without a gradient, and on a rank with
an empty part, an entry is zero. So all ranks send the same vectors in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kourkoutas.torch import parts
from kourkoutas.torch.parts import Part

LOCAL = "local"
_REMEDY = (
    "pass process_group=<the group whose ranks hold other members>, or process_group='local' if every rank holds all "
    "of them, as under DistributedDataParallel"
)


class Pooled(NamedTuple):
    """The sums of one group, complete."""

    squares: Tensor  # Σ g² per bucket of the group
    means: Tensor | None  # ⟨|θ|⟩ per parameter of the group, for adaptive_tiny
    latest: Tensor | None  # per bucket: its newest member's steps, this one included; 0: no gradient on any rank


class Pool:
    """What of an optimizer's parameters and buckets lies on other ranks.

    Attributes:
      parts: per group: None if its tensors are plain and whole and so are its buckets, else each parameter's part.
      spans: per group: whether its buckets have members on other ranks that this rank does not hold.
      active: whether there is anything to add up.
      dtensors: all DTensors among the parameters.
    """

    def __init__(self, groups: list[dict[str, Any]], process_group: Any) -> None:
        self.given: Any = process_group if process_group not in (None, LOCAL) else None
        if self.given is not None and torch.distributed.get_world_size(self.given) == 1:
            self.given = None
        flat = [p for group in groups for p in group["params"] if parts.is_fsdp1(p)]
        self.pieces = bool(flat)
        if ranks() > 1:
            for group in groups:
                _check_reach(group, process_group)
        pieces = self._exchange([p.numel() for p in flat]) if flat and self.given is not None else []
        before = iter(zip(*pieces, strict=True))
        self.parts: list[list[Part] | None] = []
        self.spans: list[bool] = []
        for group in groups:
            found = [self._part(p, name, before) for p, name in zip(group["params"], _names(group), strict=True)]
            spans = self.given is not None and group["buckets"] != "parameter"
            self.spans.append(spans)
            meshed = any(map(parts.is_dtensor, group["params"]))
            self.parts.append(found if spans or meshed or any(part.over for part in found) else None)
        self.dtensors = [p for group in groups for p in group["params"] if parts.is_dtensor(p)]
        self._lay_out(groups)
        self.active = bool(self._over) or any(self.spans)

    def _part(self, p: Tensor, name: str, before: Any) -> Part:
        if parts.is_dtensor(p):
            return parts.of_dtensor(p, name)
        if parts.is_fsdp1(p) and self.given is not None:
            sizes = next(before)  # of this parameter on each rank of `process_group`, consecutive
            rank = torch.distributed.get_rank(self.given)
            return Part((self.given.group_name,), sum(sizes), sum(sizes[:rank]), None)
        return parts.whole(p)

    def _exchange(self, mine: Any) -> list[Any]:
        """What every rank of `process_group` gives, in the order of ranks; once, before the first step."""
        out: list[Any] = [None] * torch.distributed.get_world_size(self.given)
        torch.distributed.all_gather_object(out, mine, group=self.given)
        return out

    def _lay_out(self, groups: list[dict[str, Any]]) -> None:
        """Places of parameters and buckets in the vectors that are sent."""
        self._first = [sum(len(g["params"]) for g in groups[:i]) for i in range(len(groups) + 1)]
        self._over: dict[str, list[int]] = {}
        for first, found in zip(self._first, self.parts, strict=False):
            for i, part in enumerate(found or ()):
                for name in part.over:
                    self._over.setdefault(name, []).append(first + i)
        # Members of a bucket are found by the bucket's name, in groups of the same number.
        keys = [(i, name) for i, g in enumerate(groups) for name in g["bucket_names"] if self.spans[i]]
        everywhere = self._exchange(keys) if any(self.spans) and not self.pieces else [keys]
        place = {key: i for i, key in enumerate(dict.fromkeys(key for of_rank in everywhere for key in of_rank))}
        self._bucket_places = [[place.get((i, name), -1) for name in g["bucket_names"]] for i, g in enumerate(groups)]
        self._bucket_count = len(place)

    def changed(self) -> None:
        """Let autograd know of DTensors whose local tensors were written."""
        if not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version([p for p in self.dtensors if p.grad is not None])

    def add(self, steps: Sequence[Any], groups: list[dict[str, Any]]) -> list[Pooled | None]:
        """The complete sums of every group that has something on other ranks, from the local ones of each step."""
        going = [step if found is not None else None for step, found in zip(steps, self.parts, strict=True)]
        device = next((step.device for step in going if step is not None), torch.device("cpu"))
        rows = 2 if any(g["adaptive_tiny"] for g in groups) else 1
        sums = torch.zeros((rows, self._first[-1]), dtype=torch.float64, device=device)
        for first, step in zip(self._first, going, strict=False):
            if step is not None and step.work.places:
                at = torch.tensor([first + i for i in step.work.places], device=device)
                local = step.sums()
                sums[: len(local)] = sums[: len(local)].index_copy(1, at, local.to(sums))
        for name, index in self._over.items():
            at = torch.tensor(index, device=device)
            sums = sums.index_copy(1, at, _reduced(sums[:, at], "sum", name))
        pooled: list[Pooled | None] = []
        for i, (group, found) in enumerate(zip(groups, self.parts, strict=True)):
            if found is None:
                pooled.append(None)
                continue
            mine = sums[:, self._first[i] : self._first[i + 1]]
            bucket_of = torch.tensor(group["bucket_index"], dtype=torch.int64, device=device)
            squares = torch.zeros(len(group["bucket_names"]), dtype=torch.float64, device=device)
            squares = squares.index_add(0, bucket_of, mine[0])
            pooled.append(Pooled(squares, mine[1] if group["adaptive_tiny"] else None, None))
        return self._span(going, pooled, device) if any(self.spans) else pooled

    def _span(self, steps: Sequence[Any], pooled: list[Pooled | None], device: torch.device) -> list[Pooled | None]:
        """Add the members of buckets that lie on the ranks of `process_group`."""
        squares = torch.zeros(self._bucket_count, dtype=torch.float64, device=device)
        latest = torch.zeros_like(squares)
        places = [torch.tensor(at, dtype=torch.int64, device=device) for at in self._bucket_places]
        for step, at, spans, one in zip(steps, places, self.spans, pooled, strict=True):
            if spans and one is not None:
                squares = squares.index_copy(0, at, one.squares)
                if step is not None:
                    latest = latest.index_copy(0, at, step.latest().to(latest))
        name = self.given.group_name
        if not self.pieces:  # the entries of FSDP1's parameters are complete
            squares = _reduced(squares, "sum", name)
        latest = _reduced(latest, "max", name)
        return [
            Pooled(squares[at], one.means, latest[at]) if spans and one is not None else one
            for at, spans, one in zip(places, self.spans, pooled, strict=True)
        ]

    def first_of(self, bucket: str | None) -> str | None:
        """The bucket found to be bad here, or else a name that tells of one on another rank of `process_group`."""
        if self.given is None:
            return bucket
        anywhere = _reduced(torch.tensor([float(bucket is not None)]), "max", self.given.group_name).item()
        return "(on another rank)" if bucket is None and anywhere else bucket


def local(work: Any) -> None:
    """Put the plain tensors of this rank in place of DTensors, and gradients where their parameters are."""
    work.grads[:] = [parts.local_gradient(p, g) for p, g in zip(work.params, work.grads, strict=True)]
    for tensors in (work.params, work.exp_avgs, work.exp_avg_sqs, work.max_exp_avg_sqs):
        tensors[:] = [parts.local_tensor(x) for x in tensors]


def ranks() -> int:
    """How many processes there are, as far as torch.distributed knows."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def check_process_group(process_group: Any) -> None:
    """Raise unless `process_group` is None, "local" or a process group."""
    kind = getattr(torch.distributed, "ProcessGroup", None)
    if process_group in (None, LOCAL) or (kind is not None and isinstance(process_group, kind)):
        return
    raise TypeError(
        f"`process_group` must be a torch.distributed.ProcessGroup, 'local' or None; got {process_group!r}: "
        "for a mesh, pass mesh.get_group('name of a dimension')"
    )


def _names(group: dict[str, Any]) -> list[str]:
    return group.get("param_names") or [f"param_{i}" for i in range(len(group["params"]))]


def _check_reach(group: dict[str, Any], process_group: Any) -> None:
    """Raise if it cannot be known from here where all parts and members are."""
    kind = group["buckets"]
    reached: set[int] = set()
    for p, name in zip(group["params"], _names(group), strict=True):
        if parts.is_dtensor(p):
            reached.update(p.device_mesh.mesh.flatten().tolist())  # type: ignore[attr-defined]
        elif type(p).__name__ == "FlatParameter":
            raise ValueError(
                f"parameter {name!r} is FSDP1's FlatParameter, which mixes parameters: wrap the model with "
                "FSDP(..., use_orig_params=True), or use FSDP2 (fully_shard)"
            )
        elif parts.is_fsdp1(p):
            if process_group in (None, LOCAL):
                raise ValueError(
                    f"`process_group` is {process_group!r} but parameter {name!r} is a piece that FSDP1 left on this "
                    "rank: pass process_group=<the FSDP model>.process_group, or use FSDP2 (fully_shard)"
                )
            if kind == "shape":
                raise ValueError(
                    "`buckets` is 'shape' but FSDP1 shows flat pieces without their shapes: use 'parameter', "
                    "'module' or 'global', or FSDP2 (fully_shard)"
                )
            reached.update(range(ranks()))
        else:
            reached.add(-1)
    may_reach = kind not in ("parameter", "module") and (-1 in reached or len(reached) < ranks())
    if process_group is None and may_reach and group["params"]:
        what = f"'{kind}'" if kind != "custom" else "a function"
        raise ValueError(
            f"`buckets` is {what} and there are {ranks()} processes, so that a bucket may have members on other "
            f"ranks: {_REMEDY}"
        )


def _device(group_name: str, like: Tensor) -> torch.device:
    """Where a process group can reduce: on the device of `like`, or else, say for offloaded parameters, its own."""
    from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

    kinds = [d.type for d in _resolve_process_group(group_name)._device_types]  # type: ignore[arg-type, attr-defined]
    return like.device if like.device.type in kinds else torch.device(kinds[0])


def _reduced(x: Tensor, how: str, group_name: str) -> Tensor:
    """`x` reduced over a process group."""
    device = x.device if torch.compiler.is_compiling() else _device(group_name, x)
    from torch.distributed import _functional_collectives as collectives

    out = collectives.all_reduce(x.to(device), how, group_name)  # type: ignore[arg-type]
    return collectives.wait_tensor(out).to(x.device)  # type: ignore[no-any-return]
