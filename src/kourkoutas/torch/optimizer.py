"""The optimizer class: its state, and the stages of a step."""

from __future__ import annotations

import pickle
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
from kourkoutas.torch import eigenbasis, options, routes, sharding
from kourkoutas.torch.group import Collected, Group, Members, Tensors
from kourkoutas.torch.lists import ListStep
from kourkoutas.torch.recorder import Recorder, most_steps
from kourkoutas.torch.routes import Step
from kourkoutas.torch.sharding import Pool
from kourkoutas.torch.stacks import Stacked
from kourkoutas.trace import Trace


class KourkoutasBeta(Optimizer):
    """Adam whose second-moment memory shortens when a bucket's gradient norm spikes: see `kourkoutas.rule`.

    Args:
      params: tensors, param groups, or `model.named_parameters()`. Any keyword below may be set per group.
      lr: learning rate γ, a float or a tensor.
      betas: (β1, β2_max), as Adam's; in their place `beta1` and `beta2_max` may be given.
      beta1, beta2_min, beta2_max, alpha, eps, tiny_spike, tiny_denom, decay, max_ratio, adaptive_tiny, bias_correction,
        warmup_steps, nonfinite, lr_warmup, basis, basis_every, basis_memory, basis_limit: see
        :class:`kourkoutas.Hyper`.
      weight_decay: decoupled weight decay λ, as in AdamW.
      amsgrad: True is short for `decay=1`.
      buckets: what shares a β2: "parameter", "module" (needs named parameters), "shape", "global" or a callable
        `f(name, tensor)`. Buckets never reach across param groups.
      diagnostics: record sun, β2 and n of every bucket at every step; read them with :meth:`pull`.
      maximize: maximize the objective.
      state_dtype: None keeps m, v and v_max in the parameter's dtype. torch.bfloat16 halves the state of float32
        parameters: arithmetic stays float32, and results are rounded stochastically, so that small changes are kept on
        average. torch.float32 gives float32 state to bfloat16 and float16 parameters.
      stochastic_rounding: round everything that is stored in bfloat16 stochastically: bfloat16 parameters, and m, v and
        v_max where they are bfloat16. A step that is smaller than half the distance to the next bfloat16 number, which
        rounding to nearest would lose, is then kept on average. What is stored in float32 or float64 is not rounded.
      differentiable: only False; a step leaves no trace for autograd.
      foreach, fused, capturable: as in `torch.optim.Adam`. By default the fastest that applies: on the CPU this
        package's C kernel if it was built, else torch's fused Adam kernel; on a GPU this package's Triton kernels, if
        Triton is installed; torch's foreach operations elsewhere. `fused=False` or `foreach=True` turns kernels off.
      process_group: over whom buckets are pooled where tensors carry no mesh. A torch.distributed process group whose
        ranks hold other parts (FSDP1 with use_orig_params=True) or other members (ZeroRedundancyOptimizer, pipeline
        stages) of this rank's buckets; "local" if there are none, as under DistributedDataParallel. None is enough for
        DTensors, and where buckets are single parameters or modules. Norms are those of whole tensors, so all ranks
        must step together: see docs/distributed.md.

    Example:
      >>> optimizer = KourkoutasBeta(torch.nn.Linear(3, 1).named_parameters(), lr=1e-2)
      >>> optimizer.bucket_names
      ['weight', 'bias']

    NOTE: β1 and β2_max stand in a group as Adam's `betas`, where schedulers such as OneCycleLR write them. A `beta1` or
    `beta2_max` written into a group later is taken over at the next step.

    NOTE: state. Per parameter, with Adam's names: `step`, `exp_avg` (m), `exp_avg_sq` (v), `max_exp_avg_sq` (v_max, if
    `Hyper.leak` is set), `log_beta2` (Σ log β2, for "exact"). Per bucket, one tensor shared by its members: `norm_ema`
    (r), `skipped` (for nonfinite="skip"). Scalars are 0-dim views of one vector per group, float32, or float64 in a
    group with a float64 parameter. An Adam checkpoint loads: r then starts afresh, and
    `amsgrad=True` becomes `decay=1`; one with L2 decay is refused. AdamW loads this state, too.

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
        betas: tuple[float | Tensor, float | Tensor] | None = None,
        eps: float = Hyper.eps,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        beta1: float | None = None,
        beta2_min: float = Hyper.beta2_min,
        beta2_max: float = Hyper.beta2_max,
        alpha: float = Hyper.alpha,
        tiny_spike: float = Hyper.tiny_spike,
        tiny_denom: float = Hyper.tiny_denom,
        decay: float | None = None,
        max_ratio: float | None = None,
        adaptive_tiny: bool = False,
        bias_correction: str | None = None,
        warmup_steps: int = 0,
        buckets: Buckets = "parameter",
        nonfinite: str = "propagate",
        lr_warmup: bool = False,
        basis: str | None = None,
        basis_every: int = Hyper.basis_every,
        basis_memory: float = Hyper.basis_memory,
        basis_limit: int = Hyper.basis_limit,
        diagnostics: bool = False,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        process_group: Any = None,
    ) -> None:
        defaults = {k: v for k, v in locals().items() if k not in ("self", "params", "process_group", "__class__")}
        sharding.check_process_group(process_group)
        if betas is None:
            del defaults["betas"]
        elif beta1 is not None or beta2_max != Hyper.beta2_max:
            options.refuse_two_sets_of_betas()
        else:
            del defaults["beta1"], defaults["beta2_max"]
        options.join_betas(defaults)
        options.take_amsgrad(defaults)
        options.check_group(defaults)
        self.process_group = process_group
        self._groups: list[Group] = []
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled; a function for `buckets` only if it can be, as the groups have its answers."""
        state: dict[str, Any] = super().__getstate__()
        try:
            pickle.dumps(self.defaults["buckets"])
        except (pickle.PicklingError, AttributeError, TypeError):
            state["defaults"] = {**self.defaults, "buckets": "custom"}
        return state

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
        given = {**param_group}
        if "betas" in given and ("beta1" in given or "beta2_max" in given):
            options.refuse_two_sets_of_betas()
        super().add_param_group(given)  # which fills in defaults, and warns of a parameter given twice
        group = self.param_groups.pop()
        options.join_betas(group)
        options.take_amsgrad(group)
        options.take_defaults(group)
        if group["buckets"] == "custom":
            raise ValueError(
                "`buckets` was a function that was not saved with the optimizer, since it cannot be pickled: give the "
                "new group its own `buckets`"
            )
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
        # A function cannot be saved, but its answers can: from here on `bucket_of` is what counts.
        group["buckets"] = group["buckets"] if isinstance(group["buckets"], str) else "custom"
        group["bucket_names"], group["bucket_of"] = list(found.bucket_names), list(found.bucket_of)
        self._groups.append(Group(group, first))
        self._groups[-1].check()
        self.param_groups.append(group)
        self._pool = None
        if self._recorder is not None:
            self._recorder.widen(len(found.bucket_names))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a K-β or an Adam state; scalars keep their dtype, whatever the parameters' dtype."""
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
        """Give scalars and moments the dtypes that torch has not, and scalars their vectors."""
        for own, saved in zip(self._groups, loaded["param_groups"], strict=True):
            own.check()
            group = own.group
            for i, p in zip(saved["params"], group["params"], strict=True):
                for name, value in loaded["state"].get(i, {}).items():
                    dtype = options.loaded_dtype(name, value, group)
                    if dtype is not None:
                        self.state[p][name] = torch.as_tensor(value).detach().to(p.device, dtype, copy=True)
            own.pack(self.state, [], saved["betas"][1])
            own.read_taken()

    @property
    def bucket_names(self) -> list[str]:
        """Names of all buckets; one that several groups use has its group's `name`, or its number, in front."""
        count = Counter(name for group in self.param_groups for name in group["bucket_names"])
        names = []
        for i, group in enumerate(self.param_groups):
            prefix = group.get("name", f"group{i}")
            names += [name if count[name] == 1 else f"{prefix}.{name}" for name in group["bucket_names"]]
        return unique_names(names)

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
            return [routes.gather(own, self.state)[0] for own in self._groups]

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
                self._move([routes.gather(own, self.state)[1] for own in self._groups])
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
            self._recorder = Recorder(self.param_groups, most_steps(self.state))
        if self._pool is None or self._pool.process_group is not self.process_group:
            self._pool = Pool(self._groups, self.process_group)
        if all_ranks and not self._pool.exchanged:
            self._pool.exchange()
            for own in self._groups:
                own.forget_members()  # sizes of parameters may be known only now

    # NOTE: torch.compile runs `_init_group` as plain Python while it traces `step`, and hands the lists that it filled
    # to the graph; so all lazy set-up belongs there, and its arguments are a group, constants and empty lists.
    def _init_group(
        self,
        group: dict[str, Any],
        number: int,
        params: list[Tensor],
        grads: list[Tensor],
        m: list[Tensor],
        v: list[Tensor],
        v_max: list[Tensor],
        scalars: list[Any],
        members: list[Any],
        stacked: list[Tensor],
        outlines: list[Any],
    ) -> None:
        self._check(all_ranks=True)
        own = self._groups[number]
        collected = own.collect(self.state)
        for filled, entries in zip((params, grads, m, v, v_max), collected.tensors, strict=True):
            filled.extend(entries)
        scalars.extend(collected.scalars)
        members.extend(collected.members)
        if own.hyper.basis is not None:
            kept, rest = eigenbasis.stacked(own, collected, self.state).flat()
            stacked.extend(kept)
            outlines.extend(rest)

    def _traced(self, number: int, group: dict[str, Any]) -> ListStep:
        """The step of a group as torch.compile sees it."""
        tensors = Tensors([], [], [], [], [])
        scalars: list[Any] = []
        members: list[Any] = []
        stacked: list[Tensor] = []
        outlines: list[Any] = []
        self._init_group(group, number, *tensors, scalars, members, stacked, outlines)
        own, collected = self._groups[number], Collected(tensors, rule.State(*scalars), Members(*members))
        step = ListStep(own, collected)
        if stacked:
            step = eigenbasis.EigenStep(own, collected, Stacked.unflattened(stacked, outlines))
        step.check()
        return step

    def _move(self, steps: Sequence[Step]) -> None:
        """Measure, pool and look; then move everything."""
        for step in steps:
            step.measure()
        pool = self._pool
        if pool.active:
            pool.add(steps)
        if any(group["nonfinite"] == "raise" for group in self.param_groups):
            # Every norm is looked at before the first parameter moves.
            looked_at = [step.first_bad() for step in steps if step.hyper.nonfinite == "raise"]
            bad = [name for name in looked_at if name is not None]
            first = pool.agree_on(bad[0] if bad else None)
            if first is not None:
                raise rule.NonFiniteGradient(first)
        if self._recorder is None:
            for step in steps:
                step.apply()
        else:
            rows = self._recorder.begin([len(own.bucket_names) for own in self._groups])
            for step, row in zip(steps, rows, strict=True):
                step.apply(row)
            self._recorder.end()
        if pool.dtensors and not torch.compiler.is_compiling():  # autograd saw their local tensors change, not them
            torch.autograd.graph.increment_version([p for p in pool.dtensors if p.grad is not None])
