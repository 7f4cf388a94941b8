"""The command that adds seeds to a study."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

MORE = 10


def more_seeds(command: str, seeds: Sequence[int], taken: Sequence[int] = (), more: int = MORE) -> str | None:
    """The study's command with `more` new seeds, none of those `taken` by its tuning; None when it was not made by one.

    >>> more_seeds("kbeta study rare_trigger --seeds 0-9 --out r", range(10))
    'kbeta study rare_trigger --seeds 0-19 --out r'
    """
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    if "study" not in words[1:4] or not seeds:
        return None
    first = max(seeds) + 1
    free = [seed for seed in range(first, first + more + len(taken)) if seed not in taken]
    wanted = ranges([*seeds, *free[:more]])
    for at, word in enumerate(words):
        if word == "--seeds" and at + 1 < len(words):
            words[at + 1] = wanted
            break
        if word.startswith("--seeds="):
            words[at] = f"--seeds={wanted}"
            break
    else:
        words += ["--seeds", wanted]
    return shlex.join(words)


def ranges(seeds: Sequence[int]) -> str:
    """Seeds as the command line takes them.

    >>> ranges([3, 0, 1, 2, 7])
    '0-3,7'
    """
    parts: list[list[int]] = []
    for seed in sorted(set(seeds)):
        if parts and seed == parts[-1][1] + 1:
            parts[-1][1] = seed
        else:
            parts.append([seed, seed])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
