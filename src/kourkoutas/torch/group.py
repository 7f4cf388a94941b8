"""A param group: its options, its buckets, the scalars of its state, and the tensors of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kourkoutas import rule
from kourkoutas.buckets import names_of
from kourkoutas.rule import Hyper
from kourkoutas.torch import kernel, options, private, sharding
from kourkoutas.torch.sharding import Shard


class Tensors(NamedTuple):
    """The tensors of the parameters that have a gradient, each list in the order of the group."""

    params: list[Tensor]
    grads: list[Tensor]
    m: list[Tensor]
    v: list[Tensor]
    v_max: list[Tensor]  # empty where none is kept

    def moments(self) -> list[tuple[str, list[Tensor]]]:
        """Those lists of the state that are kept, with their names in the state."""
        lists = zip(options.MOMENTS, (self.m, self.v, self.v_max), strict=True)
        return [(name, tensors) for name, tensors in lists if tensors]

    def written(self) -> list[tuple[str, list[Tensor]]]:
        """Those lists that a step writes, with their names; the parameters are "param"."""
        return [("param", self.params), *self.moments()]


HOST = ("cpu",)
"""Devices on which reading a value costs nothing, so that steps need not be counted beside them."""


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Taken(NamedTuple):
    """How many steps parameters have taken, known without reading it from the device."""

    steps: int
    places: list[int] | None  # who took the last of them; None: nobody yet, and every parameter of the group is there
    version: int  # of the vector of steps, into which others may write


class Members(NamedTuple):
    """The parameters and buckets of a step, and which parameter is in which bucket: the `Members` of `rule.step`.

    NOTE: a NamedTuple of lists, tensors and None, because these are what torch.compile lets out of `_init_group`.
    """

    places: list[int]  # the parameters that have a gradient, by their numbers in the group
    buckets: list[int]  # the buckets that step, by their numbers in the group
    bucket_names: list[str]  # their names
    place_index: Any  # `places` as a tensor; None if they are all parameters
    bucket_index: Any  # `buckets` as a tensor; None if they are all buckets, in order
    bucket_of: Any  # for each parameter, the number of its bucket among `buckets`; None if each is its own, in order
    sizes: Any  # real numbers in each parameter, wherever they lie
    latest: Any = None  # `largest` of t, where members on other ranks count, too

    def spread(self, x: Any) -> Any:
        """From an entry per bucket to one per parameter."""
        return x if self.bucket_of is None else x.index_select(0, self.bucket_of)

    def largest(self, x: Any) -> Any:
        """From an entry per parameter to one per bucket: the largest of its members that have a gradient."""
        if self.latest is not None:
            return self.latest.to(x)
        if self.bucket_of is None:
            return x
        return x.new_zeros(len(self.buckets)).scatter_reduce_(0, self.bucket_of, x, "amax")

    def total(self, x: Any) -> Any:
        """From an entry per parameter to one per bucket: the sum over its members."""
        return x if self.bucket_of is None else x.new_zeros(len(self.buckets)).index_add_(0, self.bucket_of, x)


class Collected(NamedTuple):
    """What a step by torch's operations works on."""

    tensors: Tensors
    scalars: rule.State  # of the whole group, as vectors
    members: Members


class Group:
    """One param group, with what follows from it and from its state; nothing of this is saved.

    The scalars of the state are kept as one vector each, in the order of `rule.State`: r and skips per bucket, t and
    Σ log β2 per parameter. The state shows 0-dim views of them; all members of a bucket show the same view.

    NOTE: anybody may put another tensor in the place of a view, or delete it: load_state_dict, ZeroRedundancyOptimizer,
    a hook. So a step first looks whether the state still shows the views, and packs new vectors from what it shows if
    not. A parameter that was never shown only needs its views put into its state.
    """

    # As of the last `check`:
    lr: Any = None  # γ
    key: tuple[Any, ...] | None = None  # the entries of the group that these follow from
    device: torch.device  # of its scalars
    hyper: Hyper
    packed: bytes | None  # the same for the kernel; None if one of them is a tensor
    noisy_states: bool  # whether bfloat16 state is rounded stochastically
    moment_names: tuple[str, ...] = ()  # names of the state that is like the parameter
    scalar_names: tuple[str, ...] = ()  # names of the state that is scalars

    # As of the last `pack`:
    scalars: Any = None  # a `rule.State` of vectors; None for a scalar that is not kept
    views: tuple[list[Tensor] | None, ...] = ()  # per scalar: what the state of each parameter shows of it
    taken: Taken | None = None  # None if it is not known, or not the same for all that step

    stacks: Any = None  # with basis="eigen", what `kourkoutas.torch.stacks` keeps

    # What the `Pool` found:
    shards: list[Shard] | None = None  # None if its tensors and buckets are whole
    spans = False  # whether its buckets have members on other ranks that this rank does not hold

    def __init__(self, group: dict[str, Any], first: int) -> None:
        self.group = group
        self.first = first  # how many parameters stand in groups before it
        self.names = names_of(group.get("param_names"), first, len(group["params"]))
        # Kept here, too, as ZeroRedundancyOptimizer overwrites them with those of another rank's group.
        self.bucket_names: list[str] = group["bucket_names"]
        self.bucket_of: list[int] = group["bucket_of"]  # for each parameter, the number of its bucket
        self.shown: set[int] = set()  # the parameters into whose state the views were put
        self._members: dict[tuple[int, ...], Members] = {}

    def check(self) -> None:
        """Take over what was written into the group since the last step."""
        group, params = self.group, self.group["params"]
        self.device = params[0].device if params else torch.device("cpu")
        if "beta1" in group or "beta2_max" in group:
            options.join_betas(group)
        if group["bucket_of"] is not self.bucket_of:
            group["bucket_names"], group["bucket_of"] = self.bucket_names, self.bucket_of
        if group["lr"] is not self.lr and isinstance(group["lr"], Tensor):
            options.check_learning_rate(group["lr"])
        self.lr = group["lr"]
        key = options.OPTIONS(group)
        if self.key == key:
            return
        hyper = options.check_group(group)
        if self.scalars is not None and (hyper.basis, hyper.basis_limit) != (self.hyper.basis, self.hyper.basis_limit):
            raise RuntimeError(
                f"`basis` and `basis_limit` of a group cannot change after its first step; got basis={hyper.basis!r}, "
                f"basis_limit={hyper.basis_limit!r}: make a new optimizer"
            )
        self.hyper = hyper
        self.packed = kernel.pack(self.hyper, group)
        self.noisy_states = options.noisy_states(group)
        before = self.scalar_names
        self.moment_names, self.scalar_names = options.state_names(self.hyper)
        if self.scalar_names != before:
            self.views = ()
        # For an Adam that loads this state:
        group["amsgrad"], group["decoupled_weight_decay"] = self.hyper.leak is not None, True
        self.key = key

    def collect(self, state: Any) -> Collected:
        """What a step by torch's operations needs; missing state is made, once every parameter has been checked."""
        params = self.group["params"]
        if len(self.bucket_of) != len(params):
            raise RuntimeError(
                f"a param group has {len(params)} parameters but buckets for {len(self.bucket_of)}: "
                "add parameters with add_param_group, and to take some out make a new optimizer"
            )
        places = [i for i, p in enumerate(params) if p.grad is not None]
        chosen = [params[i] for i in places]
        for p in chosen:
            if p.grad.layout is not torch.strided:
                raise RuntimeError(
                    f"KourkoutasBeta does not support sparse gradients; got layout {p.grad.layout}: make the layer "
                    "dense (sparse=False) or give its parameters to torch.optim.SparseAdam"
                )
        self._show_scalars(state, places)
        moments: dict[str, list[Tensor]] = {}
        if self.hyper.basis is None:  # with a basis, m and v are in the stacks
            moments = {name: self._moments(name, state, chosen) for name in self.moment_names}
        m, v, v_max = (moments.get(name, []) for name in options.MOMENTS)
        tensors = Tensors(chosen, [p.grad for p in chosen], m, v, v_max)
        if self.shards is not None:
            sharding.check_layouts(tensors)
        return Collected(tensors, self.scalars, self.members(places))

    def _moments(self, name: str, state: Any, chosen: Sequence[Tensor]) -> list[Tensor]:
        """m, v or v_max of each parameter."""
        found = []
        for p in chosen:
            entries = state[p]
            if name not in entries:
                dtype = self.group["state_dtype"]
                entries[name] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
            found.append(entries[name])
        return found

    def _show_scalars(self, state: Any, places: Sequence[int]) -> None:
        """Make sure that the states of the parameters at `places` show the views."""
        params = self.group["params"]
        usable = bool(self.views) and self.scalars.step.device == self.device
        missing = [i for i in places if not self._shows(state, i)] if usable else places
        if usable and not missing:
            return
        for i in places:
            options.check_parameter(params[i], self.group)
        if usable and all(self._is_new(state, i) for i in missing):
            self.show(state, missing)
        else:
            self.pack(state, places, self.group["betas"][1])

    def _shows(self, state: Any, place: int) -> bool:
        """Whether the state of a parameter shows its views."""
        entries = state.get(self.group["params"][place], {})
        for name, views in zip(options.SCALARS, self.views, strict=True):
            if views is not None and entries.get(name) is not views[place]:
                return False
        return True

    def _is_new(self, state: Any, place: int) -> bool:
        """Whether a parameter never had scalars, here or in its state; if it had, somebody replaced or deleted them."""
        entries = state.get(self.group["params"][place], {})
        return place not in self.shown and not any(name in entries for name in self.scalar_names)

    def show(self, state: Any, places: Sequence[int]) -> None:
        """Put the views into the states of the parameters at `places`."""
        for name, views in zip(options.SCALARS, self.views, strict=True):
            if views is None:
                continue
            for i in places:
                state[self.group["params"][i]][name] = views[i]
        self.shown.update(places)

    def pack(self, state: Any, places: Sequence[int], beta2: Any) -> None:
        """Make vectors of what the state shows, and views for the parameters at `places` and those that have a state.

        Steps taken before "exact" was asked for, or by an Adam, had `beta2`.
        """
        vectors: dict[str, Tensor] = {}
        for name in self.scalar_names:  # `step` comes before `log_beta2`
            start = self._start(name, beta2, vectors.get("step"))
            vectors[name] = self._with_what_is_shown(name, start, state)
        self.scalars = rule.State(*(vectors.get(name) for name in options.SCALARS))
        all_views: list[list[Tensor] | None] = []
        for name in options.SCALARS:
            if name in vectors:
                entries = vectors[name].unbind()
                all_views.append([entries[i] for i in self._entry_of(name)])
            else:
                all_views.append(None)
        self.views = tuple(all_views)
        started = any("step" in state.get(p, ()) for p in self.group["params"])
        self.taken = None if started else self._taken(0, None)
        self._members.clear()
        chosen = set(places)
        self.shown = set()
        self.show(state, [i for i, p in enumerate(self.group["params"]) if i in chosen or p in state])

    def _taken(self, steps: int, places: list[int] | None) -> Taken | None:
        vector = self.scalars.step
        return None if vector.is_inference() else Taken(steps, places, vector._version)

    def read_taken(self) -> None:
        """Read from the device how many steps were taken, as after loading a state."""
        vector = self.scalars.step
        if self.device.type in HOST or not len(vector) or vector.is_meta or private.is_fake(vector):
            return
        steps = set(vector.tolist())
        self.taken = self._taken(int(steps.pop()), None) if len(steps) == 1 else None

    def steps_taken(self, places: list[int]) -> int | None:
        """How many steps these parameters have all taken, if that is known here.

        It is if they took all of them together. A CUDA graph takes steps that nobody counts here.
        """
        if self.taken is None or self.device.type in HOST or self.group["capturable"] or is_capturing(self.device):
            return None
        known = self.taken.places in (None, places) and self.taken.version == self.scalars.step._version
        return self.taken.steps if known else None

    def note_steps(self, steps: int | None, places: list[int]) -> None:
        """Remember how many steps these parameters have taken now."""
        self.taken = None if steps is None else self._taken(steps, places)

    def _entry_of(self, name: str) -> Sequence[int]:
        """For each parameter, the number of its entry in the vector of a scalar."""
        return self.bucket_of if name in options.PER_BUCKET else range(len(self.group["params"]))

    def _start(self, name: str, beta2: Any, steps: Tensor | None) -> Tensor:
        """The vector of a scalar as it is before anything is read from the state."""
        params = self.group["params"]
        dtype = options.scalar_dtype(name, params)
        if name == "log_beta2" and steps is not None:
            return rule.adam_log_beta2(beta2, steps.double(), torch).to(dtype)  # type: ignore[no-any-return]
        if name in options.PER_BUCKET and self.spans and self.scalars is not None:
            # A gradient on another rank moves the scalars of a bucket of which no member here has a state.
            before = self.scalars[options.SCALARS.index(name)]
            if before is not None:
                return before  # type: ignore[no-any-return]
        count = len(self.bucket_names) if name in options.PER_BUCKET else len(params)
        return torch.zeros(count, dtype=dtype, device=self.device)

    def _with_what_is_shown(self, name: str, start: Tensor, state: Any) -> Tensor:
        """A new vector of a scalar: of what the state of each parameter shows, and elsewhere as at the start."""
        values = list(start.unbind())
        each = list(zip(self.group["params"], self._entry_of(name), strict=True))
        for p, entry in reversed(each):  # so that of a bucket its first member speaks
            if name not in state.get(p, ()):
                continue
            value = state[p][name]
            if not isinstance(value, Tensor) or value.numel() != 1:
                raise RuntimeError(f"`{name}` in the state must be a tensor of one element; got {value!r}")
            values[entry] = value.detach().reshape(()).to(self.device, start.dtype)
        return torch.stack(values) if values else start

    def forget_members(self) -> None:
        """Work out anew who steps with whom: the ranks have told each other how large their parameters are."""
        self._members.clear()

    def members(self, places: list[int]) -> Members:
        """The members of a step of these parameters; kept, so that their tensors are made once."""
        key = tuple(places)
        if key not in self._members:
            if len(self._members) > len(
                self.group["params"]
            ):  # each parameter by itself, as in a step in backward, fits
                self._members.clear()
            self._members[key] = self._make_members(places)
        return self._members[key]

    def _make_members(self, places: list[int]) -> Members:
        params, count = self.group["params"], len(self.bucket_names)
        bucket_of = [self.bucket_of[i] for i in places]
        buckets = list(range(count)) if self.spans else list(dict.fromkeys(bucket_of))
        number = {bucket: i for i, bucket in enumerate(buckets)}
        bucket_of = [number[bucket] for bucket in bucket_of]
        one_each = not self.spans and bucket_of == list(range(len(buckets)))
        all_parameters = len(places) == len(params)
        all_in_order = len(buckets) == count and buckets == list(range(count))
        return Members(
            places,
            buckets,
            [self.bucket_names[b] for b in buckets],
            place_index=None if all_parameters else self._index(places),
            bucket_index=None if all_in_order else self._index(buckets),
            bucket_of=None if one_each else self._index(bucket_of),
            sizes=self._index([self._size(i) for i in places]),
        )

    def _index(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def _size(self, place: int) -> int:
        """Real numbers in a parameter, wherever they lie; 1 in an empty one, for the mean over it."""
        p = self.group["params"][place]
        elements = p.numel() if self.shards is None else self.shards[place].size
        return max(elements * (2 if p.is_complex() else 1), 1)
