"""A training function given as an object: how worker processes get it.

A function of a module that has a file is named by that file, FILE.py:FUNC. One of a notebook, of the running script or
of another function is pickled by value with what it refers to (cloudpickle), and loaded by a small file in the cache
folder. That file holds the function's source, so that an edited function is another run, as with files.

NOTE: only the function's own source decides whether it is the same; what it refers to does not.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import sys
import textwrap
from collections.abc import Callable
from typing import Any

from kourkoutas.lab import corpus

FILE = '''"""Written by kourkoutas.lab.study for a function that has no file of its own; its source is below."""
import pathlib
import cloudpickle

{name} = cloudpickle.loads(pathlib.Path(__file__).with_suffix(".pickle").read_bytes())

'''


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
    return _written(train, name if name.isidentifier() else "train")


def _written(train: Callable[..., Any], name: str) -> str:
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
    text = FILE.format(name=name) + textwrap.indent(source, "# ", lambda line: True)
    folder = corpus.cache_folder() / "tasks" / hashlib.sha256(text.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in ((folder / "notebook.pickle", pickled), (folder / "notebook.py", text.encode())):
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_bytes(content)
        os.replace(temporary, path)
    return f"{folder / 'notebook.py'}:{name}"
