"""Print the requirements of one extra of pyproject.toml, for an environment that needs nothing else of the project."""

import sys
import tomllib
from pathlib import Path

if __name__ == "__main__":
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    print(*project["optional-dependencies"][sys.argv[1]])
