"""A param group's options: checks, each of which names the argument, the value and the remedy, and what follows."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from kourkoutas import rule
from kourkoutas.buckets import check_buckets
from kourkoutas.rule import Hyper
from kourkoutas.torch import native
from kourkoutas.torch.state import MOMENTS, STATE
from kourkoutas.torch.work import LOW_PRECISION, Options, Work

_IN_GROUP = [name for name in rule.HYPER_NAMES if name not in ("beta1", "beta2_max")]
OPTIONS = itemgetter(*_IN_GROUP, "betas", "maximize", "state_dtype")
"""The entries of a group that its `Options` are made of."""


def make_options(group: dict[str, Any], key: tuple[Any, ...]) -> Options:
    """The options of a group whose entries are `key`."""
    hyper = check_group(group)
    packed = native.pack(hyper, group["maximize"], group["state_dtype"])
    plain = hyper.bias_correction == "beta2max" and hyper.nonfinite != "skip" and group["state_dtype"] is None
    extras = hyper.adaptive_tiny or hyper.max_ratio is not None or hyper.leak not in (None, 1)
    adam = packed is not None and hyper.fixed and plain and not extras
    unused = {"max_exp_avg_sq": hyper.leak is None, "log_beta2": hyper.bias_correction != "exact"}
    unused["skipped"] = hyper.nonfinite != "skip"
    needed = tuple(name for name in STATE if not unused.get(name))
    return Options(key, hyper, packed, adam, needed, group["state_dtype"] is torch.bfloat16)


def join_betas(options: dict[str, Any]) -> None:
    """Put `beta1` and `beta2_max` where torch's schedulers and Adam look for them: options["betas"]."""
    betas = options.get("betas", (Hyper.beta1, Hyper.beta2_max))
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"`betas` must be a pair (beta1, beta2_max), for example (0.9, 0.999); got {betas!r}")
    options["betas"] = (options.pop("beta1", betas[0]), options.pop("beta2_max", betas[1]))


def _scalar(x: Any) -> Any:
    return x.reshape(()) if isinstance(x, Tensor) and x.numel() == 1 else x


def check_group(options: dict[str, Any]) -> Hyper:
    """The hyper-parameters of a group's options, all of which are checked."""
    rule.check_learning_rate(options["lr"])
    values = {name: options[name] for name in _IN_GROUP}
    values["beta1"], values["beta2_max"] = options["betas"]
    for name, value in {"lr": options["lr"], **values}.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(f"`{name}` must be a number or a tensor of one element; got shape {tuple(value.shape)}")
    hyper = Hyper(**{name: _scalar(value) for name, value in values.items()})
    if options["buckets"] != "custom":
        check_buckets(options["buckets"])
    for name, allowed in (
        ("maximize", (True, False)),
        ("diagnostics", (True, False)),
        ("capturable", (True, False)),
        ("foreach", (True, False, None)),
        ("fused", (True, False, None)),
    ):
        if not any(options[name] is x for x in allowed):
            raise TypeError(f"`{name}` must be one of {', '.join(map(str, allowed))}; got {options[name]!r}")
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
    if group["fused"] and not (p.device.type in ("cpu", "cuda") and (p.is_floating_point() or p.is_complex())):
        raise RuntimeError(
            f"`fused=True` needs floating-point parameters on a CPU or a GPU; got {p.dtype} on {p.device}: "
            "use foreach=True"
        )
    if group["state_dtype"] is not None and p.dtype not in (torch.float32, *LOW_PRECISION):
        raise RuntimeError(
            f"`state_dtype` needs float32, bfloat16 or float16 parameters; got {p.dtype}: "
            "put this parameter in a group with state_dtype=None"
        )


def check_tensors(work: Work, same: bool) -> None:
    """Raise if the lists of torch cannot update these tensors, so that nothing is half done; `same`: in one dtype."""
    eager = not torch.compiler.is_compiling()  # asking for the bits would break a graph in two

    def kind(x: Tensor) -> tuple[Any, ...]:
        odd = eager and (x.is_neg() or (x.is_inference() and not torch.is_inference_mode_enabled()))
        return x.shape, x.device, x.dtype if same or x.dtype not in LOW_PRECISION else torch.float32, odd

    if eager and any(x.is_neg() for xs in work[5:8] for x in xs):
        raise RuntimeError("a number in the state is negated lazily: load another state")
    wanted = [(*kind(p)[:3], False) for p in work.params]
    for name, tensors in zip(("param", "grad", *MOMENTS), work[:5], strict=True):
        found = [kind(x) for x in tensors]
        if name == "grad":  # is only read, and may be negated lazily
            found = [(*x[:3], False) for x in found]
        if found and found != wanted:
            i = next(i for i, (x, y) in enumerate(zip(found, wanted, strict=True)) if x != y)
            what = f"`{name}` in the state" if name in MOMENTS else f"`{name}`"
            raise RuntimeError(
                f"{what} of parameter {work.places[i]} has another shape, dtype or device than the parameter, is "
                "negated lazily, or was made in inference mode: set it anew, or load another state"
            )


def entries_of(params: Any) -> list[Any]:
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, (set, frozenset)):
        raise TypeError("`params` must be ordered; got a set, whose order changes from run to run: pass a list")
    if not isinstance(params, Iterable) or isinstance(params, (str, bytes)):
        raise TypeError(f"`params` must be tensors or (name, tensor) pairs; got {params!r}")
    return list(params)


def named(entries: list[Any], first: int) -> tuple[list[str], list[Tensor]]:
    """Names and tensors, each tensor once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for i, entry in enumerate(entries):
        name, tensor = entry if isinstance(entry, tuple) and len(entry) == 2 else (f"param_{first + i}", entry)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"`params` must be tensors or (name, tensor) pairs; got {tensor!r} at place {i}")
        found.setdefault(id(tensor), (name, tensor))
    return [name for name, _ in found.values()], [tensor for _, tensor in found.values()]
