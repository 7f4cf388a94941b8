"""Docstrings are written for Sphinx, IDEs and `help()`; here their formulas, references and examples become Markdown.

Defaults that the front ends take from `Hyper`, `_DEFAULT.alpha` or `Hyper.alpha` in the source, are shown as numbers.
"""

import ast
import re
import textwrap
from pathlib import Path
from typing import Any

import griffe

RULE = ast.parse((Path(__file__).parents[2] / "src" / "kourkoutas" / "rule.py").read_text(encoding="utf-8"))
HYPER = next(node for node in RULE.body if isinstance(node, ast.ClassDef) and node.name == "Hyper")
DEFAULTS = {x.target.id: ast.unparse(x.value) for x in HYPER.body if isinstance(x, ast.AnnAssign)}

BLOCK = re.compile(r"^\.\. math::\n((?:[ \t]+.*\n|\n)+)", re.MULTILINE)
INLINE = re.compile(r":math:`([^`]+)`")
REFERENCE = re.compile(r":(?:class|meth|func|mod):(?=`)")
EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
SYNTAX = re.compile(r"(?<!`)\b[A-Z]+(?:\[:[^\]]+\])+")
SESSION = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class Docstrings(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
        if obj.is_function:
            for parameter in obj.parameters:
                home, _, name = str(parameter.default).rpartition(".")
                if home in ("_DEFAULT", "Hyper"):
                    parameter.default = DEFAULTS[name]


def markdown(text: str) -> str:
    r"""`.. math::` as $$ … $$, :math: as $…$, :class: and the like as plain code, and examples as code blocks.

    >>> print(markdown(".. math::\n    a = b\n\nArgs:"))
    $$
    a = b
    $$
    <BLANKLINE>
    Args:
    <BLANKLINE>
    >>> markdown("the norm :math:`n_t`, see :class:`kourkoutas.Hyper`")
    'the norm $n_t$, see `kourkoutas.Hyper`\n'

    Griffe makes code blocks of the section "Examples" only, and Markdown makes quotes of a session outside of it.

    >>> markdown("Example:\n  >>> 1 + 1\n  2")
    'Examples:\n  >>> 1 + 1\n  2\n'
    >>> markdown("Adds.\n\n>>> 1 + 1\n2\n\nMore.")
    'Adds.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore.\n'

    Brackets that say what may be left out would be taken for links.

    >>> markdown("by METRIC[:best|tail][:max].")
    'by `METRIC[:best|tail][:max]`.\n'
    """
    text = SYNTAX.sub(lambda found: f"`{found[0]}`", text)
    text = BLOCK.sub(lambda found: f"$$\n{textwrap.dedent(found[1]).strip()}\n$$\n\n", text + "\n")
    text = SESSION.sub(lambda found: f"```pycon\n{found[0]}\n```", EXAMPLE.sub("Examples:", text))
    return REFERENCE.sub("", INLINE.sub(r"$\1$", text))
