"""Whether a portable state fits an optimizer: everything that does not is told at once, before anything changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kourkoutas.rule import Hyper
from kourkoutas.state.file import PER_BUCKET, VECTORS, Portable, listed

_OPTION = {
    "v_max": "`decay` or `max_ratio` (a v_max)",
    "log_beta2": "`bias_correction='exact'`",
    "skipped": "`nonfinite='skip'`",
}


def kinds_of(hyper: Hyper) -> tuple[str, ...]:
    """The optional parts of the state that an optimizer with these settings keeps."""
    kept = {
        "v_max": hyper.leak is not None,
        "log_beta2": hyper.bias_correction == "exact",
        "skipped": hyper.nonfinite == "skip",
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
    moments = [kept for kept in (state.m, state.v, state.v_max) if kept is not None]
    for name in both:
        shape = tuple(shapes[name])
        found = [tuple(kept[name].shape) if name in kept else "none" for kept in moments]
        if other := [x for x in found if x != shape]:
            wrong.append(f"{name!r} has shape {other[0]} in the file and {shape} here")
    for vector in VECTORS:
        entries = len(state.bucket_names) if vector in PER_BUCKET else len(state.names)
        if (x := getattr(state, vector)) is not None and len(x) != entries:
            wrong.append(f"`{vector}` has {len(x)} entries in the file, which lists {entries}")
    if there == here:
        members: dict[Any, set[str]] = {}
        for name in shapes:
            members.setdefault(bucket_of[name], set()).add(name)
        theirs = state.buckets
        moved = [name for name in both if theirs[name] != members[bucket_of[name]]]
        if moved:
            wrong.append(f"other parameters share a bucket with {listed(moved)} here: use the same `buckets`")
    for kind in _OPTION if shapes else ():  # without parameters nothing tells what is kept
        if (kind in state.kinds) != (kind in kinds):
            where = "with, the optimizer without" if kind in state.kinds else "without, the optimizer with"
            wrong.append(f"the file was written {where} {_OPTION[kind]}")
    if wrong:
        raise ValueError(f"the state does not fit, and nothing was changed: {'; '.join(wrong)}")
