"""The optimizer class: its state, and the stages of a step."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import Any, overload

import numpy as np
import torch
from torch import Tensor
from torch.autograd import profiler
from torch.optim.optimizer import Optimizer, ParamsT
from torch.optim.optimizer import register_optimizer_step_post_hook as _register_post_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook as _register_pre_hook

from kourkoutas import _native
from kourkoutas.buckets import partition, unique_names
from kourkoutas.rule import Buckets, Hyper, NonFiniteGradient
from kourkoutas.torch import host, native, pooling, routes
from kourkoutas.torch.lists import DeviceStep
from kourkoutas.torch.options import (
    OPTIONS,
    check_group,
    check_parameter,
    check_tensors,
    entries_of,
    join_betas,
    make_options,
    named,
)
from kourkoutas.torch.parts import same_layout
from kourkoutas.torch.pooling import Pool, check_process_group
from kourkoutas.torch.recorder import Recorder
from kourkoutas.torch.state import BUCKET_STATE, MOMENTS, STATE, Shared, fill, log_beta2_of_adam, recast, statistic, tie
from kourkoutas.torch.work import Options, Work
from kourkoutas.trace import Trace

# The dictionaries of hooks for all optimizers, from handles of hooks that are removed at once.
_HANDLES = [register(lambda *_: None) for register in (_register_pre_hook, _register_post_hook)]
_GLOBAL_HOOKS: list[Any] = [handle.hooks_dict_ref() for handle in _HANDLES]
for _handle in _HANDLES:
    _handle.remove()


class KourkoutasBeta(Optimizer):
    r"""Adam whose second-moment memory shortens when a bucket's gradient norm spikes.

    .. math::
       \begin{aligned}
          &\textbf{for each bucket } \ell \textbf{ with gradients:} \\
          &\quad n \leftarrow \sqrt{\textstyle\sum_{p \in \ell} \lVert g_t(p) \rVert^2}, \quad
            r \leftarrow \alpha r + (1-\alpha) n                                                  \\
          &\quad \mathrm{sun} \leftarrow \frac{n}{n + r + \mathrm{tiny\_spike}}, \quad
            \beta_2 \leftarrow \beta_{2,max} - (\beta_{2,max} - \beta_{2,min})\,\mathrm{sun}
            \quad (\tfrac12(\beta_{2,min}+\beta_{2,max}) \text{ in warmup})                        \\
          &\quad \textbf{for each } \theta \in \ell:                                               \\
          &\qquad m \leftarrow \beta_1 m + (1-\beta_1) g, \quad
            v \leftarrow \beta_2 v + (1-\beta_2) g^2                                               \\
          &\qquad \hat v \leftarrow v_{max} \leftarrow \max(\delta v_{max}, v)
            \text{ if a } v_{max} \text{ is kept, else } \hat v \leftarrow v                       \\
          &\qquad \Delta \leftarrow \frac{\gamma}{a_1}
            \frac{m}{\sqrt{\hat v / b_2} + \epsilon\, [+ \mathrm{tiny\_denom} \max(\langle|\theta|\rangle, 1)]},
            \text{ clipped to } \pm\gamma\,\mathrm{max\_ratio}                                     \\
          &\qquad \theta \leftarrow (1 - \gamma\lambda)\,\theta - \Delta
       \end{aligned}

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
      foreach, fused, capturable: as in `torch.optim.Adam`. By default the fastest that applies: `fused` on the CPU
        (this package's own kernel if it was built, else torch's fused Adam kernel), `foreach` elsewhere. `fused=True`
        on a GPU is a Triton kernel.
      process_group: over whom buckets are pooled where tensors carry no mesh. A torch.distributed process group whose
        ranks hold other parts (FSDP1 with use_orig_params=True) or other members (ZeroRedundancyOptimizer, pipeline
        stages) of this rank's buckets; "local" if there are none, as under DistributedDataParallel. None is enough for
        DTensors, and where buckets are single parameters or modules.

    Example:
      >>> import torch
      >>> model = torch.nn.Linear(3, 1)
      >>> optimizer = KourkoutasBeta(model.named_parameters(), lr=1e-2)
      >>> model(torch.ones(2, 3)).pow(2).mean().backward()
      >>> optimizer.step()
      >>> optimizer.bucket_names
      ['weight', 'bias']

    NOTE: β1 and β2_max stand in a group as Adam's `betas`, where schedulers such as OneCycleLR write them. A `beta1` or
    `beta2_max` written into a group later is taken over at the next step.

    NOTE: state. Per parameter, with Adam's names: `step`, `exp_avg` (m), `exp_avg_sq` (v), `max_exp_avg_sq` (v_max, if
    `Hyper.leak` is set), `log_beta2` (Σ log β2, for "exact"). Per bucket, one tensor shared by its members: `norm_ema`
    (r), `skipped` (for nonfinite="skip"). An Adam checkpoint loads: r then starts afresh. AdamW loads this state, too.

    NOTE: sharded parameters. A bucket's norm is that of the whole tensors: DTensors (FSDP2, HSDP, tensor parallel) are
    updated where they lie, after one small all-reduce over each mesh dimension that shards any of them, so all ranks
    must step together. Where it cannot be known what lies on other ranks, `step` raises: see `process_group`.

    NOTE: dtypes. m and v have the parameter's dtype, as in Adam, unless `state_dtype` is set; r, Σ log β2 and the norms
    are float32, or float64 for float64 parameters. float16 and bfloat16 parameters are updated in float32 arithmetic
    and rounded once.

    NOTE: routes. `route()` says which way a step goes, and why; `kourkoutas.torch` has the list. On the CPU the scalars
    of a step are numbers; otherwise they stay on the device, so that nothing waits for it and nothing is compiled again
    when β2, betas or a tensor lr change. `nonfinite="raise"` must read the norms, and so does wait.

    Reference: S. C. Kassinos, "Kourkoutas-β: A Sunspike-Driven Adam Optimizer with Desert Flair".
    """

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
        check_process_group(process_group)
        join_betas(defaults)
        check_group(defaults)
        if isinstance(params, Tensor):
            raise TypeError("`params` must be an iterable of tensors or groups; got one tensor: pass [tensor]")
        self._process_group = process_group
        self._buckets: list[tuple[dict[str, Any], list[str], list[int]]] = []
        self._lock = RLock()  # two threads may step one after the other, but not share working memory
        self._reset()
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for options in (self.defaults, *self.param_groups):
            join_betas(options)
            options.setdefault("lr_warmup", Hyper.lr_warmup)  # version 0.1 had none
        self._process_group = getattr(self, "_process_group", None)  # torch loads a state through here, too
        self._lock = getattr(self, "_lock", None) or RLock()
        self._own_buckets()
        self._reset()
        tie(self._shared, self.state, self.param_groups)

    def _own_buckets(self) -> None:
        """Take the buckets that stand in the groups for this optimizer's own."""
        self._buckets = [(g, g["bucket_names"], g["bucket_index"]) for g in self.param_groups if "bucket_index" in g]

    def _settle(self) -> None:
        """Let groups that somebody has removed, put in another order or added by hand keep their own buckets."""
        owned = {id(group): entries for group, *entries in self._buckets}
        for group in self.param_groups:
            if id(group) in owned:
                group["bucket_names"], group["bucket_index"] = owned[id(group)]
            elif "bucket_index" not in group:
                raise RuntimeError("`param_groups` has a group without buckets: add groups with add_param_group")
        self._own_buckets()
        self._reset()
        tie(self._shared, self.state, self.param_groups)

    def _reset(self) -> None:
        """What is derived from the state and the groups, and not saved."""
        self._options: dict[int, Options] = {}
        self._plans: dict[int, Any] = {}
        self._cells: dict[int, tuple[host.Cells, host.Cells, host.Cells]] = {}
        self._shared: Shared = {}
        self._pool: Pool | None = None
        self._recorder: Recorder | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; every check is made before anything changes."""
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f"`param_group` must be a dict with the key 'params'; got {param_group!r}")
        options = {**self.defaults, **{k: v for k, v in param_group.items() if k != "params"}}
        join_betas(options)
        hyper = check_group(options)
        entries = entries_of(param_group["params"])
        names, tensors = named(entries, sum(len(g["params"]) for g in self.param_groups))
        if options["buckets"] == "module" and not any(isinstance(e, tuple) for e in entries):
            raise ValueError(
                "`buckets` is 'module' but the parameters have no names: pass model.named_parameters(), "
                "or, where a tool dropped the names, buckets=kourkoutas.buckets.by_module(model)"
            )
        parts = partition(options["buckets"], unique_names(names, options["buckets"]), tensors)
        super().add_param_group({**options, "params": entries})  # which warns of a parameter given twice
        group = self.param_groups[-1]
        if len(tensors) < len(entries):
            group["params"] = tensors
            if "param_names" in group:
                group["param_names"] = names
        # A function cannot be saved, but its answers can: from here on `bucket_index` is what counts.
        group["buckets"] = options["buckets"] if isinstance(options["buckets"], str) else "custom"
        group["bucket_names"], group["bucket_index"] = list(parts.names), list(parts.index)
        group["amsgrad"] = hyper.leak is not None  # for an Adam that loads this state
        self._own_buckets()
        self._pool = None
        if self._recorder is not None:
            self._recorder.widen(len(group["bucket_names"]))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a K-β or an Adam state; scalars keep their dtype, whatever the parameters' dtype."""
        before = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        # After the hooks of others that change what is loaded, and before those that change what was.
        read: list[dict[str, Any]] = []
        handles = (
            self.register_load_state_dict_pre_hook(lambda _, loaded: read.append(loaded)),
            self.register_load_state_dict_post_hook(lambda _: self._take_over(read[0], before), prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for handle in handles:
                handle.remove()

    def _take_over(self, state_dict: dict[str, Any], before: list[dict[str, Any]]) -> None:
        """What torch has not loaded as it should be: entries of groups that Adam lacks, and dtypes."""
        adams: list[Any] = []
        for group, old in zip(self.param_groups, before, strict=True):
            adams.append(None if "beta2_min" in group else group["betas"][1])
            if adams[-1] is not None:
                group["betas"] = old["betas"]
            for key, value in old.items():
                group.setdefault(key, value)
            if len(group["bucket_index"]) != len(group["params"]):  # saved by a rank that held other parameters
                group["bucket_names"], group["bucket_index"] = old["bucket_names"], old["bucket_index"]
        self._own_buckets()
        saved = [i for g in state_dict["param_groups"] for i in g["params"]]
        params = [(p, g, beta2) for g, beta2 in zip(self.param_groups, adams, strict=True) for p in g["params"]]
        for i, (p, group, beta2) in zip(saved, params, strict=True):
            for name, value in state_dict["state"].get(i, {}).items():
                own = recast(name, value, p, group["state_dtype"])
                if own is not None:
                    self.state[p][name] = own
            if beta2 is not None and group["bias_correction"] == "exact" and "step" in self.state[p]:
                self.state[p]["log_beta2"] = log_beta2_of_adam(self.state[p]["step"], beta2, p)
        self._reset()
        tie(self._shared, self.state, self.param_groups)

    @property
    def process_group(self) -> Any:
        """Over whom buckets are pooled; it is not saved with the optimizer, and can be set."""
        return self._process_group

    @process_group.setter
    def process_group(self, process_group: Any) -> None:
        check_process_group(process_group)
        self._process_group, self._pool = process_group, None

    @property
    def bucket_names(self) -> list[str]:
        """Names of all buckets; one that several groups use has its group's number behind it."""
        names = [(i, name) for i, group in enumerate(self.param_groups) for name in group["bucket_names"]]
        plain = [name for _, name in names]
        return [name if plain.count(name) == 1 else f"{name}@{i}" for i, name in names]

    def pull(self, trace: Trace) -> None:
        """Move the rows recorded since the last pull into `trace` (needs `diagnostics=True`)."""
        if not any(group["diagnostics"] for group in self.param_groups):
            raise ValueError("nothing is recorded: make the optimizer with diagnostics=True")
        if self._recorder is not None:
            self._recorder.pull(trace)

    def route(self) -> list[routes.Route]:
        """Which way the next step of each group goes, and why; this makes the state that the step would make."""
        reasons: list[routes.Route] = []
        with self._lock:
            self._steps(reasons)
            self._release()
        return reasons

    def _release(self) -> None:
        """Let go of what was gathered for the kernel."""
        for plan in self._plans.values():
            _native.step.release(plan)

    def _check(self, number: int, group: dict[str, Any]) -> Options:
        """The group's checked options, made again only when an entry of the group has changed."""
        if "beta1" in group or "beta2_max" in group:
            join_betas(group)
        if group["bucket_index"] is not self._buckets[number][2]:
            # ZeroRedundancyOptimizer copies the entries of another rank's group, and puts loaded state in place.
            _, group["bucket_names"], group["bucket_index"] = self._buckets[number]
            self._shared.clear()
            tie(self._shared, self.state, self.param_groups)
        key = OPTIONS(group)
        cached = self._options.get(number)
        if cached is None or cached.key != key:
            cached = self._options[number] = make_options(group, key)
            group["amsgrad"] = cached.hyper.leak is not None
        return cached

    def _meet(self) -> Pool:
        """Where parts of parameters and members of buckets are; ranks ask each other once, before the first step."""
        if self._pool is None:
            for number, group in enumerate(self.param_groups):
                self._check(number, group)
            self._pool = Pool(self.param_groups, self._process_group)
        return self._pool

    def _collect(self, number: int, group: dict[str, Any]) -> Work:
        """The tensors of one step; what is missing of the state is made."""
        needed, pool = self._check(number, group).needed, self._meet()
        if group["diagnostics"] and self._recorder is None:
            self._recorder = Recorder(self.param_groups)
        params, index = list(group["params"]), list(group["bucket_index"])
        if len(index) != len(params):
            raise RuntimeError(
                f"a param group has {len(params)} parameters but buckets for {len(index)}: add parameters with "
                "add_param_group, and to take some out make a new optimizer"
            )
        grads: list[Any] = [p.grad for p in params]
        places = [i for i, g in enumerate(grads) if g is not None]
        if len(places) < len(params):
            params, grads, index = ([xs[i] for i in places] for xs in (params, grads, index))
        for g in grads:
            if g.layout is not torch.strided:
                raise RuntimeError(
                    f"KourkoutasBeta does not support sparse gradients; got layout {g.layout}: make the layer dense "
                    "(sparse=False) or give its parameters to torch.optim.SparseAdam"
                )
        states: list[Any] = [self.state.get(p) for p in params]
        try:
            found = {name: [state[name] for state in states] for name in needed}
        except (KeyError, TypeError):
            for p in params:  # every check comes before the first state is made
                check_parameter(p, group)
            if not pool.spans[number]:  # statistics are those that members still hold: a state may have been cleared
                for b in range(len(group["bucket_names"])):
                    self._shared.pop((number, b), None)
                tie(self._shared, self.state, self.param_groups)
            for p, b in zip(params, index, strict=True):
                fill(self.state[p], needed, p, self._shared.setdefault((number, b), {}), group)
            found = {name: [self.state[p][name] for p in params] for name in needed}
        # A gradient on another rank moves the statistics of a bucket that has none here.
        present = list(range(len(group["bucket_names"])) if pool.spans[number] else dict.fromkeys(index))
        bucket_of = list(range(len(index)))
        if present != index:
            place = {b: i for i, b in enumerate(present)}
            bucket_of = [place[b] for b in index]
            for name in [name for name in needed if name in BUCKET_STATE]:  # a bucket's first member speaks
                first = dict(zip(reversed(index), reversed(found[name]), strict=True))
                found[name] = [first[b] if b in first else self._statistic(name, number, b) for b in present]
        parts = pool.parts[number]
        state = [found.get(name, []) for name in STATE]
        work = Work._make(
            [params, grads, *state, bucket_of, present, places, [parts[i] for i in places] if parts else []]
        )
        if parts is not None:
            for name, tensors in zip(MOMENTS, work[2:5], strict=True):
                if not all(same_layout(p, x) for p, x in zip(params, tensors, strict=False)):
                    raise RuntimeError(
                        f"`{name}` in the state does not lie on the ranks as its parameter does: load it with "
                        "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict, which spreads a state"
                    )
        return work

    # NOTE: torch.compile runs `_init_group` as plain Python while it traces `step`, and hands the lists that it filled
    # to the graph; so all lazy set-up belongs there, and its arguments are a group, constants and empty lists.
    def _init_group(self, group: dict[str, Any], number: int, *lists: list[Any]) -> None:
        for i, found in enumerate(self._collect(number, group)):
            lists[i].extend(found)  # type: ignore[arg-type]

    def _statistic(self, name: str, number: int, bucket: int) -> Tensor:
        """A statistic of a bucket of which no member here has a gradient, made if it has none."""
        group = self.param_groups[number]
        p = group["params"][group["bucket_index"].index(bucket)]
        return statistic(self._shared.setdefault((number, bucket), {}), name, p)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Perform one optimization step; `closure` re-evaluates the model and returns the loss."""
        hooks = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks or any(_GLOBAL_HOOKS)
        if hooks or profiler._is_profiler_enabled:
            return self._watched_step() if closure is None else self._watched_step(closure)
        return self._plain_step(closure)

    # NOTE: torch would wrap `step` to run hooks and tell the profiler. That takes 15 µs, twice as long as the step of a
    # small model and a quarter of Adam's. `hooked` says that this is taken care of: by torch's wrapper, if anybody
    # watches.
    step.hooked = True  # type: ignore[attr-defined]

    def _plain_step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.compiler.is_compiling():
            with torch.no_grad():
                self._move([self._gather(number, group, True)[1] for number, group in enumerate(self.param_groups)])
            return loss
        with self._lock:
            try:
                steps = self._steps()
                for step in steps:
                    if type(step) is not native.KernelStep:
                        with torch.set_grad_enabled(False):  # half the time of no_grad
                            self._move(steps)
                        return loss
                self._move(steps)  # the kernel does not need it, and is done as fast
            except BaseException:
                self._release()
                raise
        return loss

    _watched_step = Optimizer.profile_hook_step(_plain_step)

    def _steps(self, reasons: list[routes.Route] | None = None) -> list[Any]:
        """Each group's step with all tensors at hand, None without anything to do; all checks are made here."""
        if len(self._buckets) != len(self.param_groups):
            self._settle()
        self._cursor = 0
        watched, steps = routes.watched(), []
        for number, group in enumerate(self.param_groups):
            if self._buckets[number][0] is not group:
                self._settle()
                return self._steps(reasons)
            route, step = self._gather(number, group, watched)
            steps.append(step)
            if reasons is not None:
                reasons[number:] = [route]
        return steps

    def _move(self, steps: list[Any]) -> None:
        """Measure, pool and look; then move everything."""
        going = [step for step in steps if step is not None]
        for step in going:
            step.measure()
        pool = self._pool
        if pool is not None and pool.active:
            for step, pooled in zip(steps, pool.add(steps, self.param_groups), strict=True):
                if step is not None and pooled is not None:
                    step.take(pooled)
        # Every norm is looked at before the first parameter moves.
        bad_bucket = None
        for step in going:
            norms = step.norms()
            if step.hyper.nonfinite == "raise" and bad_bucket is None:
                bad = np.flatnonzero(~np.isfinite(np.asarray(norms.cpu() if isinstance(norms, Tensor) else norms)))
                bad_bucket = step.group["bucket_names"][step.present[bad[0]]] if bad.size else None
        if pool is not None and pool.given is not None and any(g["nonfinite"] == "raise" for g in self.param_groups):
            bad_bucket = pool.first_of(bad_bucket)
        if bad_bucket is not None:
            raise NonFiniteGradient(bad_bucket)
        if self._recorder is None:
            for step in going:
                step.apply()
        else:
            self._recorder.apply(steps, self.param_groups)
        if pool is not None and pool.dtensors:
            pool.changed()

    def _gather(self, number: int, group: dict[str, Any], watched: bool) -> tuple[routes.Route, Any]:
        """The route of one group, and its step with all tensors at hand: None if there is nothing to do."""
        if watched:
            return routes.TRACED, self._on_lists(routes.TRACED, number, group, self._work(number, group))
        options, pool = self._check(number, group), self._meet()
        found: list[Work] = []

        def work_found() -> Work:
            if not found:
                found.append(self._work(number, group))
            return found[0]

        def kernel_takes() -> bool:
            if native.kernel is None:
                return False
            # The first step finds its state, and the trace, only after they have been made.
            whole = pool.parts[number] is None
            made = not group["diagnostics"] or self._recorder is not None
            if whole and made and self._planned(number, group, options):
                return True
            work = work_found()
            return bool(work.params) and self._planned(number, group, options, None if whole else work)

        def host_takes() -> bool:
            return host.takes(work_found(), options.hyper)

        route = routes.choose(options, group, pool.spans[number], kernel_takes, host_takes)
        if route is routes.KERNEL:
            parts = None if pool.parts[number] is None else found[0]
            return route, native.KernelStep(options, group, self._plans[number], parts)
        return route, self._on_lists(route, number, group, work_found())

    def _on_lists(self, route: routes.Route, number: int, group: dict[str, Any], work: Work) -> Any:
        """The step of any route but the kernel's."""
        if not work.present:
            return None
        if route is not routes.HOST:
            check_tensors(work, same=route is routes.ADAM)
        if route is routes.HOST or (route.on_host and all(p.is_cpu for p in (*work.params, *work.norm_emas))):
            if number not in self._cells:
                self._cells[number] = (host.Cells(), host.Cells(), host.Cells())
            return host.HostStep(self._options[number], group, work, route, self._cells[number])
        return DeviceStep(self._options[number], group, work, route)

    def _work(self, number: int, group: dict[str, Any]) -> Work:
        """The tensors of one step; of those that are spread over ranks, what lies here."""
        if torch.compiler.is_compiling():
            work = Work([], [], [], [], [], [], [], [], [], [], [], [], [])
            self._init_group(group, number, *work)
        else:
            work = self._collect(number, group)
        if work.parts:
            pooling.local(work)
        return work

    def _planned(self, number: int, group: dict[str, Any], options: Options, work: Work | None = None) -> bool:
        """Let the kernel gather the group's tensors; False if it does not take one of them, or state is missing.

        `work` is None, or has the parts of parameters that lie on this rank.
        """
        plan = self._plans.get(number) or self._plans.setdefault(number, native.kernel.new_plan())
        index, buckets = group["bucket_index"], len(group["bucket_names"])
        if work is not None:
            state = {p: self.state[group["params"][i]] for p, i in zip(work.params, work.places, strict=True)}
            return native.plan_parts(plan, options, index, buckets, state, work)
        gather, at = native.kernel.gather, self._cursor
        cursor: int = gather(plan, options.packed, group["params"], index, buckets, self.state, at, None)
        if cursor > at:
            self._cursor = cursor
        return cursor >= 0
