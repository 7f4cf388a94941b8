"""The step through the Triton kernels: GPU tensors, in a number of launches that does not grow with theirs.

Norms, ⟨|θ|⟩ and the update are launches over all tensors of a kind, that is, with the same dtypes of θ, g and state; in
between, `rule.step` computes on vectors that stay on the device. The kernels find the tensors through a `Table`.

They take plain tensors: real or complex of float32, float64, bfloat16 or float16, without gaps in memory, gradient and
state laid out as the parameter, none lazily negated or conjugated. A group with any other tensor goes another way.

NOTE: fake tensors, which have no memory, go the same way, with every launch left out. So `route()` and counts of
operations tell what a GPU would do.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import weakref
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kourkoutas.rule import Coefficients, Hyper
from kourkoutas.torch import private
from kourkoutas.torch.group import Collected, Group, is_capturing
from kourkoutas.torch.lists import ListStep

DEVICES = ("cuda",)  # those of ROCm, too
BLOCK = 1024  # elements that one program takes
LANES = 1024  # sums of blocks that `total` adds at once
NOTES = 16  # addresses that one launch of `note` writes
_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_TYPES = (Tensor, torch.nn.Parameter)


@functools.cache
def missing(device: torch.device | None) -> str | None:
    """Why the kernels cannot run, on a real device if one is given; None if they can."""
    if os.environ.get("KBETA_NATIVE", "1") == "0":
        return "KBETA_NATIVE=0 turned it off"
    if importlib.util.find_spec("triton") is None:
        return "it is not installed: pip install 'kourkoutas-beta[gpu]'"
    if device is not None and device.type == "cuda" and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        if major < 7:
            return f"it needs a GPU of compute capability 7.0 or later, and this one has {major}.{minor}"
    return None


def launch(name: str, programs: int, out: Tensor, *args: Any, **constants: Any) -> None:
    """Start a kernel of `triton_kernels` on the device of its first argument, `out`."""
    if not programs or private.is_fake(out):
        return
    from triton import language

    from kourkoutas.torch import triton_kernels

    kernel = getattr(triton_kernels, name)[(programs,)]
    for constant, value in constants.items():
        if isinstance(value, torch.dtype):
            constants[constant] = getattr(language, str(value).removeprefix("torch."))
    # 128 threads take 8 elements each, which are 128 bits even of bfloat16. ROCm's warps have 64 threads.
    constants["num_warps"] = 2 if torch.version.hip else 4
    if out.is_cuda and out.device.index != torch.cuda.current_device():
        with torch.cuda.device(out.device):
            kernel(out, *args, **constants)
    else:
        kernel(out, *args, **constants)


class Kind(NamedTuple):
    """Dtypes of the tensors that one launch takes; of complex tensors, those of their parts."""

    params: torch.dtype
    grads: torch.dtype
    state: torch.dtype


class Table:
    """What the kernels know of the tensors of one kind, on the device: see `triton_kernels.ROWS`.

    NOTE: it is uploaded when an address has changed, from pinned memory and without waiting. torch's allocator does not
    give the pinned memory away before the copy is done.

    NOTE: while a CUDA graph is captured nothing is uploaded. If an address has changed, as those of gradients do that
    are made under capture, launches that become part of the graph write the new ones into a copy of the table.
    """

    rows: Tensor  # as uploaded
    tensors: Tensor  # per block: the number of its tensor
    current: Tensor  # `rows`, or the copy that a CUDA graph makes

    def __init__(self, kind: Kind, columns: list[int]) -> None:
        self.kind, self.columns = kind, columns
        self.count = len(columns)
        self.blocks = 0
        self.sizes: list[int] = []
        self.addresses: list[int] = []  # of all θ, then of all g, m, v and v_max
        self.stream = 0  # on which it was uploaded

    def refresh(self, addresses: list[int], sizes: list[int], step: TritonStep) -> None:
        """Bring the table up to date."""
        same = addresses == self.addresses and sizes == self.sizes
        if step.in_graph:
            self.current = self.rows if same else self._with(addresses)
            return
        stream = torch.cuda.current_stream(step.device).cuda_stream if step.on_gpu else 0
        if not same or stream != self.stream:
            self._upload(addresses, sizes, step)
            self.addresses, self.sizes, self.stream = addresses, sizes, stream
            if step.group["capturable"]:
                # A kernel must not be loaded for the first time under capture: this one writes nothing.
                launch("note", 1, self.rows, 0, 0, *[0] * NOTES)
        self.current = self.rows

    def _upload(self, addresses: list[int], sizes: list[int], step: TritonStep) -> None:
        blocks = [-(-size // BLOCK) for size in sizes]
        places = [step.members.places[i] for i in self.columns]
        of_address = np.zeros((5, self.count), np.int64)
        of_address[: len(addresses) // self.count] = np.reshape(addresses, (-1, self.count))
        aligned = (of_address % 16 == 0).all(0)
        first_block = np.cumsum([0, *blocks[:-1]])
        elements = [step.first_element(place) for place in places]
        rows = np.vstack([of_address, sizes, first_block, aligned, self.columns, places, elements])
        self.rows = step.upload(rows.astype(np.int64))
        self.tensors = step.upload(np.repeat(np.arange(self.count, dtype=np.int32), blocks))
        self.blocks = sum(blocks)

    def _with(self, addresses: list[int]) -> Tensor:
        """A copy of the table with other addresses, by launches."""
        rows = self.rows.clone()
        for start in range(0, len(addresses), NOTES):
            some = addresses[start : start + NOTES]
            if some != self.addresses[start : start + NOTES]:
                launch("note", 1, rows, start, len(some), *some, *[0] * (NOTES - len(some)))
        return rows


class Tables:
    """The tables of a group, and what CUDA graphs read of them, which is kept as long as the group."""

    def __init__(self) -> None:
        self.known: dict[Any, Table] = {}
        self.in_graphs: list[Table | Tensor] = []


_tables: weakref.WeakKeyDictionary[Group, Tables] = weakref.WeakKeyDictionary()


class TritonStep(ListStep):
    """A step by the kernels, where it `takes` the tensors."""

    def __init__(self, own: Group, collected: Collected) -> None:
        super().__init__(own, collected)
        self.fake = private.is_fake(self.scalars.step)
        self.on_gpu = self.device.type == "cuda" and not self.fake
        self.in_graph = self.on_gpu and is_capturing(self.device)
        self.lists = [each for each in self.tensors if each]
        self.noisy = bool(self.group["stochastic_rounding"])
        self.noisy_state = own.noisy_states
        self.tables: list[Table] = []
        self.late = False  # whether the update sums |θ|, and may then have to be corrected: see `triton_kernels`

    def takes(self) -> bool:
        """Whether the kernels can take every tensor; if so, they know where it is from here on."""
        kinds: dict[Kind, list[int]] = {}
        for i, p in enumerate(self.tensors.params):
            if not self._is_plain(i, p):
                return False
            dtypes = (part_dtype(x) for x in (p, self.tensors.grads[i], self.tensors.m[i]))
            kinds.setdefault(Kind(*dtypes), []).append(i)
        if self.own not in _tables:
            _tables[self.own] = Tables()
        tables = _tables[self.own]
        if len(tables.known) > 2 * len(
            self.group["params"]
        ):  # each parameter by itself, as in a step in backward, fits
            tables.known.clear()
        places = tuple(self.members.places)
        for kind, columns in kinds.items():
            table = tables.known.setdefault((kind, places, tuple(columns)), Table(kind, columns))
            sizes = [real_size(self.tensors.params[i]) for i in columns]
            if self.in_graph and sizes != table.sizes:
                return False  # it was never uploaded
            addresses = [0 if self.fake else each[i].data_ptr() for each in self.lists for i in columns]
            table.refresh(addresses, sizes, self)
            if self.in_graph:
                tables.in_graphs += [table.rows, table.tensors]
            self.tables.append(table)
        self.late = self._may_be_late(kinds)
        if self.late:
            self.hyper = with_mean_of_one(self.hyper)
        return True

    def _is_plain(self, i: int, p: Tensor) -> bool:
        """Whether the tensors of a parameter are laid out as the kernels take them for."""
        contiguous, strides = p.is_contiguous(), p.stride()
        if not contiguous and not is_dense(p):
            return False
        for each in self.lists:
            x = each[i]
            if (type(x) not in _TYPES and not self.fake) or x.device != self.device or x.shape != p.shape:
                return False
            if part_dtype(x) not in _DTYPES or x.is_complex() != p.is_complex() or x.is_neg() or x.is_conj():
                return False
            if x.stride() != strides and not (contiguous and x.is_contiguous()):
                return False
            if each is not self.tensors.grads and x.is_inference():
                return False
        kept = [each[i].dtype for each in self.lists[2:]]
        dtypes = {part_dtype(p), part_dtype(self.tensors.grads[i]), part_dtype(self.tensors.m[i])}
        if len(set(kept)) > 1 or (torch.float64 in dtypes and len(dtypes) > 1):
            return False
        shard = None if self.own.shards is None else self.own.shards[self.members.places[i]]
        # The noise counts elements in the order of the whole tensor.
        return shard is None or not self.noisy_state or (shard.first is not None and shard.strides == strides)

    def _may_be_late(self, kinds: dict[Kind, list[int]]) -> bool:
        """Whether ⟨|θ|⟩ may be summed by the update: what is stored is not rounded, and lies on this rank."""
        sizes = self.hyper.eps, self.hyper.tiny_denom
        if not self.hyper.adaptive_tiny or self.own.shards is not None or any(isinstance(x, Tensor) for x in sizes):
            return False
        return sum(sizes) > 0 and all(kind == (torch.float32,) * 3 for kind in kinds)

    def first_element(self, place: int) -> int:
        """The number of the first element here of a parameter, in the order of the whole parameter's memory."""
        return 0 if self.own.shards is None else self.own.shards[place].first or 0

    def upload(self, numbers: np.ndarray) -> Tensor:
        """An array on the device, without waiting for it."""
        if self.fake:
            return torch.empty(numbers.shape, dtype=torch.int64, device=self.device)
        host = torch.from_numpy(numbers)
        return host.pin_memory().to(self.device, non_blocking=True) if self.on_gpu else host

    def measure(self) -> None:
        """||g|| of each parameter, and ⟨|θ|⟩ where it is needed before the update."""
        rows = 2 if self.hyper.adaptive_tiny else 1
        found = self._empty(rows, len(self.tensors.params))
        for table in self.tables:
            sums = self._empty(rows, table.blocks)
            kind = {"P": table.kind.params, "G": table.kind.grads}
            about = table.current, table.tensors, table.count
            launch("measure", table.blocks, sums, *about, **kind, MEAN=rows == 2, BLOCK=BLOCK)
            for row in range(rows):
                self._total(table, found.select(0, row), sums.select(0, row), root=row == 0)
        self.norms = found.select(0, 0)
        if rows == 2:
            self.mean_abs = found.select(0, 1) / self.members.sizes

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float64, device=self.device)

    def _total(self, table: Table, out: Tensor, sums: Tensor, *, root: bool) -> None:
        """The sum over a tensor's blocks, or its root, into `out` for each tensor of a table."""
        launch("total", table.count, out, sums, table.current, table.count, ROOT=root, BLOCK=BLOCK, LANES=LANES)

    def update(self, k: Coefficients, updated: Tensor | None) -> None:
        """The update of `rule.Coefficients`, one launch per kind."""
        cells, given = self._cells(k, updated)
        count, sign = len(self.tensors.params), -1 if self.group["maximize"] else 1
        kept = bool(self.tensors.v_max)
        for table in self.tables:
            kind = table.kind
            about = table.current, table.tensors, cells
            sums = self._empty(table.blocks) if self.late else cells
            launch(
                "update",
                table.blocks,
                sums,
                *about,
                self.scalars.step,
                table.count,
                count,
                given,
                sign,
                P=kind.params,
                G=kind.grads,
                S=kind.state,
                KEPT=kept,
                MEAN=self.late,
                NOISE_P=self.noisy and kind.params is torch.bfloat16,
                NOISE_S=self.noisy_state and kind.state is torch.bfloat16,
                BLOCK=BLOCK,
            )
            if self.late:
                abs_sums = self._empty(count)
                self._total(table, abs_sums, sums, root=False)
                share = self.own.hyper.tiny_denom / self.hyper.eps  # whose ε is ε + tiny_denom
                constants = {"P": kind.params, "KEPT": kept, "BLOCK": BLOCK}
                launch("correct", table.blocks, abs_sums, *about, table.count, count, given, share, **constants)
        written = [x for each in self.lists if each is not self.tensors.grads for x in each]
        torch.autograd.graph.increment_version(written)

    def _cells(self, k: Coefficients, updated: Tensor | None) -> tuple[Tensor, int]:
        """The coefficients and which parameters move, a row each, and a bit for each row that has a meaning."""
        count, given = len(self.tensors.params), 0
        rows = []
        for row, x in enumerate((*k, updated)):
            given |= (x is not None) << row
            if x is None:
                x = k.c2  # whatever: nobody reads it
            elif not isinstance(x, Tensor) or (x.is_cpu and self.device.type != "cpu"):
                x = torch.full((), float(x), dtype=torch.float64, device=self.device)
            rows.append(x.to(torch.float64).expand(count))
        return torch.stack(rows), given


def part_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a tensor, or of the parts of a complex one."""
    return _PARTS.get(x.dtype, x.dtype)


def real_size(x: Tensor) -> int:
    """How many real numbers a tensor holds."""
    return x.numel() * (2 if x.is_complex() else 1)


def is_dense(x: Tensor) -> bool:
    """Whether elements lie in memory without gaps, in whatever order of the dimensions."""
    longer = [(stride, n) for stride, n in zip(x.stride(), x.shape, strict=True) if n != 1]
    expected = 1
    for stride, n in sorted(longer):
        if stride != expected:
            return False
        expected *= n
    return True


@functools.lru_cache(maxsize=256)
def with_mean_of_one(hyper: Hyper) -> Hyper:
    """The hyper-parameters with ε + tiny_denom·max(⟨|θ|⟩, 1) as ε, for ⟨|θ|⟩ ≤ 1."""
    return replace(hyper, eps=hyper.eps + hyper.tiny_denom, adaptive_tiny=False)
