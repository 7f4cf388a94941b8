"""Errors that several layers of the laboratory raise."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def unknown(what: str, name: object, choices: Sequence[str]) -> ValueError:
    """The error for a name that is not among `choices`, with the near ones first."""
    near = difflib.get_close_matches(str(name), choices, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(repr(n) for n in near)}? " if near else ""
    return ValueError(f"unknown {what} {name!r}: {hint}choose from {', '.join(choices) or 'nothing'}")


class StudyError(ValueError):
    """It is the study that has to be corrected: its next run would fail in the same way."""
