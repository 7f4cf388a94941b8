"""PyTorch's state to and from the portable form, by way of `state_dict`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kourkoutas.rule import Hyper
from kourkoutas.state.file import Portable, Rename, read, write
from kourkoutas.state.match import check, kinds_of
from kourkoutas.torch import KourkoutasBeta
from kourkoutas.torch.sharding import is_dtensor, is_fsdp1

_SLOTS = {"m": "exp_avg", "v": "exp_avg_sq", "v_max": "max_exp_avg_sq"}


def save(optimizer: KourkoutasBeta, file: str | Path) -> None:
    """Write the optimizer's state to a file that Optax and MLX also read.

    Args:
      optimizer: made with `model.named_parameters()`; bare parameters are called param_0, param_1, ...
      file: where to; a kill leaves the old file or the new one.
    """
    write(portable(optimizer), file)


def load(file: str | Path, optimizer: KourkoutasBeta, *, rename: Rename | None = None) -> None:
    """Put a saved state into an optimizer, in place; if it does not fit, ValueError, and nothing has changed.

    Args:
      file: written by `save` of any framework.
      optimizer: with the parameters, buckets and settings that the state was made with.
      rename: {name in the file: name here} for those that differ, or a function of the name in the file.

    Example:
      >>> import tempfile
      >>> w = torch.nn.Parameter(torch.ones(3))
      >>> optimizer = KourkoutasBeta([("w", w)], lr=0.1)
      >>> w.grad = torch.ones(3)
      >>> optimizer.step()
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save(optimizer, f"{folder}/state.safetensors")
      ...     load(f"{folder}/state.safetensors", KourkoutasBeta([("w", w)], lr=0.1))
    """
    state = read(file) if rename is None else read(file).renamed(rename)
    named = _named(optimizer)
    shapes = {name: tuple(one.p.shape) for name, one in named.items()}
    check(state, shapes, {name: one.bucket for name, one in named.items()}, _kinds(optimizer))
    saved = optimizer.state_dict()
    numbers = [i for group in saved["param_groups"] for i in group["params"]]
    saved["state"] = {i: _entries(state, name, one.p) for i, (name, one) in zip(numbers, named.items(), strict=True)}
    optimizer.load_state_dict(saved)


class _Parameter(NamedTuple):
    p: Tensor
    bucket: tuple[int, int]  # number of the group, number of the bucket in it


def _named(optimizer: KourkoutasBeta) -> dict[str, _Parameter]:
    """The optimizer's parameters by name, in its order."""
    named: dict[str, _Parameter] = {}
    for number, group in enumerate(optimizer.param_groups):
        bare = [f"param_{len(named) + i}" for i in range(len(group["params"]))]
        for name, p, bucket in zip(group.get("param_names", bare), group["params"], group["bucket_index"], strict=True):
            if is_dtensor(p) or is_fsdp1(p) or p.is_complex():
                kind = "complex" if p.is_complex() else "spread over ranks"
                raise ValueError(
                    f"parameter {name!r} is {kind}, which the portable form does not hold: for parameters on several "
                    "ranks gather the state first, or use torch.distributed.checkpoint"
                )
            if name in named:
                raise ValueError(f"two parameters are called {name!r}: give each its own name")
            named[name] = _Parameter(p, (number, bucket))
    return named


def _kinds(optimizer: KourkoutasBeta) -> tuple[str, ...]:
    """The optional parts of the state that the settings need."""
    found = set()
    for group in optimizer.param_groups:
        beta1, beta2_max = group["betas"]
        found.add(kinds_of(Hyper.pick({**group, "beta1": beta1, "beta2_max": beta2_max})))
    if len(found) > 1:
        raise ValueError(
            "the groups differ in what they keep (`decay`, `max_ratio`, `bias_correction`, `nonfinite`), and "
            "the portable form has it alike for all parameters: make an optimizer for each"
        )
    return found.pop() if found else ()


def portable(optimizer: KourkoutasBeta) -> Portable:
    """The state apart from the framework."""
    named, kinds = _named(optimizer), _kinds(optimizer)
    states = {name: optimizer.state.get(one.p, {}) for name, one in named.items()}
    places = {bucket: i for i, bucket in enumerate(dict.fromkeys(one.bucket for one in named.values()))}
    bucket_of = tuple(places[one.bucket] for one in named.values())

    def moments(slot: str) -> dict[str, Any]:
        return {name: _array(states[name].get(slot, torch.zeros_like(one.p))) for name, one in named.items()}

    def per_parameter(key: str) -> Any:
        return np.array([float(state.get(key, 0)) for state in states.values()], np.float64)

    def per_bucket(key: str) -> Any:
        found = np.zeros(len(places), np.float64)
        for state, bucket in zip(states.values(), bucket_of, strict=True):
            if key in state:
                found[bucket] = float(state[key])
        return found

    step = per_parameter("step").astype(np.int64)
    log_beta2 = None
    if "log_beta2" in kinds:  # of steps taken before "exact" was asked for there is none
        forgotten = [math.log(b) if b else -math.inf for b in map(float, _beta2_maxs(optimizer))]
        there = ["log_beta2" in state for state in states.values()]
        before = np.where(step > 0, step * np.array(forgotten), 0.0) if named else np.zeros(0)
        log_beta2 = np.where(there, per_parameter("log_beta2"), before)
    skipped = per_bucket("skipped").astype(np.int64) if "skipped" in kinds else None
    calls = step if skipped is None else step + skipped[list(bucket_of)]
    return Portable(
        names=tuple(named),
        bucket_of=bucket_of,
        bucket_names=tuple(optimizer.param_groups[i]["bucket_names"][b] for i, b in places),
        count=int(calls.max(initial=0)),  # PyTorch counts the steps of parameters, not the calls
        m=moments("exp_avg"),
        v=moments("exp_avg_sq"),
        v_max=moments("max_exp_avg_sq") if "v_max" in kinds else None,
        step=step,
        log_beta2=log_beta2,
        ema=per_bucket("norm_ema"),
        skipped=skipped,
    )


def _beta2_maxs(optimizer: KourkoutasBeta) -> list[Any]:
    """β2_max of each parameter."""
    return [group["betas"][1] for group in optimizer.param_groups for _ in group["params"]]


def _array(x: Tensor) -> Any:
    """A copy: the optimizer goes on to change its tensors in place."""
    x = x.detach().cpu()
    return x.to(x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32, copy=True).numpy()


def _entries(state: Portable, name: str, p: Tensor) -> dict[str, Tensor]:
    """What the optimizer keeps of one parameter."""
    kept = {slot: torch.from_numpy(getattr(state, kind)[name]) for kind, slot in _SLOTS.items() if getattr(state, kind)}
    real = torch.float64 if p.dtype == torch.float64 else torch.float32
    kept["step"] = torch.tensor(state.entry("step", name), dtype=torch.float32)
    kept["norm_ema"] = torch.tensor(state.entry("ema", name), dtype=real)
    if state.log_beta2 is not None:
        kept["log_beta2"] = torch.tensor(state.entry("log_beta2", name), dtype=real)
    if state.skipped is not None:
        kept["skipped"] = torch.tensor(state.entry("skipped", name), dtype=torch.int64)
    return kept
