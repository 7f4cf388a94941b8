"""The `kbeta` command, and `python -m kourkoutas`.

Most of the command is the laboratory's and needs the packages of its extra. Where they are missing, the few commands
that work without them do, and every other one says in one line what to install.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

LAB_MISSING = "the laboratory is not installed: pip install 'kourkoutas-beta[lab]'"
WITHOUT_LAB = "Without it there are: kbeta --version, kbeta doctor [--json], kbeta script FILE [ARGS...]"


def main() -> None:
    """The entry point of the console script."""
    if all(importlib.util.find_spec(name) for name in ("typer", "rich")):
        from kourkoutas import cli

        cli.main()
    else:
        sys.exit(without_lab(sys.argv[1:]))


def without_lab(arguments: Sequence[str]) -> int:
    """Run a command that needs no extra but its framework's; returns the exit code."""
    command, *rest = arguments or ["--help"]
    try:
        if command == "--version":
            from kourkoutas import __version__

            sys.stdout.write(f"kbeta {__version__}\n")
        elif command in ("-h", "--help"):
            sys.stdout.write(f"kbeta: {LAB_MISSING}\n{WITHOUT_LAB}\n")
        elif command == "doctor":
            from kourkoutas.lab import doctor

            doctor.main(rest)
        elif command == "script":
            if not rest:
                raise ValueError("script needs a file: kbeta script FILE [ARGS...]")
            from kourkoutas import paper

            paper.script(rest[0], rest[1:])
        else:
            sys.stderr.write(f"kbeta: {LAB_MISSING}\n")
            return 2
    except (ValueError, ImportError, OSError) as error:
        sys.stderr.write(f"kbeta: {' '.join(str(error).split())}\n")
        return 2
    return 0


if __name__ == "__main__":
    main()
