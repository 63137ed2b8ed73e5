"""The noise of one request, drawn from its seed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from omni_async.stages.models.hibari.decoder import BINS


class SentenceNoise:
    """A sentence of known length: the same draw, in the same order, as the package's own synthesis."""

    def __init__(self, rng: np.random.Generator, frames: int) -> None:
        drawn = rng.standard_normal((BINS, 2 * frames), dtype=np.float32)
        self._noise = torch.from_numpy(drawn.view(np.complex64))
        self._at = 0

    def take(self, count: int) -> Tensor:
        """complex64 [count, 601]."""
        self._at += count
        return self._noise[:, self._at - count : self._at].t()


class FrameNoise:
    """A sentence whose length is not known yet: drawn frame by frame."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def take(self, count: int) -> Tensor:
        """complex64 [count, 601]."""
        drawn = self._rng.standard_normal((count, 2 * BINS), dtype=np.float32)
        return torch.from_numpy(drawn.view(np.complex64))
