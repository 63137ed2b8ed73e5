"""The pieces in which a sentence's frames leave the talker."""

from __future__ import annotations

from dataclasses import dataclass

from omni_async.stages.models.hibari.decoder import LOOKAHEAD
from omni_async.stages.models.hibari.frames import Frames, join

FIRST_SLICES = (20 + LOOKAHEAD, 80, 160)
"""Frames of a sentence's first slices; of the first one the decoder makes a fifth of a second."""

SLICE = 320
"""Frames of every later slice: 4 s of audio."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Some frames, and whether a sentence begins or ends with them."""

    frames: Frames
    first: bool
    last: bool


class SentenceSlices:
    """A sentence's frames as far as they are known, given out in slices whose sizes depend on their
    position alone, so that what the decoder makes of them does not depend on load."""

    def __init__(self) -> None:
        self._parts: list[Frames] = []
        self._waiting = 0
        self._given = 0
        self.added = 0
        self.complete = False

    def add(self, frames: Frames) -> None:
        """More of it."""
        self._parts.append(frames)
        self._waiting += len(frames)
        self.added += len(frames)

    @property
    def missing(self) -> int:
        """Frames that the next slice lacks; zero or less when it can be taken."""
        return 0 if self.complete else self._size - self._waiting

    @property
    def ends_with_slice(self) -> bool:
        """Whether the next slice is the last."""
        return self.complete and self._waiting <= self._size

    def take(self) -> Slice:
        """The next slice."""
        last = self.ends_with_slice
        size = self._waiting if last else self._size
        frames = join(self._parts)
        piece = Slice(frames[:size], self._given == 0, last)
        self._parts = [frames[size:]]
        self._waiting -= size
        self._given += 1
        return piece

    @property
    def _size(self) -> int:
        return FIRST_SLICES[self._given] if self._given < len(FIRST_SLICES) else SLICE
