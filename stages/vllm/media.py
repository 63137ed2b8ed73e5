"""Media of a request on their way into vLLM: arrays, named as `omni:image0`, that came with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from PIL import Image
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

from omni_async.errors import InvalidRequest
from omni_async.stages.executor import Arrays

SCHEME = "omni:"
AUDIO_RATE = 16000

_current: list[tuple[Arrays, dict[str, Any]]] = []


@contextmanager
def media_of(arrays: Arrays, params: dict[str, Any]) -> Iterator[None]:
    """Inside, messages mean these arrays by their `omni:` names. The stage has one thread."""
    _current.append((arrays, params))
    try:
        yield
    finally:
        _current.pop()


@MEDIA_CONNECTOR_REGISTRY.register("omni_async")
class ArrayConnector(MediaConnector):
    """vLLM's way to media, to arrays only: nothing is fetched or opened in a stage."""

    def fetch_image(self, image_url: str, *, image_mode: str | None = "RGB") -> Image.Image:
        """The picture uint8 `[height, width, 3 or 4]`."""
        picture = Image.fromarray(_array(image_url))
        return picture.convert(image_mode) if image_mode else picture

    def fetch_audio(self, audio_url: str) -> Any:
        """The sound float32 `[samples]` and its rate."""
        return _array(audio_url), AUDIO_RATE

    def fetch_video(self, video_url: str, **_: Any) -> Any:
        """The frames uint8 `[frames, height, width, 3]` and what vLLM's processors ask of their timing."""
        frames, fps = (
            _array(video_url),
            float(_current[-1][1].get("video_fps", {}).get(_name(video_url), 2.0)),
        )
        return frames, {
            "fps": fps,
            "duration": len(frames) / fps,
            "total_num_frames": len(frames),
            "frames_indices": list(range(len(frames))),
            "video_backend": "omni_async",
            "do_sample_frames": False,
        }


def _name(url: str) -> str:
    return url.removeprefix(SCHEME)


def _array(url: str) -> Any:
    if not url.startswith(SCHEME) or not _current or _name(url) not in _current[-1][0]:
        raise InvalidRequest("Media must come with the request.", param="messages")
    return _current[-1][0][_name(url)].copy()
