r"""Testbed C: length jitter and a rare trigger.

A sequence of L ~ U{80, …, 256} tokens, uniform in 1 … 255, gets the trigger token 255 at a random place with
probability 0.01; that is its label. A bag of embeddings decides:

.. math::
    z = \Big(\tfrac1L \sum_{i \le L} E_{x_i}\Big) w + b = \tfrac1L\, c\, E\, w + b, \qquad
    \text{loss} = ⟨\log(1 + e^z) - y z⟩

NOTE: c counts each token of the sequence, so a batch is a matrix of counts and no embedding is gathered.

NOTE: fillers take the value 255 too, so about half of all sequences hold a trigger that is no label: the task is noisy
by design. With the paper's sizes the best possible held-out loss is about 0.0473, the base rate gives 0.0557.

NOTE: the paper's endpoint is the loss of the very last batch after its update: 64 sequences, mostly without a positive.
The held-out loss on fresh sequences stands beside it.

NOTE: the paper's script takes ten updates on its first batch before it counts steps; `repeat_first` is their number.
With `stream="listing"` batch n of seed s is batch s + n of one common stream, as in that script, so that the seeds see
the same data shifted by one step. By default every seed has a stream of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from kourkoutas.lab import engines
from kourkoutas.lab.engines import Array, Batch, Batches, Engine, Loss, Params
from kourkoutas.lab.optimizers.recipes import USUAL
from kourkoutas.lab.testbeds import PAPER, Endpoint, Plain, Problem, Testbed

# Batches that share one generator; part of the definition of the data.
BLOCK = 50
TRAIN, HELD_OUT, INIT = 1, 2, 3
STREAMS = ("own", "listing")


@dataclass(frozen=True)
class Settings:
    """The sizes of a run; the defaults are the paper's."""

    steps: int = 30_000
    repeat_first: int = 10
    lr: float = 1e-2
    batch: int = 64
    shortest: int = 80
    longest: int = 256
    vocabulary: int = 256
    p_trigger: float = 0.01
    width: int = 64
    stream: str = "own"
    held_out: int = 65_536
    tail: int = 5_000

    def __post_init__(self) -> None:
        if self.stream not in STREAMS:
            raise ValueError(f"`stream` must be 'own' or 'listing'; got {self.stream!r}")
        if not 1 <= self.shortest <= self.longest <= 256:
            raise ValueError(
                f"`shortest` and `longest` must satisfy 1 <= shortest <= longest <= 256; "
                f"got shortest={self.shortest!r}, longest={self.longest!r}"
            )
        if not 3 <= self.vocabulary <= 256:
            raise ValueError(f"`vocabulary` must be in 3 ... 256; got {self.vocabulary!r}")
        if not 0 <= self.p_trigger <= 1:
            raise ValueError(f"`p_trigger` must be in [0, 1], for example 0.01; got {self.p_trigger!r}")
        for name in ("steps", "batch", "width", "held_out", "tail"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be >= 1; got {getattr(self, name)!r}")
        if self.repeat_first < 0:
            raise ValueError(f"`repeat_first` must be >= 0; got {self.repeat_first!r}")


@dataclass(frozen=True)
class Sequences:
    """Sequences as counts (…, vocabulary) uint8, lengths (…,) and labels (…,) float32."""

    counts: NDArray[np.uint8]
    lengths: NDArray[np.float32]
    labels: NDArray[np.float32]


def draw(settings: Settings, rows: int, *key: int, out: NDArray[np.uint8] | None = None) -> Sequences:
    """`rows` sequences from the generator of `key`, their counts in `out` if that is given.

    A byte of a raw random word is uniform in 0 … 255. Bytes outside 1 … vocabulary-1 are drawn again, which leaves the
    others, and so all tokens, exactly uniform. Words and seeds of PCG64 are the same on every machine.
    """
    bits = np.random.PCG64(np.random.SeedSequence(key))
    rng = np.random.Generator(bits)
    V = settings.vocabulary
    lengths = rng.integers(settings.shortest, settings.longest + 1, size=rows)
    placed = rng.random(rows) < settings.p_trigger
    ends = np.zeros(rows + 1, np.int32)
    np.cumsum(lengths, out=ends[1:])
    place = ends[:-1] + (rng.random(rows) * lengths).astype(np.int32)

    tokens = bits.random_raw((ends[-1] + 7) // 8).astype("<u8", copy=False).view(np.uint8)[: ends[-1]]
    outside = tokens == 0 if V == 256 else (tokens == 0) | (tokens >= V)
    again = np.flatnonzero(outside)
    tokens[again] = rng.integers(1, V, size=again.size)
    tokens[place[placed]] = V - 1

    # Row i of a sparse matrix with a 1 at column t for every token t: its dense form adds them up to the counts.
    ones = _ones(rows * settings.longest)[: ends[-1]]
    counts = csr_array((ones, tokens.astype(np.int32), ends), shape=(rows, V)).toarray(out=out)
    return Sequences(counts, lengths.astype(np.float32), placed.astype(np.float32))


@functools.lru_cache(maxsize=4)
def _ones(n: int) -> NDArray[np.uint8]:
    ones = np.ones(n, np.uint8)
    ones.flags.writeable = False
    return ones


# One seed's data serves all its optimizers, which a worker runs in a row.
@functools.lru_cache(maxsize=1)
def training_data(settings: Settings, seed: int) -> Sequences:
    """Batches 0 … steps of a seed, each with a leading axis over batches."""
    stream, first = (seed + 1, 0) if settings.stream == "own" else (0, seed)
    last = first + settings.steps + 1
    low, high = first // BLOCK, -(-last // BLOCK)
    B, V = settings.batch, settings.vocabulary
    rows = BLOCK * B
    counts = np.zeros(((high - low) * rows, V), np.uint8)
    drawn = [
        draw(settings, rows, TRAIN, stream, block, out=counts[(block - low) * rows : (block - low + 1) * rows])
        for block in range(low, high)
    ]
    here = slice(first - low * BLOCK, last - low * BLOCK)
    return Sequences(
        counts.reshape(-1, B, V)[here],
        np.concatenate([d.lengths for d in drawn]).reshape(-1, B)[here],
        np.concatenate([d.labels for d in drawn]).reshape(-1, B)[here],
    )


def _as_batch(s: Sequences) -> dict[str, NDArray[Any]]:
    return {"counts": s.counts, "lengths": s.lengths, "labels": s.labels}


def logits(E: Engine, params: Params, batch: Batch) -> Array:
    """z = c·E·w / L + b."""
    # E·w first: a product of the counts with one column instead of `width` columns, forward and backward.
    scores = E.cast(batch["counts"], "float32") @ (params["embedding"] @ params["head.w"])
    return scores[..., 0] / batch["lengths"] + params["head.b"]


def loss(E: Engine, params: Params, batch: Batch) -> Array:
    return E.bce_with_logits(logits(E, params, batch), batch["labels"])


@dataclass(frozen=True)
class RareTriggerProblem(Plain):
    """One seed: its stream, initial parameters and held-out set."""

    settings: Settings

    @property
    def steps(self) -> int:
        return self.settings.repeat_first + self.settings.steps

    @property
    def tail(self) -> int:
        return self.settings.tail

    @property
    def loss(self) -> Loss:
        return loss

    @functools.cached_property
    def params(self) -> Mapping[str, NDArray[Any]]:
        rng = np.random.default_rng([INIT, self.seed])
        s = self.settings
        return {
            "embedding": (0.02 * rng.standard_normal((s.vocabulary, s.width))).astype(np.float32),
            "head.w": (0.02 * rng.standard_normal((s.width, 1))).astype(np.float32),
            "head.b": np.zeros(1, np.float32),
        }

    def batches(self, start: int, stop: int) -> Batches:
        data = training_data(self.settings, self.seed)
        repeat = self.settings.repeat_first
        if start >= repeat:
            here: Any = slice(start - repeat + 1, stop - repeat + 1)
        else:
            here = np.maximum(np.arange(start, stop) - repeat + 1, 0)
        return {name: x[here] for name, x in _as_batch(data).items()}

    def evaluate(self, E: Engine, params: Params, step: int) -> dict[str, float]:
        data = training_data(self.settings, self.seed)
        last = {name: x[-1] for name, x in _as_batch(data).items()}
        return {"last_batch_bce": _value(E, params, last), "heldout_bce": self._held_out(E, params)}

    def _held_out(self, E: Engine, params: Params) -> float:
        """The mean loss on `held_out` fresh sequences of this seed, in pieces of a fixed size."""
        total, piece = 0.0, 8192
        for number, start in enumerate(range(0, self.settings.held_out, piece)):
            rows = min(piece, self.settings.held_out - start)
            fresh = draw(self.settings, rows, HELD_OUT, self.seed, number)
            total += rows * _value(E, params, _as_batch(fresh))
        return total / self.settings.held_out


@functools.lru_cache(maxsize=3)
def _compiled(engine: str) -> Callable[..., Array]:
    return engines.get(engine).compile(functools.partial(loss, engines.get(engine)))


def _value(E: Engine, params: Params, batch: Mapping[str, NDArray[Any]]) -> float:
    return float(E.numpy(_compiled(E.name)(params, {name: E.array(x) for name, x in batch.items()})))


@dataclass(frozen=True)
class RareTrigger:
    """See `kourkoutas.lab.testbeds.Testbed`."""

    name: str = "rare_trigger"
    title: str = "Testbed C: length jitter + rare trigger"
    version: int = 1
    endpoints: tuple[Endpoint, ...] = (
        Endpoint("last_batch_bce", "BCE of the last batch after its update (the paper's)", log=True, threshold=1e-2),
        Endpoint("heldout_bce", "held-out BCE"),
        Endpoint("train_loss", "mean training BCE of the last steps"),
    )
    arms: tuple[str, ...] = USUAL

    @property
    def presets(self) -> Mapping[str, Settings]:
        return {
            "smoke": Settings(steps=190, held_out=2_048, tail=50),
            "laptop": Settings(steps=10_000),
            "paper": Settings(),
        }

    @property
    def kbeta(self) -> Mapping[str, Any]:
        return {**PAPER, "warmup_steps": 50, "buckets": "global"}

    def problem(self, settings: Settings, seed: int) -> Problem:
        return RareTriggerProblem(settings, seed)


TESTBEDS: tuple[Testbed, ...] = (RareTrigger(),)
