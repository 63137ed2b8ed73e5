"""What the decoder says of each frame: five maps over 601 frequency bins, of which sound is made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BINS = 601

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Spectra:
    """Maps float32 [n, 601]: magnitude and phase (radians) of the harmonics' filter, magnitude of the
    noise, magnitude and phase of the free part."""

    harmonic: Floats
    harmonic_phase: Floats
    noise: Floats
    free: Floats
    free_phase: Floats

    def __len__(self) -> int:
        return len(self.harmonic)

    @property
    def maps(self) -> tuple[Floats, Floats, Floats, Floats, Floats]:
        """The five in their order."""
        return self.harmonic, self.harmonic_phase, self.noise, self.free, self.free_phase
