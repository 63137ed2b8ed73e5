"""The fields of the speech routes as clients send them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta

from omni_async.speech import Speech, SpeechOptions

AudioFormat = Literal["wav", "pcm", "flac", "mp3", "aac", "opus"]
StreamFormat = Literal["audio", "sse"]
SampleRate = Annotated[int, Meta(ge=8000, le=48000)]


class SpeechFields(SpeechOptions, kw_only=True, frozen=True):
    """Everything but the text: how it is spoken, and as what bytes it is answered. null is absent."""

    response_format: AudioFormat | None = None
    sample_rate: SampleRate | None = None


class SpeechBody(SpeechFields, kw_only=True, frozen=True):
    """The body of `POST /v1/audio/speech`."""

    input: str
    stream: bool | None = None
    stream_format: StreamFormat | None = None


class BatchItem(SpeechFields, kw_only=True, frozen=True):
    """One item of a batch."""

    input: str


class BatchBody(SpeechFields, kw_only=True, frozen=True):
    """The body of `POST /v1/audio/speech/batch`. The fields beside `items` are the items' defaults.

    Items are decoded one by one, so that one bad item fails alone.
    """

    items: Annotated[list[Any], Meta(min_length=1)]


def speech_of(fields: SpeechFields, text: str, *, gapless: bool) -> Speech:
    """The request for the engine."""
    options: dict[str, Any] = {name: getattr(fields, name) for name in SpeechOptions.__struct_fields__}
    return Speech(input=text, gapless=gapless, **options)
