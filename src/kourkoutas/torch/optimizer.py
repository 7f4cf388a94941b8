"""The optimizer class: checks, state, and the scalars of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.optim.optimizer import (
    Optimizer,
    ParamsT,
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

from kourkoutas import rule
from kourkoutas.buckets import check_buckets, partition
from kourkoutas.rule import Buckets, Hyper, NonFiniteGradient
from kourkoutas.torch import folded, general, host, native
from kourkoutas.torch.update import LOW_PRECISION
from kourkoutas.trace import WINDOW, Trace

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_BUCKET_STATE = ("norm_ema", "skipped")
_SCALAR_STATE = ("step", "log_beta2", *_BUCKET_STATE)
_OPTIONS = itemgetter(*rule.HYPER_NAMES, "maximize", "foreach", "fused", "capturable", "diagnostics", "state_dtype")


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
        warmup_steps, nonfinite: see :class:`kourkoutas.Hyper`.
      weight_decay: decoupled weight decay λ, as in AdamW.
      buckets: what shares a β2: "parameter", "module" (needs named parameters), "shape", "global" or a callable
        `f(name, tensor)`. Buckets never reach across param groups.
      diagnostics: record sun and β2 of every bucket at every step; read them with :meth:`pull`.
      maximize: maximize the objective.
      state_dtype: None keeps m, v and v_max in the parameter's dtype. torch.bfloat16 halves the state of float32
        parameters: arithmetic stays float32, and results are rounded stochastically, so that small changes are kept on
        average. torch.float32 gives float32 state to bfloat16 and float16 parameters.
      foreach, fused, capturable: as in `torch.optim.Adam`. By default the fastest that applies: `fused` on the CPU
        (this package's own kernel if it was built, else torch's fused Adam kernel), `foreach` elsewhere.

    Example:
      >>> import torch
      >>> model = torch.nn.Linear(3, 1)
      >>> optimizer = KourkoutasBeta(model.named_parameters(), lr=1e-2)
      >>> model(torch.ones(2, 3)).pow(2).mean().backward()
      >>> optimizer.step()
      >>> optimizer.bucket_names
      ['weight', 'bias']

    NOTE: state. Per parameter, with Adam's names: `step`, `exp_avg` (m), `exp_avg_sq` (v), `max_exp_avg_sq` (v_max, if
    `Hyper.leak` is set), `log_beta2` (Σ log β2, for "exact"). Per bucket, one tensor shared by its members: `norm_ema`
    (r), `skipped` (for nonfinite="skip"). An Adam checkpoint loads: r then starts afresh.

    NOTE: dtypes. m and v have the parameter's dtype, as in Adam, unless `state_dtype` is set; r, Σ log β2 and the norms
    are float32, or float64 for float64 parameters. float16 and bfloat16 parameters are updated in float32 arithmetic
    and rounded once.

    NOTE: where scalars live. On the CPU the coefficients of a step are Python floats. With `capturable=True`, under
    `torch.compile` and on accelerators they stay 0-dim tensors, so that nothing waits for the device and nothing is
    compiled again when β2 or a tensor lr changes. `nonfinite="raise"` must read the norms, and so does wait.

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
        diagnostics: bool = False,
        maximize: bool = False,
        state_dtype: torch.dtype | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
    ) -> None:
        defaults = {k: v for k, v in locals().items() if k not in ("self", "params", "__class__")}
        _check_group(defaults)
        if isinstance(params, Tensor):
            raise TypeError("`params` must be an iterable of tensors or groups; got one tensor: pass [tensor]")
        self._reset()
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset()
        self._tie_buckets()

    def _reset(self) -> None:
        """What is derived from the state and the groups, and not saved."""
        self._hypers: dict[int, tuple[tuple[Any, ...], Hyper, bytes | None, folded.Folded | None]] = {}
        self._plans: dict[int, Any] = {}
        self._scalars: dict[int, host.Scalars] = {}
        self._shared: dict[tuple[int, int], dict[str, Tensor]] = {}
        self._ring: Tensor | None = None
        self._rows: Tensor | None = None

    def _tie_buckets(self) -> None:
        """Make the members of each bucket share one tensor per bucket statistic, the first member's."""
        for i, group in enumerate(self.param_groups):
            for p, b in zip(group["params"], group.get("bucket_index", ()), strict=False):
                if p in self.state:
                    shared = self._shared.setdefault((i, b), {})
                    for name in _BUCKET_STATE:
                        if name in self.state[p]:
                            self.state[p][name] = shared.setdefault(name, self.state[p][name])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; every check is made before anything changes."""
        if not isinstance(param_group, dict) or "params" not in param_group:
            raise TypeError(f"`param_group` must be a dict with the key 'params'; got {param_group!r}")
        options = {**self.defaults, **{k: v for k, v in param_group.items() if k != "params"}}
        _check_group(options)
        entries = _entries(param_group["params"])
        names, tensors = _named(entries, sum(len(g["params"]) for g in self.param_groups))
        if options["buckets"] == "module" and not any(isinstance(e, tuple) for e in entries):
            raise ValueError(
                "`buckets` is 'module' but the parameters have no names: pass model.named_parameters(), "
                "or, where a tool dropped the names, buckets=kourkoutas.buckets.by_module(model)"
            )
        parts = partition(options["buckets"], names, tensors)
        super().add_param_group(
            {
                **param_group,
                "params": entries,
                # A function cannot be saved, but its answers can: from here on `bucket_index` is what counts.
                "buckets": options["buckets"] if isinstance(options["buckets"], str) else "custom",
                "bucket_names": list(parts.names),
                "bucket_index": list(parts.index),
            }
        )
        self._ring = None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a K-β or an Adam state; scalars keep their dtype, whatever the parameters' dtype."""
        before = [{k: v for k, v in g.items() if k != "params"} for g in self.param_groups]
        super().load_state_dict(state_dict)
        for group, old in zip(self.param_groups, before, strict=True):
            for key, value in old.items():
                group.setdefault(key, value)
        saved = [i for g in state_dict["param_groups"] for i in g["params"]]
        params = [(p, g["state_dtype"]) for g in self.param_groups for p in g["params"]]
        for i, (p, dtype) in zip(saved, params, strict=True):
            for name in _MOMENTS if dtype is not None else ():
                if name in state_dict["state"].get(i, {}):
                    value = state_dict["state"][i][name].detach()
                    self.state[p][name] = value.to(p.device, dtype, copy=True)
            for name in _SCALAR_STATE:
                if name in state_dict["state"].get(i, {}):
                    value = torch.as_tensor(state_dict["state"][i][name])
                    wide = (
                        value if name in ("step", "skipped") else value.to(torch.promote_types(value.dtype, _stat(p)))
                    )
                    self.state[p][name] = wide.detach().to(p.device, copy=True)
        self._reset()
        self._tie_buckets()

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
        if self._ring is not None and self._rows is not None:
            trace.pull(self._ring.cpu().numpy(), int(self._rows))

    def _hyper(self, number: int, group: dict[str, Any]) -> Hyper:
        """The group's checked hyper-parameters, built again only when an entry of the group has changed."""
        key = _OPTIONS(group)
        cached = self._hypers.get(number)
        if cached is None or cached[0] != key:
            hyper = Hyper.pick(group)
            elsewhere = group["foreach"] or group["fused"] is False or group["capturable"]
            packed = None if elsewhere else native.pack(hyper, group["maximize"], group["state_dtype"])
            work = folded.Folded() if folded.suits(hyper, group) else None
            cached = self._hypers[number] = (key, hyper, packed, work)
        return cached[1]

    # NOTE: torch.compile runs `_init_group` as plain Python while it traces `step`, and hands the lists that it filled
    # to the graph; so all lazy set-up belongs here, and its arguments are a group, constants and empty lists.
    def _init_group(
        self,
        group: dict[str, Any],
        number: int,
        params: list[Tensor],
        grads: list[Tensor],
        exp_avgs: list[Tensor],
        exp_avg_sqs: list[Tensor],
        max_exp_avg_sqs: list[Tensor],
        steps: list[Tensor],
        log_beta2s: list[Tensor],
        norm_emas: list[Tensor],
        skipped: list[Tensor],
        bucket_of: list[int],
        present: list[int],
        places: list[int],
    ) -> None:
        hyper = self._hyper(number, group)
        if group["diagnostics"] and self._ring is None:
            count = sum(len(g["bucket_names"]) for g in self.param_groups)
            device = group["params"][0].device
            self._ring = torch.full((WINDOW, 2, count), torch.nan, dtype=torch.float32, device=device)
            self._rows = torch.zeros((), dtype=torch.int64, device=self._ring.device)
        for i, (p, b) in enumerate(zip(group["params"], group["bucket_index"], strict=True)):
            if (g := p.grad) is not None:
                params.append(p)
                grads.append(g)
                bucket_of.append(b)
                places.append(i)
        for g in grads:
            if g.layout is not torch.strided:
                raise RuntimeError(
                    f"KourkoutasBeta does not support sparse gradients; got layout {g.layout}: make the layer dense "
                    "(sparse=False) or give its parameters to torch.optim.SparseAdam"
                )
        exact, skip, leak = hyper.bias_correction == "exact", hyper.nonfinite == "skip", hyper.leak is not None
        states = [self.state[p] for p in params]
        for p, b, state in zip(params, bucket_of, states, strict=True):
            if "norm_ema" not in state:
                self._init_state(p, (number, b), group)
            if leak and "max_exp_avg_sq" not in state:
                state["max_exp_avg_sq"] = _zeros(p, group["state_dtype"])
            if exact and "log_beta2" not in state:
                state["log_beta2"] = torch.zeros((), dtype=_stat(p), device=p.device)
            if skip and "skipped" not in state:
                self._shared_state(p, (number, b), "skipped", torch.int64)
        exp_avgs += [state["exp_avg"] for state in states]
        exp_avg_sqs += [state["exp_avg_sq"] for state in states]
        steps += [state["step"] for state in states]
        if leak:
            max_exp_avg_sqs += [state["max_exp_avg_sq"] for state in states]
        if exact:
            log_beta2s += [state["log_beta2"] for state in states]
        # One member speaks for its bucket.
        leaders = dict(zip(reversed(bucket_of), reversed(states), strict=True))
        present += dict.fromkeys(bucket_of)
        norm_emas += [leaders[b]["norm_ema"] for b in present]
        if skip:
            skipped += [leaders[b]["skipped"] for b in present]
        if len(present) < len(params):
            place = {b: i for i, b in enumerate(present)}
            bucket_of[:] = [place[b] for b in bucket_of]

    def _init_state(self, p: Tensor, bucket: tuple[int, int], group: dict[str, Any]) -> None:
        state = self.state[p]
        if group["fused"] and not _fusable(p):
            raise RuntimeError(
                f"`fused=True` needs floating-point parameters on the CPU; got {p.dtype} on {p.device}: "
                "use foreach=True"
            )
        if group["state_dtype"] is not None and p.dtype not in (torch.float32, *LOW_PRECISION):
            raise RuntimeError(
                f"`state_dtype` needs float32, bfloat16 or float16 parameters; got {p.dtype}: "
                "put this parameter in a group with state_dtype=None"
            )
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = _zeros(p, group["state_dtype"])
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
        self._shared_state(p, bucket, "norm_ema", _stat(p))

    def _shared_state(self, p: Tensor, bucket: tuple[int, int], name: str, dtype: torch.dtype) -> Tensor:
        """The bucket's tensor of that name, entered into the state of `p`."""
        shared = self._shared.setdefault(bucket, {})
        if name not in shared:
            shared[name] = torch.zeros((), dtype=dtype, device=p.device)
        self.state[p][name] = shared[name]
        return shared[name]

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Perform one optimization step; `closure` re-evaluates the model and returns the loss."""
        return self._watched_step(closure) if self._watched() else self._plain_step(closure)

    # NOTE: torch would wrap `step` to run hooks and tell the profiler, which costs a small model as much as the step.
    # `hooked` says that this is taken care of: the wrapper is gone through when somebody watches.
    step.hooked = True  # type: ignore[attr-defined]

    def _watched(self) -> bool:
        return bool(
            profiler._is_profiler_enabled
            or self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
        )

    def _plain_step(self, closure: Callable[[], float] | None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._native_step():
            with torch.no_grad():
                if not self._folded_step():
                    self._step()
        return loss

    _watched_step = Optimizer.profile_hook_step(_plain_step)

    def _native_step(self) -> bool:
        """The step through the C kernel; False, with nothing changed, if it must go another way."""
        kernel = native.kernel
        if kernel is None or torch.compiler.is_compiling():
            return False
        place = 0
        plans: list[Any] = []
        raises = False
        for number, group in enumerate(self.param_groups):
            hyper = self._hyper(number, group)
            packed = self._hypers[number][2]
            if packed is None or (group["diagnostics"] and self._ring is None):
                return False
            plan = self._plans.get(number)
            if plan is None:
                plan = self._plans[number] = kernel.new_plan()
            buckets = len(group["bucket_names"])
            place = kernel.gather(plan, packed, group["params"], group["bucket_index"], buckets, self.state, place)
            if place < 0:
                for earlier in plans:
                    kernel.release(earlier)
                return False
            plans.append(plan)
            raises |= hyper.nonfinite == "raise"

        threads = torch.get_num_threads()
        for number, plan in enumerate(plans) if raises else ():
            if self._hypers[number][1].nonfinite == "raise":
                bad = kernel.norms(plan, threads)
                if bad >= 0:
                    for gathered in plans:
                        kernel.release(gathered)
                    raise NonFiniteGradient(self.param_groups[number]["bucket_names"][bad])

        first = 0
        for plan, group in zip(plans, self.param_groups, strict=True):
            written = kernel.apply(plan, float(group["lr"]), threads, self._ring, self._rows, first)
            torch.autograd.graph.increment_version(written)
            first += len(group["bucket_names"])
        return True

    def _folded_step(self) -> bool:
        """The usual step through torch's fused Adam kernel; False, with nothing changed, if it must go another way."""
        if torch.compiler.is_compiling():
            return False
        works = []
        for number, group in enumerate(self.param_groups):
            hyper = self._hyper(number, group)
            work = self._hypers[number][3]
            gathered = work.gather(group, self.state) if work is not None and group["params"] else None
            if work is None or gathered is None:
                return False
            works.append((work, gathered, hyper, float(group["lr"]), group["maximize"]))
        for work, *arguments in works:
            work.apply(*arguments)
        return True

    def _step(self) -> None:
        gathered = []
        for number, group in enumerate(self.param_groups):
            work = general.Work([], [], [], [], [], [], [], [], [], [], [], [])
            self._init_group(group, number, *work)
            if work.params:
                gathered.append((number, work))
        # The first step goes the native way as soon as its state exists.
        if self._native_step():
            return
        works = []
        compiling = torch.compiler.is_compiling()
        for number, work in gathered:
            scalars = None
            if not (compiling or self.param_groups[number]["capturable"]):
                scalars = self._scalars.get(number) or self._scalars.setdefault(number, host.Scalars())
                if not scalars.look(work.bucket_of, work.norm_emas, work.steps, work.log_beta2s):
                    scalars = None
            norm = (
                general.pooled_norms(work)
                if scalars is None
                else scalars.pool([general.square_sum(g).item() for g in work.grads])
            )
            works.append((number, work, scalars, norm))

        # Every norm is looked at before the first parameter moves.
        for number, work, _, norm in works:
            if self._hypers[number][1].nonfinite == "raise":
                fine = torch.isfinite(torch.as_tensor(norm)).view(-1)
                if not bool(fine.all()):
                    bad = work.present[int((~fine).nonzero()[0])]
                    raise NonFiniteGradient(self.param_groups[number]["bucket_names"][bad])

        stats: list[Tensor | None] = []
        traced = self._ring is not None
        for number, work, scalars, norm in works:
            group, hyper = self.param_groups[number], self._hypers[number][1]
            if scalars is None:
                stats.append(general.on_device(group, hyper, work, norm))
            else:
                stats.append(general.on_host(group, hyper, work, scalars, norm, traced))
        if self._ring is not None and self._rows is not None:
            row = torch.full_like(self._ring[0], torch.nan)
            for (number, work, *_), stat in zip(works, stats, strict=True):
                offset = sum(len(g["bucket_names"]) for g in self.param_groups[:number])
                if stat is not None:
                    row[:, torch.tensor(work.present, device=row.device) + offset] = stat.to(row)
            self._ring.index_copy_(0, (self._rows % WINDOW).view(1), row[None])
            self._rows += 1


def _check_group(options: dict[str, Any]) -> None:
    rule.check_learning_rate(options["lr"])
    hyper = Hyper.pick(options)
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
    lr = options["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"`lr` must be a float or a tensor of one element; got shape {tuple(lr.shape)}")


def _entries(params: Any) -> list[Any]:
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, (set, frozenset)):
        raise TypeError("`params` must be ordered; got a set, whose order changes from run to run: pass a list")
    if not isinstance(params, Iterable) or isinstance(params, (str, bytes)):
        raise TypeError(f"`params` must be tensors or (name, tensor) pairs; got {params!r}")
    return list(params)


def _named(entries: list[Any], first: int) -> tuple[list[str], list[Tensor]]:
    names: list[str] = []
    tensors: list[Tensor] = []
    for i, entry in enumerate(entries):
        name, tensor = entry if isinstance(entry, tuple) and len(entry) == 2 else (f"param_{first + i}", entry)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"`params` must be tensors or (name, tensor) pairs; got {tensor!r} at place {i}")
        if any(tensor is other for other in tensors):
            raise ValueError(f"`params` holds parameter {name!r} twice: pass each parameter once")
        names.append(name)
        tensors.append(tensor)
    return names, tensors


def _stat(p: Tensor) -> torch.dtype:
    """The dtype of norms and moving averages: float64 for float64 parameters, else float32."""
    return torch.float64 if p.dtype in (torch.float64, torch.complex128) else torch.float32


def _zeros(p: Tensor, dtype: torch.dtype | None) -> Tensor:
    return torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)


def _fusable(p: Tensor) -> bool:
    return p.device.type == "cpu" and (p.is_floating_point() or p.is_complex())
