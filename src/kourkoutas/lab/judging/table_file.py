"""Anybody's table of results: a CSV with one row per run."""

from __future__ import annotations

import csv
from pathlib import Path

from kourkoutas.lab.judging.values import Seed

COLUMNS = ("seed", "optimizer", "value")


def read_table(path: str | Path) -> dict[str, dict[Seed, float]]:
    """{optimizer: {seed: value}} from a text table with the columns seed, optimizer and value, in any order.

    Comma, semicolon or tab separate; other columns are ignored; `nan` and `inf` stand for a diverged run.
    """
    columns = ", ".join(COLUMNS)
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8; save the table as UTF-8 text") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; give a table with the columns {columns}") from None
    delimiter = max(",;\t", key=next(filter(str.strip, lines), "").count)
    reader = csv.reader(lines, delimiter=delimiter)
    rows = [(reader.line_num, [cell.strip() for cell in row]) for row in reader if any(map(str.strip, row))]
    line, header = rows[0] if rows else (1, list(COLUMNS))
    header = [name.lower() for name in header]
    for name in COLUMNS:
        if header.count(name) != 1:
            what = "is missing" if name not in header else "appears more than once"
            raise ValueError(
                f"{path}, line {line}: column {name!r} {what} (found {', '.join(header)}); "
                f"the first line must name the columns {columns}"
            )
    if not rows[1:]:
        raise ValueError(f"{path}: holds no rows; give one line per run under the columns {columns}")
    at = header.index("seed")
    numbered = all(row[at].removeprefix("-").isdecimal() for _, row in rows[1:] if len(row) > at)
    values: dict[str, dict[Seed, float]] = {}
    first: dict[tuple[str, Seed], int] = {}
    for line, row in rows[1:]:
        where = f"{path}, line {line}"
        if len(row) != len(header):
            raise ValueError(
                f"{where}: {len(row)} fields where the first line names {len(header)} columns; add or remove fields "
                f"(separator {delimiter!r})"
            )
        text, optimizer, value = (row[header.index(name)] for name in COLUMNS)
        for name, cell in (("seed", text), ("optimizer", optimizer)):
            if not cell:
                raise ValueError(f"{where}, column {name!r}: empty; fill in the {name}")
        seed: Seed = int(text) if numbered else text
        if (optimizer, seed) in first:
            raise ValueError(
                f"{where}, column 'seed': {optimizer!r} has seed {seed} already on line {first[optimizer, seed]}; "
                "keep one value per optimizer and seed"
            )
        first[optimizer, seed] = line
        try:
            values.setdefault(optimizer, {})[seed] = float(value)
        except ValueError:
            raise ValueError(
                f"{where}, column 'value': {value!r} is not a number; "
                "write it as 0.0012 or 1.2e-3, or nan for a diverged run"
            ) from None
    return values
