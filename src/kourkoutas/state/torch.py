"""PyTorch's state to and from the portable form, by way of `state_dict`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kourkoutas.buckets import names_of
from kourkoutas.rule import adam_log_beta2
from kourkoutas.state.file import PER_BUCKET, Parameter, Portable, kinds_of, made, read, write
from kourkoutas.torch import KourkoutasBeta, options
from kourkoutas.torch.sharding import is_dtensor, is_fsdp1

_SLOTS = {"m": "exp_avg", "v": "exp_avg_sq", "v_max": "max_exp_avg_sq"}


def save(optimizer: KourkoutasBeta, file: str | Path) -> None:
    """Write the optimizer's state to a file that Optax and MLX also read.

    Make the optimizer with `model.named_parameters()`; bare parameters are called param_0, param_1, ... A kill leaves
    the old file or the new one.
    """
    here, kinds = _parameters(optimizer), _kinds(optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state.get(p, {}) for p in params]
    place = {b: i for i, b in enumerate(dict.fromkeys(each.bucket for each in here.values()))}
    bucket_of = [place[each.bucket] for each in here.values()]

    def moments(slot: str) -> Any:
        """Copies: the optimizer goes on to change its tensors in place."""
        kept = [state.get(slot, torch.zeros_like(p)).detach().cpu() for state, p in zip(states, params, strict=True)]
        return [x.to(x.dtype if x.itemsize >= 4 else torch.float32, copy=True).numpy() for x in kept]

    def per_parameter(key: str) -> Any:
        return np.array([float(state.get(key, 0)) for state in states])

    def per_bucket(key: str) -> Any:
        """The number that the members of a bucket share; those without a state yet have 0."""
        found = np.zeros(len(place))
        np.maximum.at(found, bucket_of, per_parameter(key))
        return found

    step = calls = per_parameter("step")
    vectors = {"step": step, "ema": per_bucket("norm_ema")}
    if "log_beta2" in kinds:  # of steps taken before "exact" was asked for there is none
        beta2s = np.array([float(group["betas"][1]) for group in optimizer.param_groups for _ in group["params"]])
        there = ["log_beta2" in state for state in states]
        with np.errstate(divide="ignore"):  # log 0
            vectors["log_beta2"] = np.where(there, per_parameter("log_beta2"), adam_log_beta2(beta2s, step, np))
    if "skipped" in kinds:
        vectors["skipped"] = per_bucket("skipped")
        calls = step + vectors["skipped"][bucket_of]
    kept = {kind: moments(slot) for kind, slot in _SLOTS.items() if kind in {"m", "v", *kinds}}
    # PyTorch counts the steps of parameters, not the calls.
    write(made(here, int(calls.max(initial=0)), kept, **vectors), file)


def load(file: str | Path, optimizer: KourkoutasBeta) -> None:
    """Put a state saved from any framework into an optimizer, in place; if it does not fit, ValueError and no change.

    The optimizer has the parameters, buckets and settings that the state was made with.
    """
    state = read(file).arranged(_parameters(optimizer), _kinds(optimizer))
    saved = optimizer.state_dict()
    numbers = [i for group in saved["param_groups"] for i in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    entries = [_entries(state, i, p) for i, p in enumerate(params)]
    optimizer.load_state_dict({**saved, "state": dict(zip(numbers, entries, strict=True))})


def _parameters(optimizer: KourkoutasBeta) -> dict[str, Parameter]:
    """The optimizer's parameters by name, in its order; a bucket is known by the numbers of its group and its own."""
    found: dict[str, Parameter] = {}
    for number, group in enumerate(optimizer.param_groups):
        names = names_of(group.get("param_names"), len(found), len(group["params"]))
        for name, p, bucket in zip(names, group["params"], group["bucket_of"], strict=True):
            if is_dtensor(p) or is_fsdp1(p):
                raise ValueError(
                    f"parameter {name!r} is spread over ranks, which the portable form does not hold: gather the state "
                    "first, or use torch.distributed.checkpoint"
                )
            if name in found:
                raise ValueError(f"two parameters are called {name!r}: give each its own name")
            found[name] = Parameter(tuple(p.shape), (number, bucket), p.is_complex())
    return found


def _kinds(optimizer: KourkoutasBeta) -> set[str]:
    """The optional parts of the state that the settings need."""
    found = [kinds_of(options.check_group(group)) for group in optimizer.param_groups]
    if any(kinds != found[0] for kinds in found):
        raise ValueError(
            "the groups differ in what they keep (`decay`, `max_ratio`, `bias_correction`, `nonfinite`), and "
            "the portable form has it alike for all parameters: make an optimizer for each"
        )
    return found[0] if found else set()


def _entries(state: Portable, i: int, p: Tensor) -> dict[str, Tensor]:
    """What the optimizer keeps of one parameter, number `i` of the state."""
    real = torch.float64 if p.dtype in (torch.float64, torch.complex128) else torch.float32
    kept = {_SLOTS[kind]: torch.from_numpy(arrays[state.names[i]]) for kind, arrays in state.moments.items()}
    for kind, x in state.vectors.items():
        own = x[state.bucket_of[i] if kind in PER_BUCKET else i]
        dtype = {"step": torch.float32, "skipped": torch.int64}.get(kind, real)
        kept["norm_ema" if kind == "ema" else kind] = torch.tensor(own, dtype=dtype)
    return kept
