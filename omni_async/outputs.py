"""What `AsyncOmni.generate()` yields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class AudioChunk:
    """A piece of the answer's audio: `pcm` is float32 `[samples]`, mono, nominally in [-1, 1]."""

    request_id: str
    pcm: NDArray[np.float32]
    sample_rate: int

    @property
    def duration(self) -> float:
        """Seconds."""
        return len(self.pcm) / self.sample_rate


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A piece of the answer's text."""

    request_id: str
    text: str
