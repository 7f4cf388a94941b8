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
from kourkoutas.torch import private

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


def noisy_states(group: dict[str, Any]) -> bool:
    """Whether m, v and v_max are rounded stochastically where they are bfloat16."""
    return group["state_dtype"] is torch.bfloat16 or bool(group["stochastic_rounding"])


def join_betas(options: dict[str, Any]) -> None:
    """Put `beta1` and `beta2_max` where torch's schedulers and Adam look for them: options["betas"]."""
    betas = options.get("betas", (None, Hyper.beta2_max))
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"`betas` must be a pair (beta1, beta2_max), for example (0.9, 0.999); got {betas!r}")
    options["betas"] = (options.pop("beta1", betas[0]), options.pop("beta2_max", betas[1]))


def refuse_two_sets_of_betas() -> None:
    raise ValueError(
        "`betas` and `beta1` or `beta2_max` were given: leave `betas` out, or give it alone; it is the pair "
        "(beta1, beta2_max)"
    )


def take_amsgrad(options: dict[str, Any]) -> None:
    """Let Adam's `amsgrad=True` set `decay` to 1, unless v_max is kept anyway."""
    amsgrad, decay = options["amsgrad"], options["decay"]
    if not isinstance(amsgrad, bool):
        raise TypeError(f"`amsgrad` must be True or False; got {amsgrad!r}: it is short for decay=1")
    if not amsgrad:
        return
    if isinstance(decay, (int, float)) and decay == 0:
        raise ValueError("`amsgrad` is True, but decay=0 keeps no v_max: leave one of them out")
    if decay is None and options["max_ratio"] is None:
        options["decay"] = 1.0


def check_learning_rate(lr: Any) -> None:
    """Raise unless `lr` is a learning rate: a number, or a tensor of one element."""
    rule.check_learning_rate(_checkable("lr", lr))


def _checkable(name: str, value: Any) -> Any:
    """What `rule` checks of an option: the value of a tensor if it can be read, and else the tensor, which passes."""
    if not isinstance(value, Tensor):
        return value
    if value.numel() != 1:
        raise ValueError(f"`{name}` must be a number or a tensor of one element; got shape {[*value.shape]}")
    watched = not private.knows_modes or private.count_dispatch_modes() or private.functorch_level() is not None
    if watched or type(value) not in (Tensor, torch.nn.Parameter) or not value.is_cpu:
        return value  # reading it would wait for a device or disturb a trace
    number = value.detach().item()
    # Of a float32 the digits that it holds: 0.999 is kept as 0.9990000129, which exceeds a beta2_max of 0.999.
    return float(f"{number:.7g}") if value.dtype is torch.float32 else number


def check_group(options: dict[str, Any]) -> Hyper:
    """The hyper-parameters of a group's options, all of which are checked."""
    check_learning_rate(options["lr"])
    values = {name: options[name] for name in _IN_GROUP}
    values["beta1"], values["beta2_max"] = options["betas"]
    hyper = Hyper.pick({name: _checkable(name, value) for name, value in values.items()})
    tensors = {name: value.reshape(()) for name, value in values.items() if isinstance(value, Tensor)}
    if tensors:
        hyper = Hyper.pick({**values, **tensors})
    if options["buckets"] != "custom":
        check_buckets(options["buckets"])
    if options.get("differentiable"):
        raise ValueError(
            "`differentiable` is True, but a step of KourkoutasBeta leaves no trace for autograd: leave it out, or use "
            "torch.optim.Adam(differentiable=True)"
        )
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
    if hyper.basis is not None:
        _check_eigenbasis(options)
    if not any(options["state_dtype"] is x for x in (None, torch.float32, torch.bfloat16)):
        raise ValueError(f"`state_dtype` must be None, torch.bfloat16 or torch.float32; got {options['state_dtype']!r}")
    return hyper


def _check_eigenbasis(options: dict[str, Any]) -> None:
    """Raise if an option does not go with `basis="eigen"`."""
    if options["capturable"]:
        raise ValueError(
            '`capturable` is True but `basis` is "eigen", and a captured graph cannot tell when the basis turns: leave '
            "`capturable` out, or put the step into torch.compile"
        )
    if options["state_dtype"] is torch.bfloat16:
        raise ValueError(
            '`state_dtype` is torch.bfloat16 but `basis` is "eigen", whose state is float32 at least: leave it out'
        )


def take_defaults(group: dict[str, Any]) -> None:
    """Check a group, and put what its `basis` means by None into its place."""
    hyper = check_group(group)
    if group["betas"][0] is None:
        group["betas"] = (hyper.beta1, group["betas"][1])
    if group["bias_correction"] is None:
        group["bias_correction"] = hyper.bias_correction


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


def loaded_dtype(name: str, value: Any, group: dict[str, Any]) -> torch.dtype | None:
    """The dtype of an entry of the state after loading; None for the parameter's, which torch gives it."""
    if name in SCALARS:
        return scalar_dtype(name, group["params"])
    if group["basis"] is not None:
        return torch.as_tensor(value).dtype
    return group["state_dtype"] if name in MOMENTS else None


def check_loaded(state_dict: dict[str, Any]) -> None:
    """Raise if a state dict is neither Kourkoutas-β's nor Adam's, or would decay weights in another way here."""
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
    for i, group in enumerate(state_dict["param_groups"]):
        if _is_adams(group) and group.get("weight_decay") and not group.get("decoupled_weight_decay"):
            raise ValueError(_of_decay(i, group))


def _is_adams(saved: dict[str, Any]) -> bool:
    """Whether an Adam saved this group."""
    return "beta2_min" not in saved


def _of_decay(i: int, group: dict[str, Any]) -> str:
    """Why the weight decay of a saved group is refused.

    NOTE: Adam and AdamW have saved which of the two they are since torch 2.7. Of older states, and of other people's
    AdamWs, nobody knows, so that it is asked for.
    """
    known = "decoupled_weight_decay" in group
    kind = "is Adam's L2 decay" if known else "may be Adam's L2 decay or AdamW's decoupled decay"
    return (
        f"`state_dict` has a `weight_decay` of {group['weight_decay']} in group {i}, which {kind}; Kourkoutas-β decays "
        f"as AdamW does. If that is what you want, write state_dict['param_groups'][{i}]['decoupled_weight_decay'] = "
        "True, and the decay of your choice, before you load it; nothing was loaded"
    )


def filled(saved: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """A saved group with those of our entries that it lacks: an Adam's has no buckets, and its β2 is not β2_max."""
    group = {**ours, **saved}
    if _is_adams(saved):
        group["betas"] = ours.get("betas")
        group["differentiable"] = False
        if saved.get("amsgrad") and not ours.get("amsgrad"):
            group["decay"] = 1.0
    if "bucket_index" in group:  # as version 0.3 called it
        group["bucket_of"] = group.pop("bucket_index")
    if len(group.get("bucket_of", ())) != len(saved["params"]):  # saved by a rank that held other parameters
        group["bucket_names"], group["bucket_of"] = ours.get("bucket_names"), ours.get("bucket_of")
    return group
