"""Anybody's table of results: a CSV with one row per run."""

from __future__ import annotations

from pathlib import Path

from kourkoutas.lab.judging.values import Seed

COLUMNS = ["seed", "optimizer", "value"]


def read_table(path: str | Path) -> dict[str, dict[Seed, float]]:
    """{optimizer: {seed: value}} from a text table with the columns seed, optimizer and value, in any order.

    Comma, semicolon or tab separate; other columns are ignored; `nan` and `inf` stand for a diverged run.
    """
    import pandas as pd  # which takes a second

    try:
        with open(path, encoding="utf-8-sig") as lines:
            separator = max(",;\t", key=lines.readline().count)
        cells = pd.read_csv(
            path, sep=separator, encoding="utf-8-sig", header=None, dtype=str, na_filter=False, skip_blank_lines=False
        )
    except (OSError, ValueError) as error:
        told = " ".join(str(error).split())
        raise ValueError(f"{path}: {told}; give a UTF-8 table with the columns {', '.join(COLUMNS)}") from None
    cells = cells.map(lambda cell: str(cell).strip())
    header, rows = cells.iloc[0].str.lower().tolist(), cells.iloc[1:]
    if sorted(name for name in header if name in COLUMNS) != sorted(COLUMNS):
        raise ValueError(f"{path}, line 1: found {', '.join(header)}; name the columns {', '.join(COLUMNS)}, each once")
    rows = rows[(rows != "").any(axis=1)].set_axis(header, axis=1)[COLUMNS]
    if rows.empty:
        raise ValueError(f"{path}: holds no rows; give one line per run under the columns {', '.join(COLUMNS)}")
    if rows["seed"].str.fullmatch(r"-?\d+").all():
        rows = rows.assign(seed=rows["seed"].map(int))
    values: dict[str, dict[Seed, float]] = {}
    for at, seed, optimizer, value in rows.itertuples():
        where, own = f"{path}, line {at + 1}", values.setdefault(optimizer, {})
        if "" in (seed, optimizer):
            raise ValueError(f"{where}: seed or optimizer is empty; fill it in")
        if seed in own:
            raise ValueError(f"{where}: {optimizer!r} has seed {seed} already; keep one value per optimizer and seed")
        try:
            own[seed] = float(value)
        except ValueError:
            raise ValueError(f"{where}: value {value!r} is not a number; write 1.2e-3, or nan if it diverged") from None
    return values
