"""One framework on one shape, timed in this process: `python -m kourkoutas.bench torch pinn 2 15 10`."""

import json
import sys

from kourkoutas.bench import measure

if __name__ == "__main__":
    framework, shape, threads, rounds, seconds = sys.argv[1:]
    sys.stdout.write(json.dumps(measure(framework, shape, int(threads), int(rounds), float(seconds))) + "\n")
