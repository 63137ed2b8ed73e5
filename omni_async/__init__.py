"""omni_async serves omni-modality models as pipelines of stages.

The names below are loaded on first use, so that `import omni_async` costs next to nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from omni_async.chat import Chat
    from omni_async.client import AsyncOmni, Omni
    from omni_async.config import (
        ChatConfig,
        Deployment,
        ImageConfig,
        PipelineConfig,
        ServerConfig,
        SoundConfig,
        SpeechConfig,
        StageConfig,
    )
    from omni_async.echo import Echo
    from omni_async.errors import (
        ConfigError,
        DeadlineExceeded,
        EngineDead,
        InvalidRequest,
        NotFound,
        OmniError,
        Overloaded,
        StageFailed,
    )
    from omni_async.image import Image, Lora
    from omni_async.outputs import AudioChunk, ImageChunk, Progress, TextChunk, VideoChunk
    from omni_async.sound import Sound
    from omni_async.speech import Speech

__version__ = "0.1.0"

_HOMES = {
    "client": ("AsyncOmni", "Omni"),
    "chat": ("Chat",),
    "config": (
        "ChatConfig",
        "Deployment",
        "ImageConfig",
        "PipelineConfig",
        "ServerConfig",
        "SoundConfig",
        "SpeechConfig",
        "StageConfig",
    ),
    "echo": ("Echo",),
    "errors": (
        "ConfigError",
        "DeadlineExceeded",
        "EngineDead",
        "InvalidRequest",
        "NotFound",
        "OmniError",
        "Overloaded",
        "StageFailed",
    ),
    "image": ("Image", "Lora"),
    "outputs": ("AudioChunk", "ImageChunk", "Progress", "TextChunk", "VideoChunk"),
    "sound": ("Sound",),
    "speech": ("Speech",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AsyncOmni",
    "AudioChunk",
    "Chat",
    "ChatConfig",
    "ConfigError",
    "DeadlineExceeded",
    "Deployment",
    "Echo",
    "EngineDead",
    "Image",
    "ImageChunk",
    "ImageConfig",
    "InvalidRequest",
    "Lora",
    "NotFound",
    "Omni",
    "OmniError",
    "Overloaded",
    "PipelineConfig",
    "Progress",
    "ServerConfig",
    "Sound",
    "SoundConfig",
    "Speech",
    "SpeechConfig",
    "StageConfig",
    "StageFailed",
    "TextChunk",
    "VideoChunk",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
