"""The voices: the package's own, and others made from it by pitch, formants and spectral tilt."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from omni_async.stages.models.hibari.spectra import BINS, Floats, Spectra

NYQUIST = 12000.0
PIVOT_HZ = 1000.0


@dataclass(frozen=True, slots=True)
class Voice:
    """`pitch` and `formants` are factors on frequencies; `tilt` is in dB per octave above 1 kHz."""

    pitch: float = 1.0
    formants: float = 1.0
    tilt: float = 0.0

    def colour(self, spectra: Spectra) -> Spectra:
        """The spectra with formants moved and magnitudes tilted."""
        if self.formants == 1.0 and self.tilt == 0.0:
            return spectra
        harmonic, harmonic_phase, noise, free, free_phase = (_moved(m, self.formants) for m in spectra.maps)
        gain = _tilt(self.tilt)
        return Spectra(harmonic * gain, harmonic_phase, noise * gain, free * gain, free_phase)


VOICES = {
    "heart": Voice(),
    "robin": Voice(pitch=1.12, formants=1.06, tilt=0.5),
    "wren": Voice(pitch=1.22, formants=1.12),
    "crane": Voice(pitch=0.92, formants=0.96, tilt=-1.0),
    "rook": Voice(pitch=0.78, formants=0.87),
    "owl": Voice(pitch=0.75, formants=0.92, tilt=-1.5),
}


def _moved(m: Floats, formants: float) -> Floats:
    low, high, weight = _warp(formants)
    moved = m[:, high] - m[:, low]
    moved *= weight
    moved += m[:, low]
    return moved


@lru_cache
def _warp(formants: float) -> tuple[NDArray[np.intp], NDArray[np.intp], Floats]:
    """For each bin, the two bins it comes from and the weight of the second."""
    source = np.minimum(np.arange(BINS) / formants, BINS - 1)
    low = np.floor(source).astype(np.intp)
    return low, np.minimum(low + 1, BINS - 1), (source - low).astype(np.float32)


@lru_cache
def _tilt(decibels: float) -> Floats:
    """Gain [601] per bin."""
    hertz = np.maximum(np.linspace(0, NYQUIST, BINS), PIVOT_HZ)
    return (10 ** (np.log2(hertz / PIVOT_HZ) * decibels / 20)).astype(np.float32)
