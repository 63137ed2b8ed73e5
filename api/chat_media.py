"""The media parts of a conversation: fetched under the server's rules and decoded, off the event loop."""

from __future__ import annotations

from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct

from omni_async.api.config import ApiConfig
from omni_async.api.media_pool import MediaPool
from omni_async.api.media_source import MediaSource
from omni_async.errors import InvalidRequest

if TYPE_CHECKING:
    from numpy.typing import NDArray

AUDIO_RATE = 16000
"""Hz: what the audio encoders of such models take."""

VIDEO_FPS = 2.0
"""Frames a second that are looked at."""


class MediaPart(Struct, frozen=True):
    """One part: at an address, or as base64 of a declared `format`. `param` is where the request has it."""

    kind: Literal["image", "audio", "video"]
    url: str | None
    data: str | None
    format: str | None
    param: str


@dataclass
class MediaRead:
    """Arrays by name (`image0`, `audio0`, `video0`, …): images uint8 `[height, width, 3 or 4]`, audio float32
    `[samples]` at 16 kHz, videos uint8 `[frames, height, width, 3]` with their frames a second in `fps`."""

    arrays: dict[str, NDArray[Any]] = field(default_factory=dict[str, "NDArray[Any]"])
    fps: dict[str, float] = field(default_factory=dict[str, float])


async def read_media(
    parts: Sequence[MediaPart], source: MediaSource, media: MediaPool, config: ApiConfig
) -> MediaRead:
    """All parts, one after the other. Raises `InvalidRequest` naming the first that cannot be had."""
    if len(parts) > config.max_media_parts:
        message = f"The messages have {len(parts)} media parts; at most {config.max_media_parts} are taken."
        raise InvalidRequest(message, param="messages")
    read = MediaRead()
    counts = {"image": 0, "audio": 0, "video": 0}
    for part in parts:
        name = f"{part.kind}{counts[part.kind]}"
        counts[part.kind] += 1
        await media.run(lambda part=part, name=name: _read(part, name, source, config, read))
    return read


def _read(part: MediaPart, name: str, source: MediaSource, config: ApiConfig, read: MediaRead) -> None:
    data = _bytes(part, source, config)
    if part.kind == "image":
        from omni_async.api.image_codec import read_picture

        read.arrays[name] = read_picture(data, config.max_image_pixels, part.param)
        return
    from omni_async.api.media_decoding import decode_audio, decode_video

    try:
        if part.kind == "audio":
            read.arrays[name] = decode_audio(
                data, rate=AUDIO_RATE, max_seconds=config.max_audio_seconds, format=part.format
            )
        else:
            video = decode_video(
                data, max_frames=config.max_video_frames, fps=VIDEO_FPS, max_pixels=config.max_image_pixels
            )
            read.arrays[name], read.fps[name] = video.frames, video.fps
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param=part.param, code=error.code) from error


def _bytes(part: MediaPart, source: MediaSource, config: ApiConfig) -> bytes:
    if part.data is None:
        assert part.url is not None
        try:
            return source.read(part.url)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=part.param, code=error.code) from error
    if len(part.data) * 3 // 4 > config.max_upload_bytes:
        message = f"It has more than {config.max_upload_bytes} bytes."
        raise InvalidRequest(message, param=part.param)
    try:
        return b64decode(part.data, validate=True)
    except (Base64Error, ValueError):
        raise InvalidRequest("It is not base64.", param=part.param) from None
