"""The speech package as people call it, for the peers to serve."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from hibari import Hibari


def make() -> Hibari:
    """Loaded and warm, one thread."""
    voice = Hibari(threads=1)
    voice("Warm up.")
    return voice


def pcm16(audio: np.ndarray) -> bytes:
    """float32 → 16-bit little-endian PCM."""
    return (np.clip(audio, -1, 1) * 32767).astype("<i2").tobytes()


def sentences(voice: Hibari, text: str) -> Iterator[bytes]:
    """PCM of one sentence after the other, each as soon as it is made."""
    return map(pcm16, voice.stream(text))
