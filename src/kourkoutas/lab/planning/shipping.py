"""A training function or an optimizer given as an object: how worker processes get it.

A function of a module that has a file is named by that file, FILE.py:FUNC. One of a notebook, of the running script or
of another function is pickled by value with what it refers to (cloudpickle), and loaded by a small file in the cache
folder. That file holds the function's source and the values that it uses, so that an edited function, and the same one
with another value, is another run, as with files.

NOTE: values are numbers, text, truth values and None, also in containers, found in closures, globals, default arguments
and objects, also those of functions and classes that are pickled by value with it. Anything else (arrays, models, what
is imported from a file) does not decide whether the function is the same.

NOTE: file and pickle are in a folder named by the content of both, so that no later call replaces the pickle of a study
that is being made.
"""

from __future__ import annotations

import contextlib
import dis
import hashlib
import importlib.metadata
import inspect
import os
import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np

from kourkoutas.lab.machine import cache_folder

FILE = '''"""Written by kourkoutas.lab.study for a function that has no file of its own; its source is below."""
import pathlib
import cloudpickle

{name} = cloudpickle.loads(pathlib.Path(__file__).with_suffix(".pickle").read_bytes())

'''
LONGEST = 200  # characters of a list that are written out; a longer one stands there as its hash
PLAIN = (bool, int, float, complex, str, bytes, range, type(None), np.generic)


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


def optimizer_of(given: Any) -> str:
    """The name of an optimizer that was given by name, or as a class or function: MODULE:NAME of what is installed,
    else FILE.py:NAME, written for it where it has no file."""
    if isinstance(given, str):
        return given
    if not callable(given):
        raise TypeError(
            "`optimizers` must be names, classes or functions, for example ['kbeta', Mine]; got "
            f"{type(given).__name__} {given!r}"
        )
    module, name = str(getattr(given, "__module__", "")), getattr(given, "__qualname__", "")
    installed = module.partition(".")[0] in importlib.metadata.packages_distributions()
    if installed and name and "<" not in name:
        return f"{module}:{name}"
    return target_of(given)


def _written(train: Callable[..., Any], name: str, stem: str) -> str:
    import cloudpickle

    pickled = cloudpickle.dumps(train)
    try:
        source = textwrap.dedent(inspect.getsource(train))
    except (OSError, TypeError):  # typed into a plain interpreter
        source = f"pickle {hashlib.sha256(pickled).hexdigest()}\n"
    source += _told(train, set()) if isinstance(train, type) else _lines(_used(train), {id(train)})
    text = FILE.format(name=name) + textwrap.indent(source, "# ", lambda line: True)
    folder = cache_folder() / "tasks" / hashlib.sha256(text.encode() + pickled).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in ((folder / f"{stem}.pickle", pickled), (folder / f"{stem}.py", text.encode())):
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(content)
        os.replace(temporary, path)
    return f"{folder / stem}.py:{name}"


def _used(function: Any) -> dict[str, Any]:
    """What a function uses and its source does not tell, by name: closures, globals, default arguments, its object."""
    if isinstance(function, MethodType):
        return {**_used(function.__func__), "self": function.__self__}
    if not isinstance(function, FunctionType):
        return {}
    code, found = function.__code__, dict[str, Any]()
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # an empty one has no value yet
            found[name] = cell.cell_contents
    found |= {name: function.__globals__[name] for name in _globals(code) if name in function.__globals__}
    names, given = code.co_varnames[: code.co_argcount], function.__defaults__ or ()
    return found | dict(zip(names[len(names) - len(given) :], given, strict=True)) | (function.__kwdefaults__ or {})


def _globals(code: CodeType) -> set[str]:
    """The globals that a function reads, also in the functions and comprehensions within it."""
    reading = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
    found = {str(one.argval) for one in dis.get_instructions(code) if one.opname in reading}
    return found.union(*(_globals(part) for part in code.co_consts if isinstance(part, CodeType)))


def _lines(values: Mapping[str, Any], seen: set[int]) -> str:
    """`NAME = VALUE` of those that decide."""
    told = {name: _told(value, seen) for name, value in sorted(values.items())}
    return "".join(f"{name} = {text}\n" for name, text in told.items() if text)


def _told(value: Any, seen: set[int]) -> str:
    """Text that is the same for the same value in every process; empty for one that does not decide."""
    if isinstance(value, PLAIN):
        return repr(value)
    if id(value) in seen:
        return ""
    seen.add(id(value))
    if isinstance(value, list | tuple | set | frozenset | dict):
        parts = [_told(part, seen) for part in (value.items() if isinstance(value, dict) else value)]
        seen.remove(id(value))  # in two places it counts twice
        text = f"{type(value).__name__}({', '.join(parts if isinstance(value, list | tuple) else sorted(parts))})"
        return text if len(text) <= LONGEST else f"sha256 {hashlib.sha256(text.encode()).hexdigest()}"
    if isinstance(value, FunctionType | MethodType):
        return _source(value) + _lines(_used(value), seen) if _by_value(value) else ""
    if not _by_value(value if isinstance(value, type) else type(value)):
        return ""
    if not isinstance(value, type):
        return _lines({"class": type(value), **getattr(value, "__dict__", {})}, seen)
    own = {
        name: part for name, part in vars(value).items() if not name.startswith("__") or isinstance(part, FunctionType)
    }
    functions = {name: getattr(part, "__func__", getattr(part, "fget", part)) for name, part in own.items()}
    return _lines({**functions, **{base.__name__: base for base in value.__bases__}}, seen)


def _source(function: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):  # typed into a plain interpreter
        code = function.__code__
        return f"{code.co_code.hex()} {code.co_names} {[part for part in code.co_consts if isinstance(part, PLAIN)]}\n"


def _by_value(thing: Any) -> bool:
    """Whether cloudpickle takes a function or a class with it, since no file has it by its name."""
    return thing.__module__ == "__main__" or "<" in thing.__qualname__  # <locals>, <lambda>
