"""From the messages that a client sends to those that a stage renders, and the media that they bring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from omni_async.api.chat_fields import (
    AudioPart,
    ChatBody,
    ImagePart,
    InputAudioPart,
    Message,
    Part,
    TextPart,
    VideoPart,
)
from omni_async.api.chat_media import MediaPart
from omni_async.errors import InvalidRequest


def split_messages(messages: Sequence[Message]) -> tuple[list[dict[str, Any]], list[MediaPart], list[str]]:
    """The messages with their media named `omni:image0`, …; the media, and their names, in order."""
    media: list[MediaPart] = []
    names: list[str] = []
    plain: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        content = message.content
        if content is None and not message.tool_calls:
            raise InvalidRequest("A message needs content.", param=f"messages[{index}].content")
        tree: dict[str, Any] = msgspec.to_builtins(message)
        if isinstance(content, list):
            at = f"messages[{index}].content"
            tree["content"] = [_plain(part, f"{at}[{i}]", media, names) for i, part in enumerate(content)]
        plain.append(tree)
    return plain, media, names


def _plain(part: Part, at: str, media: list[MediaPart], names: list[str]) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    found = _media(part, at)
    name = f"{found.kind}{sum(each.kind == found.kind for each in media)}"
    media.append(found)
    names.append(name)
    return {"type": f"{found.kind}_url", f"{found.kind}_url": {"url": f"omni:{name}"}}


def _media(part: ImagePart | AudioPart | VideoPart | InputAudioPart, at: str) -> MediaPart:
    match part:
        case InputAudioPart():
            sound = part.input_audio
            return MediaPart("audio", None, sound.data, sound.format, f"{at}.input_audio")
        case ImagePart():
            return MediaPart("image", part.image_url.url, None, None, f"{at}.image_url")
        case AudioPart():
            return MediaPart("audio", part.audio_url.url, None, None, f"{at}.audio_url")
        case VideoPart():
            return MediaPart("video", part.video_url.url, None, None, f"{at}.video_url")


def prompt_options(body: ChatBody) -> dict[str, Any]:
    """What shapes the prompt beside the messages."""
    options: dict[str, Any] = {}
    for name in (
        "chat_template_kwargs",
        "add_generation_prompt",
        "continue_final_message",
        "mm_processor_kwargs",
    ):
        if (value := getattr(body, name)) is not None:
            options[name] = value
    if body.continue_final_message:
        if body.add_generation_prompt:
            message = "add_generation_prompt and continue_final_message exclude each other."
            raise InvalidRequest(message, param="continue_final_message")
        options["add_generation_prompt"] = False
    if body.tools and body.tool_choice != "none":
        options["tools"] = msgspec.to_builtins(body.tools)
        options["tool_choice"] = body.tool_choice or "auto"
        if body.parallel_tool_calls is not None:
            options["parallel_tool_calls"] = body.parallel_tool_calls
    return options
