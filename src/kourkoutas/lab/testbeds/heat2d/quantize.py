r"""INT8 quantization-aware training: weights on a grid of at most 255 levels per output channel.

.. math::
    s_c = \max_i |w_{ic}| / 127, \qquad q(w)_{ic} = s_c \operatorname{round}(w_{ic} / s_c), \qquad
    \frac{\partial q}{\partial w} := 1

The forward pass sees what an INT8 matrix with one float scale per column can hold; the gradient passes straight
through to the float weights, which are what is trained.
"""

from __future__ import annotations

from kourkoutas.lab.engines import Array, Engine

LARGEST = 127


def int8(E: Engine, w: Array) -> tuple[Array, Array]:
    """(whole numbers in -127 … 127, scale of each column) of w (inputs, outputs)."""
    scale = E.max(E.abs(w), axis=0, keepdims=True) / LARGEST
    # A column of zeros has no scale of its own and stays zero with any.
    scale = E.where(scale > 0, scale, 1.0)
    return E.clip(E.round(w / scale), -LARGEST, LARGEST), scale


def fake_quantize(E: Engine, w: Array) -> Array:
    """q(w), with the gradient of w.

    NOTE: q + (w - w) and not w + (q - w): the second is off by a rounding error, which would make new levels.
    """
    levels, scale = int8(E, E.stop_gradient(w))
    return E.stop_gradient(levels * scale) + (w - E.stop_gradient(w))
