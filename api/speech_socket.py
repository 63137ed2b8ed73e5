"""`WS /v1/audio/speech/stream`: the IO round `SpeechSession` and `SentenceSpeaker`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.types import Receive, Scope
from starlette.types import Send as AsgiSend

from omni_async.api.errors import ClientGone, error_detail
from omni_async.api.sentence_speaker import Sentence, SentenceSpeaker
from omni_async.api.session_messages import (
    AudioDone,
    AudioStart,
    ServerEvent,
    SessionConfig,
    SessionCreated,
)
from omni_async.api.speech_job import SpeechService
from omni_async.api.speech_session import Action, Close, Send, Silence, Speak, SpeechSession
from omni_async.errors import OmniError

log = logging.getLogger(__name__)

_encoder = msgspec.json.Encoder()


class SpeechSocket:
    """An ASGI endpoint for WebSockets."""

    def __init__(self, service: SpeechService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: AsgiSend) -> None:
        """Serve one session."""
        await _Connection(self._service, scope["request_id"], receive, send).serve()


class _Closed(Exception):
    """The server has closed the connection, as the protocol wants."""


class _Connection:
    """One session's two tasks: the reader, and the speaker that sends audio."""

    def __init__(self, service: SpeechService, session_id: str, receive: Receive, send: AsgiSend) -> None:
        self._service = service
        self._id = session_id
        self._receive = receive
        self._asgi_send = send
        self._now = asyncio.get_running_loop().time
        self._session = SpeechSession(service.config, self._open, self._now())
        self._speaker = SentenceSpeaker(service.config, self._pieces, self._say, self._ended)
        self._timer = asyncio.timeout(None)
        self._fields: SessionConfig | None = None
        self._created: SessionCreated | None = None

    async def serve(self) -> None:
        """Run the session to its end, whoever ends it."""
        await self._receive()
        headers = [(b"x-request-id", self._id.encode())]
        await self._asgi_send({"type": "websocket.accept", "headers": headers})
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._speaker.run())
                await self._read()
        except* (_Closed, ClientGone):
            log.debug("session %s has ended", self._id)

    def _open(self, fields: SessionConfig) -> SessionCreated:
        job = self._service.prepare(fields, "a", gapless=True)
        self._fields = fields
        self._created = SessionCreated(session_id=self._id, sample_rate=job.plan.rate, format=job.plan.format)
        return self._created

    async def _read(self) -> None:
        try:
            async with self._timer:
                while True:
                    self._set_timer()
                    await self._take(await self._receive())
        except TimeoutError:
            await self._perform(self._session.time_out())

    def _set_timer(self) -> None:
        if not self._timer.expired():
            self._timer.reschedule(self._session.deadline)

    async def _take(self, message: Any) -> None:
        if message["type"] == "websocket.disconnect":
            raise ClientGone
        text: str | None = message.get("text")
        if text is None:
            await self._perform(self._session.receive_binary())
            return
        await self._perform(self._session.receive_text(text, self._now()))
        while self._session.unread:
            await asyncio.sleep(0)
            await self._perform(self._session.read_on())

    async def _perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Send(event):
                    await self._send_event(event)
                case Speak(index, text):
                    self._speaker.add(index, text)
                case Silence():
                    await self._speaker.silence()
                case Close(code):
                    await self._send({"type": "websocket.close", "code": code, "reason": ""})
                    raise _Closed

    async def _pieces(self, index: int, text: str) -> AsyncGenerator[bytes, None]:
        fields = self._fields
        assert fields is not None
        job = self._service.prepare(fields, text, gapless=True)
        streaming = fields.stream_audio is not False
        run = self._service.run(job, f"{self._id}.{index}", streaming=streaming)
        async with aclosing(run.pieces()) as pieces:
            async for piece in pieces:
                yield piece

    async def _say(self, sentence: Sentence) -> None:
        await self._send_event(self._start_of(sentence))
        sent = 0
        try:
            async with aclosing(self._frames(sentence)) as frames:
                async for frame in frames:
                    await self._send({"type": "websocket.send", "bytes": frame})
                    sent += len(frame)
        except asyncio.CancelledError:
            await self._send_event(_end_of(sentence, sent, "cancelled"))
            raise
        reason = error_detail(sentence.error, None).message if sentence.error else None
        await self._send_event(_end_of(sentence, sent, reason))

    async def _frames(self, sentence: Sentence) -> AsyncGenerator[bytes, None]:
        """The sentence's frames as they are to be sent: as made, or, without `stream_audio`, as one."""
        assert self._fields is not None
        whole = self._fields.stream_audio is False
        held: list[bytes] = []
        while (frame := await sentence.next_frame()) is not None:
            if whole:
                held.append(frame)
            else:
                yield frame
        if held and sentence.error is None:
            yield b"".join(held)

    def _start_of(self, sentence: Sentence) -> AudioStart:
        assert self._created is not None
        return AudioStart(
            sentence_index=sentence.index,
            sentence_text=sentence.text,
            format=self._created.format,
            sample_rate=self._created.sample_rate,
        )

    async def _ended(self, sentence: Sentence) -> None:
        error = sentence.error
        if error is not None and not isinstance(error, OmniError):
            log.error("session %s: sentence %d failed", self._id, sentence.index, exc_info=error)
        await self._perform(self._session.sentence_ended(sentence.index, self._now(), error))
        self._set_timer()

    async def _send_event(self, event: ServerEvent) -> None:
        await self._send({"type": "websocket.send", "text": _encoder.encode(event).decode()})

    async def _send(self, message: dict[str, Any]) -> None:
        try:
            await self._asgi_send(message)
        except OSError:  # what servers raise when the client has gone
            raise ClientGone from None


def _end_of(sentence: Sentence, sent: int, error: str | None) -> AudioDone:
    return AudioDone(sentence_index=sentence.index, total_bytes=sent, error=error)
