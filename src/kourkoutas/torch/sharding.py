"""Parameters and buckets that lie on several ranks: what lies here, and the sums over all ranks.

| parameter                          | told by                      | its shards lie over                         |
|------------------------------------|------------------------------|---------------------------------------------|
| DTensor (FSDP2, HSDP, TP, 2-D)     | its type                     | the mesh dimensions whose placement shards  |
| FSDP1 with `use_orig_params=True`  | FSDP1's mark on the tensor   | `process_group`                             |
| any other tensor                   |                              | nothing: it is whole                        |

    Σ g², ⟨|θ|⟩   per sharded parameter: all-reduced once over each process group that shards any of them
    Σ g², t       per bucket whose members lie on the ranks of `process_group`: one sum and one maximum

NOTE: a parameter's entry goes only through the groups that shard it, so that replicas are not counted twice; it ends
up whole, and alike, on every rank that holds a shard or a replica. Replicas are equal to the bit if the backend adds in
the same order in groups of the same size.

NOTE: what is sent depends on the parameters, not on which gradients are there: without a gradient, and on a rank with
an empty shard, an entry is zero. So all ranks send the same vectors in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kourkoutas.torch import private

if TYPE_CHECKING:
    from kourkoutas.torch.group import Group, Tensors

LOCAL = "local"


class Shard(NamedTuple):
    """What lies on this rank of one parameter."""

    over: tuple[str, ...]  # names of the process groups of more than one rank whose members hold its shards
    size: int  # elements of the whole parameter
    first: int | None  # number of the first element here, in the order of the whole parameter's memory; None: unknown
    strides: tuple[int, ...]  # of the whole parameter


class Pool:
    """The ranks over which an optimizer's parameters and buckets are spread.

    It tells each group what lies here: `shards`, None if its tensors are plain and whole and so are its buckets, and
    `spans`, whether its buckets have members on other ranks that this rank does not hold.

    NOTE: making a pool asks nobody. `exchange` does, and every rank must call it before its first step.
    """

    def __init__(self, groups: list[Group], process_group: Any) -> None:
        check_process_group(process_group)
        self.groups, self.process_group = groups, process_group
        alone = process_group in (None, LOCAL) or torch.distributed.get_world_size(process_group) == 1
        self.given: Any = None if alone else process_group  # if it has more than one rank
        self.process_groups: dict[str, Any] = {}  # those of more than one rank, by name
        if self.given is not None:
            self.process_groups[self.given.group_name] = self.given
        self.exchanged = self.active = False
        self.dtensors: list[Tensor] = []
        self.fsdp1: list[Tensor] = []
        for own in groups:
            if ranks() > 1:
                _check_reach(own, process_group)
            own.spans = self.given is not None and own.group["buckets"] != "parameter"
            shards = [self._shard(p, name) for p, name in zip(own.group["params"], own.names, strict=True)]
            pooled = own.spans or any(shard.over for shard in shards)
            own.shards = shards if pooled or any(map(is_dtensor, own.group["params"])) else None
            self.active = self.active or pooled

    def _shard(self, p: Tensor, name: str) -> Shard:
        if is_dtensor(p):
            self.dtensors.append(p)
            over = _process_groups_of(p, name)
            self.process_groups.update(over)
            offset = private.offset_of_shard(p)
            first = None if offset is None else sum(o * s for o, s in zip(offset, p.stride(), strict=True))
            return Shard(tuple(over), p.numel(), first, p.stride())
        if not is_fsdp1(p) or self.given is None:
            return Shard((), p.numel(), 0, p.stride())
        self.fsdp1.append(p)
        return Shard((self.given.group_name,), p.numel(), 0, p.stride())  # `exchange` corrects size and first

    def exchange(self) -> None:
        """Collective: every rank must call it. Learns sizes and buckets from the others, and prepares the sums."""
        self.exchanged = True
        # Members of a bucket are found by the bucket's name, in groups of the same number.
        here = [(i, name) for i, own in enumerate(self.groups) for name in own.bucket_names]
        spanning = [(i, name) for i, name in here if self.groups[i].spans]
        if self.given is not None:
            everywhere: list[Any] = [None] * torch.distributed.get_world_size(self.given)
            mine = [p.numel() for p in self.fsdp1], spanning
            torch.distributed.all_gather_object(everywhere, mine, group=self.given)
            spanning = [key for _, of_rank in everywhere for key in of_rank]
            counts = dict(zip(self.fsdp1, zip(*(counts for counts, _ in everywhere), strict=True), strict=True))
            rank = torch.distributed.get_rank(self.given)
            for own in self.groups:
                for i, p in enumerate(own.group["params"]):
                    if own.shards is not None and p in counts:
                        own.shards[i] = own.shards[i]._replace(size=sum(counts[p]), first=sum(counts[p][:rank]))
        if not self.active:
            return
        # The buckets that span ranks come first, alike on every rank; then those that lie here.
        place = {key: i for i, key in enumerate(dict.fromkeys([*spanning, *here]))}
        self._spanning, self._count = len(set(spanning)), len(place)
        self.device = next((own.device for own in self.groups if own.shards), torch.device("cpu"))

        def index(numbers: list[int]) -> Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=self.device)

        places = [[place[i, name] for name in own.bucket_names] for i, own in enumerate(self.groups)]
        self._places = [index(of_group) for of_group in places]
        each = zip(self.groups, places, strict=True)
        self._place_of_parameter = index([of_group[b] for own, of_group in each for b in own.bucket_of])
        over: dict[str, list[int]] = {}
        for own in self.groups:
            for i, shard in enumerate(own.shards or (), own.first):
                for name in shard.over:
                    over.setdefault(name, []).append(i)
        self._over = {name: index(numbers) for name, numbers in over.items()}

    def add(self, steps: Sequence[Any]) -> None:
        """Give each step the sums over all ranks in the place of its local ones."""
        counts = [len(own.bucket_of) for own in self.groups]
        rows = 2 if any(own.hyper.adaptive_tiny for own in self.groups) else 1
        blocks = [torch.zeros((rows, n), dtype=torch.float64, device=self.device) for n in counts]
        for own, step, block in zip(self.groups, steps, blocks, strict=True):
            if own.shards is not None:
                local = step.sums()
                block[: len(local)] = local
        sums = torch.cat(blocks, 1)
        for name, index in self._over.items():
            sums = sums.index_copy(1, index, self._reduced(sums.index_select(1, index), "sum", name))
        squares = torch.zeros(self._count, dtype=torch.float64, device=self.device)
        squares = squares.index_add(0, self._place_of_parameter, sums.select(0, 0))
        latest = torch.zeros_like(squares.narrow(0, 0, self._spanning))
        each = list(zip(self.groups, steps, self._places, sums.split(counts, 1), strict=True))
        if self._spanning:
            for own, step, places, _ in each:
                if own.spans:
                    latest = latest.index_copy(0, places, step.latest().to(latest))
            latest = self._reduced(latest, "max", self.given.group_name)
            if not self.fsdp1:  # of which the sums are complete
                here, others = squares.split([self._spanning, self._count - self._spanning])
                squares = torch.cat([self._reduced(here, "sum", self.given.group_name), others])
        for own, step, places, mine in each:
            if own.shards is not None:
                means = mine.select(0, 1) if own.hyper.adaptive_tiny else None
                step.take(squares.index_select(0, places), means, latest.index_select(0, places) if own.spans else None)

    def _reduced(self, x: Tensor, how: str, name: str) -> Tensor:
        """`x` reduced over a process group: on its device, or else, say for offloaded parameters, on the group's."""
        device = x.device
        if not torch.compiler.is_compiling():
            kinds = private.devices_of(self.process_groups[name])
            if kinds and device.type not in kinds:
                device = torch.device(kinds[0])
        return private.all_reduce(x.to(device), how, name, self.process_groups).to(x.device)

    def agree_on(self, bucket: str | None) -> str | None:
        """The bucket found to be bad here, or else a name that tells of one on another rank of `process_group`."""
        if self.given is None:
            return bucket
        anywhere = self._reduced(torch.tensor([float(bucket is not None)]), "max", self.given.group_name).item()
        return "(on another rank)" if bucket is None and anywhere else bucket


def ranks() -> int:
    """How many processes there are, as far as torch.distributed knows."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def is_dtensor(x: Tensor) -> bool:
    # Without the module there are no DTensors, and importing it takes long.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def is_fsdp1(x: Tensor) -> bool:
    return private.left_by_fsdp1(x) and not is_dtensor(x)


def _process_groups_of(p: Any, name: str) -> dict[str, Any]:
    """The process groups of more than one rank whose members hold the shards of a DTensor, by name."""
    from torch.distributed.tensor import Replicate

    found = {}
    for d, placement in enumerate(p.placements):
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, private.sharding_placements()):
            raise ValueError(
                f"parameter {name!r} has the placement {placement!r}, which neither shards nor replicates it: "
                "redistribute it to Shard or Replicate before the optimizer is made"
            )
        if p.device_mesh.size(d) > 1:
            process_group = p.device_mesh.get_group(d)
            found[process_group.group_name] = process_group
    return found


def _layout(x: Any) -> Any:
    """How a tensor lies on the ranks."""
    return (x.placements, x.device_mesh) if is_dtensor(x) else None


def localize(tensors: Tensors) -> None:
    """Put the plain tensors of this rank in place of DTensors; a gradient is first laid out as its parameter."""
    params, grads = tensors.params, tensors.grads
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        if is_dtensor(p) and _layout(g) != _layout(p):
            grads[i] = g.redistribute(p.device_mesh, p.placements)  # type: ignore[attr-defined]
    for each in tensors:
        for i, x in enumerate(each):
            if is_dtensor(x):
                local = x.to_local()  # type: ignore[attr-defined]
                each[i] = local.wait() if hasattr(local, "wait") else local


def check_layouts(tensors: Tensors) -> None:
    """Raise if state does not lie on the ranks as its parameter does: spreading it would change the state."""
    for _, moments in tensors.moments():
        for p, x in zip(tensors.params, moments, strict=True):
            if _layout(p) != _layout(x):
                raise RuntimeError(
                    "a moment in the state does not lie on the ranks as its parameter does: load the state with "
                    "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which spreads it"
                )


def check_process_group(process_group: Any) -> None:
    """Raise unless `process_group` is None, "local" or a process group."""
    kind = getattr(torch.distributed, "ProcessGroup", None)
    if process_group in (None, LOCAL) or (kind is not None and isinstance(process_group, kind)):
        return
    raise TypeError(
        f"`process_group` must be a torch.distributed.ProcessGroup, 'local' or None; got {process_group!r}: "
        "for a mesh, pass mesh.get_group('name of a dimension')"
    )


def _check_reach(own: Group, process_group: Any) -> None:
    """Raise if it cannot be known from here where all shards and members are."""
    kind, params = own.group["buckets"], own.group["params"]
    reached: set[int] = set()
    for p, name in zip(params, own.names, strict=True):
        if is_dtensor(p):
            reached.update(p.device_mesh.mesh.flatten().tolist())  # type: ignore[attr-defined]
        elif type(p).__name__ == "FlatParameter":
            raise ValueError(
                f"parameter {name!r} is FSDP1's FlatParameter, which mixes parameters: wrap the model with "
                "FSDP(..., use_orig_params=True), or use FSDP2 (fully_shard)"
            )
        elif is_fsdp1(p):
            if process_group in (None, LOCAL) or kind == "shape":
                raise ValueError(
                    f"`process_group` is {process_group!r} and `buckets` {kind!r} but parameter {name!r} is a flat "
                    "shard that FSDP1 left on this rank: pass process_group=<the FSDP model>.process_group and other "
                    "buckets than 'shape', or use FSDP2 (fully_shard)"
                )
            reached.update(range(ranks()))
        else:
            reached.add(-1)
    may_reach = kind not in ("parameter", "module") and (-1 in reached or len(reached) < ranks())
    if process_group is None and may_reach and params:
        raise ValueError(
            f"`buckets` is {kind!r} and there are {ranks()} processes, so that a bucket may have members on other "
            "ranks: pass process_group=<the group whose ranks hold other members>, or process_group='local' if every "
            "rank holds all of them, as under DistributedDataParallel"
        )
