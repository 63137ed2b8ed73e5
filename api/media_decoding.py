"""Sound and films from files that strangers send, with PyAV: into arrays of bounded size, in bounded work.

Only the containers named here are opened, and nothing but the bytes at hand is read: a playlist could
otherwise name files and addresses of the server.
"""

from __future__ import annotations

import io
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from typing import Any

import av
import av.error
import numpy as np
import soxr  # pyright: ignore[reportMissingTypeStubs]
from numpy.typing import NDArray

from omni_async.errors import InvalidRequest

AUDIO_FORMATS = {
    "wav": "wav",
    "mp3": "mp3",
    "flac": "flac",
    "ogg": "ogg",
    "opus": "ogg",
    "aac": "aac",
    "m4a": "mov",
    "webm": "matroska",
}
"""Names under which OpenAI's clients declare a sound, and FFmpeg's name of the container."""

CONTAINERS = "wav,mp3,flac,ogg,aac,mov,mp4,m4a,matroska,webm,avi"
MAX_PICTURES = 50_000
"""Pictures of a film that are decoded to find those that are looked at: half an hour at 25 a second."""

FRAME_PIXELS = 602_112
"""A picture of a film is scaled down to this many pixels: no such model sees more of it."""


@dataclass(frozen=True)
class Video:
    """`frames` uint8 `[frames, height, width, 3]`, `fps` of them a second."""

    frames: NDArray[np.uint8]
    fps: float


def decode_audio(
    data: bytes, *, rate: int, max_seconds: float, format: str | None = None
) -> NDArray[np.float32]:
    """Mono float32 `[samples]` at `rate` Hz, in [-1, 1]. `format` is what the sender says it is.

    Raises `InvalidRequest` for what is no sound, is none of that format, or lasts longer than `max_seconds`.
    """
    if format is not None and format not in AUDIO_FORMATS:
        known = ", ".join(AUDIO_FORMATS)
        raise InvalidRequest(f"Audio of the format {format!r} is not taken; known are {known}.")
    with _opened(data, "audio") as container:
        if format is not None and AUDIO_FORMATS[format] not in container.format.name.split(","):
            raise InvalidRequest(f"The audio is no {format} file.")
        parts, source_rate = _samples(container, max_seconds)
    sound = np.concatenate(parts) if parts else np.zeros(0, np.float32)
    if not len(sound):
        raise InvalidRequest("The audio is empty.")
    if not np.isfinite(sound).all():
        raise InvalidRequest("The audio has samples that are no numbers.")
    return np.clip(soxr.resample(sound, source_rate, rate), -1.0, 1.0).astype(np.float32)


def _samples(container: Any, max_seconds: float) -> tuple[list[NDArray[np.float32]], int]:
    stream = container.streams.audio[0]
    if stream.codec_context is None:
        raise InvalidRequest("The audio is of a kind that is not decoded.", code="invalid_audio")
    rate = stream.rate
    if not rate or not 4000 <= rate <= 384_000:
        raise InvalidRequest(f"Audio at {rate} Hz is not taken.")
    resampler = av.AudioResampler(format="flt", layout="mono", rate=rate)
    parts: list[NDArray[np.float32]] = []
    count = 0
    for frame in container.decode(stream):
        for piece in resampler.resample(frame):
            parts.append(piece.to_ndarray()[0])
            count += len(parts[-1])
        if count > max_seconds * rate:
            raise InvalidRequest(f"The audio is longer than {max_seconds:g} s.", code="audio_too_long")
    return parts, rate


def decode_video(data: bytes, *, max_frames: int, fps: float, max_pixels: int) -> Video:
    """Pictures at even distances, `fps` a second, or as many fewer as `max_frames` asks for.

    Raises `InvalidRequest` for what is no film, has pictures of more than `max_pixels`, or too many of them.
    """
    with _opened(data, "video") as container:
        stream = container.streams.video[0]
        if stream.codec_context is None:
            raise InvalidRequest("The film is of a kind that is not decoded.", code="invalid_video")
        width, height = stream.codec_context.width, stream.codec_context.height
        if width * height > max_pixels:
            raise InvalidRequest(f"The film is {width}x{height}; at most {max_pixels} pixels are taken.")
        return _chosen(container, stream, max_frames, fps, max_pixels)


def _chosen(container: Any, stream: Any, max_frames: int, fps: float, max_pixels: int) -> Video:
    kept: list[NDArray[np.uint8]] = []
    for number, frame in enumerate(container.decode(stream)):
        if number >= MAX_PICTURES:
            raise InvalidRequest(f"The film has more than {MAX_PICTURES} pictures.", code="video_too_long")
        time = float(frame.time) if frame.time is not None else number / float(stream.average_rate or 25)
        if time * fps < len(kept):
            continue
        kept.append(_picture(frame, max_pixels))
        if len(kept) > max_frames:
            # Every second picture is let go of, and from now on only half as many are looked at.
            kept, fps = kept[::2], fps / 2
    if not kept:
        raise InvalidRequest("The film has no pictures.")
    if any(picture.shape != kept[0].shape for picture in kept):
        raise InvalidRequest("The film's pictures change their size.")
    return Video(np.stack(kept[:max_frames]), fps)


def _picture(frame: Any, max_pixels: int) -> NDArray[np.uint8]:
    pixels = frame.width * frame.height
    if pixels > max_pixels:
        raise InvalidRequest(f"The film has a picture of {frame.width}x{frame.height}.")
    scale = min(1.0, sqrt(FRAME_PIXELS / pixels))
    width, height = max(2, int(frame.width * scale)), max(2, int(frame.height * scale))
    return frame.reformat(width=width, height=height, format="rgb24").to_ndarray()


@contextmanager
def _opened(data: bytes, kind: str) -> Generator[Any]:
    """The container. FFmpeg's errors, here and while it is read, become `InvalidRequest`."""
    options = {"format_whitelist": CONTAINERS, "protocol_whitelist": "none"}
    try:
        with av.open(io.BytesIO(data), options=options) as container:
            if not getattr(container.streams, kind):
                raise InvalidRequest(f"The file has no {kind} in it.")
            yield container
    except (av.error.FFmpegError, ValueError, OverflowError, EOFError, MemoryError) as error:
        raise InvalidRequest(f"The {kind} cannot be read: {error}", code=f"invalid_{kind}") from error
