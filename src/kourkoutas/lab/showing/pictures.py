"""A testbed's own matplotlib figures as SVG that follows a light and a dark page.

The SVG is an image with real text. Black, white and greys of its lines and letters become names that a style inside it
gives a light and a dark meaning; colours of data stay as they are.
"""

from __future__ import annotations

import base64
import io
import re
from typing import TYPE_CHECKING, Any

from kourkoutas.lab import testbeds
from kourkoutas.lab.optimizers.looks import name_of
from kourkoutas.lab.results.snapshot import Snapshot

if TYPE_CHECKING:  # matplotlib takes a second to import, and most reports need none of it
    from matplotlib.figure import Figure

SETTINGS: Any = {"svg.hashsalt": "kbeta", "svg.fonttype": "none", "font.family": "DejaVu Sans"}
NAMES = {"#000000": "var(--ink)", "#ffffff": "var(--paper)", "#dddddd": "var(--line)", "#b0b0b0": "var(--line)"}
NAMES |= {"#666666": "var(--soft)", "#262626": "var(--ink)"}
STYLE = (
    "<style>:root{--ink:#1d2329;--paper:#fff;--line:#d9dee3;--soft:#5b6670;fill:var(--ink)}"
    "@media (prefers-color-scheme:dark){:root{--ink:#e6e9ec;--paper:#15191d;--line:#3a424a;--soft:#a3adb6}}</style>"
)


def own(snapshot: Snapshot) -> list[tuple[Figure, str]]:
    """What the testbed draws of final parameters: those of the first seed that most arms finished, by arm."""
    record, runs = snapshot.record, snapshot.runs
    draw = None if record.code else getattr(testbeds.get(record.testbed), "figures", None)
    done = [run for run in runs if run.result and run.result.status == "ok" and (run.folder / "params.npz").exists()]
    if draw is None or not done:
        return []
    seeds = [run.spec.seed for run in done]
    chosen = [run for run in done if run.spec.seed == max(record.seeds, key=seeds.count)]
    # One picture shows one model: arms whose settings differ, as in a grid over settings, are left out.
    shared = chosen[0].spec.settings
    params = {}
    for run in chosen:
        if run.spec.settings == shared:
            params[name_of(run.spec.optimizer)] = run.params() or {}
    settings = testbeds.settings_of(testbeds.get(record.testbed), record.preset, shared)
    title = f"seed {chosen[0].spec.seed}"
    return [(figure, f"{description} ({title})") for figure, description in draw(settings, params)]


def embed(figure: Figure) -> str:
    """The figure as the address of an image that is part of the page."""
    import matplotlib as mpl

    out = io.BytesIO()
    with mpl.rc_context(SETTINGS):  # the same bytes for the same figure
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue().decode("utf-8")
    for colour, name in NAMES.items():
        text = text.replace(f": {colour}", f": {name}")
    text = re.sub(r"(<svg [^>]*>)", lambda found: found[1] + STYLE, text, count=1)
    encoded = base64.b64encode(text.encode("utf-8")).decode("ascii")
    return f"data:image/svg+xml;base64,{encoded}"
