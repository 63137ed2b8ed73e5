"""What bytes an answer's audio becomes: the format, its rates and its media type. No codec is loaded here."""

from __future__ import annotations

import msgspec

from omni_async.api.speech_fields import AudioFormat, SpeechFields
from omni_async.errors import InvalidRequest

_MPEG = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
_OPUS = (8000, 12000, 16000, 24000, 48000)
_ANY: tuple[int, ...] = ()


class FormatRule(msgspec.Struct, frozen=True):
    """`rates` the codec carries, in Hz (empty: any); the media type."""

    rates: tuple[int, ...]
    media_type: str


FORMATS: dict[AudioFormat, FormatRule] = {
    "wav": FormatRule(_ANY, "audio/wav"),
    "pcm": FormatRule(_ANY, "audio/pcm"),
    "flac": FormatRule(_ANY, "audio/flac"),
    "mp3": FormatRule(_MPEG, "audio/mpeg"),
    "aac": FormatRule(_MPEG, "audio/aac"),
    "opus": FormatRule(_OPUS, "audio/ogg; codecs=opus"),
}


class MediaPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Mono audio at `source_rate` Hz becomes `format` at `rate` Hz."""

    format: AudioFormat
    source_rate: int
    rate: int

    @property
    def media_type(self) -> str:
        """The Content-Type."""
        base = FORMATS[self.format].media_type
        return f"{base};rate={self.rate};channels=1" if self.format == "pcm" else base

    def headers(self) -> list[tuple[bytes, bytes]]:
        """What an HTTP answer says about the audio beside its Content-Type."""
        return [
            (b"x-sample-rate", b"%d" % self.rate),
            (b"x-channels", b"1"),
            (b"content-disposition", f'inline; filename="speech.{self.format}"'.encode()),
        ]


def plan_media(fields: SpeechFields, native_rate: int) -> MediaPlan:
    """The plan for what the caller asked. Raises `InvalidRequest`, param `sample_rate`."""
    chosen: AudioFormat = fields.response_format or "wav"
    rate = _carried_rate(chosen, fields.sample_rate, native_rate)
    return MediaPlan(format=chosen, source_rate=native_rate, rate=rate)


def _carried_rate(chosen: AudioFormat, asked: int | None, native: int) -> int:
    rates = FORMATS[chosen].rates
    rate = asked or native
    if not rates or rate in rates:
        return rate
    if asked is None or chosen == "opus":
        return 48000
    allowed = ", ".join(map(str, rates))
    raise InvalidRequest(f"{chosen} cannot carry {asked} Hz; it carries {allowed}.", param="sample_rate")
