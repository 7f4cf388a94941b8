"""Optimizer recipes by label: K-β, Adam, their controls, and rivals, each with a builder per engine.

`docs/laboratory.md` says what each label is for. Two are the method's own checks: `kbeta-fixed`, K-β with β2_min =
β2_max, is Adam, and `adam999-nobc` is Adam without bias correction.

A label may carry a tag in brackets, "kbeta[alpha=0.9]", so that one study can hold several versions of an arm.

NOTE: `kbeta-static` is K-β in an endless warmup, because that, and not β2_min = β2_max, leaves the bias correction
1 - β2_max^t of `kbeta` as it is.

NOTE: a rival is what its library makes of it. torch and optax differ in NAdam (torch has a schedule of the momentum)
and in AMSGrad (torch takes the maximum before the bias correction, optax after it).

NOTE: schedule-free AdamW is evaluated at its average; a user's own function calls its `eval()` and `train()` itself.

NOTE: learning rates come from the testbed's schedule, times `Recipe.lr_factor`, one number per step. `lbfgs` searches
its own step length from a first guess of 1, whatever the schedule. It is for losses that are the same at every step:
a testbed that draws batches is refused.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kourkoutas.buckets import check_buckets
from kourkoutas.lab.engines import training
from kourkoutas.lab.errors import argument, unknown
from kourkoutas.lab.optimizers import own
from kourkoutas.lab.optimizers.rivals import DECAYED, RIVALS, param_groups, tensors_in, torch_switch
from kourkoutas.lab.specs.spec import Origin, coerce, guess
from kourkoutas.rule import DEFAULTS, HYPER_NAMES, Hyper

WARM = 0.999
ENDLESS = 10**9
# At this many steps β^t is 0 in every precision, so that the library's own Adam divides by exactly 1.
LATE = 2**24
# The learning rate of an optimizer before its first step: a user's own may refuse 0.
PLACEHOLDER = 1e-3

# What a study compares that names no optimizers. The last is the control that decides: Adam with K-β's hidden warmup.
USUAL = ("kbeta", "adam95", "adam999", "adam95-warm")
CONTROLS = ("kbeta-static", "adam-mid", "adam95-warm", "adam999-warm", "kbeta-exact")

# Written out, so that a run says what it was made with.
EIGEN = {"basis": "eigen", **DEFAULTS["eigen"]}
# What sets a K-β arm apart from `kbeta`, and an Adam from Adam's usual options.
KBETAS: dict[str, dict[str, Any]] = {
    "kbeta": {},
    "kbeta-static": {"warmup_steps": ENDLESS},
    "kbeta-exact": {"bias_correction": "exact"},
    "kbeta-fixed": {},
    "kbeta-lbfgs": {},
    "kbeta-eigen": EIGEN,
    "eigen95": {**EIGEN, "beta2_min": 0.95, "beta2_max": 0.95},
}
# A testbed's options for K-β, the paper's, are not for these.
PLAIN = ("kbeta-eigen", "eigen95")
ADAMS: dict[str, dict[str, Any]] = {
    "adam90": {"beta2": 0.9},
    "adam95": {"beta2": 0.95},
    "adam99": {"beta2": 0.99},
    "adam999": {"beta2": 0.999},
    "adam-mid": {},
    "adam-equal": {"beta1": 0.95, "beta2": 0.95},
    "adam999-nobc": {"beta2": 0.999, "bias_correction": False},
}
WARMED = ("adam90", "adam95", "adam99", "adam999", "kbeta-exact", "adafactor-beta2")
SHARE = 0.5  # of the steps of kbeta-lbfgs that are K-β's

# library → (its engine, its module): torch.SGD is short for torch.optim:SGD.
ABBREVIATIONS = {
    "torch": ("torch", "torch.optim"),
    "optax": ("jax", "optax"),
    "mlx": ("mlx", "mlx.optimizers"),
    "pytorch_optimizer": ("torch", "pytorch_optimizer"),
}
# This module's option name → the keyword in each engine's libraries.
_KEYWORDS: dict[str, dict[str, str]] = {
    "torch": {"decay": "alpha"},
    "jax": {"beta1": "b1", "beta2": "b2", "decay": "decay"},
    "mlx": {"decay": "alpha"},
}

LABELS = tuple(dict.fromkeys((*KBETAS, *ADAMS, *CONTROLS, *(f"{name}-warm" for name in WARMED), *RIVALS)))


@dataclass(frozen=True)
class Recipe:
    """An optimizer, ready to be built on any engine that has it.

    Attributes:
      label: the arm's name in tables.
      family: "kbeta", "adam", a rival's name, "library.Name", or "MODULE:NAME" of a user's own.
      items: the options, sorted; see `options`.
      warm: β of the learning-rate factor √(1 - β^t), or None.
      lr_scale: constant factor on the testbed's learning rate.
      origin: of a user's own.
    """

    label: str
    family: str
    items: tuple[tuple[str, Any], ...]
    warm: float | None = None
    lr_scale: float = 1.0
    origin: Origin | None = None

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.items)

    @property
    def full_batch(self) -> bool:
        """Whether it needs the same loss at every step."""
        return self.family in ("lbfgs", "kbeta-lbfgs")

    def over(self, steps: int) -> Recipe:
        """The recipe for a run of `steps` steps: a share of them becomes a number."""
        if self.family != "kbeta-lbfgs":
            return self
        share, after = self.options["share"], self.options["after"]
        items = {**self.options, "after": round(share * steps) if after is None else after}
        return dataclasses.replace(self, items=tuple(sorted(items.items())))

    # What an engine asks of it: see `kourkoutas.lab.engines.Optimizer`.

    @property
    def recorded(self) -> bool:
        return self.family == "kbeta"

    @property
    def buckets(self) -> Any:
        return self.options.get("buckets", "parameter")

    @property
    def step(self) -> Recipe:
        return Recipe(self.family, self.family, self.items, origin=self.origin)

    def torch(self, params: Sequence[Any], diagnostics: bool = False, lr: Any = 0.0) -> Any:
        """A torch optimizer of (name, leaf tensor) pairs, or of param groups of them."""
        import torch

        o = self.options
        if self.family in ("kbeta", "kbeta-lbfgs"):
            from kourkoutas.torch import KourkoutasBeta

            _, after = o.pop("share", None), o.pop("after", None)
            first = KourkoutasBeta(params, lr=lr, diagnostics=diagnostics and self.recorded, **o)
            if self.family == "kbeta":
                return first
            if after is None:
                raise ValueError(
                    f"optimizer {self.label!r} must know after how many steps to change: set {self.label}.after=1000"
                )
            return torch_switch(first, RIVALS["lbfgs"].options, after)
        unnamed = [_unnamed(item) for item in params]
        if self.family != "adam":
            make, options = _home(self, "torch")
            if self.origin is not None and isinstance(lr, float) and lr == 0:
                lr = PLACEHOLDER
            optimizer = make(unnamed, lr=lr, **options)
            training(optimizer, True)
            return optimizer
        tensors = tensors_in(param_groups(unnamed))
        fused = all(p.device.type in ("cpu", "cuda", "mps") and not p.is_complex() for p in tensors)
        optimizer = torch.optim.AdamW(  # without decay it is Adam
            unnamed, lr=lr, betas=(o["beta1"], o["beta2"]), eps=o["eps"], weight_decay=o["weight_decay"], fused=fused
        )
        if not o["bias_correction"]:
            for p in tensors:
                optimizer.state[p] = {
                    "step": torch.tensor(float(LATE), device=p.device),
                    "exp_avg": torch.zeros_like(p),
                    "exp_avg_sq": torch.zeros_like(p),
                }
        return optimizer

    def optax(self, diagnostics: bool = False) -> Callable[[Any], Any]:
        """The structure of the state does not depend on the learning rate, so each step may use its own."""
        import jax.numpy as jnp
        import optax

        o = self.options
        if self.family == "kbeta":
            from kourkoutas.optax import kourkoutas_beta

            return lambda lr: kourkoutas_beta(lr, diagnostics=diagnostics, **o)
        if self.family != "adam":
            make, options = _home(self, "jax")
            return lambda lr: make(lr, **options)
        step = {"b1": o["beta1"], "b2": o["beta2"], "eps": o["eps"]}

        def adam(lr: Any) -> Any:
            decay = o["weight_decay"]
            tx = optax.adamw(lr, **step, weight_decay=decay) if decay else optax.adam(lr, **step)
            if o["bias_correction"]:
                return tx
            return optax.GradientTransformation(
                lambda params: optax.tree_utils.tree_set(tx.init(params), count=jnp.asarray(LATE, jnp.int32)), tx.update
            )

        return adam

    def mlx(self, diagnostics: bool = False) -> Any:
        import mlx.optimizers as optim

        o = self.options
        if self.family == "kbeta":
            from kourkoutas.mlx import KourkoutasBeta

            return KourkoutasBeta(0.0, diagnostics=diagnostics, **o)
        if self.family != "adam":
            make, options = _home(self, "mlx")
            keywords = {k: list(v) if k == "betas" else v for k, v in options.items()}
            return make(0.0 if self.origin is None else PLACEHOLDER, **keywords)
        betas, eps, bias = [o["beta1"], o["beta2"]], o["eps"], o["bias_correction"]
        if o["weight_decay"]:
            return optim.AdamW(0.0, betas, eps, weight_decay=o["weight_decay"], bias_correction=bias)
        return optim.Adam(0.0, betas, eps, bias_correction=bias)

    @property
    def described(self) -> dict[str, Any]:
        """For result.json: every option as plain JSON."""
        plain = {k: v if isinstance(v, (bool, int, float, str, type(None))) else str(v) for k, v in self.items}
        told = {"family": self.family, **plain, "warm": self.warm, "lr_scale": self.lr_scale}
        return told if self.origin is None else {**told, "comes from": self.origin.version}

    @property
    def resolved(self) -> dict[str, Any]:
        """For a run's id: `described`, with every hyper-parameter of Kourkoutas-β, defaults too."""
        if self.family != "kbeta":
            return self.described
        hyper = Hyper.pick(self.options)
        known = {f.name: getattr(hyper, f.name) for f in dataclasses.fields(hyper)}
        # Younger than the ids of version 0.1's runs: their defaults are not part of an id.
        if not hyper.lr_warmup:
            del known["lr_warmup"]
        if hyper.basis is None:
            known = {name: value for name, value in known.items() if not name.startswith("basis")}
        return {**known, **self.described}

    def lr_factor(self, t: Any, xp: Any = np) -> Any:
        """lr_scale·√(1 - β^t) of update t = 1, 2, …, a number or an array of the namespace `xp`; without the root
        unless the arm is warmed."""
        return self.lr_scale if self.warm is None else self.lr_scale * xp.sqrt(-xp.expm1(t * math.log(self.warm)))


def recipe(
    label: str,
    kbeta: Mapping[str, Any] | None = None,
    overrides: Mapping[str, Any] | None = None,
    origin: Origin | None = None,
) -> Recipe:
    """The recipe of `label` on a testbed whose K-β options are `kbeta`, with `overrides` from `--set label.name=…`; of
    a user's own optimizer, with its `origin`.

    >>> recipe("adam-mid", {"beta2_min": 0.9, "beta2_max": 0.998}).options["beta2"]
    0.949
    """
    kbeta, overrides = kbeta or {}, dict(overrides or {})
    lr_scale = coerce("lr_scale", overrides.pop("lr_scale", 1.0), 1.0)
    if lr_scale is None or not lr_scale > 0:
        raise ValueError(f"`lr_scale` must be > 0, for example 0.1; got {lr_scale!r}")
    base = label.partition("[")[0]
    name = base.removesuffix("-warm") if base in LABELS else base
    warm = WARM if base != name and origin is None else None
    options: dict[str, Any]
    if origin is not None:
        family, options = origin.words, {k: _hashable(guess(v)) for k, v in overrides.items()}
    elif name in KBETAS:
        family, options = "kbeta-lbfgs" if name == "kbeta-lbfgs" else "kbeta", _kbeta_options(name, kbeta, overrides)
    elif name in ADAMS:
        family, options = "adam", _adam_options(name, kbeta, overrides)
    elif name in RIVALS:
        family, options = name, {**RIVALS[name].options, **{k: guess(v) for k, v in overrides.items()}}
    elif name.partition(".")[0] in ABBREVIATIONS and name.partition(".")[2]:
        family, options = name, {k: guess(v) for k, v in overrides.items()}
    else:
        raise unknown("optimizer", label, LABELS)
    return Recipe(label, family, tuple(sorted(options.items())), warm, lr_scale, origin)


def _kbeta_options(name: str, kbeta: Mapping[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    options = {"buckets": "parameter", **({} if name in PLAIN else kbeta), **KBETAS[name]}
    switch: dict[str, Any] = {}
    if name == "kbeta-lbfgs":
        switch = {"share": guess(overrides.pop("share", SHARE)), "after": guess(overrides.pop("after", None))}
        _check_switch(**switch)
    defaults = {field: getattr(Hyper(), field) for field in HYPER_NAMES}
    options |= _understood(name, overrides, {**defaults, "buckets": "", **options})
    if name == "kbeta-fixed":
        options["beta2_min"] = options.setdefault("beta2_max", Hyper().beta2_max)
    check_buckets(options["buckets"])
    Hyper.pick(options)
    return options | switch


def _adam_options(name: str, kbeta: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    options = {**DECAYED, "bias_correction": True, **ADAMS[name]}
    if name == "adam-mid":
        hyper = Hyper.pick(kbeta)
        options["beta2"] = round((hyper.beta2_min + hyper.beta2_max) / 2, 12)
    options |= _understood(name, overrides, options)
    Hyper(beta1=options["beta1"], beta2_min=0, beta2_max=options["beta2"], eps=options["eps"])
    return options


def _hashable(value: Any) -> Any:
    """Tuples for lists: a compiled step is kept under the options of its optimizer."""
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def _understood(name: str, overrides: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """The overrides as the types of the options that they replace."""
    found = {}
    for option, value in overrides.items():
        if option not in like:
            raise unknown(f"option of {name}", option, (*like, "lr_scale"))
        found[option] = value if callable(value) else coerce(option, value, like[option])
    return found


def _check_switch(share: Any, after: Any) -> None:
    if not isinstance(share, (int, float)) or not 0 < share < 1:
        raise ValueError(f"`share` must be in (0, 1), for example {SHARE}; got {share!r}")
    if after is not None and (not isinstance(after, int) or after < 1):
        raise ValueError(f"`after` must be a number of steps >= 1, or none for a share of all; got {after!r}")


def _unnamed(item: Any) -> Any:
    """A tensor of a (name, tensor) pair, or a param group with its tensors."""
    return {**item, "params": [p for _, p in item["params"]]} if isinstance(item, Mapping) else item[1]


def engines_of(recipe: Recipe) -> tuple[str, ...]:
    """The engines that have this optimizer, whether or not its library is installed."""
    if recipe.origin is not None:
        return own.engines_of(recipe.origin)
    if recipe.family in ("kbeta", "adam"):
        return ("torch", "jax", "mlx")
    if recipe.family == "kbeta-lbfgs":
        return ("torch",)
    if recipe.family in RIVALS:
        return tuple(RIVALS[recipe.family].homes)
    return (ABBREVIATIONS[recipe.family.partition(".")[0]][0],)


def check(recipe: Recipe, engine: str) -> None:
    """Raise unless `recipe` can be built on `engine`: the optimizer exists there, its library is installed, and it has
    the options."""
    homes = engines_of(recipe)
    if engine not in homes:
        raise ValueError(
            f"optimizer {recipe.label!r} is not available on engine {engine!r}: "
            f"use {argument('engine')} {' or '.join(homes)}"
        )
    if recipe.family not in ("kbeta", "adam", "kbeta-lbfgs"):
        _, options = _home(recipe, engine)
        if recipe.origin is not None:
            own.check(recipe.origin, recipe.label, engine, lambda: _small(recipe, engine), options)


def check_anywhere(recipe: Recipe) -> None:
    """Raise if a user's own optimizer can be built on no engine of those that may have it; of a study whose function
    brings the framework."""
    if recipe.origin is None:
        return
    errors: list[Exception] = []
    for engine in engines_of(recipe):
        try:
            return check(recipe, engine)
        except (ValueError, TypeError, ImportError) as error:
            errors.append(error)
    raise errors[0]


def _small(recipe: Recipe, engine: str) -> Any:
    """The optimizer of one small matrix."""
    if engine == "torch":
        import torch

        return recipe.torch([("w", torch.nn.Parameter(torch.zeros(4, 4)))], lr=1e-3)
    if engine == "mlx":
        return recipe.mlx()
    import jax.numpy as jnp

    made = recipe.optax()(1e-3)
    if own.is_optimizer(made, engine):
        made.init({"w": jnp.zeros((4, 4))})
    return made


def known_options(recipe: Recipe) -> dict[str, Any]:
    """What can be set of an optimizer, with the values that it has."""
    if recipe.origin is not None:
        return {**own.options_of(own.load(recipe.origin))[0], **recipe.options}
    return {**dataclasses.asdict(Hyper()), **recipe.options}


def _home(recipe: Recipe, engine: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The constructor of a rival or of a user's own optimizer on `engine`, which has it, and its keywords."""
    if recipe.origin is not None:
        where, make = recipe.origin.words, own.load(recipe.origin)
    elif recipe.family in RIVALS:
        where = RIVALS[recipe.family].homes[engine]
        make = _of_library(recipe, engine, where)
    else:
        library, _, name = recipe.family.partition(".")
        where = f"{ABBREVIATIONS[library][1]}:{name}"
        make = _of_library(recipe, engine, where)
    if where.startswith("kourkoutas."):
        known, anything = dict(RIVALS[recipe.family].options), False
    else:
        known, anything = own.options_of(make)
    options = _keywords(recipe, engine, known)
    if recipe.family in RIVALS:
        options |= RIVALS[recipe.family].fixed.get(engine, {})
    for word in options:
        if word in ("lr", "learning_rate"):
            raise ValueError(
                f"option {word} of {recipe.label}: the study gives every optimizer its learning rate; use "
                f"{argument('settings', f'{recipe.label}.lr_scale=0.1')} for a part of it, or "
                f"{argument('tune', 'lr=LOW:HIGH')}"
            )
        if word not in known and not anything:
            shown = where if recipe.origin is not None else where.replace(":", ".")
            raise unknown(f"option of {recipe.label} ({shown})", word, (*known, "lr_scale"))
    return make, options


def _of_library(recipe: Recipe, engine: str, where: str) -> Callable[..., Any]:
    module, _, name = where.partition(":")
    try:
        home = importlib.import_module(module)
    except ImportError:
        rest = [e for e in engines_of(recipe) if e != engine]
        other = f", or use {argument('engine')} {' or '.join(rest)}" if rest else ""
        package = module.partition(".")[0].replace("_", "-")
        raise ImportError(
            f"optimizer {recipe.label!r} on engine {engine!r} comes from {module}, which is not installed: "
            f"pip install {package}{other}"
        ) from None
    make = getattr(home, name, None)
    if not callable(make):
        raise unknown(f"optimizer of {module}", name, [n for n in dir(home) if not n.startswith("_")])
    return make  # type: ignore[no-any-return]


def _keywords(recipe: Recipe, engine: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """The options by the names that a constructor with the options `known` has for them."""
    options = {}
    for name, value in recipe.items:
        options[name if name in known else _KEYWORDS[engine].get(name, name)] = value
    if "betas" in known and "beta1" not in known and ("beta1" in options or "beta2" in options):
        beta1, beta2 = known["betas"] or (0.9, 0.999)
        options["betas"] = (options.pop("beta1", beta1), options.pop("beta2", beta2))
    return options
