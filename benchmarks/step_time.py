"""Step time and memory against each framework's Adam: `kbeta bench`, with its results kept in results/bench."""

import sys

from kourkoutas.bench import main

if __name__ == "__main__":
    sys.exit(main(["--out", "results/bench", *sys.argv[1:]]))
