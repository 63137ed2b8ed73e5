"""Sound and films as files, for tests that decode them."""

from __future__ import annotations

import io
from typing import Any

import av
import numpy as np

CODECS = {"wav": "pcm_s16le", "mp3": "mp3", "flac": "flac", "ogg": "libopus", "mp4": "aac"}


def sound_file(kind: str = "wav", seconds: float = 1.0, rate: int = 48000, hz: float = 440.0) -> bytes:
    wave = np.sin(2 * np.pi * hz * np.arange(int(seconds * rate)) / rate) * 0.5
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream: Any = container.add_stream(CODECS[kind], rate=rate)
        stream.layout = "mono"
        frame = av.AudioFrame.from_ndarray((wave * 32767).astype(np.int16)[None], format="s16", layout="mono")
        frame.rate = rate
        fifo = av.AudioResampler(format=stream.format, layout="mono", rate=rate, frame_size=1024)
        for piece in [*fifo.resample(frame), *fifo.resample(None)]:
            container.mux(stream.encode(piece))
        container.mux(stream.encode(None))
    return file.getvalue()


def film_file(pictures: int = 50, size: tuple[int, int] = (64, 48), rate: int = 25) -> bytes:
    """Picture k is grey of level 4 * k."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for k in range(pictures):
            pixels = np.full((size[1], size[0], 3), 4 * k % 256, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()
