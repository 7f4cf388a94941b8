"""A group's state: the names and dtypes of its entries, and its numbers as vectors.

    step, log_beta2      t and Σ log β2, one number per parameter
    norm_ema, skipped    r and the count of skips, one number per bucket

Each is one vector per group, of which `state[p]` shows 0-dim views; all members of a bucket show the same view.

NOTE: anybody may put another tensor in the place of a view: load_state_dict, ZeroRedundancyOptimizer, a hook. So a step
first looks whether the state still shows the views, and packs the vectors again from what the state shows if not.

The form of the state that other frameworks read is `kourkoutas.state`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kourkoutas.rule import adam_log_beta2

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
NUMBERS = ("step", "norm_ema", "log_beta2", "skipped")
_PER_BUCKET = ("norm_ema", "skipped")


class Selection(NamedTuple):
    """The parameters and buckets of one step, and their numbers in the group, on the device of the vectors."""

    places: list[int]  # numbers of the parameters that have a gradient
    buckets: list[int]  # numbers of the buckets that are updated
    place_index: list[Tensor]  # `places`; empty if they are all parameters
    bucket_index: list[Tensor]  # `buckets`; empty if they are all buckets, in order
    bucket_of: list[Tensor]  # per parameter: which of `buckets` it is in; empty if each is its own, in order
    sizes: list[Tensor]  # real numbers in each parameter, wherever they lie


class Vectors:
    """The numbers of one group's state.

    Attributes:
      names: which of `NUMBERS` the options need.
      of: name → vector.
    """

    def __init__(self, group: dict[str, Any], names: tuple[str, ...], state: Mapping[Tensor, Any], rest: Any) -> None:
        """Pack what `state` shows; of a bucket, its first member speaks.

        Args:
          rest: vectors that have the numbers of buckets without a member in `state`; None: these start at 0.
        """
        params, index = group["params"], group["bucket_index"]
        self.names, self.device, self.of = names, _device(params), dict[str, Tensor]()
        self._views: dict[str, list[Tensor]] = {}
        self._selections: dict[tuple[int, ...], Selection] = {}
        for name in names:
            places = index if name in _PER_BUCKET else range(len(params))
            count = len(group["bucket_names"]) if name in _PER_BUCKET else len(params)
            dtype = number_dtype(name, params)
            vector = torch.zeros(count, dtype=dtype, device=self.device)
            if name in _PER_BUCKET and rest is not None:
                vector = rest.of.get(name, vector)
            if name == "log_beta2" and "step" in names:  # of steps taken before "exact" was asked for
                vector = adam_log_beta2(group["betas"][1], self.of["step"].double(), torch).to(dtype)
            numbers = list(vector.unbind())
            for p, place in reversed(list(zip(params, places, strict=True))):
                if p in state and name in state[p]:
                    value = state[p][name]
                    if not isinstance(value, Tensor) or value.numel() != 1:
                        raise RuntimeError(f"`{name}` in the state must be a tensor of one element; got {value!r}")
                    numbers[place] = value.detach().reshape(()).to(self.device, dtype)
            self.of[name] = torch.stack(numbers) if numbers else vector
            views = self.of[name].unbind()
            self._views[name] = [views[place] for place in places]

    def show(self, state: Any, group: dict[str, Any], places: Sequence[int]) -> None:
        """Put the views into the state of these parameters, and of those that have one."""
        chosen = set(places)
        for i, p in enumerate(group["params"]):
            if i in chosen or p in state:
                state[p].update({name: self._views[name][i] for name in self.names})

    def shown(
        self, group: dict[str, Any], names: tuple[str, ...], states: Sequence[Mapping[str, Any]], places: Sequence[int]
    ) -> bool:
        """Whether these are vectors of `names`, and the states of the parameters at `places` show their views."""
        if names != self.names or self.device != _device(group["params"]):
            return False
        for name in names:
            views = self._views[name]
            if not all(entries.get(name) is views[i] for entries, i in zip(states, places, strict=True)):
                return False
        return True

    def select(
        self, group: dict[str, Any], places: list[int], sizes: Callable[[], list[int]], all_buckets: bool
    ) -> Selection:
        """What a step of these parameters reads; kept, so that indices are made once."""
        kept = self._selections.get(key := tuple(places))
        if kept is not None:
            return kept
        if len(self._selections) > len(group["params"]):  # each parameter by itself, as in a step in backward, fits
            self._selections.clear()
        count, index = len(group["bucket_names"]), [group["bucket_index"][i] for i in places]
        buckets = list(range(count)) if all_buckets else list(dict.fromkeys(index))
        at = {b: i for i, b in enumerate(buckets)}
        bucket_of, every = [at[b] for b in index], sizes()

        def on_device(numbers: list[int], needed: bool) -> list[Tensor]:
            return [torch.tensor(numbers, dtype=torch.int64, device=self.device)] if needed else []

        self._selections[key] = Selection(
            list(places),
            buckets,
            on_device(places, len(places) < len(group["params"])),
            on_device(buckets, buckets != list(range(count))),
            on_device(bucket_of, bucket_of != list(range(len(buckets)))),
            on_device([every[i] for i in places], True),
        )
        return self._selections[key]


def _device(params: Sequence[Tensor]) -> torch.device:
    return params[0].device if params else torch.device("cpu")


def number_dtype(name: str, params: Sequence[Tensor]) -> torch.dtype:
    """t is float32 as in Adam; r and Σ log β2 are float64 where one of the group's parameters is."""
    if name in ("step", "skipped"):
        return torch.float32 if name == "step" else torch.int64
    wide = any(p.dtype in (torch.float64, torch.complex128) for p in params)
    return torch.float64 if wide else torch.float32


def check_loaded(state_dict: dict[str, Any]) -> None:
    """Raise if a state dict is neither Kourkoutas-β's nor Adam's."""
    for number, group in enumerate(state_dict["param_groups"]):
        if "betas" not in group:
            raise ValueError(
                f"`state_dict` is neither Kourkoutas-β's nor Adam's: its group {number} has no `betas`; nothing was "
                "loaded: load it into the kind of optimizer that saved it"
            )
    for key, entries in state_dict["state"].items():
        if entries and not {"step", "exp_avg", "exp_avg_sq"} <= entries.keys():
            raise ValueError(
                f"`state_dict` is neither Kourkoutas-β's nor Adam's: parameter {key} has {list(entries)}, not "
                "step, exp_avg and exp_avg_sq; nothing was loaded: load it into the kind of optimizer that saved it"
            )
