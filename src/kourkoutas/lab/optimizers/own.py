"""A user's own optimizer: MODULE:NAME, anything that can be imported, or FILE.py:NAME.

It is called as the optimizers of its framework are:

    Mine(params, lr=..., **options)      PyTorch: a class of torch.optim.Optimizer, or a function whose first argument
                                         begins with "param"
    mine(learning_rate, **options)       JAX: a function that gives an Optax transformation
    Mine(learning_rate, **options)       MLX: a class of mlx.optimizers.Optimizer, or a function that gives one

Its label is NAME. Two of one name, and one with the name of an optimizer of ours, are told apart by where they come
from: mine.Adam and theirs.Adam.

NOTE: where it comes from is part of a run's identity: the version of its distribution, or the text of its file where it
has none. Files that it imports are not.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from kourkoutas.lab.errors import ArgumentError, argument, unknown
from kourkoutas.lab.specs.spec import Origin

WHAT = (
    "an optimizer is a class of torch.optim.Optimizer or mlx.optimizers.Optimizer, or a function of the learning rate "
    "that gives an Optax transformation"
)


def named(optimizers: Iterable[str], ours: Collection[str]) -> tuple[list[str], dict[str, Origin]]:
    """(the labels of all these optimizers, each once; where those come from that a user brings).

    `ours` are the labels that are taken.
    """
    words = list(dict.fromkeys(word.strip() for word in optimizers if word.strip()))
    origins = {word: origin_of(word) for word in words if ":" in word.partition("[")[0] or word.endswith(".py")}
    counts = Counter(origin.name for origin in origins.values())
    labels, named = {}, {}
    for word, origin in origins.items():
        alone = counts[origin.name] == 1 and origin.name not in ours
        labels[word] = origin.name if alone else f"{_place(origin, origins.values())}.{origin.name}"
        named[labels[word]] = origin
    return [labels.get(word, word) for word in words], named


def _place(origin: Origin, all_origins: Iterable[Origin]) -> str:
    """The module, or as much of the file's path as tells it from the others."""
    if not origin.in_file:
        return origin.place
    parts = Path(origin.place).with_suffix("").parts
    others = {one.place for one in all_origins if one.in_file and one.place != origin.place}
    count = 1
    while any(Path(other).with_suffix("").parts[-count:] == parts[-count:] for other in others):
        count += 1
    return "/".join(parts[-count:])


def origin_of(word: str) -> Origin:
    """Where MODULE:NAME or FILE.py:NAME is found; it is loaded, and an error tells what to correct."""
    place, _, name = word.rpartition(":")
    if word.endswith(".py"):
        raise ArgumentError(
            "optimizers", f"{argument('optimizers')} {word}: which optimizer of the file? Write {word}:NAME"
        )
    if not place or not all(part.isidentifier() for part in name.split(".")):
        raise ArgumentError(
            "optimizers",
            f"{argument('optimizers')} {word}: write MODULE:NAME or FILE.py:NAME, for example heavyball:SOAP",
        )
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise ArgumentError(
                "optimizers",
                f"{argument('optimizers')} {word}: there is no file {place}; "
                "name a Python file and an optimizer in it, FILE.py:NAME",
            )
        found = Origin(place=str(path.resolve()), name=name, version=digest(path))
    else:
        found = Origin(place=place, name=name, version=_version(_imported(place, word), word))
    engines_of(found)
    return found


def digest(path: Path) -> str:
    """A file's text, as the version of what is in it."""
    return f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"


def _version(module: ModuleType, word: str) -> str:
    """The distribution of a module with its version; the text of its file where it has none."""
    top = module.__name__.partition(".")[0]
    for distribution in importlib.metadata.packages_distributions().get(top, ()):
        return f"{distribution} {importlib.metadata.version(distribution)}"
    if not getattr(module, "__file__", None):
        raise ArgumentError(
            "optimizers", f"{argument('optimizers')} {word}: {top} has neither a version nor a file; write FILE.py:NAME"
        )
    return digest(Path(str(module.__file__)))


def load(origin: Origin) -> Callable[..., Any]:
    """The class or function itself."""
    if origin.in_file:
        path = Path(origin.place)
        if not path.is_file() or digest(path) != origin.version:
            raise ValueError(
                f"{path} is no longer the file that the study was planned with: a result would belong to another "
                f"optimizer. Restore it and use {argument('retry_failed')}, or use a new {argument('out')}"
            )
        try:
            module = load_file(path)
        except Exception as error:
            line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            told = getattr(error, "msg", None) or f"{type(error).__name__}: {error}"
            raise ArgumentError(
                "optimizers",
                f"{argument('optimizers')} {origin.words}: {path}{line} cannot be loaded ({told}): correct the file",
            ) from None
    else:
        module = _imported(origin.place, origin.words)
    found: Any = module
    for part in origin.name.split("."):
        if not hasattr(found, part):
            raise unknown(f"optimizer of {origin.words.rpartition(':')[0]}", part, _public(found))
        found = getattr(found, part)
    if not callable(found):
        raise TypeError(f"{origin.words} is a {type(found).__name__}: {WHAT}")
    return found  # type: ignore[no-any-return]


def _public(module: Any) -> list[str]:
    """Names of what could be meant: of a package all, of another module what it does not import."""
    names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    if hasattr(module, "__path__"):
        return names
    return [name for name in names if getattr(vars(module)[name], "__module__", "") == module.__name__]


def _imported(module: str, word: str) -> ModuleType:
    """The module of `word`, also one of the working folder, as in a worker process."""
    here = os.getcwd()
    sys.path.append(here)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        missing = (error.name or top).partition(".")[0]
        if missing == top and isinstance(error, ModuleNotFoundError) and importlib.util.find_spec(top) is not None:
            raise ArgumentError(
                "optimizers", f"{argument('optimizers')} {word}: {top} is installed, and has no module {module}"
            ) from None
        whom = "which is not installed" if missing == top else f"which needs {missing}, and that is not installed"
        raise ImportError(
            f"{argument('optimizers')} {word}: the optimizer comes from {top}, {whom}: pip install "
            f"{missing.replace('_', '-')}"
        ) from None
    finally:
        sys.path.remove(here)


def load_file(path: Path) -> ModuleType:
    """A user's file as a module, loaded once per process and text, that imports its neighbours like a script."""
    own = hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:16]
    name = f"kbeta_user_{path.stem}_{own}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not a Python file")
    _put_first(path.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


_folders: set[Path] = set()  # of the users' files that this process has loaded


def _put_first(folder: Path) -> None:
    """Let a file import its own neighbours, also where a file of another folder has neighbours of the same names."""
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        has_one = (folder / f"{top}.py").exists() or (folder / top / "__init__.py").exists()
        file = getattr(module, "__file__", None)
        if has_one and file and any(Path(file).is_relative_to(other) for other in _folders - {folder}):
            del sys.modules[name]
    _folders.add(folder)
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))


def engines_of(origin: Origin) -> tuple[str, ...]:
    """The engines that may have it.

    NOTE: a framework that was not imported cannot be the one of a class.
    """
    made = load(origin)
    if not isinstance(made, type):
        first = next(iter(_parameters(made)), "")
        return ("torch",) if first.startswith("param") else ("jax", "mlx")
    for engine, module in (("torch", "torch.optim"), ("mlx", "mlx.optimizers")):
        if module in sys.modules and issubclass(made, sys.modules[module].Optimizer):
            return (engine,)
    raise TypeError(f"{origin.words} is no optimizer: {WHAT}")


def _parameters(make: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(make).parameters
    except ValueError:  # of a builtin
        return {}


def options_of(make: Callable[..., Any]) -> tuple[dict[str, Any], bool]:
    """({option: its default, or None where it has none}, whether it takes any other, too)."""
    parameters = list(_parameters(make).values())[1:]
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = {one.name: one.default for one in parameters if one.kind in plain and one.name != "lr"}
    anything = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    return {name: None if value is inspect.Parameter.empty else value for name, value in known.items()}, anything


def check(origin: Origin, label: str, engine: str, build: Callable[[], Any], options: Mapping[str, Any]) -> None:
    """Build it once, for a small matrix, before any run: what its constructor refuses is told in one line."""
    try:
        made = build()
    except Exception as error:
        given = ", ".join(["…", *(f"{name}={value!r}" for name, value in options.items())])
        name = label.partition("[")[0]
        remedy = "give it what it needs: " + argument("settings", f"{name}.NAME=VALUE")
        if options:
            remedy = "change " + argument("settings", f"{name}.{next(iter(options))}=VALUE")
        raise ValueError(
            f"optimizer {origin.words!r} cannot be made: {origin.name}({given}) gives {type(error).__name__}: {error}; "
            f"{remedy}"
        ) from None
    if not is_optimizer(made, engine):
        raise TypeError(f"{origin.words} gives a {type(made).__name__} on {engine}, which is no optimizer: {WHAT}")


def is_optimizer(made: Any, engine: str) -> bool:
    if engine == "jax":
        return callable(getattr(made, "init", None)) and callable(getattr(made, "update", None))
    module = {"torch": "torch.optim", "mlx": "mlx.optimizers"}[engine]
    return isinstance(made, importlib.import_module(module).Optimizer)
