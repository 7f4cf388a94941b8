"""Errors that several layers of the laboratory raise, and how messages name the arguments of a study.

The command line calls them by its options, `--tune-seeds`, and Python by their names, `tune_seeds`. Messages name them
with `argument(...)`, so that everybody reads what he has to write.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

_for_python = ContextVar("_for_python", default=False)
OPTIONS = {"settings": "--set"}  # arguments whose option has another name


class ArgumentError(ValueError):
    """A value that cannot be used.

    Attributes:
      argument: the name of the argument in Python.
    """

    def __init__(self, argument: str, message: str) -> None:
        super().__init__(message)
        self.argument = argument


@contextlib.contextmanager
def in_python() -> Iterator[None]:
    """Messages that are made within it are for somebody who calls `kourkoutas.lab` from Python."""
    before = _for_python.set(True)
    try:
        yield
    finally:
        _for_python.reset(before)


def argument(name: str, value: str = "") -> str:
    """An argument of a study in a message, with a value to write there, which is given as the command line has it.

    >>> argument("tune_seeds", "100-102"), argument("settings", "steps=9"), argument("retry_failed")
    ('--tune-seeds 100-102', '--set steps=9', '--retry-failed')
    >>> with in_python():
    ...     argument("tune_seeds", "100-102"), argument("settings", "steps=9"), argument("retry_failed")
    ('tune_seeds=range(100, 103)', "settings={'steps': 9}", '`retry_failed`')
    >>> with in_python():
    ...     argument("tune", "lr=1e-4:1e-1"), argument("grid", "lr=0.1,0.01"), argument("engine", "jax")
    ("tune={'lr': (1e-4, 1e-1)}", "grid={'lr': [0.1, 0.01]}", "engine='jax'")
    """
    if not _for_python.get():
        option = OPTIONS.get(name, f"--{name.replace('_', '-')}")
        return f"{option} {value}".rstrip()
    return f"{name}={_literal(name, value)}" if value else f"`{name}`"


def _literal(name: str, value: str) -> str:
    """Words of a command line as a value of Python."""
    option, equals, given = value.partition("=")
    if equals:
        brackets = {"tune": "({})", "grid": "[{}]"}.get(name, "{}")
        return f"{{{option!r}: {brackets.format(given.replace(':', ', ').replace(',', ', ').replace(',  ', ', '))}}}"
    first, dash, last = value.partition("-")
    if dash and first.isdigit() and last.isdigit():
        return f"range({first}, {int(last) + 1})"
    return repr(value)


def unknown(what: str, name: object, choices: Sequence[str]) -> ValueError:
    """The error for a name that is not among `choices`, with the near ones first."""
    near = difflib.get_close_matches(str(name), choices, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    return ValueError(f"unknown {what} {name!r}: {hint}choose from {', '.join(choices) or 'nothing'}")


class StudyError(ValueError):
    """It is the study that has to be corrected: its next run would fail in the same way."""
