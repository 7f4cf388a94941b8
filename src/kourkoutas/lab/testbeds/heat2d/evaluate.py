"""What a trained surrogate is worth: mean squared errors on each part of the data, and a roll-out.

one-shot    block mode: all frames from the known ones; causal mode: each frame from all true frames before it
roll-out    the model's own frames are fed back: `known` at a time in block mode, one at a time in causal mode
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from kourkoutas.lab.engines import Array, Batch, Engine, Params
from kourkoutas.lab.testbeds.heat2d import model
from kourkoutas.lab.testbeds.heat2d.data import Cases, cases
from kourkoutas.lab.testbeds.heat2d.settings import Settings

Frames = NDArray[np.float32]
# Bytes of frames predicted at once.
PIECE = 16 * 2**20


@functools.lru_cache(maxsize=16)
def _predictor(engine: Hashable, settings: Settings, count: int) -> Callable[[Params, Batch], Array]:
    """Compiled `model.predict`."""
    E = cast(Engine, engine)
    return E.compile(lambda params, batch: model.predict(E, settings, params, batch, count))


def _predict(
    E: Engine, settings: Settings, params: Params, given: NDArray[Any], alpha: NDArray[Any], count: int
) -> Frames:
    batch = {"given": np.ascontiguousarray(given), "alpha": np.asarray(alpha, np.float32), **model.rotations(settings)}
    predicted = _predictor(cast(Hashable, E), settings, count)(params, {name: E.array(x) for name, x in batch.items()})
    return E.numpy(predicted)


def one_shot(E: Engine, settings: Settings, params: Params, truth: Frames, alpha: NDArray[Any]) -> Frames:
    """Frames as the model gives them in one pass; frame 0, which a causal one does not predict, is the true one."""
    if settings.mask == "block":
        return _predict(E, settings, params, truth[:, : settings.known], alpha, settings.frames)
    rest = _predict(E, settings, params, truth[:, :-1], alpha, settings.frames - 1)
    return np.concatenate([truth[:, :1], rest], axis=1)


def roll_out(E: Engine, settings: Settings, params: Params, truth: Frames, alpha: NDArray[Any]) -> Frames:
    """Frames from the known ones alone, each pass starting from the model's own output.

    Block mode takes the last `known` frames for the first ones of a new case and gives the `known` that follow.
    """
    k, frames = settings.known, settings.frames
    out = np.zeros_like(truth)
    out[:, :k] = truth[:, :k]
    if settings.mask == "block":
        for at in range(k, frames, k):
            fresh = _predict(E, settings, params, out[:, at - k : at], alpha, 2 * k)[:, k:]
            out[:, at : at + k] = fresh[:, : frames - at]
    else:
        # One shape for all passes: what comes later is hidden by the mask.
        for at in range(k, frames):
            out[:, at] = _predict(E, settings, params, out[:, :-1], alpha, frames - 1)[:, at - 1]
    return out


def mean_square(E: Engine, settings: Settings, params: Params, data: Cases, first: int, count: int) -> float:
    """⟨(û - u)²⟩ of the one-shot prediction of `count` cases, over the frames that are predicted."""
    piece = max(1, min(count, PIECE // (4 * settings.frames * settings.nodes)))
    predicted_from = 0 if settings.mask == "block" else 1
    total = 0.0
    for start in range(first, first + count, piece):
        rows = np.arange(start, start + piece)
        # One shape for all pieces: rows past the end stand in for nothing and are left out below.
        fits = rows < first + count
        rows = np.minimum(rows, first + count - 1)
        truth = data.frames[rows]
        error = one_shot(E, settings, params, truth, data.alpha[rows]) - truth
        error = error[fits, predicted_from:]
        total += float(np.sum(np.square(error, dtype=np.float64)))
    return total / (count * (settings.frames - predicted_from) * settings.nodes)


def metrics(E: Engine, settings: Settings, params: Params, *, final: bool) -> dict[str, float]:
    """Errors on training and validation cases; at the end also on test cases, one-shot and rolled out."""
    data = cases(settings)
    train, validation, test = settings.split
    found = {
        "train_mse": mean_square(E, settings, params, data, 0, train),
        "validation_mse": mean_square(E, settings, params, data, train, validation),
    }
    if final:
        held = slice(train + validation, train + validation + min(settings.rollout, test))
        truth = data.frames[held]
        rolled = roll_out(E, settings, params, truth, data.alpha[held])
        found["test_mse"] = mean_square(E, settings, params, data, train + validation, test)
        found["rollout_mse"] = float(np.mean(np.square(rolled - truth, dtype=np.float64)[:, settings.known :]))
    return found
