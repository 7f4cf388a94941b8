"""Docstrings hold formulas as `.. math::` blocks, which Sphinx, IDEs and `help()` know; here they become $$ … $$."""

import re
import textwrap
from typing import Any

import griffe

BLOCK = re.compile(r"^\.\. math::\n((?:[ \t]+.*\n|\n)+)", re.MULTILINE)


class RstMath(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_dollars(obj.docstring.value)


def with_dollars(text: str) -> str:
    r"""
    >>> print(with_dollars(".. math::\n    a = b\n\nArgs:\n"))
    $$
    a = b
    $$
    <BLANKLINE>
    Args:
    <BLANKLINE>
    """
    return BLOCK.sub(lambda found: f"$$\n{textwrap.dedent(found[1]).strip()}\n$$\n\n", text + "\n")
