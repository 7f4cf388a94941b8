r"""Testbed D: a character language model with jumping sequence lengths and sudden drops of the learning rate.

A pre-LN Transformer with learned positions, causal attention, tanh GELU and a head of its own reads windows of a text:

.. math::
    h &= E_x + P_{1..L}, \qquad h \leftarrow h + \mathrm{attention}(\mathrm{LN}(h)), \qquad
         h \leftarrow h + W_2\,\mathrm{gelu}(W_1\,\mathrm{LN}(h)) \\
    \text{loss} &= ⟨-\log p(x_{i+1} \mid x_{\le i})⟩, \qquad \text{BPC} = \text{loss} / \ln 2

Update s of a seed sees 4 windows of one length L ~ U{16, …, 512}, rounded up to a multiple of 32, so that an engine
compiles 16 shapes and no more. `lengths="fixed"` gives the longest at every step, as the paper's published commands do.

NOTE: the last tenth of the text is held out. The endpoint is the BPC of one fixed batch of it, the same for all seeds.

NOTE: `vocabulary="text"` takes every character of the text, as the paper does. By default the training part decides:
characters that it holds less than `rare` times share one symbol, which also stands for unseen ones in the held-out
part. Where the training part has no such symbol to learn, an unseen character is an error.

NOTE: Adam's failure in the paper needs its learning rate times width, 1e-3 · 512. The preset `laptop` keeps that
product at width 64; `laptop-low-lr` is the same with 1e-3.
"""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kourkoutas.lab import engines
from kourkoutas.lab.engines import Array, Batch, Batches, Engine, Loss, Params
from kourkoutas.lab.errors import argument
from kourkoutas.lab.optimizers.recipes import CONTROLS
from kourkoutas.lab.testbeds import PAPER, Endpoint, Plain, Problem, Testbed
from kourkoutas.lab.testbeds.char_lm import corpus
from kourkoutas.lab.testbeds.char_lm.corpus import CorpusError

TRAIN, INIT = 1, 2
LENGTHS = ("jitter", "fixed")
VOCABULARIES = ("training", "text")
PRECISIONS = ("float32", "bfloat16")
# Held-out windows evaluated at once.
PIECE = 16
# More unknown characters than this in the held-out part, and it is another kind of text.
MOST_UNKNOWN = 0.01


@dataclass(frozen=True)
class Settings:
    """The sizes of a run; the defaults are the paper's, except for the text."""

    text: str = "generated"
    text_sha256: str = ""
    characters: int = 1_000_000
    vocabulary: str = "training"
    rare: int = 0
    held_out: float = 0.1
    steps: int = 50_001
    lr: float = 1e-3
    drops: str = "0.6:0.5,0.8:0.1"
    batch: int = 4
    lengths: str = "jitter"
    shortest: int = 16
    longest: int = 512
    multiple: int = 32
    layers: int = 6
    width: int = 512
    heads: int = 8
    precision: str = "float32"
    eval_windows: int = 128
    eval_length: int = 256
    eval_seed: int = 1234
    evaluate_every: int = 500
    tail: int = 500

    def __post_init__(self) -> None:
        for name, choices in (("vocabulary", VOCABULARIES), ("lengths", LENGTHS), ("precision", PRECISIONS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"`{name}` must be {' or '.join(map(repr, choices))}; got {getattr(self, name)!r}")
        for name in ("characters", "steps", "batch", "shortest", "multiple", "layers", "width", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be >= 1; got {getattr(self, name)!r}")
        for name in ("eval_windows", "eval_length", "tail"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be >= 1; got {getattr(self, name)!r}")
        for name in ("rare", "eval_seed", "evaluate_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` must be >= 0; got {getattr(self, name)!r}")
        if not self.lr > 0:
            raise ValueError(f"`lr` must be > 0, for example 1e-3; got {self.lr!r}")
        if not 0 < self.held_out < 1:
            raise ValueError(f"`held_out` must be between 0 and 1, for example 0.1; got {self.held_out!r}")
        if self.shortest > self.longest:
            raise ValueError(
                f"`shortest` must be at most `longest`; got shortest={self.shortest!r}, longest={self.longest!r}"
            )
        if self.width % self.heads:
            raise ValueError(f"`width` must be a multiple of `heads`; got width={self.width!r}, heads={self.heads!r}")
        if self.eval_length > self.context:
            raise ValueError(
                f"`eval_length` must be at most {self.context}, the longest length in training; "
                f"got {self.eval_length!r}"
            )
        schedule(self.drops)
        if self.precision == "bfloat16":
            check_bfloat16()

    @property
    def context(self) -> int:
        """The largest L, and the number of learned positions."""
        return -(-self.longest // self.multiple) * self.multiple


def schedule(drops: str) -> tuple[tuple[float, float], ...]:
    """Pairs (fraction of the run, factor of the learning rate from there on).

    >>> schedule("0.6:0.5,0.8:0.1")
    ((0.6, 0.5), (0.8, 0.1))
    """
    try:
        pairs = tuple((float(at), float(factor)) for at, factor in (p.split(":") for p in drops.split(",") if p))
    except ValueError:
        pairs = ((math.nan, math.nan),)
    fractions = [at for at, _ in pairs]
    if not all(at > 0 and factor > 0 for at, factor in pairs) or fractions != sorted(fractions):
        raise ValueError(
            f"`drops` must be FRACTION:FACTOR, … in order, for example '0.6:0.5,0.8:0.1', or empty; got {drops!r}"
        )
    return pairs


def check_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Raise where the processor is known to have no bfloat16 arithmetic, and would only be slower with it."""
    if platform.system() == "Linux" and cpuinfo.is_file():
        flags = cpuinfo.read_text().split()
        if not {"avx512_bf16", "amx_bf16", "bf16"} & set(flags):
            raise ValueError(
                "`precision` 'bfloat16' needs a processor with bfloat16 arithmetic (avx512_bf16, amx_bf16 or bf16), "
                "which this one has not; use 'float32'"
            )


@dataclass(frozen=True, eq=False)
class Split:
    """A text in two parts; `symbols[id]` is the model's symbol of a character of the text."""

    training: NDArray[Any]
    held_out: NDArray[Any]
    symbols: NDArray[np.int32]
    vocabulary: int

    def windows(self, part: NDArray[Any], starts: NDArray[np.int64], length: int) -> NDArray[np.int32]:
        """One row of `length` + 1 symbols per start."""
        return np.asarray(self.symbols[np.stack([part[s : s + length + 1] for s in starts.tolist()])])


def split(settings: Settings) -> Split:
    """The text of `settings`, or a `CorpusError` that says why it cannot be used."""
    s = settings
    return _split(
        s.text,
        s.text_sha256,
        s.characters,
        s.held_out,
        s.vocabulary,
        s.rare,
        s.context,
        s.eval_length,
        _version(s.text),
    )


def _version(text: str) -> tuple[int, int]:
    """Changes when the file does, so that a text that was edited is read again."""
    path = Path(text)
    return (path.stat().st_mtime_ns, path.stat().st_size) if path.is_file() else (0, 0)


@functools.lru_cache(maxsize=4)
def _split(
    text: str,
    sha256: str,
    characters: int,
    share: float,
    vocabulary: str,
    rare: int,
    context: int,
    eval_length: int,
    version: tuple[int, int],
) -> Split:
    found = corpus.load(text, characters=characters)
    if sha256 and found.sha256 != sha256:
        raise CorpusError(
            f"text {found.name} is not the one of this study: sha256 {found.sha256}, not {sha256}; "
            "bring back that file, or start another study"
        )
    total = len(found.ids)
    cut = total - int(total * share)
    for part, have, need in (("training", cut, context), ("held-out", total - cut, eval_length)):
        if have <= need:
            raise CorpusError(
                f"text {found.name} is shorter than one window: its {part} part has {have:,} characters and a window "
                f"needs {need + 1:,}; use a longer text, or shorter windows "
                f"({argument('settings')} {'longest' if part == 'training' else 'eval_length'}=…)"
            )
    symbols, size = _symbols(found, found.ids[:cut], found.ids[cut:], vocabulary, rare)
    ids = corpus.keep(found).ids
    return Split(ids[:cut], ids[cut:], symbols, size)


def _symbols(
    found: corpus.Corpus, training: NDArray[Any], held_out: NDArray[Any], vocabulary: str, rare: int
) -> tuple[NDArray[np.int32], int]:
    """Text id → symbol, and the number of symbols. The last symbol is that of rare and unseen characters."""
    n = len(found.characters)
    if vocabulary == "text":
        return np.arange(n, dtype=np.int32), n
    seen = np.bincount(training, minlength=n)
    known = seen >= max(1, rare)
    learned = bool((seen[~known] > 0).any())
    size = int(known.sum())
    symbols = np.full(n, size, np.int32)
    symbols[known] = np.arange(size, dtype=np.int32)

    met = np.bincount(held_out, minlength=n)
    unseen = np.flatnonzero((met > 0) & (seen == 0))
    unknown = met[~known].sum() / len(held_out)
    if unseen.size and not learned:
        listed = ", ".join(f"{found.characters[i]!r} (U+{ord(found.characters[i]):04X})" for i in unseen[:5])
        helps = (
            f", let them share a symbol with rare characters ({argument('settings', 'rare=20')})"
            if (seen[seen > 0] < 20).any()
            else ""
        )
        raise CorpusError(
            f"text {found.name} has {unseen.size:,} character(s) in its held-out part that the training part never "
            f"shows: {listed}{', …' if unseen.size > 5 else ''}; mix the text or remove them{helps}, "
            f"or give each a symbol of its own all the same ({argument('settings', 'vocabulary=text')})"
        )
    if unknown > MOST_UNKNOWN:
        raise CorpusError(
            f"text {found.name}: {unknown:.1%} of its held-out part are characters that are rare or unseen in the "
            f"training part; mix the text, lower {argument('settings')} rare=, or use "
            f"{argument('settings', 'vocabulary=text')}"
        )
    return symbols, size + learned


@dataclass(frozen=True)
class Model:
    """The loss of a batch {"ids": (B, L+1)}: a function of the engine, the parameters and the batch."""

    layers: int
    heads: int
    precision: str

    def __call__(self, E: Engine, params: Params, batch: Batch) -> Array:
        ids = batch["ids"]
        return E.cross_entropy(self.logits(E, params, ids[:, :-1]), ids[:, 1:])

    def logits(self, E: Engine, params: Params, ids: Array) -> Array:
        """(B, L) symbols → (B, L, vocabulary)."""
        h = E.take(params["embedding"], ids) + params["positions"][: ids.shape[1]]
        for n in range(self.layers):
            block = f"blocks.{n}"
            h = h + self._attention(E, params, block, self._norm(E, params, f"{block}.norm1", h))
            inner = E.gelu(self._linear(E, params, f"{block}.mlp1", self._norm(E, params, f"{block}.norm2", h)))
            h = h + self._full(E, self._linear(E, params, f"{block}.mlp2", inner))
        return self._full(E, self._linear(E, params, "head", self._norm(E, params, "norm", h)))

    def _attention(self, E: Engine, params: Params, block: str, x: Array) -> Array:
        B, L, d = x.shape
        # Split before the heads are told apart: the gradient of a split is one concatenation.
        q, k, v = (
            E.transpose(each.reshape(B, L, self.heads, d // self.heads), (0, 2, 1, 3))
            for each in E.split(self._linear(E, params, f"{block}.qkv", x), 3)
        )
        mixed = E.attention(q, k, v)
        joined = E.transpose(mixed, (0, 2, 1, 3)).reshape(B, L, d)
        return self._full(E, self._linear(E, params, f"{block}.out", joined))

    def _norm(self, E: Engine, params: Params, name: str, x: Array) -> Array:
        return E.layer_norm(x, params[f"{name}.gain"], params[f"{name}.bias"])

    def _linear(self, E: Engine, params: Params, name: str, x: Array) -> Array:
        w, b = params[f"{name}.w"], params[f"{name}.b"]
        if self.precision == "float32":
            return E.linear(x, w, b)
        # Products in bfloat16; parameters, residual stream, normalisation, loss and optimizer stay in float32.
        return E.linear(*(E.cast(each, self.precision) for each in (x, w, b)))

    def _full(self, E: Engine, x: Array) -> Array:
        return x if self.precision == "float32" else E.cast(x, "float32")


def init(settings: Settings, vocabulary: int, seed: int) -> dict[str, NDArray[Any]]:
    """Weights and tables N(0, 0.02), biases 0, gains 1."""
    rng = np.random.default_rng([INIT, seed])
    d = settings.width
    params: dict[str, NDArray[Any]] = {}

    def table(name: str, rows: int, columns: int) -> None:
        params[name] = 0.02 * rng.standard_normal((rows, columns), np.float32)

    def linear(name: str, inputs: int, outputs: int) -> None:
        table(f"{name}.w", inputs, outputs)
        params[f"{name}.b"] = np.zeros(outputs, np.float32)

    def norm(name: str) -> None:
        params[f"{name}.gain"], params[f"{name}.bias"] = np.ones(d, np.float32), np.zeros(d, np.float32)

    table("embedding", vocabulary, d)
    table("positions", settings.context, d)
    for n in range(settings.layers):
        norm(f"blocks.{n}.norm1")
        linear(f"blocks.{n}.qkv", d, 3 * d)
        linear(f"blocks.{n}.out", d, d)
        norm(f"blocks.{n}.norm2")
        linear(f"blocks.{n}.mlp1", d, 4 * d)
        linear(f"blocks.{n}.mlp2", 4 * d, d)
    norm("norm")
    linear("head", d, vocabulary)
    return params


@dataclass(frozen=True)
class CharLMProblem(Plain):
    """One seed: its windows and its initial parameters."""

    settings: Settings

    @property
    def chunk(self) -> int:
        # A paper-size step takes seconds on a few cores, and checkpoints are taken between chunks.
        return 10 if self.settings.width >= 256 else 50

    @property
    def tail(self) -> int:
        return self.settings.tail

    @property
    def evaluate_every(self) -> int:
        return self.settings.evaluate_every

    @functools.cached_property
    def loss(self) -> Loss:
        return Model(self.settings.layers, self.settings.heads, self.settings.precision)

    @functools.cached_property
    def text(self) -> Split:
        return split(self.settings)

    @functools.cached_property
    def params(self) -> Mapping[str, NDArray[Any]]:
        return init(self.settings, self.text.vocabulary, self.seed)

    def batches(self, start: int, stop: int) -> Batches:
        return [{"ids": self._windows(step)} for step in range(start, stop)]

    def _windows(self, step: int) -> NDArray[np.int32]:
        s = self.settings
        rng = np.random.default_rng([TRAIN, self.seed, step])
        drawn = int(rng.integers(s.shortest, s.longest + 1)) if s.lengths == "jitter" else s.longest
        length = -(-drawn // s.multiple) * s.multiple
        starts = rng.integers(0, len(self.text.training) - length, size=s.batch)
        return self.text.windows(self.text.training, starts, length)

    def lr(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """`lr`, times the factor of the last drop at or before update s = step + 1."""
        factors = np.ones(len(steps))
        for at, factor in schedule(self.settings.drops):
            # The paper's 30,000 and 40,000 of 50,001 are the whole part of 0.6 and 0.8 of the run.
            factors[steps + 1 >= math.floor(at * self.settings.steps + 1e-9)] = factor
        return self.settings.lr * factors

    @functools.cached_property
    def eval_batch(self) -> NDArray[np.int32]:
        """The held-out windows (windows, length + 1)."""
        s = self.settings
        rng = np.random.default_rng(s.eval_seed)
        starts = rng.integers(0, len(self.text.held_out) - s.eval_length, size=s.eval_windows)
        return self.text.windows(self.text.held_out, starts, s.eval_length)

    def evaluate(self, E: Engine, params: Params, step: int) -> dict[str, float]:
        loss, total = _compiled(E.name, self.loss), 0.0
        for first in range(0, len(self.eval_batch), PIECE):
            piece = self.eval_batch[first : first + PIECE]
            total += len(piece) * float(E.numpy(loss(params, {"ids": E.array(piece)})))
        nats = total / len(self.eval_batch)
        return {"bpc": nats / math.log(2), "heldout_loss": nats}


@functools.lru_cache(maxsize=8)
def _compiled(engine: str, loss: Loss) -> Callable[..., Array]:
    return engines.get(engine).compile(functools.partial(loss, engines.get(engine)))


@dataclass(frozen=True)
class CharLM:
    """See `kourkoutas.lab.testbeds.Testbed`."""

    name: str = "char_lm"
    title: str = "Testbed D: character language model"
    version: int = 1
    endpoints: tuple[Endpoint, ...] = (
        Endpoint("bpc", "held-out bits per character"),
        Endpoint("train_loss", "mean training loss of the last steps, nats"),
    )
    arms: tuple[str, ...] = ("kbeta", "adam95", "adam999", *CONTROLS)

    @property
    def presets(self) -> Mapping[str, Settings]:
        paper = Settings(vocabulary="text")
        laptop = Settings(
            rare=20,
            steps=2_500,
            lr=8e-3,
            longest=128,
            layers=4,
            width=64,
            heads=2,
            eval_length=128,
        )
        smoke = Settings(
            characters=100_000,
            steps=200,
            lr=8e-3,
            longest=64,
            layers=2,
            width=32,
            heads=2,
            eval_windows=32,
            eval_length=64,
            evaluate_every=100,
            tail=50,
        )
        return {"smoke": smoke, "laptop": laptop, "laptop-low-lr": replace(laptop, lr=1e-3), "paper": paper}

    @property
    def kbeta(self) -> Mapping[str, Any]:
        return {**PAPER, "warmup_steps": 250, "buckets": "parameter"}

    def pinned(self, overrides: Mapping[str, Any]) -> Mapping[str, Any]:
        """The hash of a text that comes from a file, unless the study names it; the generated one has none."""
        text = str(overrides.get("text", "generated"))
        if text == "generated" or "text_sha256" in overrides:
            return {}
        return {"text_sha256": corpus.load(text).sha256}

    def problem(self, settings: Settings, seed: int) -> Problem:
        problem = CharLMProblem(settings, seed)
        # A text that cannot be used is an error here, before a run has written anything.
        _ = problem.text
        return problem


TESTBEDS: tuple[Testbed, ...] = (CharLM(),)
