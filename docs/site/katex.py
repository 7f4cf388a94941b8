"""A hook of MkDocs: copies KaTeX, which `make docs` fetched into its environment, into the site and sets every formula.

So formulas need no network when a page is read, and the repository holds no copy of KaTeX.
"""

import sys
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

DIST = Path(sys.prefix) / "katex" / "node_modules" / "katex" / "dist"
SCRIPTS = ("katex.min.js", "contrib/auto-render.min.js")
STYLE = "katex.min.css"
# Only what arithmatex has marked is a formula; elsewhere a dollar is a dollar.
RENDER = """
for (const node of document.querySelectorAll(".arithmatex")) {
  renderMathInElement(node, {delimiters: [
    {left: "\\\\(", right: "\\\\)", display: false},
    {left: "\\\\[", right: "\\\\]", display: true},
  ]});
}
"""


def on_config(config: MkDocsConfig, **_: Any) -> MkDocsConfig:
    if not (DIST / STYLE).exists():
        raise PluginError(f"KaTeX is not in {DIST}: npm install --prefix {sys.prefix}/katex katex")
    config.extra_css.insert(0, f"katex/{STYLE}")
    config.extra_javascript.extend([*(f"katex/{script}" for script in SCRIPTS), "katex/render.js"])
    return config


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    fonts = sorted((DIST / "fonts").glob("*.woff2"))
    for source in [*(DIST / script for script in SCRIPTS), DIST / STYLE, *fonts]:
        files.append(File.generated(config, f"katex/{source.relative_to(DIST).as_posix()}", abs_src_path=str(source)))
    files.append(File.generated(config, "katex/render.js", content=RENDER))
    return files
