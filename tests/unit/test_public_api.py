"""The names that programs which embed omni_async may rely on."""

from __future__ import annotations

import omni_async

NAMES = [
    *(
        "AsyncOmni",
        "AudioChunk",
        "ConfigError",
        "DeadlineExceeded",
        "Chat",
        "ChatConfig",
        "Deployment",
        "Echo",
        "EngineDead",
    ),
    *("InvalidRequest", "NotFound", "Omni", "OmniError", "Overloaded", "PipelineConfig", "ServerConfig"),
    *("Image", "ImageChunk", "ImageConfig", "Lora", "Progress", "Sound", "SoundConfig", "VideoChunk"),
    *("Speech", "SpeechConfig", "StageConfig", "StageFailed", "TextChunk"),
]


def test_the_public_names_are_these_and_all_exist() -> None:
    assert sorted(omni_async.__all__) == sorted(NAMES)
    for name in NAMES:
        assert getattr(omni_async, name).__name__ == name
