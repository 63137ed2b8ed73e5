"""The voice's source: a pulse train made from pitch, and its windows for the STFT, as streams.

As in `hibari.dsp` (Apache-2.0): every harmonic below 11 kHz at unit amplitude, silence where unvoiced.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

SAMPLE_RATE = 24000
HOP = 300
N_FFT = 1200
HALF = N_FFT // 2
VOICED_HZ = 40.0
HIGHEST_HZ = 11000.0

Floats = NDArray[np.float32]

RISE = (((np.arange(HOP) + 0.5) / HOP - 0.5) % 1.0).astype(np.float32)
"""Sample j of frame k lies at k + (j + ½) / 300 - ½: between frames k - 1 and k, then k and k + 1."""
FALL = 1 - RISE


class PulseTrain:
    """Source samples of one sentence, frame by frame; a frame needs the pitch of its neighbours."""

    def __init__(self) -> None:
        self._phase = 0.0
        self._pitch: Floats = np.zeros(0, np.float32)

    def push(self, pitch: Floats, *, last: bool) -> Floats:
        """Pitch [n] in Hz of the next frames → the samples that are now certain, 300 a frame.

        All but the last frame of what has come are certain until `last`.
        """
        known = np.concatenate([self._pitch if len(self._pitch) else pitch[:1], pitch])
        if last:
            known = np.append(known, known[-1:])
        # Kept: the two frames on which the next sample depends.
        self._pitch = known[-2:]
        return self._pulses(_interpolate(known)) if len(known) > 2 else np.zeros(0, np.float32)

    def _pulses(self, hertz: Floats) -> Floats:
        """Σ cos(h t) = sin((H + ½) t) / (2 sin(t / 2)) - ½ over the harmonics h ≤ H."""
        voiced = hertz > VOICED_HZ
        np.maximum(hertz, VOICED_HZ, out=hertz)
        turns = np.cumsum(hertz, dtype=np.float64)
        turns *= 1.0 / SAMPLE_RATE
        turns += self._phase
        turns -= np.floor(turns)
        self._phase = float(turns[-1])
        if not voiced.any():
            return np.zeros(len(hertz), np.float32)
        turns *= 2 * math.pi
        angle = turns.astype(np.float32)
        order = np.floor(np.divide(HIGHEST_HZ, hertz, out=hertz), out=hertz)
        order += 0.5
        pulses = _sin(order * angle)
        angle *= 0.5
        below = _sin(angle)
        below *= 2
        flat = np.flatnonzero(np.abs(below, out=angle) <= 2e-3)
        below[flat] = 1
        pulses /= below
        pulses[flat] = order[flat]
        pulses -= 0.5
        pulses *= voiced
        return pulses


class SourceWindows:
    """Windows of 1200 source samples, one each 300, centred on the frames; mirrored at both ends."""

    def __init__(self) -> None:
        self._samples: Floats = np.zeros(0, np.float32)
        self._begun = False

    def add(self, samples: Floats, *, last: bool) -> None:
        """The next samples. Those that come before the first window is taken must be 601 at least, if they
        are not the last too."""
        known = np.concatenate([self._samples, samples])
        before = 0 if self._begun else HALF
        self._begun = True
        if before or last:
            known = np.pad(known, (before, HALF if last else 0), mode="reflect")
        self._samples = known

    def take(self, count: int) -> Floats:
        """The next windows [count, 1200], as a view."""
        windows = sliding_window_view(self._samples, N_FFT)[::HOP][:count]
        # What stays is three hops at least; the end is mirrored from two.
        self._samples = self._samples[count * HOP :]
        return windows


def _interpolate(known: Floats) -> Floats:
    """Pitch per frame [n + 2] → per sample [n · 300] of the frames between."""
    before, here, after = known[:-2, None], known[1:-1, None], known[2:, None]
    half = HOP // 2
    left = before * FALL[:half] + here * RISE[:half]
    right = here * FALL[half:] + after * RISE[half:]
    hertz: Floats = np.concatenate([left, right], 1, dtype=np.float32).reshape(-1)
    return hertz


def _sin(x: Floats) -> Floats:
    return torch.as_tensor(x).sin().numpy()
