"""The `kbeta` command: parse (`arguments`), call the laboratory, print (`command`).

The commands are in `running`, `suites`, `results` and `tools`; `kbeta --help` lists them in this order. Nothing
of the laboratory is imported before a command needs it, so that `--help` and completion answer at once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

import typer

# isort: off
from kourkoutas.cli import running, suites, results, tools  # noqa: F401

# isort: on
from kourkoutas.cli.command import BAD_INPUT, FAILED, app, say


def _is_of_lab(module: str) -> bool:
    from kourkoutas.lab import doctor

    return module.partition(".")[0] in (*doctor.LAB, "markupsafe")  # which Jinja brings


def _got(error: Exception) -> str:
    """The value that the parser refused, where its own message does not have it."""
    refused = getattr(error.__cause__, "errors", None)
    return f"; got {refused()[0]['input']!r}" if callable(refused) else ""


def with_address(arguments: Sequence[str]) -> list[str]:
    """The arguments with an empty ADDRESS where `--ray` stands alone: the parser knows no optional values.

    >>> with_address(["study", "rare_trigger", "--ray", "--seeds", "0-3"])
    ['study', 'rare_trigger', '--ray=', '--seeds', '0-3']
    """
    after = [*arguments, "-"][1:]
    return [
        "--ray=" if argument == "--ray" and following.startswith("-") else argument
        for argument, following in zip(arguments, after, strict=True)
    ]


def main() -> None:
    """Run the command line; an error is one line on standard error and exit code 2."""
    try:
        code = app(with_address(sys.argv[1:]), standalone_mode=False)
    except KeyboardInterrupt:
        say("Stopped.")
        code = 128 + signal.SIGINT
    except (typer.Abort, EOFError):
        code = FAILED
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error of the parser
            message = error.format_message() + _got(error)
        elif isinstance(error, ValueError | TypeError | ImportError | OSError) and "KBETA_TRACEBACK" not in os.environ:
            message = str(error)
            if isinstance(error, OSError):
                from kourkoutas.lab.results import store

                message = str(store.DiskFull.of(error)) if store.is_full(error) else message
            if isinstance(error, ModuleNotFoundError) and _is_of_lab(error.name or ""):
                message += ": pip install 'kourkoutas-beta[lab]'"
        else:
            raise
        say(f"kbeta: {' '.join(message.split())}")
        code = BAD_INPUT
    sys.exit(code)
