"""The runs behind `curves`, kept as a table beside this file.

    kbeta study heat3d --preset laptop --set steps=1500 --seeds 0-9 --optimizers kbeta,adam95,adam999,adam95-warm \\
        --out RESULTS
    python docs/pictures/runs.py RESULTS    curves.csv

curves.csv has the loss of each optimizer at the paper's learning rate, ten seeds, a column per run. Runs that are there
and not in RESULTS stay.
"""

import sys
from pathlib import Path

import pandas as pd

from kourkoutas.lab import load

FILE = Path(__file__).parent / "curves.csv"


def main(results: Path) -> None:
    table = load(results).curves()
    run = table["optimizer"] + "-" + table["seed"].astype(str)
    steps = table["step"].astype(int)  # a float would be rounded in the file like a loss
    new = table.assign(run=run, step=steps).pivot(index="step", columns="run", values="loss")
    old = pd.read_csv(FILE, index_col="step") if FILE.exists() else pd.DataFrame(index=new.index)
    both = old.drop(columns=new.columns, errors="ignore").join(new, how="outer")
    both[sorted(both.columns)].to_csv(FILE, float_format="%.3g", lineterminator="\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case [results]:
            main(Path(results))
        case _:
            sys.exit(__doc__)
