"""What the talker makes and the decoder reads: frames of 12.5 ms."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omni_async.stages.models.hibari.spectra import Floats

CONTENT = 128
FRAME_CHANNELS = CONTENT + 2
"""Content, log pitch, energy."""


@dataclass(frozen=True, slots=True)
class Frames:
    """`values` float32 [n, 130] and the `pitch` [n] in Hz that is in them; unvoiced is below 40 Hz."""

    values: Floats
    pitch: Floats

    def __len__(self) -> int:
        return len(self.pitch)

    def __getitem__(self, part: slice) -> Frames:
        return Frames(self.values[part], self.pitch[part])

    def pitched(self, factor: float) -> Frames:
        """The same with pitch times `factor`."""
        if factor == 1.0:
            return self
        values, pitch = self.values.copy(), self.pitch * np.float32(factor)
        values[:, CONTENT] = _log_pitch(pitch)
        return Frames(values, pitch)

    def retimed(self, factor: float, start: int = 0) -> Frames:
        """Played `factor` times as fast by leaving frames out or repeating them.

        `start` is the position of the first frame in its sentence: pieces give what the whole would.
        """
        if factor == 1.0:
            return self
        first, end = retimed_length(start, factor), retimed_length(start + len(self), factor)
        source = np.floor(np.arange(first, end) * factor).astype(np.intp) - start
        source = np.clip(source, 0, len(self) - 1)
        return Frames(self.values[source], self.pitch[source])


def retimed_length(frames: int, factor: float) -> int:
    """How many frames `frames` become, from a sentence's beginning on."""
    count = int(frames / factor)
    # As many as there are places whose source, rounded as `retimed` rounds it, lies before `frames`.
    while int(count * factor) < frames:
        count += 1
    while count and int((count - 1) * factor) >= frames:
        count -= 1
    return count


def assemble(content: Floats, index: NDArray[np.intp], pitch: Floats, energy: Floats) -> Frames:
    """Content [L, 128] by phoneme, the phoneme of each frame [n], pitch [n] in Hz and energy [n]."""
    values = np.concatenate([content[index], _log_pitch(pitch)[:, None], energy[:, None] / 5], 1)
    return Frames(values.astype(np.float32), pitch)


def join(parts: list[Frames]) -> Frames:
    """The parts in their order."""
    if len(parts) == 1:
        return parts[0]
    return Frames(np.concatenate([p.values for p in parts]), np.concatenate([p.pitch for p in parts]))


def _log_pitch(pitch: Floats) -> Floats:
    return (np.log(1 + np.maximum(pitch, 0)) / 5).astype(np.float32, copy=False)
