"""A param group's options, and checks of what comes in: each error names the argument, the value and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from kourkoutas import rule
from kourkoutas.buckets import check_buckets
from kourkoutas.rule import Hyper

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
SCALARS = ("norm_ema", "step", "log_beta2", "skipped")  # in the order of `rule.State`, and of _native/step.c
PER_BUCKET = ("norm_ema", "skipped")
LOW_PRECISION = (torch.float16, torch.bfloat16)
_IN_GROUP = [name for name in rule.HYPER_NAMES if name not in ("beta1", "beta2_max")]
OPTIONS = itemgetter(*_IN_GROUP, "betas", "maximize", "state_dtype", "stochastic_rounding")
"""The entries of a group that its hyper-parameters, and what the kernel knows of them, are made of."""


def state_names(hyper: Hyper) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Those of `MOMENTS` and of `SCALARS` that the hyper-parameters need."""
    unused = set()
    if hyper.leak is None:
        unused.add("max_exp_avg_sq")
    if hyper.bias_correction != "exact":
        unused.add("log_beta2")
    if hyper.nonfinite != "skip":
        unused.add("skipped")
    moments = tuple(name for name in MOMENTS if name not in unused)
    scalars = tuple(name for name in SCALARS if name not in unused)
    return moments, scalars


def join_betas(options: dict[str, Any]) -> None:
    """Put `beta1` and `beta2_max` where torch's schedulers and Adam look for them: options["betas"]."""
    betas = options.get("betas", (Hyper.beta1, Hyper.beta2_max))
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"`betas` must be a pair (beta1, beta2_max), for example (0.9, 0.999); got {betas!r}")
    options["betas"] = (options.pop("beta1", betas[0]), options.pop("beta2_max", betas[1]))


def check_group(options: dict[str, Any]) -> Hyper:
    """The hyper-parameters of a group's options, all of which are checked."""
    rule.check_learning_rate(options["lr"])
    values = {name: options[name] for name in ("lr", *_IN_GROUP)}
    values["beta1"], values["beta2_max"] = options["betas"]
    for name, value in values.items():
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(f"`{name}` must be a number or a tensor of one element; got shape {[*value.shape]}")
            values[name] = value.reshape(())
    hyper = Hyper.pick(values)
    if options["buckets"] != "custom":
        check_buckets(options["buckets"])
    for name in ("maximize", "diagnostics", "stochastic_rounding", "capturable", "foreach", "fused"):
        may_be_none = name in ("foreach", "fused")
        if not isinstance(options[name], bool) and not (may_be_none and options[name] is None):
            wanted = "True, False or None" if may_be_none else "True or False"
            raise TypeError(f"`{name}` must be {wanted}; got {options[name]!r}")
    if options["fused"] and options["foreach"]:
        raise ValueError("`fused` and `foreach` cannot both be True: set one of them, or neither")
    if options["capturable"] and hyper.nonfinite == "raise":
        raise ValueError(
            "`nonfinite` is 'raise' but `capturable` is True, and a captured step cannot raise: use 'skip'"
        )
    if not any(options["state_dtype"] is x for x in (None, torch.float32, torch.bfloat16)):
        raise ValueError(f"`state_dtype` must be None, torch.bfloat16 or torch.float32; got {options['state_dtype']!r}")
    return hyper


def check_parameter(p: Tensor, group: dict[str, Any]) -> None:
    """Raise if a group's options do not hold for one of its parameters."""
    if group["state_dtype"] is not None and p.dtype not in (torch.float32, *LOW_PRECISION):
        raise RuntimeError(
            f"`state_dtype` needs float32, bfloat16 or float16 parameters; got {p.dtype}: "
            "put this parameter in a group with state_dtype=None"
        )
    if group["stochastic_rounding"] and p.dtype is torch.float16:
        raise RuntimeError(
            f"`stochastic_rounding` rounds to bfloat16 only; got a {p.dtype} parameter: use a bfloat16 model, or put "
            "this parameter in a group with stochastic_rounding=False"
        )
    if group["fused"] and not (p.device.type in ("cpu", "cuda") and (p.is_floating_point() or p.is_complex())):
        raise RuntimeError(
            f"`fused=True` needs floating-point parameters on a CPU or a GPU; got {p.dtype} on {p.device}: "
            "use foreach=True"
        )


def scalar_dtype(name: str, params: Sequence[Tensor]) -> torch.dtype:
    """t is float32 as in Adam; r and Σ log β2 are float64 where one of the group's parameters is."""
    if name in ("step", "skipped"):
        return torch.float32 if name == "step" else torch.int64
    wide = any(p.dtype in (torch.float64, torch.complex128) for p in params)
    return torch.float64 if wide else torch.float32


def check_loaded(state_dict: dict[str, Any]) -> None:
    """Raise if a state dict is neither Kourkoutas-β's nor Adam's."""
    needed = {"step", "exp_avg", "exp_avg_sq"}
    wrong = ["one of its groups has no `betas`" for group in state_dict["param_groups"] if "betas" not in group]
    for key, entries in state_dict["state"].items():
        if entries and not needed <= entries.keys():
            wrong.append(f"parameter {key} has {list(entries)}, not {', '.join(sorted(needed))}")
    if wrong:
        raise ValueError(
            f"`state_dict` is neither Kourkoutas-β's nor Adam's: {wrong[0]}; nothing was loaded: load it into the kind "
            "of optimizer that saved it"
        )


def filled(saved: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """A saved group with those of our entries that it lacks: an Adam's has no buckets, and its β2 is not β2_max."""
    group = {**ours, **saved}
    if "beta2_min" not in saved:
        group["betas"] = ours.get("betas")
    if "bucket_index" in group:  # as version 0.3 called it
        group["bucket_of"] = group.pop("bucket_index")
    if len(group.get("bucket_of", ())) != len(saved["params"]):  # saved by a rank that held other parameters
        group["bucket_names"], group["bucket_of"] = ours.get("bucket_names"), ours.get("bucket_of")
    return group
