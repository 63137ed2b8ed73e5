"""Every message of the speech WebSocket: one union per direction."""

from __future__ import annotations

import msgspec

from omni_async.api.errors import error_detail
from omni_async.api.sentence_splitter import Granularity
from omni_async.api.speech_fields import SpeechFields


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class SessionConfig(SpeechFields, frozen=True, kw_only=True, tag_field="type", tag="session.config"):
    """The first message. With `stream_audio` false each sentence comes as one binary frame."""

    stream_audio: bool | None = None
    split_granularity: Granularity | None = None


class InputText(_Message, frozen=True, kw_only=True, tag="input.text"):
    """A piece of text, cut anywhere."""

    text: str


class InputFlush(_Message, frozen=True, kw_only=True, tag="input.flush"):
    """The utterance is complete: speak what is held back, keep the session."""


class InputCancel(_Message, frozen=True, kw_only=True, tag="input.cancel"):
    """Stop speaking at once and forget the text that is not spoken yet, keep the session."""


class InputDone(_Message, frozen=True, kw_only=True, tag="input.done"):
    """No more text will come; the session ends when all is spoken."""


class Ping(_Message, frozen=True, kw_only=True, tag="ping"):
    """Answered by `pong` at once, also while speaking."""


ClientMessage = SessionConfig | InputText | InputFlush | InputCancel | InputDone | Ping


class SessionCreated(_Message, frozen=True, kw_only=True, tag="session.created"):
    """The configuration is accepted; `sample_rate` is in Hz, of the audio that will be sent."""

    session_id: str
    sample_rate: int
    format: str


class AudioStart(_Message, frozen=True, kw_only=True, tag="audio.start"):
    """The binary frames up to the next `audio.done` are this sentence."""

    sentence_index: int
    sentence_text: str
    format: str
    sample_rate: int


class AudioDone(_Message, frozen=True, kw_only=True, tag="audio.done"):
    """The end of a sentence; `error` says why it ends early, else null."""

    sentence_index: int
    total_bytes: int
    error: str | None = None


class SessionDone(_Message, frozen=True, kw_only=True, tag="session.done"):
    """All is spoken; the server closes with 1000."""

    total_sentences: int


class Pong(_Message, frozen=True, kw_only=True, tag="pong"):
    """The answer to `ping`."""


class ErrorEvent(_Message, frozen=True, kw_only=True, tag="error"):
    """What was wrong with a message, or with the session. The session goes on unless it is closed."""

    message: str
    code: str | None = None
    param: str | None = None

    @staticmethod
    def of(error: Exception) -> ErrorEvent:
        """The event that tells of `error`."""
        detail = error_detail(error, None)
        return ErrorEvent(message=detail.message, code=detail.code, param=detail.param)


ServerEvent = SessionCreated | AudioStart | AudioDone | SessionDone | Pong | ErrorEvent
