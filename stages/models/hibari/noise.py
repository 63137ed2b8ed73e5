"""The noise of one request, drawn from its seed.

Drawing a normal number for every bin of every frame costs as much as the inverse STFT. So one table of
them is drawn once, and a frame takes 601 in a row from a place that the request's generator chooses.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from omni_async.stages.models.hibari.spectra import BINS

PLACES = 1 << 18


class FrameNoise:
    """An endless stream of noise frames; pieces are what the whole would be."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, count: int) -> NDArray[np.complex64]:
        """complex64 [count, 601], real and imaginary parts of variance 1."""
        return _table()[self._rng.integers(0, PLACES, count)]


@lru_cache
def _table() -> NDArray[np.complex64]:
    """[places, 601], a view in which each row begins one number later than the row before it."""
    drawn = np.random.default_rng(0).standard_normal(2 * (PLACES + BINS - 1), dtype=np.float32)
    return sliding_window_view(drawn.view(np.complex64), BINS)
