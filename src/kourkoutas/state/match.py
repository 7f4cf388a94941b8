"""Whether a portable state fits an optimizer: everything that does not is told at once, before anything changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kourkoutas.rule import Hyper
from kourkoutas.signals import MEMORY
from kourkoutas.state.file import Portable, listed

_OPTION = {
    "v_max": "`decay` or `max_ratio` (a v_max)",
    "log_beta2": "`bias_correction='exact'`",
    "skipped": "`nonfinite='skip'`",
    **{name: f"`signal='{name}'`" for name, kept in MEMORY.items() if kept},
}


def kinds_of(hyper: Hyper) -> tuple[str, ...]:
    """The optional parts of the state that an optimizer with these settings keeps."""
    kept = {
        "v_max": hyper.leak is not None,
        "log_beta2": hyper.bias_correction == "exact",
        "skipped": hyper.nonfinite == "skip",
        **{name: hyper.signal == name for name, size in MEMORY.items() if size},
    }
    return tuple(kind for kind, there in kept.items() if there)


def check(
    state: Portable,
    shapes: Mapping[str, Sequence[int]],
    bucket_of: Mapping[str, Any],
    kinds: Sequence[str],
) -> None:
    """Raise ValueError unless `state` is that of an optimizer with these parameters, buckets and optional parts.

    Args:
      state: what was read.
      shapes: name → shape, of all parameters of the optimizer that loads.
      bucket_of: name → the bucket's key there, whatever that is.
      kinds: the optional parts that its settings need.
    """
    wrong = []
    there, here = set(state.names), set(shapes)
    if there != here:
        wrong.append(
            f"only the file has {listed(sorted(there - here)) or 'none'}, only the optimizer has "
            f"{listed(sorted(here - there)) or 'none'} (rename= maps names of the file to those here)"
        )
    both = [name for name in shapes if name in there]
    for name in both:
        if tuple(state.m[name].shape) != tuple(shapes[name]):
            wrong.append(f"{name!r} has shape {tuple(state.m[name].shape)} in the file and {tuple(shapes[name])} here")
    if there == here:
        members: dict[Any, set[str]] = {}
        for name in shapes:
            members.setdefault(bucket_of[name], set()).add(name)
        theirs = state.buckets
        moved = [name for name in both if theirs[name] != members[bucket_of[name]]]
        if moved:
            wrong.append(f"other parameters share a bucket with {listed(moved)} here: use the same `buckets`")
    for kind in _OPTION:
        if (kind in state.kinds) != (kind in kinds):
            where = "with, the optimizer without" if kind in state.kinds else "without, the optimizer with"
            wrong.append(f"the file was written {where} {_OPTION[kind]}")
    if wrong:
        raise ValueError(f"the state does not fit, and nothing was changed: {'; '.join(wrong)}")
