"""Spectral maps and pitch → sound, streamed by absolute sample position.

The signal model is that of hibari (`hibari.dsp.synth`, Apache-2.0): a band-limited pulse train from the
pitch, filtered by the harmonic maps, plus shaped noise, plus a free-phase part, through one inverse
STFT of 1200 samples with a hop of 300. Here each chunk continues where the one before it stopped, and
every sample is the one that synthesis in one piece would put there.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from omni_async.stages.models.hibari.decoder import BINS

SAMPLE_RATE = 24000
HOP = 300
N_FFT = 1200
HALF = N_FFT // 2
OVERLAP = N_FFT // HOP - 1
VOICED_HZ = 40.0
HIGHEST_HZ = 11000.0

WINDOW = 0.5 - 0.5 * torch.cos(2 * math.pi * torch.arange(N_FFT, dtype=torch.float64) / N_FFT)
WINDOW = WINDOW.float()
SOURCE_WINDOW = WINDOW / (N_FFT / 4)
WINDOW_POWER = (WINDOW * WINDOW).view(OVERLAP + 1, HOP)
RISE = (((torch.arange(HOP, dtype=torch.float64) + 0.5) / HOP - 0.5) % 1.0).float()
FALL = 1 - RISE


class PulseTrain:
    """The source signal, frame by frame; a frame needs the pitch of its neighbours."""

    def __init__(self) -> None:
        self.phase = 0.0
        self.pitch = torch.zeros(0)

    def push(self, pitch: Tensor, *, last: bool) -> Tensor:
        """Pitch [n] in Hz of the next frames → the samples that are now certain, 300 a frame.

        All but the last frame of what has come are certain until `last`.
        """
        first = len(self.pitch) == 0
        known = torch.cat([pitch[:1] if first else self.pitch, pitch])
        if last:
            known = torch.cat([known, known[-1:]])
        # Kept: the two frames on which the next sample depends.
        self.pitch = known[-2:]
        if len(known) < 3:
            return torch.zeros(0)
        return self._pulses(self._interpolate(known))

    def _interpolate(self, known: Tensor) -> Tensor:
        before, here, after = known[:-2, None], known[1:-1, None], known[2:, None]
        half = HOP // 2
        left = before * FALL[:half] + here * RISE[:half]
        right = here * FALL[half:] + after * RISE[half:]
        return torch.cat([left, right], 1).reshape(-1)

    def _pulses(self, hertz: Tensor) -> Tensor:
        """Every harmonic below 11 kHz at unit amplitude:
        Σ cos(h t) = sin((H + ½) t) / (2 sin(t / 2)) - ½; silence where unvoiced."""
        voiced = hertz > VOICED_HZ
        hertz = hertz.clamp(min=VOICED_HZ)
        turns = self.phase + torch.cumsum(hertz.double(), 0) / SAMPLE_RATE
        self.phase = float(turns[-1] % 1.0)
        angle = (torch.remainder(turns, 1.0) * (2 * math.pi)).float()
        order = torch.floor(HIGHEST_HZ / hertz) + 0.5
        below = 2 * torch.sin(angle * 0.5)
        flat = below.abs() <= 2e-3
        pulses = torch.where(flat, order, torch.sin(order * angle) / torch.where(flat, 1.0, below)) - 0.5
        return torch.where(voiced, pulses, 0.0)


class Noise(Protocol):
    """Where a sentence's noise comes from."""

    def take(self, count: int) -> Tensor:
        """Complex Gaussian noise, complex64 [count, 601], of the next `count` frames."""
        ...


class Vocoder:
    """One sentence."""

    def __init__(self) -> None:
        self.train = PulseTrain()
        self.source = torch.zeros(0)
        self.source_at = 0
        self.waiting: list[Tensor] = []
        self.frames_in = 0
        self.frames_done = 0
        self.tail = torch.zeros(OVERLAP, HOP)
        self.tail_power = torch.zeros(OVERLAP, HOP)
        self.samples = 0

    def push(self, maps: Tensor, pitch: Tensor, noise: Noise, *, last: bool) -> Tensor:
        """Maps [n, 5·601] and pitch [n] in Hz of the next frames → float32 PCM [samples].

        A few frames lag behind until `last`; then exactly 300 samples a frame have been given.
        """
        self._extend_source(self.train.push(pitch, last=last), last=last)
        self.waiting.append(maps)
        self.frames_in += len(maps)
        count = self._certain(last=last) - self.frames_done
        if count <= 0:
            return torch.zeros(0)
        ready, rest = torch.cat(self.waiting).split([count, self.frames_in - self.frames_done - count])
        self.waiting = [rest] if len(rest) else []
        frames = self._synthesize(ready, self._source_frames(count), noise.take(count))
        return self._overlap_add(frames, last=last)

    def _certain(self, *, last: bool) -> int:
        # A frame reaches 600 samples, two frames of source, beyond its beginning.
        made = (self.source_at + len(self.source)) // HOP
        return self.frames_in if last else min(self.frames_in, max(0, made - 1))

    def _extend_source(self, new: Tensor, *, last: bool) -> None:
        begins = self.source_at == 0 and not len(self.source) and len(new) > HALF
        self.source = torch.cat([self.source, new])
        if begins:
            # The STFT is centred: the sentence's beginning is mirrored before it.
            self.source = torch.cat([self.source[1 : HALF + 1].flip(0), self.source])
            self.source_at = -HALF
        if last:
            self.source = torch.cat([self.source, self.source[-HALF - 1 : -1].flip(0)])

    def _source_frames(self, count: int) -> Tensor:
        start = self.frames_done * HOP - HALF - self.source_at
        length = (count - 1) * HOP + N_FFT
        windows = self.source[start : start + length].unfold(0, N_FFT, HOP) * SOURCE_WINDOW
        done = start + count * HOP
        # What is mirrored at the end must still be at hand.
        keep_from = max(0, min(done, len(self.source) - N_FFT - HOP))
        self.source, self.source_at = self.source[keep_from:], self.source_at + keep_from
        return torch.fft.rfft(windows)

    def _synthesize(self, maps: Tensor, source: Tensor, noise: Tensor) -> Tensor:
        harmonic, theta, noisy, rest, phi = maps.split(BINS, 1)
        spectrum = source * torch.polar(_level(harmonic), torch.tanh(theta) * math.pi)
        spectrum = spectrum + noise * _level(noisy) + torch.polar(_level(rest), phi.contiguous())
        return torch.fft.irfft(spectrum, N_FFT) * WINDOW

    def _overlap_add(self, frames: Tensor, *, last: bool) -> Tensor:
        count = len(frames)
        quarters = frames.view(count, OVERLAP + 1, HOP)
        sound = torch.zeros(count + OVERLAP, HOP)
        power = torch.zeros(count + OVERLAP, HOP)
        sound[:OVERLAP], power[:OVERLAP] = self.tail, self.tail_power
        for k in range(OVERLAP + 1):
            sound[k : k + count] += quarters[:, k]
            power[k : k + count] += WINDOW_POWER[k]
        self.tail, self.tail_power = sound[count:], power[count:]
        skip = HALF if self.frames_done == 0 else 0
        self.frames_done += count
        whole = sound if last else sound[:count]
        norm = power if last else power[:count]
        pcm = (whole / norm.clamp(min=1e-11)).reshape(-1)[skip:]
        if last:
            pcm = pcm[: self.frames_in * HOP - self.samples]
        self.samples += len(pcm)
        return pcm


def _level(logarithm: Tensor) -> Tensor:
    return torch.exp(logarithm.clamp(max=7.0))


