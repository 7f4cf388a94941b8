"""Docstrings are written for Sphinx, IDEs and `help()`; here their formulas and references become Markdown."""

import re
import textwrap
from typing import Any

import griffe

BLOCK = re.compile(r"^\.\. math::\n((?:[ \t]+.*\n|\n)+)", re.MULTILINE)
INLINE = re.compile(r":math:`([^`]+)`")
REFERENCE = re.compile(r":(?:class|meth|func|mod):(?=`)")


class RstMath(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(text: str) -> str:
    r"""`.. math::` as $$ … $$, :math: as $…$, and :class: and the like as plain code.

    >>> print(markdown(".. math::\n    a = b\n\nArgs:"))
    $$
    a = b
    $$
    <BLANKLINE>
    Args:
    <BLANKLINE>
    >>> markdown("the norm :math:`n_t`, see :class:`kourkoutas.Hyper`")
    'the norm $n_t$, see `kourkoutas.Hyper`\n'
    """
    text = BLOCK.sub(lambda found: f"$$\n{textwrap.dedent(found[1]).strip()}\n$$\n\n", text + "\n")
    return REFERENCE.sub("", INLINE.sub(r"$\1$", text))
