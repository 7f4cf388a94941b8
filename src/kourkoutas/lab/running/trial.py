"""Bring your own training: `kbeta study my_task.py:train --seeds 0-9 --optimizers kbeta,adam95`.

    def train(trial):
        model = make_model(trial.seed)                    # same seed, same data and init for every optimizer
        optimizer = trial.optimizer(model, lr=1e-3)       # the arm's optimizer, for the framework of `model`
        for step in range(1000):
            loss = ...
            trial.log(step, loss=loss)
        return validation_loss                            # the endpoint; lower is better

NOTE: the text of the file is part of a run's identity, so that results of edited code are never mixed with older ones;
files that it imports are not.

NOTE: a run is started anew after a kill; `trial.folder` is the place for checkpoints of your own.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
import sys
import time
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from pathlib import Path
from typing import Any

import numpy as np

from kourkoutas.lab.errors import StudyError, argument
from kourkoutas.lab.optimizers import own, recipes
from kourkoutas.lab.optimizers.recipes import Recipe
from kourkoutas.lab.results import files
from kourkoutas.lab.results.export import names_in
from kourkoutas.lab.specs.spec import LARGEST, OWN_SETTINGS, Code, Report, RunResult, RunSpec
from kourkoutas.trace import KEYS, WINDOW, Trace

CURVE_POINTS = 2000


class Settings(UserDict[str, Any]):
    """What was given with `--set`, `--grid` and `--tune`, and which of it was `read`."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.read: set[str] = set()
        super().__init__(values)

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        self.read.add(name)
        return value

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name):
            self.read.add(str(name))  # asking for it is a way of depending on it
            return True
        return False


class Trial:
    """What a user's training function gets.

    Attributes:
      seed: of this run; use it for data, init and order alike.
      arm: the optimizer's label, e.g. "kbeta" or "kbeta[alpha=0.9]".
      settings: what was given with `--set`, `--grid` and `--tune`.
      folder: the run's folder, for files of your own.
    """

    def __init__(self, spec: RunSpec, folder: Path, on_progress: Report | None = None) -> None:
        self.seed = spec.seed
        self.used: set[str] = set()
        self._arm = spec.optimizer
        self.settings = Settings({n: value for n, value in spec.settings.items() if n not in OWN_SETTINGS})
        self.folder = folder
        self.rows: list[dict[str, float]] = []
        self.described: dict[str, Any] = {}
        self._options, self._origin = spec.options, spec.origin
        self._on_progress = on_progress
        self._traced: Any = None
        self._trace: Trace | None = None
        self._pulled = 0
        self._file: files.Lines | None = None
        self._last: tuple[int, float] | None = None
        self._paces: list[float] = []
        # A run of a user's function always starts at its beginning, so rows of an earlier attempt are not its own.
        files.remove(folder / "metrics.jsonl")

    @property
    def arm(self) -> str:
        self.used.add("arm")
        return self._arm

    def optimizer(self, params_or_model: Any, lr: Any = 1e-3) -> Any:
        """The arm's optimizer for the framework that `params_or_model` belongs to.

        A torch module, parameters, named parameters or param groups give a `torch.optim.Optimizer`; a pytree of JAX
        arrays an Optax transformation, whose `init` and `update` you call; an MLX module or tree an
        `mlx.optimizers.Optimizer`.
        `lr` is a number, or for JAX and MLX also a function of the steps taken. An `lr` of the study (--set, --grid or
        --tune lr=...) takes its place, unless the function has read `trial.settings["lr"]` and made its own from that.
        """
        framework, target = framework_of(params_or_model)
        in_groups = framework == "torch" and all(isinstance(item, Mapping) and "lr" in item for item in target)
        lr = self._own_lr(lr, in_groups)
        self.used.add("optimizer")
        recipe = recipes.recipe(self._arm, {}, self._options, self._origin)
        recipes.check(recipe, framework)
        self.described = {"framework": framework, "optimizer": recipe.described}
        if not callable(lr):
            self.described["lr"] = float(lr)
        optimizer = _BUILD[framework](recipe, target, lr)
        self._traced = optimizer if recipe.family == "kbeta" and hasattr(optimizer, "pull") else None
        return optimizer

    def _own_lr(self, lr: Any, in_groups: bool) -> Any:
        """`lr`, or the study's in its place, which replaces neither a schedule nor rates that stand `in_groups`."""
        if "lr" in self.settings.read or "lr" not in self.settings:
            return lr
        own = self.settings["lr"]
        if in_groups:
            raise TypeError(
                f"the study sets lr={own}, but every param group brings its own: make them from trial.settings['lr']"
            )
        if callable(lr):
            raise TypeError(
                f"the study sets lr={own}, but trial.optimizer was given a schedule, which has no one number to "
                "replace: make the schedule from trial.settings['lr']"
            )
        return own

    def log(self, step: int, **metrics: Any) -> None:
        """Record numbers (Python, NumPy or 0-dim arrays of a framework) at a step."""
        if files.CHECK in metrics:
            raise ValueError(
                f"trial.log({files.CHECK}=...): {files.CHECK!r} is taken by kbeta itself; use another name"
            )
        row = {name: _number(name, value) for name, value in metrics.items()}
        self._pace(int(step))
        self.rows.append({"step": int(step), **row})
        if self._file is None:
            self._file = files.Lines(self.folder / "metrics.jsonl")
        self._file.write({"step": int(step), **row})
        if int(step) - self._pulled >= WINDOW // 2:
            self._pulled = int(step)
            self._pull()
        if self._on_progress is not None:
            self._on_progress(int(step), None, row.get("loss", next(iter(row.values()), None)))

    def _pace(self, step: int) -> None:
        now = time.perf_counter()
        if self._last is not None and step > self._last[0]:
            self._paces.append((now - self._last[1]) / (step - self._last[0]))
        if self._last is None or step > self._last[0]:
            self._last = (step, now)

    def times(self) -> dict[str, float]:
        """The median pace between logged steps, which holds whatever the function does at each of them."""
        return {"per_step": statistics.median(self._paces)} if self._paces else {}

    def updates(self) -> int | None:
        """How many K-β has made, by its own count; None of others, and where the user holds the state."""
        return int(self._trace.steps[-1]) if self._trace is not None and self._trace.steps.size else None

    def close(self) -> None:
        """Write what is still to be written."""
        if self._file is not None:
            self._file.close()
        self._pull()
        if self._trace is not None and self._trace.steps.size:
            every = -(-self._trace.steps.size // CURVE_POINTS)
            rows = {key: getattr(self._trace, key)[::every] for key in ("steps", *KEYS)}
            arrays = {"names": np.array(self._trace.names), **rows}
            files.write_arrays(self.folder / "trace.npz", arrays, compress=True)

    def _pull(self) -> None:
        """Take over sun and β2 from the optimizer's ring; Optax keeps them in a state that only the user holds."""
        if self._traced is None or not self._traced.bucket_names:
            return
        if self._trace is None:
            self._trace = Trace(self._traced.bucket_names)
        if tuple(self._traced.bucket_names) == self._trace.names:  # a group added on the way ends the trace
            self._traced.pull(self._trace)


def run(spec: RunSpec, folder: Path, code: Code, *, on_progress: Report | None = None) -> RunResult:
    """One run of the user's function."""
    function = load(code)
    start = time.perf_counter()  # of the training: the file's imports are paid once per worker, not per run
    trial = Trial(spec, folder, on_progress)
    try:
        returned = function(trial)
    finally:
        trial.close()
    if returned is not None:
        trial.used.add("returned")
    endpoint = _endpoint(code, returned, trial.rows)
    finite = abs(endpoint) <= LARGEST
    if finite:  # else it may have ended before it came to them
        _check_read(code, trial)
    return RunResult(
        status="ok" if finite else "diverged",
        endpoint=endpoint if finite else None,
        metrics=_last(trial.rows),
        curve=_curve(trial.rows),
        settings={**trial.settings, **trial.described, "used": sorted(trial.used)},
        seconds=time.perf_counter() - start,
        times=trial.times(),
        updates=trial.updates(),
    )


def _check_read(code: Code, trial: Trial) -> None:
    unread = [name for name in trial.settings if name not in trial.settings.read]
    if unread:
        name = unread[0]
        places = ", ".join(f"trial.settings[{one!r}]" for one in unread)
        also = ", nor does it make its optimizer with trial.optimizer" if name == "lr" else ""
        raise StudyError(
            f"{code.function}() never reads {places}{also}, so the setting would change nothing: read it there, or "
            f"leave {name} out of {argument('settings')}, {argument('grid')} and {argument('tune')}"
        )


def load(code: Code) -> Callable[[Trial], Any]:
    """The function from its file, which must still be the one that was planned.

    NOTE: the module is loaded once per worker process.
    """
    path = Path(code.file)
    if hashlib.sha256(path.read_bytes()).hexdigest() != code.sha256:
        raise RuntimeError(
            f"{path} changed while the study was running; this run was not made: its result would belong to other "
            f"code. Use a new {argument('out')} for the new code, or restore the file and use "
            f"{argument('retry_failed')}"
        )
    module = own.load_file(path)
    function = getattr(module, code.function, None)
    if not callable(function):
        names = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        raise StudyError(f"{path} has no function {code.function!r}; it has {', '.join(names) or 'none'}")
    return function  # type: ignore[no-any-return]


def framework_of(params_or_model: Any) -> tuple[str, Any]:
    """("torch" | "jax" | "mlx", what to build from) of a model, its parameters, or a tree of arrays.

    Only frameworks that the caller has imported are looked at: an object of one that was not cannot exist.
    """
    torch, mlx, jax = (sys.modules.get(name) for name in ("torch", "mlx.core", "jax"))
    given = params_or_model
    if torch is not None and isinstance(given, torch.nn.Module):
        given = given.named_parameters()
    if isinstance(given, Iterator | ValuesView):
        given = list(given)
    leaves = list(_leaves(given))
    # A param group may hold its parameters as a generator.
    is_torch = torch is not None and any(isinstance(leaf, torch.Tensor | Iterator) for leaf in leaves)
    if is_torch and not isinstance(given, Mapping):
        return "torch", [_listed(one) for one in (given if isinstance(given, list | tuple) else [given])]
    if mlx is not None and any(isinstance(leaf, mlx.array) for leaf in leaves):
        return "mlx", given
    if jax is not None and any(isinstance(leaf, jax.Array) for leaf in jax.tree_util.tree_leaves(given)):
        return "jax", given
    raise TypeError(
        "trial.optimizer takes a torch module, its parameters or param groups, a pytree of JAX arrays, or an MLX "
        f"module; got {type(params_or_model).__name__}"
    )


def _listed(item: Any) -> Any:
    """A param group with a list of its parameters; anything else unchanged."""
    if not isinstance(item, Mapping):
        return item
    params = item["params"]
    return {**item, "params": [params] if hasattr(params, "shape") else list(params)}


def _leaves(tree: Any) -> Iterable[Any]:
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for item in tree:
            yield from _leaves(item)
    else:
        yield tree


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"trial.log({name}=...) takes a number; got {type(value).__name__} {value!r}") from None


def _endpoint(code: Code, returned: Any, rows: list[dict[str, float]]) -> float:
    """What `--endpoint` names, else the returned number, else the last logged `loss`."""
    last = _last(rows)
    if code.endpoint is not None:
        if code.endpoint in last:
            return last[code.endpoint]
        raise ValueError(
            f"{argument('endpoint')} {code.endpoint} was never logged; logged were: {', '.join(last) or 'nothing'}: "
            f"call trial.log(step, {code.endpoint}=...)"
        )
    if returned is not None:
        try:
            return float(returned)
        except (TypeError, ValueError):
            raise TypeError(f"{code.function} must return a number or None; got {type(returned).__name__}") from None
    if "loss" in last:
        return last["loss"]
    raise ValueError(
        f"{code.function} returned nothing and logged no `loss`: return the endpoint, log a loss, or name a logged "
        f"metric with {argument('endpoint')}"
    )


def _last(rows: list[dict[str, float]]) -> dict[str, float]:
    last: dict[str, float] = {}
    for row in rows:
        last.update(row)
    last.pop("step", None)
    return last


def _curve(rows: list[dict[str, float]]) -> dict[str, list[float]]:
    """Columns of equal length, NaN where a metric was not logged; at most CURVE_POINTS rows, the last among them."""
    if not rows:
        return {}
    every = -(-len(rows) // CURVE_POINTS)
    kept = rows[::-every][::-1]
    return {name: [float(row.get(name, math.nan)) for row in kept] for name in names_in(rows)}


def _torch(recipe: Recipe, params: Sequence[Any], lr: Any) -> Any:
    count = itertools.count()

    def pairs(items: Sequence[Any]) -> list[tuple[str, Any]]:
        return [item if isinstance(item, tuple) else (str(next(count)), item) for item in items]

    named: list[Any] = []
    for item in params:
        named += [{**item, "params": pairs(item["params"])}] if isinstance(item, Mapping) else pairs([item])
    optimizer = recipe.torch(named, diagnostics=True, lr=lr)
    if recipe.warm is not None or recipe.lr_scale != 1:
        _scale_torch_steps(optimizer, recipe)
    return optimizer


def _scale_torch_steps(optimizer: Any, recipe: Recipe) -> None:
    """Take each step with lr·lr_factor(t); between steps the learning rate is the user's, for schedulers to see."""
    taken = 0
    own: list[Any] = []

    def before(*_: Any) -> None:
        nonlocal taken, own
        taken += 1
        own = [group["lr"] for group in optimizer.param_groups]
        factor = float(recipe.lr_factor(taken))
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor

    def after(*_: Any) -> None:
        for group, lr in zip(optimizer.param_groups, own, strict=True):
            group["lr"] = lr

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def _jax(recipe: Recipe, params: Any, lr: Any) -> Any:
    import jax.numpy as jnp

    return recipe.optax()(_scheduled(recipe, lr, jnp))


def _mlx(recipe: Recipe, params: Any, lr: Any) -> Any:
    import mlx.core as mx

    optimizer = recipe.mlx(diagnostics=True)
    # What the constructors of MLX's own optimizers do with a float or a schedule.
    optimizer._maybe_schedule("learning_rate", _scheduled(recipe, lr, mx))
    return optimizer


def _scheduled(recipe: Recipe, lr: Any, xp: Any) -> Any:
    """`lr`, a number or a function of the steps taken, times the recipe's lr_factor in the array namespace `xp`."""
    if recipe.warm is None and not callable(lr):
        return lr * recipe.lr_scale
    # The update after `count` steps is t = count + 1.
    return lambda count: (lr(count) if callable(lr) else lr) * recipe.lr_factor(count + 1, xp)


_BUILD: dict[str, Callable[[Recipe, Any, Any], Any]] = {"torch": _torch, "jax": _jax, "mlx": _mlx}
