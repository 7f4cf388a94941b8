"""Step time and memory against each framework's Adam: `kbeta bench`, with its results kept in results/bench.

With KBETA_PEER_PYTHON=<an interpreter that has a peer>, the peer is timed in the same rounds.
"""

import json
import os
import sys

from peer import Peer

from kourkoutas.bench import main, measure
from kourkoutas.bench.contestants import SHAPES
from kourkoutas.bench.timing import Contestant


def beside_a_peer(framework: str, shape: str, threads: int, rounds: int, seconds: float) -> dict:
    """`measure`, with the peer among the contestants of PyTorch."""
    python = os.environ.get("KBETA_PEER_PYTHON") if framework == "torch" else None
    if not python:
        return measure(framework, shape, threads, rounds, seconds)
    peer = Peer(python, SHAPES[shape], threads)
    try:
        others = {peer.name: Contestant(peer.steps, "K-β", peer.state_bytes, elsewhere=True)}
        return measure(framework, shape, threads, rounds, seconds, others)
    finally:
        peer.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        framework, shape, threads, rounds, seconds = sys.argv[2:]
        result = beside_a_peer(framework, shape, int(threads), int(rounds), float(seconds))
        sys.stdout.write(json.dumps(result) + "\n")
    else:
        worker = [sys.executable, __file__, "--worker"]
        sys.exit(main(["--out", "results/bench", *sys.argv[1:]], worker))
