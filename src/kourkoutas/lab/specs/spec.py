"""What a run is and what it gives: `RunSpec` in, `RunResult` out; the arm, the code, the search space and the endpoint
of a study. Plain data, most of it JSON."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_WORDS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}


def coerce(name: str, value: Any, like: Any) -> Any:
    """`value`, maybe a string from a command line, as the type of `like`; None and "none" stay None.

    >>> coerce("steps", "3e4", 1), coerce("lr", 1, 0.1), coerce("quantize", "off", True)
    (30000, 1.0, False)
    """
    if value is None or (isinstance(value, str) and value.lower() in ("none", "null") and not isinstance(like, str)):
        return None
    try:
        if isinstance(like, bool):
            return _WORDS[value.lower()] if isinstance(value, str) else bool(value)
        if isinstance(like, int):
            if float(value) != int(float(value)):
                raise ValueError
            return int(float(value))
        if isinstance(like, float):
            return float(value)
        if isinstance(like, (tuple, list)):
            return type(like)(value)
    except (KeyError, TypeError, ValueError, OverflowError):
        kind = {bool: "on or off", int: "a whole number", float: "a number"}.get(type(like), type(like).__name__)
        raise ValueError(f"`{name}` must be {kind}, for example {like!r}; got {value!r}") from None
    return guess(value) if like is None else value


def guess(value: Any) -> Any:
    """A command-line string as a number, a truth value or None where it reads as one; anything else unchanged.

    >>> guess("0.9"), guess("50"), guess("none"), guess("true"), guess("exact")
    (0.9, 50, None, True, 'exact')
    """
    if not isinstance(value, str):
        return value
    if value.lower() in ("none", "null"):
        return None
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            pass
    return value


def digest_of(content: Any) -> str:
    """SHA-256 of plain values, whatever the order of their keys."""
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()


LARGEST = 1e100  # a larger loss or endpoint is that of a diverged run: its square is still a number


class Origin(BaseModel):
    """Where a user's own optimizer comes from.

    Attributes:
      place: a module, or the path of a Python file.
      name: of the class or function in it.
      version: of the distribution that has the module, or a hash of the file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    place: str
    name: str
    version: str

    @property
    def in_file(self) -> bool:
        return self.place.endswith(".py")

    @property
    def words(self) -> str:
        """MODULE:NAME or FILE.py:NAME, the same on every machine."""
        return f"{Path(self.place).name if self.in_file else self.place}:{self.name}"


class RunSpec(BaseModel):
    """One run, completely: the same spec gives the same result.

    Attributes:
      optimizer: the arm's label, e.g. "kbeta" or "adam95".
      settings: overrides of the testbed's preset (`--set steps=100`).
      options: overrides of this arm's optimizer (`--set kbeta.alpha=0.9`).
      resolved: digest of what preset, overrides and recipe come down to, and of the testbed's version, so that a
        changed preset is another run.
      origin: of a user's own optimizer. Not part of the id: its version is part of `resolved`, and its file may be
        elsewhere on another machine.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    testbed: str
    preset: str = "smoke"
    engine: str = "torch"
    optimizer: str = "kbeta"
    seed: int = Field(default=0, ge=0)
    settings: dict[str, Any] = {}
    options: dict[str, Any] = {}
    resolved: str | None = None
    origin: Origin | None = None

    @property
    def id(self) -> str:
        """A readable prefix and eight hex digits of the content: also the name of the run's folder.

        >>> RunSpec(testbed="rare_trigger").id
        'rare_trigger-kbeta-s0-...'
        """
        content = self.model_dump(exclude={"origin"} if self.resolved is not None else {"origin", "resolved"})
        digest = digest_of(content)[:8]
        prefix = re.sub(r"[^A-Za-z0-9_.+=-]+", "_", f"{self.testbed}-{self.optimizer}")[:80]
        return f"{prefix}-s{self.seed}-{digest}"


class RunResult(BaseModel):
    """What one run gave; `result.json`. Non-finite numbers are written as the strings "NaN" and "Infinity".

    Attributes:
      status: "ok", "diverged" (a loss above 1e100, or a parameter that is not finite: a result) or "failed" (an error).
      endpoint: the study's primary endpoint; None unless the status is "ok".
      metrics: name → value at the end; of a diverged run `diverged_at`, the number of updates taken until then.
      curve: columns of equal length: `step` (updates taken), `loss` (mean of the block that ends there; the last entry
        is the last step's own), `lr`, and evaluation metrics (NaN where none was taken).
      times: `per_step`, the median seconds of a training step. Folders of older versions have other parts, too.
      updates: how many the optimizer of a user's function made, where it has counted them.
      settings: the resolved settings, and under "optimizer" the resolved options of the arm.
      error: the traceback of a failed run, or why its worker ended.
      mistake: what has to be corrected in the study itself, where that is why the run failed.
    """

    model_config = ConfigDict(ser_json_inf_nan="strings", extra="forbid")

    status: Literal["ok", "diverged", "failed"]
    endpoint: float | None = None
    metrics: dict[str, float] = {}
    curve: dict[str, list[float]] = {}
    settings: dict[str, Any] = {}
    seconds: float = 0.0
    times: dict[str, float] = {}
    updates: int | None = None
    error: str | None = None
    mistake: str | None = None

    @property
    def seconds_per_step(self) -> float | None:
        """The median pace of a training step; None where it was not recorded."""
        return self.times.get("per_step")


def last_line(error: str | None) -> str:
    """The line of an error that says most: the last of a traceback, the first of anything else."""
    lines = [line.strip() for line in (error or "no error was recorded").splitlines() if line.strip()]
    return lines[-1 if lines[0].startswith("Traceback") else 0]


class Arm(BaseModel):
    """One column of a study: an optimizer, its options that differ from the recipe, and settings of its own (grids).

    `resolved` is what that comes down to: the testbed's version, all settings and all options. `origin` is that of a
    user's own optimizer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: str
    optimizer: str
    options: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    resolved: dict[str, Any] | None = None
    origin: Origin | None = None


class Code(BaseModel):
    """The user's training function, for a study of one, and how its endpoint is to be read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: str
    function: str
    sha256: str
    endpoint: str | None = None
    log: bool = False
    higher_is_better: bool = False


# Significant digits of a value between the ends of a range, so that it can be read and typed again; more where values
# would be the same, up to those of a double.
DIGITS, MOST_DIGITS = 4, 17

Value = float | int


class Axis(BaseModel):
    """One option and the range it is tuned over.

    Attributes:
      name: "lr" or another setting, which every arm has, or "kbeta.alpha", an option of one optimizer.
      scale: whether values are evenly spaced in ratio ("log") or in difference ("linear").
      whole: the option takes whole numbers only.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    low: float
    high: float
    scale: Literal["log", "linear"] = "log"
    whole: bool = False

    def value(self, index: int, points: int) -> Value:
        """Value `index` of a grid of `points` values over the range; other indices go on beyond it in equal steps.

        >>> axis = Axis(name="lr", low=1e-4, high=1e-1)
        >>> [axis.value(i, 4) for i in range(-1, 5)]
        [1e-05, 0.0001, 0.001, 0.01, 0.1, 1.0]
        """
        return self.at(index / (points - 1), _digits(self, points))

    def at(self, part: float, digits: int = DIGITS) -> Value:
        """The value at this part of the range, rounded but for the ends."""
        if part in (0, 1):
            exact = self.low if part == 0 else self.high
        elif self.scale == "log":
            # low·(high/low)^part
            exact = self.low * (self.high / self.low) ** part
        else:
            exact = self.low + (self.high - self.low) * part
        if self.whole:
            return round(exact)
        if part in (0, 1):
            return exact
        rounded = float(f"{exact:.{digits}g}")
        return min(max(rounded, self.low), self.high) if 0 < part < 1 else rounded


@functools.cache
def _digits(axis: Axis, points: int) -> int:
    """As few digits as tell the values of the grid apart."""
    for digits in range(DIGITS, MOST_DIGITS):
        if len({axis.at(index / (points - 1), digits) for index in range(points)}) == points:
            return digits
    return MOST_DIGITS


class SearchSpace(BaseModel):
    """How every arm is tuned, before its best values are compared on seeds that the tuning has not seen.

    Attributes:
      trials: values tried for each arm, before any widening.
      seeds: of the tuning runs.
      budget: how many times the range may be widened when the best value of an arm is at its edge.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    axes: tuple[Axis, ...]
    trials: int
    seeds: tuple[int, ...]
    budget: int

    def values(self, spec: RunSpec) -> dict[str, Value]:
        """{option: value} of a run, of the options that are tuned and that it has."""
        own = {**spec.settings, **{f"{spec.optimizer.partition('[')[0]}.{k}": v for k, v in spec.options.items()}}
        return {axis.name: own[axis.name] for axis in self.axes if axis.name in own}


Report = Callable[[int, int | None, float | None], None]  # told of a run: steps taken, steps in all, loss
OWN_SETTINGS = ("code", "endpoint")  # what a plan adds to the settings of a run of a user's function


@dataclass(frozen=True)
class Endpoint:
    """One number that a run is judged by.

    Attributes:
      metric: its name among the metrics of a result.
      title: for tables and axes.
      log: compared on a log10 scale, as ratios.
      threshold: a run succeeds when its value is at most this; None when success is not defined.
      maximize: whether more is better.
    """

    metric: str
    title: str
    log: bool = False
    threshold: float | None = None
    maximize: bool = False
