"""The voices: the package's own, and others made from it by pitch, formants and spectral tilt."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from omni_async.stages.models.hibari.decoder import BINS

NYQUIST = 12000.0
PIVOT_HZ = 1000.0


@dataclass(frozen=True, slots=True)
class Voice:
    """`pitch` and `formants` are factors on frequencies; `tilt` is in dB per octave above 1 kHz."""

    pitch: float = 1.0
    formants: float = 1.0
    tilt: float = 0.0

    def colour(self, maps: Tensor) -> Tensor:
        """Maps [n, 5·601] with formants moved and spectrum tilted."""
        if self.formants == 1.0 and self.tilt == 0.0:
            return maps
        parts = maps.view(-1, 5, BINS)
        if self.formants != 1.0:
            low, high, weight = _warp(self.formants)
            parts = torch.lerp(parts[..., low], parts[..., high], weight)
        if self.tilt:
            parts = parts.clone()
            # Harmonics, noise and rest are levels; theta and phi between them are phases.
            parts[:, (0, 2, 3)] += _tilt(self.tilt)
        return parts.reshape(-1, 5 * BINS)


VOICES = {
    "heart": Voice(),
    "robin": Voice(pitch=1.12, formants=1.06, tilt=0.5),
    "wren": Voice(pitch=1.22, formants=1.12),
    "crane": Voice(pitch=0.92, formants=0.96, tilt=-1.0),
    "rook": Voice(pitch=0.78, formants=0.87),
    "owl": Voice(pitch=0.75, formants=0.92, tilt=-1.5),
}


@lru_cache
def _warp(formants: float) -> tuple[Tensor, Tensor, Tensor]:
    """For each bin, the two bins it comes from and the weight of the second."""
    source = (torch.arange(BINS) / formants).clamp(max=BINS - 1)
    low = source.floor().long()
    return low, (low + 1).clamp(max=BINS - 1), source - low


@lru_cache
def _tilt(decibels: float) -> Tensor:
    """Natural-log gain [601] per bin."""
    hertz = torch.linspace(0, NYQUIST, BINS).clamp(min=PIVOT_HZ)
    return torch.log2(hertz / PIVOT_HZ) * decibels * math.log(10) / 20
