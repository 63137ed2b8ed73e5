"""Limits and keys of the HTTP and WebSocket interface; every field is a CLI flag of `serve`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]


class ApiConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the edge allows. Sizes are in bytes, lengths in characters, times in seconds.

    With `api_keys` empty every caller is served. `ws_read_ahead` sentences of a session are under way at
    once (the one that is sent and those after it); `ws_frame_window` chunks of each may wait to be sent,
    so that a slow reader holds a bounded amount of audio. `max_image_pixels` is of a picture that is sent
    (Pillow opens none above the bound), `max_generated_image_size` of one that is made. What a request names
    by address or path is read from `allowed_media_domains`, and under `allowed_local_media_path` and
    `allowed_lora_path`, only.
    """

    api_keys: tuple[str, ...] = ()
    max_input_chars: Count = 100_000
    max_batch_items: Count = 32
    max_body_bytes: Count = 16 * 1024 * 1024
    max_upload_bytes: Count = 64 * 1024 * 1024
    max_edit_images: Count = 4
    max_image_pixels: Annotated[int, Meta(ge=1, le=178_956_970)] = 16 * 1024 * 1024
    max_generated_image_size: Count = 2048 * 2048
    max_media_parts: Count = 32
    max_audio_seconds: Seconds = 600.0
    max_video_frames: Count = 128
    allowed_lora_path: str = ""
    allowed_media_domains: tuple[str, ...] = ()
    allowed_local_media_path: str = ""
    media_threads: Count = 2
    ws_config_timeout: Seconds = 10.0
    ws_idle_timeout: Seconds = 30.0
    ws_max_message_bytes: Count = 128 * 1024
    ws_max_segment_chars: Count = 400
    ws_read_ahead: Count = 2
    ws_frame_window: Count = 8
