"""β2 of the one bucket of Testbed C while it trains, beside Adam's constant.

kbeta run rare_trigger --preset laptop --out results/beta2
python docs/pictures/beta2.py results/beta2 docs/pictures/beta2.png
"""

import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

if __name__ == "__main__":
    folder, picture = map(Path, sys.argv[1:])
    (file,) = folder.glob("runs/*/trace.npz")
    with np.load(file) as trace:
        shown = trace["steps"] <= 1500
        steps, sun, beta2 = trace["steps"][shown], trace["sun"][shown, 0], trace["beta2"][shown, 0]
    figure, (above, below) = plt.subplots(2, 1, figsize=(7, 3.6), sharex=True, layout="constrained")
    above.plot(steps, sun, lw=0.9, color="tab:orange")
    above.set_ylabel("sunspike")
    below.plot(steps, beta2, lw=0.9, color="tab:blue", label="K-β")
    for value, style in ((0.999, "--"), (0.95, ":")):
        below.axhline(value, color="black", lw=0.8, ls=style, label=f"Adam, β2 = {value}")
    below.set(xlabel="step", ylabel="β2")
    figure.legend(fontsize=8, loc="outside upper center", ncols=3)
    figure.savefig(picture, dpi=130)
