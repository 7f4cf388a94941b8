"""The runs behind `curves` and `report`, kept beside this file.

    kbeta study heat3d --preset laptop --set steps=1500 --seeds 0-9 \\
        --optimizers kbeta-eigen,kbeta,adam95,adam999,adam95-warm --out RESULTS
    python docs/pictures/runs.py curves RESULTS         curves.csv

    the command of README's example, with --out RESULTS
    python docs/pictures/runs.py example RESULTS        example.tar.xz

curves.csv has the loss of each optimizer at the paper's learning rate, ten seeds, a column per run. Runs that are there
and not in RESULTS stay. example.tar.xz is a results folder as `kbeta report` reads it.
"""

import shutil
import sys
import tempfile
from pathlib import Path

import pandas as pd

from kourkoutas.lab import load

HERE = Path(__file__).parent
FILE = HERE / "curves.csv"


def curves(results: Path) -> None:
    table = load(results).curves()
    run = table["optimizer"] + "-" + table["seed"].astype(str)
    steps = table["step"].astype(int)  # a float would be rounded in the file like a loss
    new = table.assign(run=run, step=steps).pivot(index="step", columns="run", values="loss")
    old = pd.read_csv(FILE, index_col="step") if FILE.exists() else pd.DataFrame(index=new.index)
    both = old.drop(columns=new.columns, errors="ignore").join(new, how="outer")
    both[sorted(both.columns)].to_csv(FILE, float_format="%.3g", lineterminator="\n")


def example(results: Path) -> None:
    sys.path.insert(0, str(HERE.parents[1] / "benchmarks"))
    import kept_runs

    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(results, Path(scratch) / "example")
        kept_runs.keep(Path(scratch), "example", Path(scratch) / "kept", evaluated="loss")
        shutil.copyfile(Path(scratch) / "kept" / "example.tar.xz", HERE / "example.tar.xz")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["curves", results]:
            curves(Path(results))
        case ["example", results]:
            example(Path(results))
        case _:
            sys.exit(__doc__)
