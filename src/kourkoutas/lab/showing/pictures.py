"""A testbed's own matplotlib figures as SVG that follows a light and a dark page.

The SVG is an image with real text. Black, white and greys of its lines and letters become names that a style inside it
gives a light and a dark meaning; colours of data stay as they are.
"""

from __future__ import annotations

import base64
import io
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # matplotlib takes a second to import, and most reports need none of it
    from matplotlib.figure import Figure

SETTINGS: Any = {"svg.hashsalt": "kbeta", "svg.fonttype": "none", "font.family": "DejaVu Sans"}
NAMES = {"#000000": "var(--ink)", "#ffffff": "var(--paper)", "#dddddd": "var(--line)", "#b0b0b0": "var(--line)"}
NAMES |= {"#666666": "var(--soft)", "#262626": "var(--ink)"}
STYLE = (
    "<style>:root{--ink:#1d2329;--paper:#fff;--line:#d9dee3;--soft:#5b6670;fill:var(--ink)}"
    "@media (prefers-color-scheme:dark){:root{--ink:#e6e9ec;--paper:#15191d;--line:#3a424a;--soft:#a3adb6}}</style>"
)


@dataclass(frozen=True)
class Picture:
    """An image to embed, its width in CSS pixels, and its description."""

    source: str
    width: int
    description: str


def svg(figure: Figure) -> bytes:
    """The figure as SVG, the same bytes for the same figure."""
    import matplotlib as mpl

    out = io.BytesIO()
    with mpl.rc_context(SETTINGS):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def png(figure: Figure, dpi: int = 150) -> bytes:
    import matplotlib as mpl

    out = io.BytesIO()
    with mpl.rc_context(SETTINGS):
        figure.savefig(out, format="png", dpi=dpi)
    return out.getvalue()


def embed(figure: Figure, description: str) -> Picture:
    """The figure as an image that is part of the page."""
    text = svg(figure).decode("utf-8")
    for colour, name in NAMES.items():
        text = text.replace(f": {colour}", f": {name}")
    text = re.sub(r"(<svg [^>]*>)", lambda found: found[1] + STYLE, text, count=1)
    encoded = base64.b64encode(text.encode("utf-8")).decode("ascii")
    return Picture(f"data:image/svg+xml;base64,{encoded}", round(96 * figure.get_figwidth()), description)
