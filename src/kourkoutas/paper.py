"""The paper's classes for MLX, and a way to run its listings as they are printed.

    from kourkoutas.paper import KourkoutasSoftmaxFlex

The constructor takes the paper's names; the maths, the state and the errors are those of `kourkoutas.mlx`.

The listings import `kbeta.optim`, which is the name of the author's own package. `kbeta script FILE [ARGS…]` runs such
a script as `python FILE` would, with `kbeta.optim` being this module in that process only, whether or not the author's
package is installed.
"""

from __future__ import annotations

import os
import sys
import traceback
import types
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kourkoutas.adam_names import explain_adams_names
from kourkoutas.mlx import KourkoutasBeta as _KourkoutasBeta
from kourkoutas.mlx import Schedule
from kourkoutas.rule import HYPER_NAMES, Hyper
from kourkoutas.trace import Trace

if TYPE_CHECKING:
    import mlx.core as mx

_DEFAULT = Hyper()


class KourkoutasSoftmaxFlex(_KourkoutasBeta):
    """Kourkoutas-β with the constructor of the paper's listings.

    Args:
      learning_rate: a number, an array or a schedule.
      layer_key_fn: bucket key of a parameter array: equal keys share one β2. Called once per parameter, when its state
        is built, so that a key made from shape, a constant or a lookup stays what it was. None: one bucket per
        parameter, named by its path.
      diagnostics: record sun and β2 of each bucket at each step, for the two snapshot methods.
      schedulers: "learning_rate" and/or "alpha" → a callable of the step; takes precedence over the argument.

    The other arguments are those of `kourkoutas.rule.Hyper`.

    Example:
      >>> import mlx.core as mx
      >>> optimizer = KourkoutasSoftmaxFlex(learning_rate=1e-3, layer_key_fn=lambda p: p.shape, diagnostics=True)
      >>> params = optimizer.apply_gradients({"w": mx.ones(3)}, {"w": mx.zeros(3)})
      >>> {name: sun.shape for name, sun in optimizer.snapshot_sunspike_history().items()}
      {'(3,)': (1,)}
    """

    @explain_adams_names
    def __init__(
        self,
        learning_rate: float | mx.array | Schedule = 1e-3,
        beta1: float = _DEFAULT.beta1,
        beta2_max: float = _DEFAULT.beta2_max,
        beta2_min: float = _DEFAULT.beta2_min,
        eps: float = _DEFAULT.eps,
        alpha: float | mx.array | Schedule = _DEFAULT.alpha,
        *,
        decay: float | None = _DEFAULT.decay,
        adaptive_tiny: bool = _DEFAULT.adaptive_tiny,
        max_ratio: float | None = _DEFAULT.max_ratio,
        bias_correction: Literal["none", "beta2max", "exact"] = _DEFAULT.bias_correction,
        warmup_steps: int = _DEFAULT.warmup_steps,
        layer_key_fn: Callable[[mx.array], Hashable] | None = None,
        diagnostics: bool = False,
        tiny_spike: float = _DEFAULT.tiny_spike,
        tiny_denom: float = _DEFAULT.tiny_denom,
        schedulers: Mapping[str, Schedule] | None = None,
    ) -> None:
        if layer_key_fn is not None and not callable(layer_key_fn):
            raise TypeError(
                f"`layer_key_fn` must be None or a callable of a parameter; got {layer_key_fn!r}: "
                "for one bucket per shape write layer_key_fn=lambda p: p.shape"
            )
        schedules = dict(schedulers or {})
        learning_rate = schedules.pop("learning_rate", learning_rate)
        alpha = schedules.pop("alpha", alpha)
        if schedules:
            raise ValueError(
                f"`schedulers` may have the keys 'learning_rate' and 'alpha'; got {next(iter(schedules))!r}"
            )
        given = locals()
        super().__init__(
            learning_rate,
            **{name: given[name] for name in HYPER_NAMES if name in given},
            buckets="parameter" if layer_key_fn is None else lambda _, p: layer_key_fn(p),
            diagnostics=diagnostics,
        )
        self._trace: Trace | None = None
        self._traced: dict[str, Any] = {}  # the state that the trace is of; one that is loaded starts a new history

    def snapshot_sunspike_history(self) -> dict[str, np.ndarray]:
        """Bucket name → sun at every recorded step, oldest first; NaN where the bucket had no gradient.

        Reads back what is new since the last snapshot. The device keeps `kourkoutas.trace.WINDOW` steps, so take a
        snapshot at least that often for a history without gaps. Empty before the first step.
        """
        trace = self._pulled()
        return {name: trace.sun[:, b] for b, name in enumerate(trace.names)}

    def snapshot_diagnostics(self) -> dict[str, dict[str, float]]:
        """Bucket name → its newest {"sun", "beta2", "ema"}; empty before the first step."""
        newest = self._pulled().snapshot()
        ema: Any = self._state["ema"].tolist() if newest else []
        return {name: {**values, "ema": r} for (name, values), r in zip(newest.items(), ema, strict=True)}

    def _pulled(self) -> Trace:
        if not self._initialized and self.diagnostics:
            return Trace(())
        if self._trace is None or self._traced is not self._state or self._trace.names != self.bucket_names:
            self._trace, self._traced = Trace(self.bucket_names), self._state
        self.pull(self._trace)
        return self._trace


KourkoutasBeta = KourkoutasSoftmaxFlex

__all__ = ["KourkoutasBeta", "KourkoutasSoftmaxFlex"]


def script(file: str, arguments: Sequence[str] = ()) -> None:
    """Run `file` as `python file arguments…` would, with `kbeta` and `kbeta.optim` being this package.

    The script finds itself in `__main__`, `sys.argv` and `sys.path[0]`. An exception ends the process with the script's
    own traceback and exit code 1. A process that the script starts is an ordinary one: there `kbeta` is whatever is
    installed.

    Raises:
      OSError: `file` cannot be read.
    """
    source = Path(file).read_bytes()
    paper = sys.modules[__name__]
    # NOTE: an empty __path__ makes `kbeta` a package without files, so `import kbeta.other` fails by name instead of
    # reaching into the author's package.
    package = types.ModuleType("kbeta", "The paper's import path, standing for kourkoutas.paper.")
    package.__dict__.update({name: globals()[name] for name in __all__}, __path__=[], optim=paper)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=file, __builtins__=__builtins__)
    sys.modules.update({"kbeta": package, "kbeta.optim": paper, "__main__": main})
    sys.argv = [file, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(file))
    try:
        exec(compile(source, file, "exec"), main.__dict__)
    except (Exception, KeyboardInterrupt) as error:
        # Without the frames of this function, and with a clean exit as Python's own.
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        traceback.print_exception(error)
        sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)
