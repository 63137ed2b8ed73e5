"""What `AsyncOmni.generate()` yields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class AudioChunk:
    """A piece of the answer's audio: `pcm` is float32 `[samples]`, or `[samples, channels]` where there
    are several, nominally in [-1, 1]."""

    request_id: str
    pcm: NDArray[np.float32]
    sample_rate: int

    @property
    def duration(self) -> float:
        """Seconds."""
        return len(self.pcm) / self.sample_rate


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A piece of the answer's text.

    `info` is what a language model says of it: `token_ids`, `finish_reason` (None until the last),
    `prompt_tokens`, `completion_tokens` (so far), `cached_tokens`, `logprobs`, `tool_calls`, `reasoning`.
    """

    request_id: str
    text: str
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class ImageChunk:
    """A picture: `pixels` is uint8 `[height, width, 3 or 4]`, RGB or RGBA.

    `partial` is the number of a preview (0, 1, …), None when the picture is finished. `upscaled_from` is the
    (width, height) that the model drew where the picture was enlarged.
    """

    request_id: str
    pixels: NDArray[np.uint8]
    seed: int
    step: int
    steps: int
    partial: int | None = None
    upscaled_from: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class VideoChunk:
    """A film: `frames` is uint8 `[frames, height, width, 3]`, to be shown at `fps` a second."""

    request_id: str
    frames: NDArray[np.uint8]
    fps: float
    seed: int


@dataclass(frozen=True, slots=True)
class Progress:
    """`step` of `steps` denoise steps are done."""

    request_id: str
    step: int
    steps: int
