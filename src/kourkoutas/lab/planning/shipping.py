"""A training function given as an object: how worker processes get it.

A function of a module that has a file is named by that file, FILE.py:FUNC. One of a notebook, of the running script or
of another function is pickled by value with what it refers to (cloudpickle), and loaded by a small file in the cache
folder. That file holds the function's source and the values that it uses, so that an edited function, and the same one
with another value, is another run, as with files.

NOTE: values are numbers, text, truth values, None and containers of them, found in closures, globals, default
arguments and objects, also those of functions and classes that are pickled by value with it. Anything else (arrays,
models, what is imported from a file) does not decide whether the function is the same.

NOTE: file and pickle are in a folder named by the content of both, so that no later call replaces the pickle of a study
that is being made.
"""

from __future__ import annotations

import contextlib
import dis
import hashlib
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np

from kourkoutas.lab import corpus

FILE = '''"""Written by kourkoutas.lab.study for a function that has no file of its own; its source is below."""
import pathlib
import cloudpickle

{name} = cloudpickle.loads(pathlib.Path(__file__).with_suffix(".pickle").read_bytes())

'''
LONGEST = 200  # characters of a value that are written out; a longer one stands there as its hash
PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)


def target_of(train: Callable[..., Any]) -> str:
    """FILE.py:FUNC of a function, written for it where it has none."""
    if not callable(train):
        raise TypeError(
            f"`train` must be a function, FILE.py:FUNC or a testbed's name; got {type(train).__name__} {train!r}"
        )
    name = getattr(train, "__name__", "train")
    module = sys.modules.get(getattr(train, "__module__", "") or "")
    file = getattr(module, "__file__", None)
    if module is not None and module.__name__ != "__main__" and file and getattr(module, name, None) is train:
        return f"{file}:{name}"
    return _written(train, name if name.isidentifier() else "train", Path(file or "notebook").stem)


def _written(train: Callable[..., Any], name: str, stem: str) -> str:
    try:
        import cloudpickle
    except ImportError:
        raise ImportError(
            "a function of a notebook or of the running script needs cloudpickle, which is not installed: "
            "pip install 'kourkoutas-beta[lab]', or put the function in a file of its own"
        ) from None
    pickled = cloudpickle.dumps(train)
    try:
        source = textwrap.dedent(inspect.getsource(train))
    except (OSError, TypeError):  # typed into a plain interpreter
        source = f"pickle {hashlib.sha256(pickled).hexdigest()}\n"
    source += "".join(f"{line}\n" for line in _used(train, "", {id(train)}))
    text = FILE.format(name=name) + textwrap.indent(source, "# ", lambda line: True)
    folder = corpus.cache_folder() / "tasks" / hashlib.sha256(text.encode() + pickled).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in ((folder / f"{stem}.pickle", pickled), (folder / f"{stem}.py", text.encode())):
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(content)
        os.replace(temporary, path)
    return f"{folder / stem}.py:{name}"


def _used(function: Any, within: str, seen: set[int]) -> Iterator[str]:
    """`NAME = VALUE` of everything that a function uses and that its source does not tell."""
    if isinstance(function, MethodType):
        yield from _told(f"{within}self", function.__self__, seen)
        function = function.__func__
    if not isinstance(function, FunctionType):
        return
    found: dict[str, Any] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty one has no value yet
            found[name] = cell.cell_contents
    found |= {name: function.__globals__[name] for name in _globals(function.__code__) if name in function.__globals__}
    names, given = function.__code__.co_varnames[: function.__code__.co_argcount], function.__defaults__ or ()
    found |= dict(zip(names[len(names) - len(given) :], given, strict=True)) | (function.__kwdefaults__ or {})
    for name, value in sorted(found.items()):
        yield from _told(f"{within}{name}", value, seen)


def _told(name: str, value: Any, seen: set[int]) -> Iterator[str]:
    try:
        plain = _plain(value)
    except RecursionError:  # a list that holds itself
        plain = None
    if plain is not None:
        short = plain if len(plain) <= LONGEST else f"sha256 {hashlib.sha256(plain.encode()).hexdigest()}"
        yield f"{name} = {short}"
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, FunctionType | MethodType):
        if _by_value(value):
            yield f"{name} = {_source(value)!r}"
            yield from _used(value, f"{name}.", seen)
    elif isinstance(value, type):
        if _by_value(value):
            for key, part in sorted(vars(value).items()):
                if not key.startswith("__") or isinstance(part, FunctionType):
                    part = getattr(part, "__func__", getattr(part, "fget", part))  # of a static method, a property
                    yield from _told(f"{name}.{key}", part, seen)
            for base in value.__bases__:
                yield from _told(f"{name}.{base.__name__}", base, seen)
    elif _by_value(type(value)):
        yield from _told(f"{name}.{type(value).__name__}", type(value), seen)
        for key, part in sorted(getattr(value, "__dict__", {}).items()):
            yield from _told(f"{name}.{key}", part, seen)


def _plain(value: Any) -> str | None:
    """The value as text, the same in every process; None for one that is not plain."""
    if isinstance(value, PLAIN):
        return repr(value.item() if isinstance(value, np.generic) else value)
    if isinstance(value, range):
        return repr(value)
    if not isinstance(value, list | tuple | set | frozenset | dict):
        return None
    parts = [_plain(part) for part in (value.items() if isinstance(value, dict) else value)]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return f"{type(value).__name__}({', '.join(known if isinstance(value, list | tuple) else sorted(known))})"


def _globals(code: CodeType) -> set[str]:
    """The globals that a function reads, also in the functions and comprehensions within it."""
    reading = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
    found = {str(one.argval) for one in dis.get_instructions(code) if one.opname in reading}
    return found.union(*(_globals(part) for part in code.co_consts if isinstance(part, CodeType)))


def _source(function: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        code = function.__code__
        return f"{code.co_code.hex()} {code.co_names} {[part for part in code.co_consts if isinstance(part, PLAIN)]}"


def _by_value(thing: Any) -> bool:
    """Whether cloudpickle takes a function or a class with it, since no file has it by its name."""
    return thing.__module__ == "__main__" or "<" in thing.__qualname__  # <locals>, <lambda>
