"""Spectra and pitch → sound, streamed by absolute sample position.

The signal model is that of hibari (`hibari.dsp.synth`, Apache-2.0): a band-limited pulse train from the
pitch, filtered by the harmonic maps, plus shaped noise, plus a free-phase part, through one inverse
STFT of 1200 samples with a hop of 300. Here each chunk continues where the one before it stopped, and
every sample is the one that synthesis in one piece would put there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from omni_async.stages.models.hibari.pulses import HALF, HOP, N_FFT, PulseTrain, SourceWindows
from omni_async.stages.models.hibari.spectra import Floats, Spectra

fft: Any = torch.fft  # it has no types

OVERLAP = N_FFT // HOP - 1
WINDOW = (0.5 - 0.5 * np.cos(2 * np.pi * np.arange(N_FFT) / N_FFT)).astype(np.float32)
SOURCE_WINDOW = WINDOW / (N_FFT / 4)
WINDOW_POWER = (WINDOW * WINDOW).reshape(OVERLAP + 1, HOP)

Complex = NDArray[np.complex64]
Noise = Callable[[int], Complex]
"""The noise [n, 601] of the next n frames: real and imaginary parts of variance 1."""


class Vocoder:
    """One sentence."""

    def __init__(self) -> None:
        self._train = PulseTrain()
        self._windows = SourceWindows()
        self._adder = OverlapAdd()

    def push(self, spectra: Spectra, pitch: Floats, noise: Noise, *, last: bool) -> Floats:
        """Spectra [m, 601] and pitch [n] in Hz of the next frames → float32 PCM [samples].

        Pitch must run ahead of spectra, by two frames at least until `last`. Two frames' worth of samples
        lag behind until `last`; then exactly 300 samples a frame have been given.
        """
        self._windows.add(self._train.push(pitch, last=last), last=last)
        windows = self._windows.take(len(spectra))
        if len(windows) < len(spectra):
            raise ValueError("the pitch of these frames is not known yet")
        return self._adder.push(synthesize(spectra, windows, noise(len(spectra))), last=last)


class OverlapAdd:
    """Overlapping frames of sound → samples, normalised by the windows' power."""

    def __init__(self) -> None:
        self._sound = np.zeros((OVERLAP, HOP), np.float32)
        self._power = np.zeros((OVERLAP, HOP), np.float32)
        self._skip = HALF // HOP

    def push(self, frames: Floats, *, last: bool) -> Floats:
        """Windowed frames [n, 1200] → the samples to which no later frame adds."""
        count = len(frames)
        quarters = frames.reshape(count, OVERLAP + 1, HOP)
        sound = np.zeros((count + OVERLAP, HOP), np.float32)
        power = np.zeros((count + OVERLAP, HOP), np.float32)
        sound[:OVERLAP], power[:OVERLAP] = self._sound, self._power
        for k in range(OVERLAP + 1):
            sound[k : k + count] += quarters[:, k]
            power[k : k + count] += WINDOW_POWER[k]
        self._sound, self._power = sound[count:], power[count:]
        # Frames are centred: two hops before the first and one behind the last are not part of the sound.
        first, end = (self._skip, count + 2) if last else (min(self._skip, count), count)
        self._skip -= first
        pcm = sound[first:end]
        pcm /= np.maximum(power[first:end], 1e-11)
        return pcm.reshape(-1)


def synthesize(spectra: Spectra, windows: Floats, noise: Complex) -> Floats:
    """Spectra [n, 601], source windows [n, 1200] and noise [n, 601] → windowed frames of sound [n, 1200]."""
    spectrum = _polar(spectra.free, spectra.free_phase)
    noise *= spectra.noise
    spectrum += noise
    if windows.any():
        filtered = _polar(spectra.harmonic, spectra.harmonic_phase)
        filtered *= fft.rfft(torch.as_tensor(windows * SOURCE_WINDOW)).numpy()
        spectrum += filtered
    frames: Floats = fft.irfft(torch.as_tensor(spectrum), N_FFT).numpy()
    frames *= WINDOW
    return frames


def _polar(magnitude: Floats, phase: Floats) -> Complex:
    """Magnitude · e^(i · phase); several times faster than `torch.polar`."""
    size, angle = torch.as_tensor(magnitude), torch.as_tensor(phase)
    return torch.complex(angle.cos().mul_(size), angle.sin().mul_(size)).numpy()
