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
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; give a table with the columns {', '.join(COLUMNS)}") from None
    except IsADirectoryError:
        raise ValueError(f"{path}: is a folder; give a table with the columns {', '.join(COLUMNS)}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8; save the table as UTF-8 text") from None
    head = next((line for line in text.splitlines() if line.strip()), "")
    delimiter = max(",;\t", key=head.count)
    reader = csv.reader(text.splitlines(), delimiter=delimiter)
    header: list[str] | None = None
    raw: dict[tuple[str, str], tuple[int, float]] = {}
    for row in reader:
        line = reader.line_num
        if not any(cell.strip() for cell in row):
            continue
        if header is None:
            header = [cell.strip().lower() for cell in row]
            for name in COLUMNS:
                if header.count(name) != 1:
                    what = "is missing" if name not in header else "appears more than once"
                    raise ValueError(
                        f"{path}, line {line}: column {name!r} {what} (found {', '.join(header)}); "
                        f"the first line must name the columns {', '.join(COLUMNS)}"
                    )
            continue
        if len(row) != len(header):
            raise ValueError(
                f"{path}, line {line}: {len(row)} fields where the first line names {len(header)} columns; "
                f"add or remove {'field' if abs(len(row) - len(header)) == 1 else 'fields'} (separator {delimiter!r})"
            )
        cells = {name: row[header.index(name)].strip() for name in COLUMNS}
        for name in ("seed", "optimizer"):
            if not cells[name]:
                raise ValueError(f"{path}, line {line}, column {name!r}: empty; fill in the {name}")
        try:
            value = float(cells["value"])
        except ValueError:
            raise ValueError(
                f"{path}, line {line}, column 'value': {cells['value']!r} is not a number; "
                "write it as 0.0012 or 1.2e-3, or nan for a diverged run"
            ) from None
        key = (cells["optimizer"], cells["seed"])
        if key in raw:
            raise ValueError(
                f"{path}, line {line}, column 'seed': {key[0]!r} has seed {key[1]} already on line {raw[key][0]}; "
                "keep one value per optimizer and seed"
            )
        raw[key] = (line, value)
    if not raw:
        raise ValueError(f"{path}: holds no rows; give one line per run under the columns {', '.join(COLUMNS)}")
    whole = all(seed.removeprefix("-").isdecimal() for _, seed in raw)
    values: dict[str, dict[Seed, float]] = {}
    lines: dict[tuple[str, Seed], int] = {}
    for (name, text), (line, value) in raw.items():
        number: Seed = int(text) if whole else text
        before = lines.setdefault((name, number), line)
        if before != line:  # 1 and 01
            raise ValueError(
                f"{path}, line {line}, column 'seed': {name!r} has seed {number} already on line {before}; keep one "
                "value per optimizer and seed"
            )
        values.setdefault(name, {})[number] = value
    return values
