"""The protocol of a speech WebSocket as a pure object: messages in, actions out.

It decides what is valid when, what is spoken as which sentence, and when a session has timed out. It
knows no socket, clock or engine; `speech_socket.py` and `sentence_speaker.py` are the shell round it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from omni_async.api.config import ApiConfig
from omni_async.api.errors import TimedOut, TooLarge, WrongContentType, close_code, invalid_json
from omni_async.api.sentence_splitter import SentenceSplitter
from omni_async.api.session_messages import (
    ClientMessage,
    ErrorEvent,
    InputCancel,
    InputDone,
    InputFlush,
    InputText,
    Ping,
    Pong,
    ServerEvent,
    SessionConfig,
    SessionCreated,
    SessionDone,
)
from omni_async.errors import DeadlineExceeded, InvalidRequest, OmniError
from omni_async.speech import has_speakable_text

_decoder = msgspec.json.Decoder(ClientMessage)
# Splitting this many characters takes a few milliseconds at the worst.
_SLICE = 4096


@dataclass(frozen=True, slots=True)
class Send:
    """Send `event` now."""

    event: ServerEvent


@dataclass(frozen=True, slots=True)
class Speak:
    """Speak `text` as sentence number `index`, after those before it."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class Silence:
    """Stop the sentence that is spoken and forget those that wait."""


@dataclass(frozen=True, slots=True)
class Close:
    """Close the connection; nothing follows."""

    code: int


Action = Send | Speak | Silence | Close


class SpeechSession:
    """One session. `open` checks a configuration and names the audio it leads to, or raises `OmniError`.

    Times are seconds of one monotonic clock.
    """

    def __init__(
        self, config: ApiConfig, open: Callable[[SessionConfig], SessionCreated], now: float
    ) -> None:
        self._config = config
        self._open = open
        self._opened_at = self._active_at = now
        self._splitter: SentenceSplitter | None = None
        self._characters = 0
        self._utterance_has_text = False
        self._utterance_spoke = False
        self._next_index = 0
        self._unspoken: set[int] = set()
        self._unread = ""
        self._done = False
        self.closed = False

    def check(self) -> None:
        """Assert the invariants."""
        assert all(0 <= index < self._next_index for index in self._unspoken)
        assert self._splitter is not None or (self._next_index == 0 and not self._done)
        assert self._characters <= self._config.max_input_chars or self.closed
        assert not (self._done and self._splitter is not None and self._splitter.pending)

    @property
    def deadline(self) -> float | None:
        """When the session times out unless something happens; None while it speaks."""
        if self._splitter is None:
            return self._opened_at + self._config.ws_config_timeout
        return None if self._unspoken or self.closed else self._active_at + self._config.ws_idle_timeout

    def time_out(self) -> list[Action]:
        """The deadline has passed."""
        what = "session.config" if self._splitter is None else "message"
        return self.fail(TimedOut(f"No {what} came in time."))

    def fail(self, error: Exception) -> list[Action]:
        """End the session because of `error`."""
        self.closed = True
        self._unread = ""
        return [Silence(), Send(ErrorEvent.of(error)), Close(close_code(error))]

    def receive_binary(self) -> list[Action]:
        """A binary frame, which this protocol has no use for."""
        return self.fail(WrongContentType("Messages are JSON text frames, not binary ones."))

    def receive_text(self, data: str, now: float) -> list[Action]:
        """A text frame."""
        limit = self._config.ws_max_message_bytes
        if len(data) > limit or (len(data) * 4 > limit and len(data.encode(errors="replace")) > limit):
            return self.fail(TooLarge(f"The message is larger than {limit} bytes."))
        try:
            message = _decoder.decode(data)
        except msgspec.DecodeError as error:
            return [Send(ErrorEvent.of(invalid_json(error)))]
        return self.receive(message, now)

    def receive(self, message: ClientMessage, now: float) -> list[Action]:
        """A message. What is wrong with it is answered by an `error` event, and the session goes on."""
        self._active_at = now
        try:
            return self._handle(message)
        except OmniError as error:
            return [Send(ErrorEvent.of(error))]

    def _handle(self, message: ClientMessage) -> list[Action]:
        if isinstance(message, Ping):
            return [Send(Pong())]
        if isinstance(message, SessionConfig):
            return self._configure(message)
        splitter = self._require_open(message)
        if isinstance(message, InputCancel):
            return self._cancel(splitter)
        if isinstance(message, InputText):
            return self._add_text(message.text, splitter)
        actions = self._end_utterance(splitter)
        if isinstance(message, InputFlush):
            return actions
        assert isinstance(message, InputDone)
        self._done = True
        return [*actions, *self._finish_if_silent()]

    def _require_open(self, message: ClientMessage) -> SentenceSplitter:
        if self._splitter is None:
            raise InvalidRequest("The first message must be session.config.", code="not_configured")
        if self._done and not isinstance(message, InputCancel):
            raise InvalidRequest("No more input is taken after input.done.", code="input_done")
        return self._splitter

    def _configure(self, message: SessionConfig) -> list[Action]:
        if self._splitter is not None:
            raise InvalidRequest("The session is configured already.", code="already_configured")
        created = self._open(message)
        granularity = message.split_granularity or "sentence"
        self._splitter = SentenceSplitter(granularity, self._config.ws_max_segment_chars)
        return [Send(created)]

    def _add_text(self, text: str, splitter: SentenceSplitter) -> list[Action]:
        self._characters += len(text)
        limit = self._config.max_input_chars
        if self._characters > limit:
            return self.fail(TooLarge(f"A session takes at most {limit} characters.", param="text"))
        self._utterance_has_text = self._utterance_has_text or bool(text)
        self._unread = text
        return self.read_on()

    @property
    def unread(self) -> bool:
        """Whether `read_on` must be called before the next message is received."""
        return bool(self._unread)

    def read_on(self) -> list[Action]:
        """Read more of a long text; it is read in slices so that the event loop is never held for long."""
        assert self._splitter is not None
        piece, self._unread = self._unread[:_SLICE], self._unread[_SLICE:]
        return self._speak(self._splitter.push(piece))

    def _end_utterance(self, splitter: SentenceSplitter) -> list[Action]:
        actions = self._speak(splitter.flush())
        if self._utterance_has_text and not self._utterance_spoke and not actions:
            actions.append(Send(_nothing_to_speak()))
        self._utterance_has_text = self._utterance_spoke = False
        return actions

    def _speak(self, segments: list[str]) -> list[Action]:
        return [self._speak_one(text) for segment in segments if (text := segment.strip())]

    def _speak_one(self, text: str) -> Action:
        if not has_speakable_text(text):
            return Send(_nothing_to_speak())
        self._utterance_spoke = True
        index = self._next_index
        self._unspoken.add(index)
        self._next_index += 1
        return Speak(index, text)

    def _cancel(self, splitter: SentenceSplitter) -> list[Action]:
        splitter.flush()
        self._utterance_has_text = self._utterance_spoke = False
        self._unspoken.clear()
        return [Silence(), *self._finish_if_silent()]

    def sentence_ended(self, index: int, now: float, error: Exception | None = None) -> list[Action]:
        """A sentence has been sent whole, or failed. One that was silenced meanwhile is ignored."""
        if index not in self._unspoken or self.closed:
            return []
        self._active_at = now
        self._unspoken.remove(index)
        if error is not None and not isinstance(error, InvalidRequest | DeadlineExceeded):
            return self.fail(error)
        event: list[Action] = [] if error is None else [Send(ErrorEvent.of(error))]
        return [*event, *self._finish_if_silent()]

    def _finish_if_silent(self) -> list[Action]:
        if not self._done or self._unspoken or self.closed:
            return []
        self.closed = True
        return [Send(SessionDone(total_sentences=self._next_index)), Close(1000)]


def _nothing_to_speak() -> ErrorEvent:
    message = "There is nothing to speak in this text: it needs at least one letter or digit."
    return ErrorEvent(message=message, code="nothing_to_speak", param="text")
