"""The optimizer class: its state, and the stages of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from kourkoutas import rule
from kourkoutas.buckets import names_of, partition, unique_names
from kourkoutas.rule import Buckets, Hyper
from kourkoutas.torch import kernel, options, routes, sharding
from kourkoutas.torch.lists import FusedStep, ListStep, Selection
from kourkoutas.torch.recorder import Recorder
from kourkoutas.torch.sharding import Pool, Shard
from kourkoutas.trace import Trace


class Group:
    """One param group, with what follows from it and from its state; nothing of this is saved.

    The numbers of the state are kept as one vector each, in the order of `rule.State`: r and skips per bucket, t and
    Σ log β2 per parameter. The state shows 0-dim views of them; all members of a bucket show the same view.

    NOTE: anybody may put another tensor in the place of a view: load_state_dict, ZeroRedundancyOptimizer, a hook. So a
    step first looks whether the state still shows the views, and packs new vectors from what it shows if not.
    """

    # As of the last `check`:
    key: tuple[Any, ...] | None = None  # the entries of the group that these follow from
    device: torch.device  # of its numbers
    hyper: Hyper
    packed: bytes | None  # the same for the kernel; None if one of them is a tensor
    moments: tuple[str, ...] = ()  # names of the state that is like the parameter
    numbers: tuple[str, ...] = ()  # names of the state that is numbers

    # As of the last `pack`:
    vectors: Any = None  # a `rule.State`
    views: tuple[list[Tensor] | None, ...] = ()  # per number: what the state of each parameter shows of it

    # What the `Pool` found:
    shards: list[Shard] | None = None  # None if its tensors and buckets are whole
    spans = False  # whether its buckets have members on other ranks that this rank does not hold

    def __init__(self, group: dict[str, Any], first: int) -> None:
        self.group = group
        self.first = first  # how many parameters stand in groups before it
        self.names = names_of(group.get("param_names"), first, len(group["params"]))
        # Kept here, too, as ZeroRedundancyOptimizer overwrites them with those of another rank's group.
        self.bucket_names, self.bucket_index = group["bucket_names"], group["bucket_index"]
        self.selections: dict[tuple[int, ...], Selection] = {}

    def check(self) -> None:
        """Take over what was written into the group since the last step."""
        group, params = self.group, self.group["params"]
        self.device = params[0].device if params else torch.device("cpu")
        if "beta1" in group or "beta2_max" in group:
            options.join_betas(group)
        if group["bucket_index"] is not self.bucket_index:
            group["bucket_names"], group["bucket_index"] = self.bucket_names, self.bucket_index
        if self.key != (key := options.OPTIONS(group)):
            self.hyper, before = options.check_group(group), self.numbers
            self.packed = kernel.pack(self.hyper, group["maximize"], group["state_dtype"])
            self.moments, self.numbers = options.state_names(self.hyper)
            if self.numbers != before:
                self.views = ()
            group["amsgrad"] = self.hyper.leak is not None  # for an Adam that loads this state
            self.key = key

    def collect(self, state: Any) -> tuple[list[list[Tensor]], rule.State, Selection]:
        """What a `ListStep` needs; missing state is made."""
        group, params = self.group, self.group["params"]
        if len(self.bucket_index) != len(params):
            raise RuntimeError(
                f"a param group has {len(params)} parameters but buckets for {len(self.bucket_index)}: "
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
        states = [state.get(p, {}) for p in chosen]
        if not self.shows(states, places):
            for p in chosen:  # every check comes before the first state is made
                options.check_parameter(p, group)
            self.pack(state, places, group["betas"][1])
            states = [state[p] for p in chosen]
        for p, entries in zip(chosen, states, strict=True):
            for name in self.moments:
                if name not in entries:
                    dtype = group["state_dtype"]
                    entries[name] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
        moments = [[entries[name] for entries in states] for name in self.moments]
        if self.shards is not None:
            sharding.check_layouts(chosen, moments)
        return [chosen, [p.grad for p in chosen], *moments], self.vectors, self.select(places)

    def shows(self, states: Sequence[dict[str, Any]], places: Sequence[int]) -> bool:
        """Whether the states of the parameters at `places` show the views."""
        if not self.views or self.vectors.step.device != self.device:
            return False
        kept = [(name, views) for name, views in zip(options.NUMBERS, self.views, strict=True) if views is not None]
        each = zip(states, places, strict=True)
        return all(entries.get(name) is views[i] for entries, i in each for name, views in kept)

    def pack(self, state: Any, places: Sequence[int], beta2: Any) -> None:
        """Make vectors of what the state shows, and views for the parameters at `places` and those that have a state.

        Of a bucket, its first member speaks. Steps taken before "exact" was asked for, or by an Adam, had `beta2`.
        """
        params, device = self.group["params"], self.device
        vectors: dict[str, Tensor] = {}
        views: dict[str, list[Tensor]] = {}
        for number, name in enumerate(options.NUMBERS):
            if name not in self.numbers:
                continue
            per_bucket = name in options.PER_BUCKET
            index = self.bucket_index if per_bucket else range(len(params))
            dtype = options.number_dtype(name, params)
            vector = torch.zeros(len(self.bucket_names) if per_bucket else len(params), dtype=dtype, device=device)
            if per_bucket and self.spans and self.vectors is not None and self.vectors[number] is not None:
                # A gradient on another rank moves the numbers of a bucket of which no member here has a state.
                vector = self.vectors[number]
            if name == "log_beta2":
                vector = rule.adam_log_beta2(beta2, vectors["step"].double(), torch).to(dtype)
            values = list(vector.unbind())
            for p, at in reversed(list(zip(params, index, strict=True))):
                if name in state.get(p, ()):
                    value = state[p][name]
                    if not isinstance(value, Tensor) or value.numel() != 1:
                        raise RuntimeError(f"`{name}` in the state must be a tensor of one element; got {value!r}")
                    values[at] = value.detach().reshape(()).to(device, dtype)
            vectors[name] = torch.stack(values) if values else vector
            each = vectors[name].unbind()
            views[name] = [each[at] for at in index]
        self.vectors = rule.State(*map(vectors.get, options.NUMBERS))
        self.views = tuple(map(views.get, options.NUMBERS))
        self.selections.clear()
        chosen = set(places)
        for i, p in enumerate(params):
            if i in chosen or p in state:
                state[p].update({name: views[name][i] for name in self.numbers})

    def select(self, places: list[int]) -> Selection:
        """What a step of these parameters reads; kept, so that indices are made once."""
        if (key := tuple(places)) in self.selections:
            return self.selections[key]
        params = self.group["params"]
        if len(self.selections) > len(params):  # each parameter by itself, as in a step in backward, fits
            self.selections.clear()
        count, index = len(self.bucket_names), [self.bucket_index[i] for i in places]
        buckets = list(range(count)) if self.spans else list(dict.fromkeys(index))
        at = {b: i for i, b in enumerate(buckets)}
        sizes = [p.numel() for p in params] if self.shards is None else [shard.size for shard in self.shards]
        parts = [2 if p.is_complex() else 1 for p in params]

        def on_device(numbers: list[int], implied: int | None = None) -> Tensor | None:
            """The numbers as a tensor; None if they are 0, 1, ... `implied` - 1."""
            known = implied is not None and numbers == list(range(implied))
            return None if known else torch.tensor(numbers, dtype=torch.int64, device=self.device)

        indices = on_device(places, len(params)), on_device(buckets, count)
        bucket_of = on_device([at[b] for b in index], None if self.spans else len(buckets))
        real_sizes = on_device([max(sizes[i] * parts[i], 1) for i in places])  # 1 in an empty one, for the mean over it
        self.selections[key] = found = Selection(places, buckets, *indices, bucket_of, real_sizes)
        return found


class KourkoutasBeta(Optimizer):
    """Adam whose second-moment memory shortens when a bucket's gradient norm spikes: see `kourkoutas.rule`.

    Args:
      params: tensors, param groups, or `model.named_parameters()`. Any keyword below may be set per group.
      lr: learning rate γ, a float or a tensor.
      beta1, beta2_min, beta2_max, alpha, eps, tiny_spike, tiny_denom, decay, max_ratio, adaptive_tiny, bias_correction,
        warmup_steps, nonfinite, lr_warmup: see :class:`kourkoutas.Hyper`.
      weight_decay: decoupled weight decay λ, as in AdamW.
      buckets: what shares a β2: "parameter", "module" (needs named parameters), "shape", "global" or a callable
        `f(name, tensor)`. Buckets never reach across param groups.
      diagnostics: record sun, β2 and n of every bucket at every step; read them with :meth:`pull`.
      maximize: maximize the objective.
      state_dtype: None keeps m, v and v_max in the parameter's dtype. torch.bfloat16 halves the state of float32
        parameters: arithmetic stays float32, and results are rounded stochastically, so that small changes are kept on
        average. torch.float32 gives float32 state to bfloat16 and float16 parameters.
      foreach, fused, capturable: as in `torch.optim.Adam`. By default the fastest that applies: on the CPU this
        package's C kernel if it was built, else torch's fused Adam kernel; torch's foreach operations elsewhere.
      process_group: over whom buckets are pooled where tensors carry no mesh. A torch.distributed process group whose
        ranks hold other parts (FSDP1 with use_orig_params=True) or other members (ZeroRedundancyOptimizer, pipeline
        stages) of this rank's buckets; "local" if there are none, as under DistributedDataParallel. None is enough for
        DTensors, and where buckets are single parameters or modules. Norms are those of whole tensors, so all ranks
        must step together: see docs/scaling-out.md.

    Example:
      >>> optimizer = KourkoutasBeta(torch.nn.Linear(3, 1).named_parameters(), lr=1e-2)
      >>> optimizer.bucket_names
      ['weight', 'bias']

    NOTE: β1 and β2_max stand in a group as Adam's `betas`, where schedulers such as OneCycleLR write them. A `beta1` or
    `beta2_max` written into a group later is taken over at the next step.

    NOTE: state. Per parameter, with Adam's names: `step`, `exp_avg` (m), `exp_avg_sq` (v), `max_exp_avg_sq` (v_max, if
    `Hyper.leak` is set), `log_beta2` (Σ log β2, for "exact"). Per bucket, one tensor shared by its members: `norm_ema`
    (r), `skipped` (for nonfinite="skip"). Numbers are 0-dim views of one vector per group, float32, or float64 in a
    group with a float64 parameter. An Adam checkpoint loads: r then starts afresh. AdamW loads this state, too.

    NOTE: scalars stay on the device, so that nothing waits for it and nothing is compiled again when β2, betas or a
    tensor lr change; only `nonfinite="raise"` must read the norms.

    Reference: S. C. Kassinos, "Kourkoutas-β: A Sunspike-Driven Adam Optimizer with Desert Flair".
    """

    process_group: Any = None  # not saved with the optimizer; it can be set
    _pool: Any = None  # a `Pool`, from the first step on
    _recorder: Recorder | None = None

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        beta1: float = Hyper.beta1,
        beta2_min: float = Hyper.beta2_min,
        beta2_max: float = Hyper.beta2_max,
        alpha: float = Hyper.alpha,
        eps: float = Hyper.eps,
        tiny_spike: float = Hyper.tiny_spike,
        tiny_denom: float = Hyper.tiny_denom,
        decay: float | None = None,
        max_ratio: float | None = None,
        adaptive_tiny: bool = False,
        bias_correction: str = "beta2max",
        warmup_steps: int = 0,
        weight_decay: float = 0.0,
        buckets: Buckets = "parameter",
        nonfinite: str = "propagate",
        lr_warmup: bool = False,
        diagnostics: bool = False,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        process_group: Any = None,
    ) -> None:
        defaults = {k: v for k, v in locals().items() if k not in ("self", "params", "process_group", "__class__")}
        sharding.check_process_group(process_group)
        options.join_betas(defaults)
        options.check_group(defaults)
        self.process_group = process_group
        self._groups: list[Group] = []
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._derive()

    def _derive(self) -> None:
        """Forget what was derived from the state and the groups."""
        starts = accumulate((len(group["params"]) for group in self.param_groups), initial=0)
        self._groups = [Group(group, first) for group, first in zip(self.param_groups, starts, strict=False)]
        self._pool = self._recorder = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; if it does not fit, nothing is added."""
        super().add_param_group({**param_group})  # which fills in defaults, and warns of a parameter given twice
        group = self.param_groups.pop()
        options.join_betas(group)
        options.check_group(group)
        first = sum(len(g["params"]) for g in self.param_groups)
        names = names_of(group.get("param_names"), first, len(group["params"]), group["buckets"])
        once: dict[Tensor, str] = {}
        for p, name in zip(group["params"], names, strict=True):
            options.check_parameter(p, group)
            once.setdefault(p, name)
        found = partition(group["buckets"], unique_names(list(once.values()), group["buckets"]), once)
        group["params"] = list(once)
        if "param_names" in group:
            group["param_names"] = list(once.values())
        # A function cannot be saved, but its answers can: from here on `bucket_index` is what counts.
        group["buckets"] = group["buckets"] if isinstance(group["buckets"], str) else "custom"
        group["bucket_names"], group["bucket_index"] = list(found.bucket_names), list(found.bucket_of)
        self._groups.append(Group(group, first))
        self._groups[-1].check()
        self.param_groups.append(group)
        self._pool = None
        if self._recorder is not None:
            self._recorder.widen(len(found.bucket_names))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a K-β or an Adam state; numbers keep their dtype, whatever the parameters' dtype."""
        read: list[dict[str, Any]] = []

        def prepare(_: Any, loaded: dict[str, Any]) -> dict[str, Any]:
            options.check_loaded(loaded)
            read.append(loaded)
            ours = [*self.param_groups, *({} for _ in loaded["param_groups"])]  # torch raises if they differ in number
            groups = map(options.filled, loaded["param_groups"], ours)
            return {**loaded, "param_groups": list(groups)}

        # After the hooks of others that change what is loaded, and before those that change what was.
        before = self.register_load_state_dict_pre_hook(prepare)
        after = self.register_load_state_dict_post_hook(lambda _: self._take_over(read[0]), prepend=True)
        with before, after:
            super().load_state_dict(state_dict)

    def _take_over(self, loaded: dict[str, Any]) -> None:
        """Give numbers and moments the dtypes that torch has not, and numbers their vectors."""
        for own, saved in zip(self._groups, loaded["param_groups"], strict=True):
            own.check()
            group = own.group
            for i, p in zip(saved["params"], group["params"], strict=True):
                for name, value in loaded["state"].get(i, {}).items():
                    dtype = group["state_dtype"] if name in options.MOMENTS else None
                    if name in options.NUMBERS:
                        dtype = options.number_dtype(name, [p])
                    if dtype is not None:
                        self.state[p][name] = torch.as_tensor(value).detach().to(p.device, dtype, copy=True)
            own.pack(self.state, [], saved["betas"][1])

    @property
    def bucket_names(self) -> list[str]:
        """Names of all buckets; one that several groups use has its group's number behind it."""
        names = [(i, name) for i, group in enumerate(self.param_groups) for name in group["bucket_names"]]
        count = Counter(name for _, name in names)
        return [name if count[name] == 1 else f"{name}@{i}" for i, name in names]

    def pull(self, trace: Trace) -> None:
        """Move the rows recorded since the last pull into `trace` (needs `diagnostics=True`)."""
        if not any(group["diagnostics"] for group in self.param_groups):
            raise ValueError("nothing is recorded: make the optimizer with diagnostics=True")
        if self._recorder is not None:
            self._recorder.pull(trace)

    def route(self) -> list[routes.Route]:
        """Which way the next step of each group goes, and why; it makes missing state, and asks no other rank."""
        self._check(all_ranks=False)
        with torch.no_grad():
            return [self._gather(own)[0] for own in self._groups]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform one optimization step; `closure` re-evaluates the model and returns the loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            if torch.compiler.is_compiling():
                self._move([self._traced(number, group) for number, group in enumerate(self.param_groups)])
            else:
                self._check(all_ranks=True)
                self._move([self._gather(own)[1] for own in self._groups])
        return loss

    def _check(self, *, all_ranks: bool) -> None:
        """Take over what was written into the groups, and find where their parts lie.

        `all_ranks`: every rank calls this, as it must before its first step, so that they can ask each other.
        """
        if [id(own.group) for own in self._groups] != [id(group) for group in self.param_groups]:
            self._derive()  # some were removed, or put in another order
        for own in self._groups:
            own.check()
        if self._recorder is None and any(group["diagnostics"] for group in self.param_groups):
            self._recorder = Recorder(self.param_groups)
        if self._pool is None or self._pool.process_group is not self.process_group:
            self._pool = Pool(self._groups, self.process_group)
        if all_ranks and not self._pool.exchanged:
            self._pool.exchange()
            for own in self._groups:
                own.selections.clear()  # sizes of parameters may be known only now

    def _gather(self, own: Group) -> tuple[routes.Route, Any]:
        """The route of one group, and its step with all tensors at hand; every check is made here."""
        route = routes.choose(own)
        if route is routes.KERNEL and (step := kernel.gather(own, self.state)) is not None:
            return route, step
        collected = own.collect(self.state)  # which makes the state that the kernel may have missed
        if route is routes.KERNEL:
            if (step := kernel.gather(own, self.state)) is not None:
                return route, step
            route = routes.OTHER
        if route.fused and (fused := FusedStep(own, *collected)).takes():
            return route, fused
        return route._replace(fused=False), ListStep(own, *collected).checked()

    # NOTE: torch.compile runs `_init_group` as plain Python while it traces `step`, and hands the lists that it filled
    # to the graph; so all lazy set-up belongs there, and its arguments are a group, constants and empty lists.
    def _init_group(self, group: dict[str, Any], number: int, *empty: list[Any]) -> None:
        self._check(all_ranks=True)
        lists, numbers, chosen = self._groups[number].collect(self.state)
        for target, entries in zip(empty, [numbers, chosen, *lists], strict=False):
            target.extend(entries)

    def _traced(self, number: int, group: dict[str, Any]) -> ListStep:
        """The step of a group as torch.compile sees it."""
        filled: list[list[Any]] = [[], [], [], [], [], [], []]
        self._init_group(group, number, *filled)
        numbers, chosen, *lists = filled
        own = self._groups[number]
        lists = lists[: 2 + len(own.moments)]
        return ListStep(own, lists, rule.State(*numbers), Selection(*chosen)).checked()

    def _move(self, steps: list[Any]) -> None:
        """Measure, pool and look; then move everything."""
        for step in steps:
            step.measure()
        pool = self._pool
        if pool.active:
            pool.add(steps)
        if any(group["nonfinite"] == "raise" for group in self.param_groups):
            # Every norm is looked at before the first parameter moves.
            bad = [name for step in steps if step.hyper.nonfinite == "raise" and (name := step.first_bad()) is not None]
            first = pool.agree_on(bad[0] if bad else None)
            if first is not None:
                raise rule.NonFiniteGradient(first)
        if self._recorder is None:
            for step in steps:
                step.apply()
        else:
            self._recorder.apply(steps, self.param_groups)
        if pool.dtensors and not torch.compiler.is_compiling():  # autograd saw their local tensors change, not them
            torch.autograd.graph.increment_version([p for p in pool.dtensors if p.grad is not None])
