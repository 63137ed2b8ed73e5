"""`POST /v1/audio/speech`: one text spoken, as a file, as a stream of bytes, or as server-sent events."""

from __future__ import annotations

from base64 import b64encode
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from omni_async.api.errors import ErrorDetail, error_detail
from omni_async.api.exchange import (
    WhileConnected,
    end_stream,
    read_json,
    send_body,
    send_piece,
    start_stream,
)
from omni_async.api.speech_fields import SpeechBody
from omni_async.api.speech_job import SpeechJob, SpeechRun, SpeechService, Usage
from omni_async.errors import InvalidRequest, OmniError

_decoder = msgspec.json.Decoder(SpeechBody)
_encoder = msgspec.json.Encoder()


class AudioDelta(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="speech.audio.delta"):
    """A piece of the file, base64."""

    audio: str


class AudioEnd(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="speech.audio.done"):
    """The file is complete."""

    usage: Usage


class AudioError(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="speech.audio.error"):
    """The request failed after its first audio; nothing follows."""

    error: ErrorDetail


class SpeechEndpoint:
    """An ASGI endpoint. The first audio is awaited before the head is sent, so early errors have a status."""

    def __init__(self, service: SpeechService) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        body = await read_json(scope, receive, self._service.config.max_body_bytes, _decoder)
        streaming = _wants_stream(body)
        job = self._service.prepare(body, body.input, gapless=streaming)
        run = self._service.run(job, scope["request_id"], streaming=streaming)
        if not streaming:
            await _answer_whole(run, job, receive, send)
        elif body.stream_format == "sse":
            await _answer_events(run, job, receive, send, scope["request_id"])
        else:
            await _answer_stream(run, job, receive, send)


def _wants_stream(body: SpeechBody) -> bool:
    if body.stream_format == "sse" and body.stream is False:
        message = "stream_format 'sse' is a stream; stream must not be false."
        raise InvalidRequest(message, param="stream_format")
    return bool(body.stream) or body.stream_format == "sse"


async def _answer_whole(run: SpeechRun, job: SpeechJob, receive: Receive, send: Send) -> None:
    async with WhileConnected(receive):
        data = await run.whole()
    await send_body(send, data, job.plan.media_type.encode(), headers=job.plan.headers())


async def _answer_stream(run: SpeechRun, job: SpeechJob, receive: Receive, send: Send) -> None:
    async with WhileConnected(receive), aclosing(run.pieces()) as pieces:
        first = await anext(pieces)
        await start_stream(send, job.plan.media_type.encode(), job.plan.headers())
        await send_piece(send, first)
        async for piece in pieces:
            await send_piece(send, piece)
    await end_stream(send)


async def _answer_events(
    run: SpeechRun, job: SpeechJob, receive: Receive, send: Send, request_id: str
) -> None:
    headers = [*job.plan.headers(), (b"cache-control", b"no-cache")]
    async with WhileConnected(receive), aclosing(run.pieces()) as pieces:
        first = await anext(pieces)
        await start_stream(send, b"text/event-stream; charset=utf-8", headers)
        await send_piece(send, _delta(first))
        try:
            async for piece in pieces:
                await send_piece(send, _delta(piece))
        except OmniError as error:
            await send_piece(send, _event(AudioError(error=error_detail(error, request_id))))
        else:
            await send_piece(send, _event(AudioEnd(usage=job.usage(run.samples))))
    await end_stream(send)


def _delta(piece: bytes) -> bytes:
    return _event(AudioDelta(audio=b64encode(piece).decode()))


def _event(value: Any) -> bytes:
    return b"data: " + _encoder.encode(value) + b"\n\n"
