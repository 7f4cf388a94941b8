"""What the commands print: results on standard output, words about them on standard error."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from kourkoutas.cli.app import err, out


def say(text: str) -> None:
    err.print(text, markup=False, highlight=False, soft_wrap=True)


def answer(text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1, allow_nan=False) + "\n")


def print_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[str] = ()) -> None:
    from kourkoutas.lab.showing.fitting import Fitting

    if title:
        out.print(f"\n{title}", style="bold", markup=False, highlight=False)
    out.print(Fitting("", head, rows, words))
