"""What a study is to do: arms × seeds, each a `RunSpec`, from the words of a command line."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kourkoutas.lab import engines, testbeds
from kourkoutas.lab.errors import ArgumentError, argument, unknown
from kourkoutas.lab.optimizers import own, recipes
from kourkoutas.lab.planning.contrasts import Family, contrasts
from kourkoutas.lab.specs.spec import (
    OWN_SETTINGS,
    Arm,
    Axis,
    Code,
    Origin,
    RunSpec,
    SearchSpace,
    Value,
    digest_of,
    guess,
)

MOST_RUNS = 1_000_000
OWN = "own"  # engine and preset of a study of a user's function, which brings both


@dataclass(frozen=True)
class Plan:
    """What a study is to do; every field but the seeds and arms is its configuration.

    A plan with a `tuning` becomes the one that is compared by `chosen`, once the tuning has said which values to use.
    """

    testbed: str
    preset: str
    engine: str
    settings: Mapping[str, Any]
    arms: Sequence[Arm]
    seeds: Sequence[int]
    code: Code | None = None
    tuning: SearchSpace | None = None
    primary: str | None = None  # the endpoint of a testbed that decides, if not its first
    margin: float | None = None  # percent of the baseline within which a difference does not matter
    count_failed: bool = False  # whether a run that fails ranks as the worst, as one that diverges does

    def __post_init__(self) -> None:
        check_size(len(self.arms), len(self.seeds))

    def _understood(self, arm: Arm) -> tuple[dict[str, Any], recipes.Recipe]:
        """All settings of an arm, and its recipe."""
        settings = {**self.settings, **arm.settings}
        if self.code is not None:
            return settings, recipes.recipe(arm.label, {}, arm.options, arm.origin)
        testbed = testbeds.get(self.testbed)
        resolved = testbeds.settings_of(testbed, self.preset, settings)
        return dataclasses.asdict(resolved), recipes.recipe(arm.label, testbed.kbeta, arm.options, arm.origin)

    def resolved(self, arm: Arm) -> dict[str, Any]:
        """Everything that an arm comes down to: the testbed's version, its settings, and the optimizer's options."""
        settings, recipe = self._understood(arm)
        if self.code is not None:
            return {"optimizer": recipe.resolved}
        version = testbeds.get(self.testbed).version
        return _canonical({"testbed": version, "settings": settings, "optimizer": recipe.resolved})

    def checked(self, arm: Arm) -> Arm:
        """The arm with its settings and options as they were understood, so that 1e2 and 100 are the same run."""
        settings, recipe = self._understood(arm)
        if self.code is None:
            recipes.check(recipe, self.engine)
        else:
            recipes.check_anywhere(recipe)
        known = {**recipe.options, "lr_scale": recipe.lr_scale}
        options = {name: known.get(name, value) for name, value in arm.options.items()}
        own = {name: settings[name] for name in arm.settings}
        return arm.model_copy(update={"options": _canonical(options), "settings": _canonical(own)})

    def spec(self, arm: Arm, seed: int) -> RunSpec:
        settings = {**self.settings, **arm.settings}
        if self.code is not None:
            # Part of the run's id: a result of other code, or another endpoint, is another run.
            settings |= {"code": self.code.sha256[:16], "endpoint": self.code.endpoint}
        return RunSpec(
            testbed=self.testbed,
            preset=self.preset,
            engine=self.engine,
            optimizer=arm.label,
            seed=seed,
            settings=settings,
            options=arm.options,
            resolved=digest_of(self.resolved(arm))[:16],
            origin=arm.origin,
        )

    def specs(self) -> list[RunSpec]:
        """All runs, seed by seed."""
        of_arms = [self.spec(arm, 0) for arm in self.arms]
        return [spec.model_copy(update={"seed": seed}) for seed, spec in itertools.product(self.seeds, of_arms)]

    @property
    def family(self) -> Family:
        """The statements that the study may make."""
        endpoints = 1 if self.code is not None else len(testbeds.get(self.testbed).endpoints)
        return Family(len(contrasts(self.arms)), endpoints)

    def doubts(self) -> list[str]:
        """What these seeds cannot show, to be said before they are paid for."""
        pairs, family = len(set(self.seeds)), self.family
        if not family.contrasts or family.can_judge(pairs):
            return []
        seeds = "1 seed is" if pairs == 1 else f"{pairs} seeds are"
        enough = max(10, family.least_pairs)
        return [
            f"{seeds} too few for a verdict on {family.words()}: even if all agreed, p would be "
            f"{family.smallest_p(pairs):.2g}. It takes at least {family.least_pairs}, and more if a run diverges: use "
            f"{argument('seeds', f'0-{enough - 1}')}"
        ]

    def axes(self) -> dict[str, list[Axis]]:
        """{arm: what it tunes}."""
        axes = self.tuning.axes if self.tuning is not None else ()
        names = [arm.optimizer for arm in self.arms]
        return {
            arm.label: [a for a in axes if "." not in a.name or _split(a.name, names)[0] == arm.optimizer]
            for arm in self.arms
        }

    def valued(self, arm: Arm, values: Mapping[str, Value]) -> Arm:
        """The arm with these values of what it tunes, checked."""
        options = {**arm.options, **_of_optimizer(arm.optimizer, values)}
        settings = {**arm.settings, **_of_testbed(values)}
        return self.checked(arm.model_copy(update={"options": options, "settings": settings}))

    def chosen(self, values: Mapping[str, Mapping[str, Value]]) -> Plan:
        """The plan of the runs that are compared: every arm with its values."""
        return replace(self, arms=[self.valued(arm, values[arm.label]) for arm in self.arms], tuning=None)


def check_size(arms: int, seeds: int) -> None:
    """Refuse a plan that nobody can mean, before anything of it is built."""
    if arms * seeds > MOST_RUNS:
        many = f"{arms:,} optimizer{'s' if arms > 1 else ''} × {seeds:,} seed{'s' if seeds > 1 else ''}"
        raise ValueError(
            f"{many} are {arms * seeds:,} runs, more than the {MOST_RUNS:,} that one study may hold: shorten "
            f"{argument('seeds')} or {argument('grid')}"
        )


def parse_seeds(text: str, name: str = "seeds") -> list[int]:
    """Seeds from numbers and ranges.

    >>> parse_seeds("0-3,7")
    [0, 1, 2, 3, 7]
    """
    ranges: list[range] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            low, high = int(first), int(last if dash else first)
        except ValueError:
            raise ArgumentError(
                name, f"{argument(name)} must be numbers and ranges like 0-9 or 0,3,7; got {text!r}"
            ) from None
        if high < low:
            raise ArgumentError(
                name, f"{argument(name)}: the range {part.strip()!r} runs backwards; write {high}-{low}"
            )
        ranges.append(range(low, high + 1))
    check_size(1, sum(1 + part[-1] - part[0] for part in ranges))  # len() of a range has a limit of its own
    return list(dict.fromkeys(itertools.chain.from_iterable(ranges)))


def whole_seeds(seeds: Iterable[Any], name: str = "seeds") -> list[int]:
    """Seeds given as numbers: whole, not negative, each once.

    >>> whole_seeds([0, 2, 2])
    [0, 2]
    """
    found: dict[int, None] = {}
    seed: Any = seeds
    try:
        for seed in itertools.islice(seeds, MOST_RUNS + 1):
            if isinstance(seed, bool) or int(seed) != seed or seed < 0:
                raise ValueError
            found[int(seed)] = None
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(
            name, f"{argument(name)} must be whole numbers >= 0, for example range(10); got {seed!r}"
        ) from None
    if not found:
        raise ArgumentError(name, f"{argument(name)} names no seed; give at least one, for example range(10)")
    return list(found)


def parse_margin(text: str) -> float:
    """Percent of the baseline.

    >>> parse_margin("1%"), parse_margin("0.5 %")
    (1.0, 0.5)
    """
    number, percent, rest = str(text).partition("%")
    try:
        margin = float(number)
    except ValueError:
        margin = math.nan
    if not percent or rest.strip() or not 0 < margin < 100:
        raise ArgumentError(
            "margin", f"{argument('margin')} must be a percentage between 0% and 100%, for example 1%; got {text!r}"
        )
    return margin


def parse_assignments(argument_name: str, texts: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE` strings of an argument as a mapping; the last one of a name counts.

    >>> parse_assignments("settings", ["steps=100", "kbeta.alpha=0.9"])
    {'steps': '100', 'kbeta.alpha': '0.9'}
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (equals and name.strip() and value.strip()):
            told, example = argument(argument_name), argument(argument_name, "kbeta.alpha=0.9")
            raise ArgumentError(argument_name, f"{told} must look like NAME=VALUE, for example {example}; got {text!r}")
        found[name.strip()] = value.strip()
    return found


def arms_of(
    optimizers: Sequence[str], options: Mapping[str, Any], grids: Mapping[str, str | Iterable[Any]]
) -> tuple[dict[str, Any], list[Arm]]:
    """(settings of the testbed, arms) from `--optimizers`, `--set` and `--grid`.

    `NAME=VALUE` sets the testbed for every arm, `OPTIMIZER.NAME=VALUE` one optimizer. A user's own optimizer,
    MODULE:NAME or FILE.py:NAME, is called NAME from here on. A grid splits the optimizer's arm, or every arm, into one
    per value:

    >>> settings, arms = arms_of(["kbeta", "adam95"], {"steps": "50"}, {"kbeta.alpha": "0.85,0.9"})
    >>> settings, [arm.label for arm in arms]
    ({'steps': 50}, ['kbeta[alpha=0.85]', 'kbeta[alpha=0.9]', 'adam95'])
    """
    names, origins = own.named(optimizers, recipes.LABELS)
    if not names:
        raise ArgumentError(
            "optimizers", f"{argument('optimizers')} must name at least one optimizer, for example kbeta,adam95"
        )
    given = {name: _settled("settings", name, value) for name, value in options.items()}
    options_of: dict[str, dict[str, Any]] = {name: {} for name in names}
    for name, value in given.items():
        if "." in name:
            optimizer, option = _split(name, names)
            options_of[optimizer][option] = value
    _check_grids(grids, given, names)
    points = {name: _points(name, values) for name, values in grids.items()}

    arms: list[Arm] = []
    for optimizer in names:
        axes = {key: values for key, values in points.items() if "." not in key or _split(key, names)[0] == optimizer}
        check_size(len(arms) + math.prod(len(values) for values in axes.values()), 1)
        for point in itertools.product(*axes.values()):
            values = dict(zip(axes, point, strict=True))
            arms.append(_arm(optimizer, options_of[optimizer], values, origins.get(optimizer)))
    return _of_testbed(given), arms


def _check_grids(grids: Iterable[str], given: Mapping[str, Any], optimizers: Sequence[str]) -> None:
    """Raise at the first grid of an unknown optimizer, or of what has a value already."""
    for name in grids:
        if "." in name:
            _split(name, optimizers)
        if name in given:
            raise ArgumentError(
                "grid",
                f"{argument('grid')} {name}: {argument('settings')} gives it the value {given[name]}, too; leave out "
                "one",
            )


def _of_testbed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the values that set the testbed, not an optimizer."""
    return {name: value for name, value in values.items() if "." not in name}


def _of_optimizer(optimizer: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that set an optimizer, which are all this one's, by the names of its options."""
    return {name.removeprefix(f"{optimizer}."): value for name, value in values.items() if "." in name}


def _arm(optimizer: str, options: Mapping[str, Any], values: Mapping[str, Any], origin: Origin | None) -> Arm:
    """An optimizer with these options at one point of its grid, which is part of its label."""
    label = ",".join(f"{name.rpartition('.')[2]}={_word(value)}" for name, value in values.items())
    return Arm(
        label=f"{optimizer}[{label}]" if label else optimizer,
        optimizer=optimizer,
        options={**options, **_of_optimizer(optimizer, values)},
        settings=_of_testbed(values),
        origin=origin,
    )


def _settled(where: str, name: str, value: Any) -> Any:
    """A value of the argument `where` as it comes back from the files of a study."""
    value = guess(value)
    try:
        return json.loads(json.dumps(value, allow_nan=False, default=_without_numpy))
    except ValueError:
        raise ArgumentError(
            where,
            f"{argument(where, f'{name}={value}')}: a number must be finite; leave {name} out, "
            "or use a word instead, as none",
        ) from None
    except TypeError:
        raise ArgumentError(
            where,
            f"{argument(where, f'{name}={value!r}')}: a value must be a number, text, a truth value, None, "
            f"or a list or dict of these; got {type(value).__name__}",
        ) from None


def _without_numpy(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    return os.fspath(value)  # TypeError for anything but a path


def _points(name: str, values: str | Iterable[Any]) -> list[Any]:
    """The values of one grid, each once: of "0.1,0.2", or of a list."""
    try:
        words = [word for word in values.split(",") if word.strip()] if isinstance(values, str) else list(values)
    except TypeError:
        raise ArgumentError(
            "grid", f"{argument('grid')} {name} must be a list of values, for example [0.1, 0.01]; got {values!r}"
        ) from None
    points = [_settled("grid", name, word.strip() if isinstance(word, str) else word) for word in words]
    if not points:
        raise ArgumentError(
            "grid",
            f"{argument('grid')} {name} names no value; got {values!r}: write some, for example "
            f"{argument('grid', 'lr=0.1,0.01')}",
        )
    return list({repr(one) if isinstance(one, bool | list | dict) else one: one for one in points}.values())


def _word(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")) if isinstance(value, list | dict) else str(value)


def _split(name: str, optimizers: Sequence[str]) -> tuple[str, str]:
    """("kbeta", "alpha") of "kbeta.alpha"; the optimizer's own name may hold dots, as "torch.SGD" does."""
    found = [optimizer for optimizer in optimizers if name.startswith(f"{optimizer}.")]
    if not found:
        raise unknown(f"optimizer in `{name}`", name.rpartition(".")[0], optimizers)
    optimizer = max(found, key=len)
    return optimizer, name.removeprefix(f"{optimizer}.")


def plan_study(
    target: str,
    *,
    preset: str | None = None,
    engine: str | None = None,
    optimizers: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    options: Mapping[str, Any] | None = None,
    grids: Mapping[str, str | Iterable[Any]] | None = None,
    endpoint: str | None = None,
    log: bool = False,
    higher_is_better: bool = False,
    tuning: SearchSpace | None = None,
    margin: str | None = None,
    count_failed: bool = False,
) -> Plan:
    """A study of a testbed, or of a function FILE.py:FUNC, with every name and value checked before anything is run or
    written; what is only for the other of the two is an error."""
    seeds, options, grids = whole_seeds(seeds), options or {}, grids or {}
    if ".py" in target:
        _check_absent({"engine": engine, "preset": preset}, f"is for testbeds; {target} brings its own")
        code = code_of(target, endpoint, log=log, higher_is_better=higher_is_better)
        plan = _plan_of_code(code, seeds, *arms_of(optimizers or recipes.USUAL, options, grids), tuning)
    else:
        _check_absent(
            {"log": log or None, "higher_is_better": higher_is_better or None},
            "is for functions of your own; a testbed says how it is judged",
        )
        testbed = testbeds.get(target)
        engines.check(engine or "torch")
        settings, arms = arms_of(optimizers or testbed.arms, options, grids)
        plan = _plan_of_testbed(testbed, preset or "smoke", engine or "torch", seeds, settings, arms, endpoint)
    plan = replace(plan, margin=None if margin is None else parse_margin(margin), count_failed=count_failed)
    return plan if tuning is None else _tuned(plan, tuning)


def _check_absent(given: Mapping[str, Any], why: str) -> None:
    """Raise at the first argument that has a value, which is for another kind of study."""
    for name, value in given.items():
        if value is not None:
            shown = argument(name) if value is True else f"{argument(name)} {value}"
            raise ArgumentError(name, f"{shown} {why}: leave it out")


def _plan_of_code(
    code: Code, seeds: Sequence[int], settings: dict[str, Any], arms: list[Arm], tuning: SearchSpace | None
) -> Plan:
    """The plan of a user's own function, which may read any setting but those that kbeta itself records."""
    names = set(settings)
    for arm in arms:
        names |= set(arm.settings)
    if tuning is not None:
        names |= {axis.name for axis in tuning.axes}
    if taken := names & set(OWN_SETTINGS):
        raise ValueError(
            f"{argument('settings')}, {argument('grid')} or {argument('tune')} {min(taken)}: kbeta itself uses "
            "that name; take another"
        )
    plan = Plan(f"{Path(code.file).stem}.{code.function}", OWN, OWN, settings, arms, list(seeds), code)
    return replace(plan, arms=_distinct([plan.checked(arm) for arm in arms]))


def _plan_of_testbed(
    testbed: testbeds.Testbed,
    preset: str,
    engine: str,
    seeds: Sequence[int],
    settings: dict[str, Any],
    arms: list[Arm],
    endpoint: str | None,
) -> Plan:
    """The plan of a testbed, whose settings are known, and whose data are tried before the study begins."""
    metrics = [one.metric for one in testbed.endpoints]
    if endpoint is not None and endpoint not in metrics:
        raise unknown(f"endpoint of {testbed.name}", endpoint, metrics)
    settings = testbeds.pinned(testbed, settings)
    arms = [_pinned(testbed, arm, settings) for arm in arms]
    shared = testbeds.settings_of(testbed, preset, settings)
    settings = _canonical({name: getattr(shared, name) for name in settings})
    plan = Plan(testbed.name, preset, engine, settings, arms, list(seeds), primary=endpoint)
    plan = replace(plan, arms=_distinct([plan.checked(arm) for arm in arms]))
    # A text or other data that cannot be used is an error here too.
    each = (testbeds.settings_of(testbed, preset, {**settings, **arm.settings}) for arm in plan.arms)
    for usable in {repr(one): one for one in each}.values():
        testbed.problem(usable, min(seeds))
    return plan


def _pinned(testbed: testbeds.Testbed, arm: Arm, shared: Mapping[str, Any]) -> Arm:
    """The arm with what names its own settings for good, where those differ from the `shared` ones."""
    every = testbeds.pinned(testbed, {**shared, **arm.settings})
    return arm.model_copy(update={"settings": arm.settings | {k: v for k, v in every.items() if k not in shared}})


def _distinct(arms: list[Arm]) -> list[Arm]:
    """The arms, unless two values of a grid were understood as the same, as `on` and `true` are."""
    seen: dict[str, str] = {}
    for arm in arms:
        content = json.dumps([arm.optimizer, arm.options, arm.settings], sort_keys=True)
        if content in seen:
            raise ValueError(
                f"{argument('grid')}: {seen[content]} and {arm.label} are the same optimizer; "
                "leave out one of the values"
            )
        seen[content] = arm.label
    return arms


def _tuned(plan: Plan, tuning: SearchSpace) -> Plan:
    """The plan with its tuning, once every arm has something to tune and takes every value of the ranges."""
    holders = dict(plan.settings)
    for arm in plan.arms:
        holders |= _named(arm)
    for axis in tuning.axes:
        if axis.name in holders:
            raise ArgumentError(
                "tune",
                f"{argument('tune')} {axis.name}: it is also given the value {holders[axis.name]}; leave out one",
            )
    tuning = tuning.model_copy(update={"axes": tuple(_typed(plan, axis) for axis in tuning.axes)})
    _check_distinct(tuning)
    plan = replace(plan, tuning=tuning)
    for label, axes in plan.axes().items():
        if not axes:
            raise ArgumentError(
                "tune",
                f"{argument('tune')} {', '.join(axis.name for axis in tuning.axes)} leaves nothing to tune for "
                f"{label}: a fair comparison tunes every optimizer; "
                f"add {argument('tune', 'lr=LOW:HIGH')}, or leave that one out",
            )
    for arm in plan.arms:
        for axis in plan.axes()[arm.label]:
            for index in range(tuning.trials):
                plan.valued(arm, {axis.name: axis.value(index, tuning.trials)})
    return plan


def _check_distinct(space: SearchSpace) -> None:
    """Refuse a grid that would try a value twice; several options are not taken from a grid."""
    axis, *others = space.axes
    if not others and len({axis.value(index, space.trials) for index in range(space.trials)}) < space.trials:
        raise ArgumentError(
            "tune",
            f"{argument('tune', f'{axis.name}={axis.low!r}:{axis.high!r}')} has fewer than {argument('trials')} "
            f"{space.trials} different {'whole ' if axis.whole else ''}numbers, {axis.scale}-spaced: "
            f"widen the range or lower {argument('trials')}",
        )


def _named(arm: Arm) -> dict[str, Any]:
    """Settings and options of an arm by the names that a command line has for them."""
    return {**arm.settings, **{f"{arm.optimizer}.{name}": value for name, value in arm.options.items()}}


def _typed(plan: Plan, axis: Axis) -> Axis:
    """The axis with `whole` set where the option takes whole numbers; an option that takes no numbers is an error."""
    like: Any = None
    if "." in axis.name:
        optimizer, option = _split(axis.name, [arm.optimizer for arm in plan.arms])
        kbeta = testbeds.get(plan.testbed).kbeta if plan.code is None else {}
        origin = next(arm.origin for arm in plan.arms if arm.optimizer == optimizer)
        like = recipes.known_options(recipes.recipe(optimizer, kbeta, origin=origin)).get(option)
    elif plan.code is None:
        settings = testbeds.settings_of(testbeds.get(plan.testbed), plan.preset, plan.settings)
        names = [field.name for field in dataclasses.fields(settings)]
        if axis.name not in names:
            raise unknown(f"setting of {plan.testbed}", axis.name, names)
        like = getattr(settings, axis.name)
    if isinstance(like, bool | str | tuple | list):
        raise ArgumentError(
            "tune",
            f"{argument('tune')} {axis.name}: its values are not numbers, as {like!r} is; use {argument('grid')} for "
            "those",
        )
    return axis.model_copy(update={"whole": isinstance(like, int)})


def _canonical(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as they come back from JSON: lists for tuples."""
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def code_of(target: str, endpoint: str | None = None, *, log: bool = False, higher_is_better: bool = False) -> Code:
    """The user's function named by FILE.py:FUNC; only its text is read here."""
    file, _, function = target.rpartition(":") if ":" in target else (target, "", "")
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"{target!r}: there is no file {file}; name a Python file and a function in it, FILE.py:FUNC")
    content = path.read_bytes()
    try:
        functions = [node.name for node in ast.parse(content).body if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ValueError(f"{path}{line}: not a Python file ({getattr(error, 'msg', error)})") from None
    # A name may also be assigned or imported.
    if not function.isidentifier() or not re.search(rf"\b{function}\b|import \*", content.decode(errors="replace")):
        raise ValueError(
            f"{target!r} names no function; write FILE.py:FUNC, for example {file}:{(functions or ['train'])[0]} "
            f"({path.name} defines {', '.join(functions) or 'no function yet'})"
        )
    return Code(
        file=str(path.resolve()),
        function=function,
        sha256=hashlib.sha256(content).hexdigest(),
        endpoint=endpoint,
        log=log,
        higher_is_better=higher_is_better,
    )
